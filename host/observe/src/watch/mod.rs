//! The host's topology while it changes: CPUs, memory and nodes that come and go.
//!
//! ```text
//!  kernel ──uevent──▶ netlink socket ──▶ thread ──▶ gather 100 ms ──▶ read sysfs ──▶ another one? ──▶ on_change
//!                                          ▲
//!                     every 30 s ──────────┘   in case an event was lost
//! ```
//!
//! A message only says when to read; the topology comes from sysfs. A tree other than `/` has no events and is read at
//! the interval only, as is a host whose kernel does not let us listen; [`HostWatcher::why_polling`] says why.

mod uevent;

use crate::read_host_topology;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use uevent::Uevents;
use vnuma_model::HostTopology;
use vnuma_process::{Jobs, Worker, Workers};

pub use uevent::{Uevent, parse_uevent};

/// Changes within this time are handled together: plugged memory makes an event for each block.
const GATHER: Duration = Duration::from_millis(100);

/// After a tree that made no sense, which may be one that is just changing.
const RETRY: Duration = Duration::from_secs(1);

/// Follows the topology of a host until it is dropped; then its own thread has ended too.
#[derive(Debug)]
pub struct HostWatcher {
    shared: Arc<Shared>,
    _worker: Worker<()>,
}

#[derive(Debug)]
struct Shared {
    reads: AtomicU64,
    why_polling: Mutex<Option<String>>,
}

impl HostWatcher {
    /// Follows the topology below `root`, which was `known` before. `on_change` is called from a thread of its own, one of
    /// these workers, with each one that differs in more than free memory and free huge pages.
    pub fn start(
        workers: &Workers,
        root: &Path,
        known: HostTopology,
        reread_interval: Duration,
        on_change: impl FnMut(HostTopology) + Send + 'static,
    ) -> io::Result<Self> {
        let (uevents, why_polling) = match (root == Path::new("/")).then(Uevents::open) {
            None => (None, Some(format!("{} is not the running host's tree", root.display()))),
            Some(Ok(uevents)) => (Some(uevents), None),
            Some(Err(error)) => (None, Some(format!("cannot listen to uevents: {error}"))),
        };
        let shared = Arc::new(Shared { reads: AtomicU64::new(0), why_polling: Mutex::new(why_polling) });
        let follower = Follower {
            root: root.to_owned(),
            known: Lasting::of(known),
            interval: reread_interval.max(GATHER),
            problem: None,
            shared: Arc::clone(&shared),
            on_change,
        };
        let worker =
            workers.start_polling("vnuma-host", move |jobs, end| follower.run(&jobs, &end, uevents))?;
        Ok(Self { shared, _worker: worker })
    }

    /// Why changes are found only at the interval; `None` if the kernel announces them.
    pub fn why_polling(&self) -> Option<String> {
        self.shared.why_polling.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often the topology was read.
    pub fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::Relaxed)
    }
}

/// A topology without its volatile fields.
#[derive(Debug, PartialEq, Eq)]
struct Lasting(HostTopology);

impl Lasting {
    fn of(mut topology: HostTopology) -> Self {
        for node in &mut topology.nodes {
            node.memory_free_kib = 0;
            node.huge_pages.iter_mut().for_each(|pool| pool.free = 0);
        }
        Self(topology)
    }
}

/// The thread's own.
struct Follower<F> {
    root: PathBuf,
    known: Lasting,
    interval: Duration,
    /// Why it could not be read, the last time.
    problem: Option<String>,
    shared: Arc<Shared>,
    on_change: F,
}

impl<F: FnMut(HostTopology)> Follower<F> {
    /// Until `end` is readable: there are no jobs.
    fn run(mut self, jobs: &Jobs<()>, end: &EventFd, mut uevents: Option<Uevents>) {
        let mut read_at = Instant::now() + self.interval;
        loop {
            match jobs.heartbeat().rest(|| wait(end, uevents.as_ref(), read_at)) {
                Ok(Wake::Stop) => return,
                Ok(Wake::Event) => read_at = read_at.min(Instant::now() + GATHER),
                Ok(Wake::Nothing) => {}
                Err(error) if uevents.is_none() => {
                    // Out of memory, for example. Trying again at once would keep a CPU busy.
                    tracing::warn!(%error, "cannot wait for uevents");
                    thread::sleep(RETRY);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot receive uevents any more; polling the host's topology");
                    let why = format!("uevents ended: {error}");
                    *self.shared.why_polling.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                    uevents = None;
                }
            }
            if Instant::now() >= read_at {
                read_at = Instant::now() + self.read();
            }
        }
    }

    /// Reads the topology and reports it if it differs. Returns how long the next reading can wait.
    fn read(&mut self) -> Duration {
        let read = read_host_topology(&self.root);
        self.shared.reads.fetch_add(1, Ordering::Relaxed);
        let topology = match read {
            Ok(topology) => topology,
            Err(error) => {
                let problem = error.to_string();
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(problem, "cannot read the host's topology; keeping the one known before");
                }
                self.problem = Some(problem);
                return self.interval.min(RETRY);
            }
        };
        self.problem = None;
        let lasting = Lasting::of(topology.clone());
        if lasting != self.known {
            self.known = lasting;
            (self.on_change)(topology);
        }
        self.interval
    }
}

/// Waits for an event, the time to read, or the end.
fn wait(end: &EventFd, uevents: Option<&Uevents>, until: Instant) -> io::Result<Wake> {
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
    let mut fds = vec![PollFd::new(end.as_fd(), PollFlags::POLLIN)];
    fds.extend(uevents.map(|uevents| PollFd::new(uevents.as_fd(), PollFlags::POLLIN)));
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    if fds[0].any().unwrap_or(true) {
        return Ok(Wake::Stop);
    }
    match uevents {
        Some(uevents) if uevents.take()? => Ok(Wake::Event),
        _ => Ok(Wake::Nothing),
    }
}

/// What ended a wait.
enum Wake {
    Stop,
    Event,
    Nothing,
}
