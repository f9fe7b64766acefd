//! Several backends as one.

use crate::{Source, VmBackend, VmConnection, VmError};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};
use vnuma_model::{VmCandidate, VmHandle};
use vnuma_process::{Groups, Ledger};

/// VMs of all of these. Of one that cannot list its VMs, those count that it listed last.
pub struct JoinedBackend {
    backends: Vec<Listing>,
    /// From the first scan on: one that only connects needs none.
    changes: Option<Epoll>,
}

struct Listing {
    backend: Box<dyn VmBackend>,
    last: Vec<VmCandidate>,
    problem: Option<String>,
    /// In the epoll set already.
    watched: Option<RawFd>,
}

impl JoinedBackend {
    /// These, the earlier ones first: where two have the same VM, see [`VmBackend::hide`].
    pub fn new(backends: Vec<Box<dyn VmBackend>>) -> Self {
        let listing = |backend| Listing { backend, last: Vec::new(), problem: None, watched: None };
        Self { backends: backends.into_iter().map(listing).collect(), changes: None }
    }

    /// A backend may have its descriptor from its first scan on only.
    fn watch(&mut self) {
        if self.changes.is_none() {
            match Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC) {
                Ok(epoll) => self.changes = Some(epoll),
                Err(error) => return tracing::debug!(%error, "changes of VMs are found by polling only"),
            }
        }
        let Some(epoll) = &self.changes else { return };
        for listing in &mut self.backends {
            let Some(fd) = listing.backend.changes() else { continue };
            if listing.watched == Some(fd.as_raw_fd()) {
                continue;
            }
            match epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0)) {
                Ok(()) => listing.watched = Some(fd.as_raw_fd()),
                Err(error) => tracing::debug!(%error, "changes of a backend are not seen"),
            }
        }
    }
}

impl std::fmt::Debug for JoinedBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinedBackend").field("backends", &self.backends.len()).finish_non_exhaustive()
    }
}

impl VmBackend for JoinedBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        let (mut found, mut failed, mut last_error): (Vec<VmCandidate>, _, _) = (Vec::new(), 0, None);
        for listing in &mut self.backends {
            listing.backend.hide(&found);
            match listing.backend.scan() {
                Ok(candidates) => {
                    listing.last = candidates;
                    listing.problem = None;
                }
                Err(error) => {
                    failed += 1;
                    let problem = Some(error.to_string());
                    if listing.problem != problem {
                        tracing::warn!(%error, "cannot look for VMs; the known ones stay");
                        listing.problem = problem;
                    }
                    last_error = Some(error);
                }
            }
            found.extend(listing.last.iter().cloned());
        }
        self.watch();
        match last_error {
            Some(error) if failed == self.backends.len() => Err(error),
            _ => Ok(found),
        }
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        self.changes.as_ref().map(|epoll| epoll.0.as_fd())
    }

    fn clear_changes(&mut self) {
        self.backends.iter_mut().for_each(|listing| listing.backend.clear_changes());
    }

    fn sources(&self) -> Vec<Source> {
        self.backends.iter().flat_map(|listing| listing.backend.sources()).collect()
    }

    fn workers(&self) -> Vec<Groups> {
        self.backends.iter().flat_map(|listing| listing.backend.workers()).collect()
    }

    fn ledgers(&self) -> Vec<Ledger> {
        self.backends.iter().flat_map(|listing| listing.backend.ledgers()).collect()
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let foreign = |error: &VmError| matches!(error, VmError::Connect { source, .. } if source.kind() == io::ErrorKind::InvalidInput);
        let mut refused = None;
        for listing in &self.backends {
            match listing.backend.connect(handle) {
                Err(error) if foreign(&error) => refused = Some(error),
                other => return other,
            }
        }
        Err(refused.unwrap_or_else(|| foreign_handle(handle, "a VM of any backend")))
    }
}

/// The refusal of a handle that another backend made.
pub(crate) fn foreign_handle(handle: &VmHandle, expected: &str) -> VmError {
    let source = io::Error::new(io::ErrorKind::InvalidInput, format!("not {expected}"));
    VmError::Connect { socket: handle.to_string(), source }
}
