//! VMs by their QMP sockets.

use super::{VmBackend, VmCandidate, VmConnection, VmError};
use std::path::PathBuf;

/// VMs whose QMP sockets are in a directory, or listed one by one.
#[derive(Clone, Debug, Default)]
pub struct QmpBackend {
    directory: Option<PathBuf>,
    sockets: Vec<PathBuf>,
}

impl QmpBackend {
    /// Every `*.sock` in `directory`, if one is given, and every path of `sockets`.
    pub fn new(directory: Option<PathBuf>, sockets: Vec<PathBuf>) -> Self {
        Self { directory, sockets }
    }
}

impl VmBackend for QmpBackend {
    fn scan(&mut self) -> Vec<VmCandidate> {
        Vec::new()
    }
    fn connect(&self, _candidate: &VmCandidate) -> Result<Box<dyn VmConnection>, VmError> {
        Err(VmError::Unsupported)
    }
    fn watch_dirs(&self) -> Vec<PathBuf> {
        self.directory
            .iter()
            .cloned()
            .chain(self.sockets.iter().filter_map(|s| s.parent().map(Into::into)))
            .collect()
    }
}
