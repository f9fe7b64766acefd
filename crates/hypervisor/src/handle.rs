//! What a backend knows a VM by.

use std::{fmt, sync::Arc};

/// Names a VM to the backend that found it. To everybody else it is text to show, compare and copy: what stands in it
/// is the backend's own affair.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmHandle(Arc<str>);

impl VmHandle {
    /// A handle, begun with the name of the backend so that none is taken for another's: `qmp:/run/vnuma/qmp/a.sock`.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
