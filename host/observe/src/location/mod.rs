//! Where vCPU threads run: by event where the kernel allows it, by polling elsewhere.
//!
//! ```text
//!            kernel                        this process
//!  sched_migrate_task ─┐ watched?
//!  __set_cpus_allowed ─┼─ other node? ─▶ ring buffer ─▶ KernelEvents::take ─▶ on_event
//!  sched_process_exit ─┘                (blocks; no event, no wake-up)
//!
//!  /proc/PID/task/TID/{stat,status} ◀── thread, every interval ─▶ on_event
//! ```
//!
//! Both sources report the same three things and nothing else: a thread is on another node, its allowed CPUs changed, it ended.
//! Neither is taken for the whole truth: after an event, [`read_location`] reads where the thread is now.
//!
//! They differ in what they see: BPF sees every crossing of nodes, polling only what is left of them at its interval. If BPF is
//! unavailable, or fails later, polling takes its place, and [`LocationWatcher::health`] says so and why. BPF needs the kernel's
//! BTF, `CAP_BPF` and `CAP_PERFMON`, and thread numbers of the initial PID namespace. A kernel that has inlined
//! `__set_cpus_allowed_ptr` gives no events for allowed CPUs through BPF ([`LocationWatcher::sees_affinity`]); a change of them
//! that moves the thread to another node is still seen as that.

mod bpf;
mod poll;
mod proc;
mod record;
mod watched;

use bpf::BpfSource;
pub use bpf::{KernelEvents, REST, TAKEN_AT_ONCE};
use poll::PollSource;
pub use proc::{read_location, read_pinned};
pub use record::parse_record;
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use vnuma_abi_bpf::{PASSED, WAITS, WAKES};
use vnuma_model::{Budget, Capability, CpuId, HostTopology, PassedOver, Rate};
use vnuma_process::{ProcError, Workers};

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
    /// The thread's files in /proc cannot be read or parsed.
    #[error(transparent)]
    Proc(ProcError),
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
    /// Neither BPF nor polling works any more.
    #[error("vCPU locations are not watched any more")]
    Ended,
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
        /// The system's error.
        source: std::io::Error,
    },
}

/// The best way to learn locations.
pub const BPF: &str = "bpf";

/// Most threads watched at a time: 16 VMs with as many vCPUs as QEMU can have.
pub const MAX_WATCHED: usize = 65_536;

/// For lines of the log that say that there is no room: two at once, and one in a minute.
const LINES: Rate = Rate::new(1, 120);
const LINE: u32 = 60;

/// How locations are watched, and how well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// By `bpf`, by `poll`, or `none` if neither works any more.
    pub by: Capability,
    /// A change of the allowed CPUs alone makes an event.
    pub sees_affinity: bool,
    /// Threads that are watched.
    pub watched: usize,
    /// A thread was refused because [`MAX_WATCHED`] others are watched, and there has been no room since.
    pub full: bool,
}

/// Watches threads until it is dropped; then the thread that polls has ended too.
///
/// If the events of BPF cannot be taken any more, polling takes over: [`health`](Self::health) says so from then on, and
/// each thread makes an event at the first look, whether or not it has moved.
#[derive(Debug)]
pub struct LocationWatcher {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    poll_interval: Duration,
    workers: Workers,
}

#[derive(Debug)]
struct State {
    /// `None` before the start and after the end.
    source: Option<Source>,
    why_not_bpf: Option<String>,
    topology: HostTopology,
    /// Process of each watched thread.
    threads: HashMap<i32, i32>,
    /// Those whose moves do not make the descriptor readable.
    deferred: HashSet<i32>,
    /// Those of which only the end makes an event.
    passed: HashSet<i32>,
    full: bool,
    /// For lines of the log that say so.
    lines: Budget,
    /// Events that a source lost that is in use no more.
    dropped_before: u64,
}

#[derive(Debug)]
enum Source {
    Bpf(Box<BpfSource>),
    Poll(PollSource),
}

impl Shared {
    /// No code that holds the lock can panic half-way through a change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polling takes over what BPF was watching.
    fn fall_back(&self, reason: String, on_event: impl Fn(LocationEvent) + Send + Sync + 'static) {
        let mut state = self.lock();
        // The receiver was dropped.
        let Some(Source::Bpf(bpf)) = &state.source else { return };
        tracing::error!(reason, "cannot read BPF events; vCPU locations are polled from now on");
        let dropped = bpf.dropped();
        let (workers, topology) = (&self.workers, state.topology.clone());
        let poll = PollSource::start(workers, topology, self.poll_interval, &state.threads, on_event);
        let failed = match poll {
            Ok(poll) => state.source.replace(Source::Poll(poll)),
            Err(error) => {
                tracing::error!(%error, "cannot poll vCPU locations: moves are not seen");
                state.source.take()
            }
        };
        state.dropped_before += dropped;
        state.why_not_bpf = Some(format!("events cannot be taken any more: {reason}"));
        drop(state);
        // Dropped without the lock.
        drop(failed);
    }
}

impl LocationWatcher {
    /// Starts watching. The caller takes the events of BPF itself by [`KernelEvents::take`], which spares the change to another
    /// thread, and has to [`unwatch`](Self::unwatch) threads that have exited. Polling, from the start or later, looks once each
    /// `poll_interval` and calls `on_event` from a thread of its own, one of these workers. `on_event` should not block.
    pub fn start(
        workers: &Workers,
        topology: &HostTopology,
        prefer: Prefer,
        poll_interval: Duration,
        on_event: impl Fn(LocationEvent) + Send + Sync + 'static,
    ) -> Result<(Self, Option<KernelEvents>), LocationError> {
        let state = State {
            source: None,
            why_not_bpf: None,
            topology: topology.clone(),
            threads: HashMap::new(),
            deferred: HashSet::new(),
            passed: HashSet::new(),
            full: false,
            lines: Budget::default(),
            dropped_before: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), poll_interval, workers: workers.clone() });
        let weak = Arc::downgrade(&shared);
        let on_event = move |event: LocationEvent| {
            if event.kind == LocationKind::Exited
                && let Some(shared) = weak.upgrade()
            {
                shared.lock().forget(event.tid);
            }
            on_event(event);
        };
        let programs = match prefer {
            Prefer::Poll => Err("polling was asked for".to_owned()),
            Prefer::Auto | Prefer::Bpf => bpf::Programs::load(topology),
        };
        let mut state = shared.lock();
        let events = match programs {
            Ok(programs) => {
                let weak = Arc::downgrade(&shared);
                let on_failure = move |reason| {
                    if let Some(shared) = weak.upgrade() {
                        shared.fall_back(reason, on_event);
                    }
                };
                let (source, events) = programs.start(on_failure)?;
                state.source = Some(Source::Bpf(Box::new(source)));
                Some(events)
            }
            Err(reason) if prefer == Prefer::Bpf => return Err(LocationError::NoBpf { reason }),
            Err(reason) => {
                let (topology, none) = (topology.clone(), HashMap::new());
                let poll = PollSource::start(workers, topology, poll_interval, &none, on_event)?;
                (state.source, state.why_not_bpf) = (Some(Source::Poll(poll)), Some(reason));
                None
            }
        };
        drop(state);
        Ok((Self { shared }, events))
    }

    /// Watches a thread of a process. Read its location after this call, not before, or a
    /// move in between is missed. Watching it twice is no error, and what failed can be tried again.
    pub fn watch(&self, pid: i32, tid: i32) -> Result<(), LocationError> {
        let mut state = self.shared.lock();
        let outcome = match &state.source {
            Some(Source::Bpf(_)) if state.has_no_room_for(tid) => {
                Err(LocationError::TooMany { tid, limit: MAX_WATCHED })
            }
            Some(Source::Bpf(bpf)) => bpf.watch(pid, tid, state.how(tid)),
            Some(Source::Poll(poll)) => poll.watch(pid, tid),
            None => Err(LocationError::Ended),
        };
        match &outcome {
            Ok(()) => {
                state.threads.insert(tid, pid);
            }
            Err(LocationError::TooMany { .. }) if !state.full => {
                state.full = true;
                // VMs whose threads come and go make room, and take it, as often as they like.
                if state.lines.spend(LINES, LINE, monotonic_ns()).is_ok() {
                    tracing::error!(tid, limit = MAX_WATCHED, "no room to watch more threads");
                }
            }
            Err(_) => {}
        }
        outcome
    }

    /// From now on the moves of a watched thread to another node wake nobody who waits for [`KernelEvents::fd`]: they are taken with
    /// what wakes it next, or when they are many. Or, without `waits`, they wake it again. All else that happens to the thread always
    /// does. Polling finds all at the same interval.
    pub fn defer(&self, tid: i32, waits: bool) {
        let mut state = self.shared.lock();
        if !state.threads.contains_key(&tid) {
            return;
        }
        let changed = if waits { state.deferred.insert(tid) } else { state.deferred.remove(&tid) };
        state.tell(tid, changed);
    }

    /// From now on only the end of a watched thread makes an event. Or, without `passed`, all that happens to it does again: read its
    /// location after that. Polling has not as many events that this would be needed for.
    pub fn pass_over(&self, tid: i32, passed: bool) {
        let mut state = self.shared.lock();
        if !state.threads.contains_key(&tid) {
            return;
        }
        let changed = if passed { state.passed.insert(tid) } else { state.passed.remove(&tid) };
        state.tell(tid, changed);
    }

    /// Is this thread of the process watched?
    pub fn watches(&self, pid: i32, tid: i32) -> bool {
        self.shared.lock().threads.get(&tid) == Some(&pid)
    }

    /// Forgets a thread. One that is not watched is no error. Events that are on their way still arrive.
    pub fn unwatch(&self, tid: i32) {
        let mut state = self.shared.lock();
        match &state.source {
            Some(Source::Bpf(bpf)) => bpf.unwatch(tid),
            Some(Source::Poll(poll)) => poll.unwatch(tid),
            None => {}
        }
        state.forget(tid);
    }

    /// The host's CPUs and nodes are others now. A thread that is on another node by that alone makes no event: read the
    /// locations of all threads again after this.
    pub fn set_topology(&self, topology: &HostTopology) -> Result<(), LocationError> {
        let mut state = self.shared.lock();
        state.topology = topology.clone();
        match &state.source {
            Some(Source::Bpf(bpf)) => bpf.set_topology(topology),
            Some(Source::Poll(poll)) => {
                poll.set_topology(topology);
                Ok(())
            }
            None => Err(LocationError::Ended),
        }
    }

    /// How locations are watched by now.
    pub fn health(&self) -> Health {
        let state = self.shared.lock();
        let (way, sees_affinity) = match &state.source {
            Some(Source::Bpf(bpf)) => (BPF, bpf.sees_affinity()),
            Some(Source::Poll(_)) => ("poll", true),
            None => ("none", false),
        };
        let passed_over = state.why_not_bpf.as_ref().map(|why| PassedOver::new(BPF, why));
        let by = Capability::new(Capability::LOCATIONS, way, passed_over);
        Health { by, sees_affinity, watched: state.threads.len(), full: state.full }
    }

    /// Records that the BPF programs have made; none when polling. Each wakes its reader at most once.
    pub fn reported(&self) -> u64 {
        match &self.shared.lock().source {
            Some(Source::Bpf(bpf)) => bpf.reported(),
            _ => 0,
        }
    }

    /// Events lost because they came faster than they were taken. When it has grown, read the locations of all threads again.
    pub fn dropped(&self) -> u64 {
        let state = self.shared.lock();
        match &state.source {
            Some(Source::Bpf(bpf)) => bpf.dropped(),
            _ => state.dropped_before,
        }
    }
}

impl State {
    fn has_no_room_for(&self, tid: i32) -> bool {
        self.threads.len() >= MAX_WATCHED && !self.threads.contains_key(&tid)
    }

    /// What a move of this thread does.
    fn how(&self, tid: i32) -> u8 {
        match (self.passed.contains(&tid), self.deferred.contains(&tid)) {
            (true, _) => PASSED,
            (_, true) => WAITS,
            _ => WAKES,
        }
    }

    /// The programs are to know that, if it has changed.
    fn tell(&self, tid: i32, changed: bool) {
        if let (true, Some(Source::Bpf(bpf))) = (changed, &self.source) {
            bpf.change(tid, self.how(tid));
        }
    }

    fn forget(&mut self, tid: i32) {
        self.deferred.remove(&tid);
        self.passed.remove(&tid);
        if self.threads.remove(&tid).is_some() {
            self.full = false;
        }
    }
}

impl Drop for LocationWatcher {
    fn drop(&mut self) {
        let source = self.shared.lock().source.take();
        // Its thread may be about to take the lock.
        drop(source);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use vnuma_model::HostNode;

    /// No event takes this long, on no machine.
    const HANG: Duration = Duration::from_secs(600);

    #[test]
    #[cfg_attr(not(root), ignore = "BPF needs root")]
    fn polling_takes_over_when_bpf_events_cannot_be_taken() {
        let node = HostNode { id: 0, cpus: (0..64).collect(), ..HostNode::default() };
        let host = HostTopology { nodes: vec![node], ..HostTopology::default() };
        let (send, events) = mpsc::channel();
        let on_event = move |event| send.send(event).unwrap();
        let (workers, interval) = (Workers::default(), Duration::from_millis(5));
        let started = LocationWatcher::start(&workers, &host, Prefer::Bpf, interval, on_event).unwrap();
        let (watcher, mut kernel) = (started.0, started.1.expect("the kernel's events"));
        assert_eq!((watcher.health().by.in_use.as_str(), watcher.health().watched), (BPF, 0));
        let pid = std::process::id().cast_signed();
        let (tell, told) = mpsc::channel();
        let (keep, kept) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = kept.recv();
        });
        let tid = told.recv().unwrap();
        watcher.watch(pid, tid).unwrap();
        while kernel.failed("a test wants it so".to_owned()).is_some() {
            assert_eq!(watcher.health().by.in_use, BPF, "it is tried again");
        }
        assert_eq!(kernel.take(&mut Vec::new()), None);
        let health = watcher.health();
        assert_eq!((health.by.in_use.as_str(), health.watched), ("poll", 1));
        assert!(health.by.why_not(BPF).unwrap().contains("a test wants it so"));
        watcher.watch(pid, tid).unwrap();
        drop(keep);
        thread.join().unwrap();
        while events.recv_timeout(HANG).expect("an event").kind != LocationKind::Exited {}
        assert_eq!(watcher.health().watched, 0);
    }
}
