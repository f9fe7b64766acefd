//! A configured backend that this host does not have.

use crate::{Source, VmBackend, VmConnection, VmError, joined::foreign_handle};
use std::os::fd::BorrowedFd;
use vnuma_model::{VmCandidate, VmHandle};

/// Has no VMs, and says why.
#[derive(Clone, Debug)]
pub struct UnusableBackend {
    sources: Vec<Source>,
}

impl UnusableBackend {
    /// In the place of one that would ask these.
    pub fn new(names: &[String], problem: &str) -> Self {
        let source = |name: &String| Source { name: name.clone(), problem: Some(problem.to_owned()) };
        Self { sources: names.iter().map(source).collect() }
    }
}

impl VmBackend for UnusableBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        Ok(Vec::new())
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear_changes(&mut self) {}

    fn sources(&self) -> Vec<Source> {
        self.sources.clone()
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        Err(foreign_handle(handle, "a VM of a backend that can be used"))
    }
}
