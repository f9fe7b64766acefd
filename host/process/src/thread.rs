//! The thread behind a number.

use crate::{
    ActError, alive,
    procfs::{self, ProcError},
};
use std::{io, os::fd::BorrowedFd};

/// Start time of a thread of the process behind `pidfd`, in clock ticks since boot: with
/// its number, it tells a thread from any other that ever had that number.
pub(crate) fn start_time(pidfd: BorrowedFd<'_>, pid: i32, tid: i32) -> Result<u64, ActError> {
    let system = |act| move |source| ActError::System { pid, tid, act, source };
    if pid <= 0 || tid <= 0 {
        return Err(ActError::ForeignThread { pid, tid });
    }
    let time = procfs::read_start_time(pid, tid);
    // Looked up last: if the process is alive now, its number was not reused.
    if !alive(pidfd).map_err(system("asking for its process"))? {
        return Err(ActError::Exited { pid });
    }
    time.map_err(|error| match error {
        ProcError::Gone { .. } => ActError::ForeignThread { pid, tid },
        error => system("reading its start time")(io::Error::other(error)),
    })
}
