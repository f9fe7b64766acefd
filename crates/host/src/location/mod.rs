//! Where vCPU threads run: by event where the kernel allows it, by polling elsewhere.
//!
//! ```text
//!            kernel                        this process
//!  sched_migrate_task ─┐ watched?
//!  __set_cpus_allowed ─┼─ other node? ─▶ ring buffer ─▶ thread ─▶ on_event
//!  sched_process_exit ─┘                (blocks; no event, no wake-up)
//!
//!  /proc/PID/task/TID/{stat,status} ◀── thread, every interval ─▶ on_event
//! ```
//!
//! Both sources tell the same three things and nothing else: a thread is on another node,
//! its allowed CPUs changed, it ended. Neither is taken for the whole truth: after an event,
//! [`read_location`] tells where the thread is by now.
//!
//! Where they end: BPF sees every crossing of nodes, polling only what is left of them at its
//! interval. BPF needs the kernel's BTF, `CAP_BPF` and `CAP_PERFMON`, and thread numbers of
//! the initial PID namespace; [`LocationWatcher::why_not_bpf`] says what was missing. A kernel
//! that has inlined `__set_cpus_allowed_ptr` gives no events for allowed CPUs through BPF
//! ([`LocationWatcher::sees_affinity`]); a change of them that moves the thread to another
//! node is still seen as that.

mod bpf;
mod poll;
pub mod proc;
mod record;

use bpf::BpfSource;
use poll::PollSource;
pub use proc::{read_allowed, read_location};
pub use record::parse_record;
use std::time::Duration;
use vnuma_topology::{CpuId, HostTopology};

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
    #[error("thread {tid}: {limit} threads are watched already, the most there is room for")]
    TooMany {
        /// The thread.
        tid: i32,
        /// The room.
        limit: usize,
    },
    /// The system refused something that the watcher needs.
    #[error("watching vCPU locations: {act}: {source}")]
    Watch {
        /// What was tried.
        act: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Most threads watched at a time: 16 VMs with as many vCPUs as QEMU can have.
pub(crate) const MAX_WATCHED: usize = 65_536;

/// Watches threads until it is dropped; then its own thread has ended too.
#[derive(Debug)]
pub struct LocationWatcher {
    source: Source,
    why_not_bpf: Option<String>,
}

#[derive(Debug)]
enum Source {
    Bpf(Box<BpfSource>),
    Poll(PollSource),
}

impl LocationWatcher {
    /// Starts watching. `on_event` is called from a thread of the watcher's own and should
    /// not block. `poll_interval` counts for polling only.
    pub fn start(
        topology: &HostTopology,
        prefer: Prefer,
        poll_interval: Duration,
        on_event: impl Fn(LocationEvent) + Send + 'static,
    ) -> Result<Self, LocationError> {
        let why_not_bpf = match prefer {
            Prefer::Poll => "polling was asked for".to_owned(),
            Prefer::Auto | Prefer::Bpf => match bpf::Programs::load(topology) {
                Ok(programs) => {
                    let source = Source::Bpf(Box::new(programs.start(on_event)?));
                    return Ok(Self { source, why_not_bpf: None });
                }
                Err(reason) if prefer == Prefer::Bpf => return Err(LocationError::NoBpf { reason }),
                Err(reason) => reason,
            },
        };
        let source = Source::Poll(PollSource::start(topology.clone(), poll_interval, on_event)?);
        Ok(Self { source, why_not_bpf: Some(why_not_bpf) })
    }

    /// Watches a thread of a process. Read its location after this call, not before, or a
    /// move in between is missed. Watching it twice is no error.
    pub fn watch(&self, pid: i32, tid: i32) -> Result<(), LocationError> {
        match &self.source {
            Source::Bpf(bpf) => bpf.watch(pid, tid),
            Source::Poll(poll) => poll.watch(pid, tid),
        }
    }

    /// The host's CPUs and nodes are others now. A thread that is on another node by that alone makes no event: read the
    /// locations of all threads again after this.
    pub fn set_topology(&self, topology: &HostTopology) -> Result<(), LocationError> {
        match &self.source {
            Source::Bpf(bpf) => bpf.set_topology(topology),
            Source::Poll(poll) => {
                poll.set_topology(topology);
                Ok(())
            }
        }
    }

    /// Forgets a thread. One that is not watched is no error. Events that are on their way
    /// still arrive.
    pub fn unwatch(&self, tid: i32) {
        match &self.source {
            Source::Bpf(bpf) => bpf.unwatch(tid),
            Source::Poll(poll) => poll.unwatch(tid),
        }
    }

    /// `bpf` or `poll`.
    pub fn source(&self) -> &'static str {
        match &self.source {
            Source::Bpf(_) => "bpf",
            Source::Poll(_) => "poll",
        }
    }

    /// Why it is not BPF, in words.
    pub fn why_not_bpf(&self) -> Option<String> {
        self.why_not_bpf.clone()
    }

    /// Does a change of the allowed CPUs alone make an event?
    pub fn sees_affinity(&self) -> bool {
        match &self.source {
            Source::Bpf(bpf) => bpf.sees_affinity(),
            Source::Poll(_) => true,
        }
    }

    /// Records that the BPF programs have made; none when polling. Each wakes the watcher's thread at most once.
    pub fn reported(&self) -> u64 {
        match &self.source {
            Source::Bpf(bpf) => bpf.reported(),
            Source::Poll(_) => 0,
        }
    }

    /// Events lost because they came faster than they were taken. When it has grown, read
    /// the locations of all threads again.
    pub fn dropped(&self) -> u64 {
        match &self.source {
            Source::Bpf(bpf) => bpf.dropped(),
            Source::Poll(_) => 0,
        }
    }
}

/// `CLOCK_MONOTONIC` now, nanoseconds: the clock of every time in this crate.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec. The call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    // Neither part is ever negative on this clock.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
