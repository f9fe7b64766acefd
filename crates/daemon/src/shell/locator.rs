//! Where vCPU threads are, by events from the kernel and from /proc. Both are read in threads of their own.

use super::inbox::{Inbox, Message};
use crate::{config::Config, core::event::Event};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_host::location::{LocationError, LocationEvent, LocationKind, LocationWatcher, read_location};
use vnuma_process::spawn_worker;
use vnuma_topology::{HostNodeId, HostTopology, VcpuLocation};

/// Threads read in one go by a resync. Three small files each, a millisecond or two altogether.
const AT_ONCE: usize = 64;

/// Time between two of these: at most 640 threads a second and 2 % of a CPU, however many there are.
const PAUSE: Duration = Duration::from_millis(100);

/// What the threads of this file share.
#[derive(Debug, Default)]
struct Shared {
    host: RwLock<Arc<HostTopology>>,
    /// Process of each watched thread, and the node that it was confined to when its affinity was read.
    threads: Mutex<HashMap<i32, (i32, Option<HostNodeId>)>>,
    /// Events that were lost because the inbox was full.
    overflowed: AtomicU64,
    health: Mutex<Health>,
}

/// How well locations are learned.
#[derive(Clone, Debug, Default)]
pub(super) struct Health {
    pub(super) source: &'static str,
    pub(super) why_not_bpf: Option<String>,
    pub(super) sees_affinity: bool,
    pub(super) lost: u64,
}

impl Shared {
    fn host(&self) -> Arc<HostTopology> {
        Arc::clone(&self.host.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn process(&self, tid: i32) -> Option<(i32, Option<HostNodeId>)> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).get(&tid).copied()
    }

    fn read(&self, pid: i32, tid: i32) -> Option<VcpuLocation> {
        let location = read_location(&self.host(), pid, tid).ok();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(known), Some(location)) = (threads.get_mut(&tid), location) {
            known.1 = location.pinned;
        }
        location
    }

    /// The location in an event. The affinity is read only if the event may concern it.
    fn after(&self, event: &LocationEvent, sees_affinity: bool) -> Option<VcpuLocation> {
        let (pid, pinned) = self.process(event.tid)?;
        let node = self.host().node_of_cpu(event.cpu);
        let mut location = match (event.kind, node) {
            (LocationKind::Migrated, Some(node)) if sees_affinity && pinned.is_none_or(|pin| pin == node) => {
                VcpuLocation { cpu: event.cpu, node, pinned, time_ns: event.time_ns }
            }
            _ => self.read(pid, event.tid)?,
        };
        if let (LocationKind::Migrated, Some(node)) = (event.kind, node) {
            // /proc may not show it yet: the event is sent during the migration.
            (location.cpu, location.node) = (event.cpu, node);
        }
        location.time_ns = event.time_ns;
        Some(location)
    }
}

/// Reads where a thread is, from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Reader(Arc<Shared>);

impl Reader {
    /// `None` if that cannot be known.
    pub(crate) fn read(&self, pid: i32, tid: i32) -> Option<VcpuLocation> {
        self.0.read(pid, tid)
    }
}

enum Order {
    Watch(i32, i32),
    Unwatch(i32),
    Look(Vec<(i32, i32)>),
    Host(Arc<HostTopology>),
}

/// Watches threads on behalf of the core.
#[derive(Debug)]
pub(super) struct Locator {
    shared: Arc<Shared>,
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Locator {
    pub(super) fn start(
        host: &HostTopology,
        config: &Config,
        inbox: Arc<Inbox>,
    ) -> Result<Self, LocationError> {
        let shared = Arc::new(Shared { host: RwLock::new(Arc::new(host.clone())), ..Shared::default() });
        let (theirs, events) = (Arc::clone(&shared), Arc::clone(&inbox));
        let on_event = move |event: LocationEvent| {
            let sees_affinity = theirs.health.lock().unwrap_or_else(PoisonError::into_inner).sees_affinity;
            let event = match event.kind {
                LocationKind::Exited => Event::ThreadEnded(event.tid),
                _ => Event::Located(event.tid, theirs.after(&event, sees_affinity)),
            };
            if !events.try_send(event) {
                theirs.overflowed.fetch_add(1, Ordering::Relaxed);
            }
        };
        let watcher = LocationWatcher::start(host, config.location, config.poll_interval, on_event)?;
        match watcher.why_not_bpf() {
            None => info!(source = watcher.source(), "watching vCPU locations"),
            Some(why) => info!(source = watcher.source(), why_not_bpf = why, "watching vCPU locations"),
        }
        let (orders, received) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let mut task =
            Task { watcher, shared: theirs, inbox, waiting: VecDeque::new(), known: HashSet::new() };
        task.note_health();
        let thread = spawn_worker("locator", move || task.run(&received));
        let thread = thread.map_err(|source| LocationError::Watch { act: "starting a thread", source })?;
        Ok(Self { shared, orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn reader(&self) -> Reader {
        Reader(Arc::clone(&self.shared))
    }

    pub(super) fn health(&self) -> Health {
        self.shared.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Watches a thread from now on, and says where it is.
    pub(super) fn watch(&self, pid: i32, tid: i32) {
        self.order(Order::Watch(pid, tid));
    }

    pub(super) fn unwatch(&self, tid: i32) {
        self.order(Order::Unwatch(tid));
    }

    /// Reads where these threads are: at once if events were lost, else a few at a time.
    pub(super) fn look(&self, threads: Vec<(i32, i32)>) {
        self.order(Order::Look(threads));
    }

    /// The host is another one now.
    pub(super) fn host_changed(&self, host: &HostTopology) {
        self.order(Order::Host(Arc::new(host.clone())));
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // Fails only while vnumad stops.
            let _ = orders.send(order);
        }
    }
}

impl Drop for Locator {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

/// What the thread works with.
struct Task {
    watcher: LocationWatcher,
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
    /// Threads to be read, in order, each once.
    waiting: VecDeque<(i32, i32)>,
    known: HashSet<i32>,
}

impl Task {
    fn run(mut self, orders: &mpsc::Receiver<Order>) {
        let mut look_at = Instant::now();
        loop {
            let order = if self.waiting.is_empty() {
                orders.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected)
            } else {
                orders.recv_timeout(look_at.saturating_duration_since(Instant::now()))
            };
            let goes_on = match order {
                Ok(order) => self.execute(order),
                Err(mpsc::RecvTimeoutError::Timeout) => true,
                Err(mpsc::RecvTimeoutError::Disconnected) => false,
            };
            if !goes_on {
                return;
            }
            if !self.waiting.is_empty() && look_at <= Instant::now() {
                look_at = Instant::now() + PAUSE;
                if !self.look_at_some(AT_ONCE) {
                    return;
                }
            }
        }
    }

    fn execute(&mut self, order: Order) -> bool {
        match order {
            Order::Watch(pid, tid) => {
                self.lock_threads(|threads| threads.insert(tid, (pid, None)));
                self.watch(pid, tid);
                return self.report(pid, tid);
            }
            Order::Unwatch(tid) => {
                if self.lock_threads(|threads| threads.remove(&tid)).is_some() {
                    self.watcher.unwatch(tid);
                }
            }
            Order::Look(threads) => {
                for (pid, tid) in threads {
                    if self.known.insert(tid) {
                        self.waiting.push_back((pid, tid));
                    }
                }
                if self.note_health() {
                    return self.look_at_some(usize::MAX);
                }
            }
            Order::Host(host) => {
                if let Err(error) = self.watcher.set_topology(&host) {
                    warn!(%error, "BPF does not know the host's new nodes; moves between them are found by the resync only");
                }
                *self.shared.host.write().unwrap_or_else(PoisonError::into_inner) = host;
            }
        }
        true
    }

    fn lock_threads<T>(&self, act: impl FnOnce(&mut HashMap<i32, (i32, Option<HostNodeId>)>) -> T) -> T {
        act(&mut self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A thread that cannot be watched is still read by each resync, which tries to watch it again.
    fn watch(&self, pid: i32, tid: i32) {
        match self.watcher.watch(pid, tid) {
            // It has ended: what is read next says so. The others were logged when they began.
            Ok(())
            | Err(LocationError::NoThread { .. } | LocationError::TooMany { .. } | LocationError::Ended) => {}
            Err(error) => warn!(tid, %error, "the thread is not watched; this is tried again"),
        }
    }

    fn report(&self, pid: i32, tid: i32) -> bool {
        self.inbox.send(Message::Event(Event::Located(tid, self.shared.read(pid, tid))))
    }

    fn look_at_some(&mut self, most: usize) -> bool {
        for _ in 0..most.min(self.waiting.len()) {
            let Some((pid, tid)) = self.waiting.pop_front() else { break };
            self.known.remove(&tid);
            // A thread that is not watched any more is not read.
            if self.shared.process(tid).is_some_and(|(known, _)| known == pid) {
                self.watch(pid, tid);
                if !self.report(pid, tid) {
                    return false;
                }
            }
        }
        true
    }

    /// Notes how well locations are learned. True if events were lost since the last call.
    fn note_health(&mut self) -> bool {
        let lost = self.watcher.dropped() + self.shared.overflowed.load(Ordering::Relaxed);
        let health = self.watcher.health();
        let now = Health {
            source: health.source,
            why_not_bpf: health.why_not_bpf,
            sees_affinity: health.sees_affinity,
            lost,
        };
        let mut health = self.shared.health.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *health, now);
        if lost > before.lost {
            warn!(lost, "location events were lost; all locations are read again");
        }
        lost > before.lost
    }
}
