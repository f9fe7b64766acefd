//! Act: puts vCPU threads where the plan wants them.

use std::os::fd::BorrowedFd;
use vnuma_topology::CpuSet;

/// Why an act failed. Nothing was changed then, unless the variant says so.
#[derive(Debug, thiserror::Error)]
pub enum ActError {
    /// The thread belongs to another process, or has ended.
    #[error("thread {tid} is no thread of process {pid}; not touched")]
    ForeignThread {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// The process has ended.
    #[error("process {pid} has ended")]
    Exited {
        /// The process.
        pid: i32,
    },
    /// No CPUs to put it on.
    #[error("thread {tid} cannot be put on no CPUs at all")]
    NoCpus {
        /// The thread.
        tid: i32,
    },
    /// The system refused.
    #[error("thread {tid} of process {pid}: {act}: {source}")]
    System {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// What was tried.
        act: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not available in this build.
    #[error("not supported yet")]
    Unsupported,
}

/// Confines a thread of the process behind `pidfd` (whose number is `pid`) to `cpus`.
pub fn pin_thread(pidfd: BorrowedFd<'_>, pid: i32, tid: i32, cpus: &CpuSet) -> Result<(), ActError> {
    let _ = (pidfd, pid, tid, cpus);
    Err(ActError::Unsupported)
}
