//! What a backend knows a VM by.

use crate::{libvirt, migration};
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

    /// Does its QEMU itself answer a [`probe`](crate::VmConnection::probe)? libvirt does for its domains, whatever their QEMUs do.
    pub fn answers_itself(&self) -> bool {
        !self.0.starts_with(libvirt::PREFIX)
    }

    /// Can a VM with this handle be told to migrate there? If not, why.
    pub fn check_destination(&self, destination: &str) -> Result<(), String> {
        match self.0.starts_with(libvirt::PREFIX) {
            true => libvirt::check_destination(destination),
            false => migration::check_destination(destination),
        }
    }
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libvirt_answers_for_its_domains() {
        assert!(VmHandle::new("qmp:/run/web.sock").answers_itself());
        assert!(!VmHandle::new("libvirt:u@qemu:///system").answers_itself());
    }

    #[test]
    fn a_destination_is_of_the_kind_that_the_backend_takes() {
        let (qemu, libvirt) = ("tcp:b:4444", "qemu+ssh://b/system");
        let taken = |handle: &str, destination| VmHandle::new(handle).check_destination(destination).is_ok();
        assert!(taken("qmp:/run/web.sock", qemu) && !taken("qmp:/run/web.sock", libvirt));
        assert!(!taken("libvirt:u@qemu:///system", qemu) && taken("libvirt:u@qemu:///system", libvirt));
    }
}
