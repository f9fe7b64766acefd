//! Where vCPU threads run: by event where the kernel allows it, by polling elsewhere.

use std::time::Duration;
use vnuma_topology::{CpuId, HostTopology, VcpuLocation};

/// Which source of events to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// BPF where it works, polling elsewhere.
    #[default]
    Auto,
    /// BPF or an error.
    Bpf,
    /// Polling.
    Poll,
}

/// What happened to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocationKind {
    /// It is put on a CPU of another node.
    Migrated,
    /// Its allowed CPUs changed.
    AffinityChanged,
    /// It has ended. It is not watched any more.
    Exited,
}

/// Something that happened to a watched thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocationEvent {
    /// The thread.
    pub tid: i32,
    /// The CPU it goes to, or is on.
    pub cpu: CpuId,
    /// What happened.
    pub kind: LocationKind,
    /// `CLOCK_MONOTONIC`, nanoseconds: of the event itself, or when a poll found it.
    pub time_ns: u64,
}

/// Why a location could not be learned.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The thread has ended, or is none of that process.
    #[error("thread {tid} of process {pid} does not exist")]
    NoThread {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// A file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A value makes no sense.
    #[error("{path}: {field} is `{value}`: {reason}")]
    Value {
        /// The file.
        path: String,
        /// Which part of it.
        field: &'static str,
        /// What was found, shortened.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
    /// The thread is on a CPU of which the topology knows no node.
    #[error("thread {tid} is on CPU {cpu}, which belongs to no known node")]
    UnknownCpu {
        /// The thread.
        tid: i32,
        /// The CPU.
        cpu: CpuId,
    },
    /// BPF was asked for and does not work here.
    #[error("vCPU locations cannot be watched by BPF: {reason}")]
    NoBpf {
        /// Why not.
        reason: String,
    },
    /// More threads than the watcher has room for.
    #[error("more than {limit} threads to watch")]
    TooMany {
        /// Its room.
        limit: usize,
    },
    /// The watcher's thread could not be started or has failed.
    #[error("watching vCPU locations: {source}")]
    Watch {
        /// What the system said.
        source: std::io::Error,
    },
    /// Not available in this build.
    #[error("not supported yet")]
    Unsupported,
}

/// Watches threads until it is dropped.
#[derive(Debug)]
pub struct LocationWatcher {}

impl LocationWatcher {
    /// Starts watching. `on_event` is called from a thread of the watcher's own and should
    /// not block. `poll_interval` counts for polling only.
    pub fn start(
        topology: &HostTopology,
        prefer: Prefer,
        poll_interval: Duration,
        on_event: impl Fn(LocationEvent) + Send + 'static,
    ) -> Result<Self, LocationError> {
        let _ = (topology, prefer, poll_interval, on_event);
        Err(LocationError::Unsupported)
    }
    /// Watches a thread of a process. Read its location after this call, not before, or a move is missed.
    pub fn watch(&self, pid: i32, tid: i32) -> Result<(), LocationError> {
        let _ = (pid, tid);
        Err(LocationError::Unsupported)
    }
    /// Forgets a thread. One that is not watched is no error.
    pub fn unwatch(&self, tid: i32) {
        let _ = tid;
    }
    /// `bpf` or `poll`.
    pub fn source(&self) -> &'static str {
        "poll"
    }
    /// Why it is not BPF, in words.
    pub fn why_not_bpf(&self) -> Option<String> {
        None
    }
    /// Events lost because they came faster than they were taken. After a loss, read the
    /// locations of all threads again.
    pub fn dropped(&self) -> u64 {
        0
    }
}

/// Where a thread is now, from /proc.
pub fn read_location(topology: &HostTopology, pid: i32, tid: i32) -> Result<VcpuLocation, LocationError> {
    let _ = (topology, pid, tid);
    Err(LocationError::Unsupported)
}

/// `CLOCK_MONOTONIC` now, nanoseconds: the clock of every time in this crate.
pub fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .unwrap_or(nix::sys::time::TimeSpec::new(0, 0));
    // Neither is ever negative on this clock.
    now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs()
}
