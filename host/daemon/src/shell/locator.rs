//! Finds where vCPU threads run: from kernel events, which the core's thread takes, and from /proc, in a thread of its own.

use super::inbox::{Inbox, Message};
use crate::{config::Config, core::event::Event};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_model::{Backoff, Capability, CpuSet, HostTopology, Party, VcpuLocation, VmId, Work};
use vnuma_observe::location::{
    Health, KernelEvents, LocationError, LocationEvent, LocationKind, LocationWatcher, REST, read_location,
    read_pinned,
};
use vnuma_process::{Jobs, Ledger, Next, Worker, Workers};

/// Threads that one pass over /proc reads, in case an event was lost: one small file each, some ten milliseconds in all.
const AT_ONCE: usize = 1280;

/// Least time between two passes: at most some 670 threads a second and 1 % of a CPU, however many threads there are.
const PAUSE: Duration = Duration::from_millis(1900);

/// How late the next pass may be. Usually a command wakes this thread before, and the pass shares that wake-up.
const SLACK: Duration = Duration::from_millis(400);

/// So many events of a VM are taken between two rests without a look at its budget: what that earns in a rest. So a move that comes
/// alone costs nothing more.
const EARNED: usize = (Work::ThreadEvents.rate().per_s as u128 * REST.as_millis() / 1000) as usize;
/// One event of each thread between two rests costs nothing, of so many threads: a large VM may be balanced as often as a small one.
const FREE: usize = 64;

/// How long threads of a VM are passed over that has spent its budget, and how long if it does so again and again.
const PASSED: Backoff = Backoff::of(Duration::from_secs(2), Duration::from_secs(60));

/// A VM that was not passed over for so long begins anew.
const FORGIVEN: Duration = Duration::from_secs(60);

/// Why changes of affinities are learned from looks at threads.
const NO_EVENT: &str = "a change of a thread's affinity alone makes no event here; it is noticed when the vCPU runs or with the next resync";

/// A thread that is watched.
#[derive(Clone, Copy, Debug)]
struct Thread {
    vm: VmId,
    pid: i32,
    /// The newest location that was sent, if the core has received it and no other since.
    sent: Option<VcpuLocation>,
}

impl Thread {
    /// Does the core know this location already, whenever it was seen?
    fn is_known(&self, location: VcpuLocation) -> bool {
        self.sent.is_some_and(|sent| sent == VcpuLocation { time_ns: sent.time_ns, ..location })
    }

    /// Has at most its CPU changed, within the node? Nothing is published for that.
    fn is_on_known_node(&self, location: VcpuLocation) -> bool {
        self.sent.is_some_and(|sent| (sent.node, sent.pinned) == (location.node, location.pinned))
    }
}

/// State that the threads of this file share.
#[derive(Debug, Default)]
struct Shared {
    host: RwLock<Arc<HostTopology>>,
    threads: Mutex<HashMap<i32, Thread>>,
    /// Events that were lost because the inbox was full.
    overflowed: AtomicU64,
    /// Changes of affinities alone make events.
    sees_affinity: AtomicBool,
    /// Events that were lost in all.
    lost: AtomicU64,
    /// Where the kernel says which CPUs are online.
    online: PathBuf,
}

impl Shared {
    fn host(&self) -> Arc<HostTopology> {
        Arc::clone(&self.host.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn thread(&self, tid: i32) -> Option<Thread> {
        self.lock_threads(|threads| threads.get(&tid).copied())
    }

    fn lock_threads<T>(&self, act: impl FnOnce(&mut HashMap<i32, Thread>) -> T) -> T {
        act(&mut self.threads.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Threads of a VM.
    fn threads_of(&self, vm: VmId) -> Vec<(i32, i32)> {
        self.lock_threads(|threads| {
            let its = threads.iter().filter(|(_, thread)| thread.vm == vm);
            its.map(|(tid, thread)| (thread.pid, *tid)).collect()
        })
    }

    fn read(&self, pid: i32, tid: i32) -> Option<VcpuLocation> {
        read_location(&self.host(), pid, tid).ok()
    }

    /// Where a thread is that a kernel event is about. What the event does not contain is asked for only if it can have changed, by a
    /// system call that does not block.
    fn after(&self, event: &LocationEvent) -> After {
        let Some(Thread { pid, sent, .. }) = self.thread(event.tid) else { return After::Located(None) };
        let host = self.host();
        let Some(node) = host.node_of_cpu(event.cpu) else { return After::Elsewhere(pid) };
        let sees_affinity = self.sees_affinity.load(Ordering::Relaxed);
        let pinned = match (event.kind, sent) {
            (LocationKind::Migrated, Some(sent))
                if sees_affinity && sent.pinned.is_none_or(|pin| pin == node) =>
            {
                Some(sent.pinned)
            }
            // The event source has checked that this is still a thread of this process.
            _ => read_pinned(&host, event.tid),
        };
        // /proc may not show the node yet: the kernel sends the event while it moves the thread.
        let located = |pinned| VcpuLocation { cpu: event.cpu, node, pinned, time_ns: event.time_ns };
        After::Located(pinned.map(located))
    }

    /// What the core is to know of a kernel event. An error: the location of this process's thread is to be read.
    fn take(&self, event: &LocationEvent) -> Result<Event, i32> {
        let tid = event.tid;
        let (event, location) = match event.kind {
            LocationKind::Exited => (Event::ThreadEnded(tid), None),
            LocationKind::Migrated | LocationKind::AffinityChanged => match self.after(event) {
                After::Located(location) => (Event::Located(tid, location), location),
                After::Elsewhere(pid) => return Err(pid),
            },
        };
        // Before it is sent, as in Task::report.
        self.note_sent(tid, location);
        Ok(event)
    }

    /// Notes what was sent to the core, or that sending failed.
    fn note_sent(&self, tid: i32, location: Option<VcpuLocation>) {
        self.lock_threads(|threads| {
            let Some(thread) = threads.get_mut(&tid) else { return };
            thread.sent = match (thread.sent, location) {
                // The core ignores late observations in the same way.
                (Some(before), Some(late)) if before.time_ns > late.time_ns => Some(before),
                (_, location) => location,
            };
        });
    }
}

/// What follows from a kernel event.
enum After {
    /// The thread is there; unknown, if `None`.
    Located(Option<VcpuLocation>),
    /// On a CPU of no known node. /proc may show another one by now, of this process.
    Elsewhere(i32),
}

/// Reads where a thread is, from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Reader(Arc<Shared>);

impl Reader {
    /// `None` if the location is unknown.
    pub(crate) fn read(&self, pid: i32, tid: i32) -> Option<VcpuLocation> {
        // The pass over /proc reports it, if it can be read at all.
        self.0.note_sent(tid, None);
        self.0.read(pid, tid)
    }

    /// CPUs of the host that are online. The kernel knows before the host is read anew that one is not any more.
    pub(crate) fn online(&self) -> CpuSet {
        let host = self.0.host();
        let known = || host.nodes.iter().flat_map(|node| node.cpus.iter());
        let now = fs::read_to_string(&self.0.online).ok().and_then(|text| text.trim().parse::<CpuSet>().ok());
        match now {
            Some(now) => known().filter(|cpu| now.contains(*cpu)).collect(),
            None => known().collect(),
        }
    }
}

/// Events in the order in which they came, together as long as no thread has two: where a vCPU that moves to and fro was in between
/// counts as well, and is decided about.
pub(super) fn split(events: &[LocationEvent]) -> impl Iterator<Item = &[LocationEvent]> {
    let mut threads = HashSet::new();
    events.chunk_by(move |before, next| {
        threads.insert(before.tid);
        let together = !threads.contains(&next.tid);
        if !together {
            threads.clear();
        }
        together
    })
}

pub(super) enum Order {
    /// Begins to watch a thread of a VM's process, and reports its location.
    Watch(VmId, i32, i32),
    /// Reports the location of a thread of a process.
    Report(i32, i32),
    Unwatch(i32),
    /// Moves of these threads need not be known at once, or need to be again.
    Defer(Vec<i32>, bool),
    /// Until then nothing but the ends of a VM's threads is to make an event.
    PassOver(VmId, Instant),
    /// Reads where these threads are, a few at a time. If events were lost, the first at once, and all are watched anew.
    Look(Vec<(i32, i32)>),
    /// The host's topology has changed.
    Host(HostTopology),
}

/// Watches threads on behalf of the core.
#[derive(Debug)]
pub(super) struct Locator {
    shared: Arc<Shared>,
    worker: Worker<Order>,
    ledger: Ledger,
    passed: PassedOver,
}

/// VMs whose budget for events is spent, until when their threads are passed over, and for how long the next time.
#[derive(Debug, Default)]
struct PassedOver(HashMap<VmId, (Instant, Backoff)>);

impl PassedOver {
    fn has(&self, vm: VmId, now: Instant) -> bool {
        self.0.get(&vm).is_some_and(|(until, _)| now < *until)
    }

    /// Until when it is passed over that can pay again after `wait`.
    fn begin(&mut self, vm: VmId, wait: Duration, now: Instant) -> Instant {
        self.0.retain(|_, (until, _)| now < *until + FORGIVEN);
        let (until, backoff) = self.0.entry(vm).or_insert((now, PASSED));
        *until = now + backoff.duration().max(wait);
        *until
    }
}

impl Locator {
    /// Also returns events of the kernel, which the caller takes, and has [`Self::take`] see what they mean.
    pub(super) fn start(
        workers: &Workers,
        host: &HostTopology,
        config: &Config,
        inbox: Arc<Inbox>,
    ) -> Result<(Self, Option<KernelEvents>), LocationError> {
        let shared = Arc::new(Shared {
            host: RwLock::new(Arc::new(host.clone())),
            online: config.root.join("sys/devices/system/cpu/online"),
            ..Shared::default()
        });
        let (theirs, messages) = (Arc::clone(&shared), Arc::clone(&inbox));
        // By the thread that polls, where BPF cannot be used.
        let on_event = move |event: LocationEvent| {
            // It is read by the next pass over /proc, or at the next interval if it moves on.
            if event.kind != LocationKind::Exited
                && let Some(thread) = theirs.thread(event.tid)
                && messages.ledger.spend(Work::ThreadEvents, Party::Vm(thread.vm), 1).is_err()
            {
                return;
            }
            let located = theirs.take(&event).unwrap_or_else(|pid| {
                let location = theirs.read(pid, event.tid);
                let location = location.map(|read| VcpuLocation { time_ns: event.time_ns, ..read });
                theirs.note_sent(event.tid, location);
                Event::Located(event.tid, location)
            });
            if !messages.try_send(located) {
                theirs.note_sent(event.tid, None);
                theirs.overflowed.fetch_add(1, Ordering::Relaxed);
            }
        };
        let (watcher, events) =
            LocationWatcher::start(workers, host, config.location, config.poll_interval, on_event)?;
        let by = watcher.health().by;
        info!(source = by.in_use, passed_over = by.why(), "watching vCPU locations");
        let theirs = Arc::clone(&shared);
        let (waiting, known, passed, ledger) =
            (VecDeque::new(), HashSet::new(), HashMap::new(), inbox.ledger.clone());
        let pass_at = Instant::now();
        let mut task = Task { watcher, shared: theirs, inbox, waiting, known, anew: 0, pass_at, passed };
        task.note_health();
        let worker = workers.start("locator", move |orders| task.run(&orders));
        let worker = worker.map_err(|source| LocationError::Watch { act: "starting a thread", source })?;
        Ok((Self { shared, worker, ledger, passed: PassedOver::default() }, events))
    }

    /// Takes events out of those that came together whose VM has spent its budget, but for the ends of threads. Its threads make no
    /// more of them for a while, and are read like those of a VM that has no channel.
    pub(super) fn afford(&mut self, events: &mut Vec<LocationEvent>) {
        if events.len() <= EARNED {
            return;
        }
        let now = Instant::now();
        let (mut counts, mut spent) = (HashMap::<VmId, (usize, HashSet<i32>)>::new(), HashSet::new());
        let vms: Vec<Option<VmId>> = self.shared.lock_threads(|threads| {
            events.iter().map(|event| threads.get(&event.tid).map(|thread| thread.vm)).collect()
        });
        for (vm, event) in vms.iter().zip(&*events).filter_map(|(vm, event)| Some(((*vm)?, event))) {
            let (count, threads) = counts.entry(vm).or_default();
            *count += 1;
            threads.insert(event.tid);
        }
        for (vm, (count, threads)) in counts {
            if self.passed.has(vm, now) {
                spent.insert(vm);
                continue;
            }
            let free = threads.len().clamp(EARNED, FREE);
            let Some(count) = count.checked_sub(free).filter(|count| *count > 0) else { continue };
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            if let Err(wait) = self.ledger.spend(Work::ThreadEvents, Party::Vm(vm), count) {
                spent.insert(vm);
                let until = self.passed.begin(vm, wait, now);
                self.order(Order::PassOver(vm, until));
            }
        }
        if !spent.is_empty() {
            let mut vms = vms.into_iter();
            let is_spent = |vm: Option<VmId>| vm.is_some_and(|vm| spent.contains(&vm));
            events.retain(|event| {
                let vm = vms.next().flatten();
                event.kind == LocationKind::Exited || !is_spent(vm)
            });
        }
    }

    /// What the core is to know of an event of the kernel now. `None`: a location is to be read, which the thread does and reports.
    pub(super) fn take(&self, event: &LocationEvent) -> Option<Event> {
        let taken = self.shared.take(event);
        taken.map_err(|pid| self.order(Order::Report(pid, event.tid))).ok()
    }

    pub(super) fn reader(&self) -> Reader {
        Reader(Arc::clone(&self.shared))
    }

    /// Events that came faster than they were taken.
    pub(super) fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    pub(super) fn order(&self, order: Order) {
        self.worker.order(order);
    }
}

/// State of the thread.
struct Task {
    watcher: LocationWatcher,
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
    /// Threads to be read, in order, each once.
    waiting: VecDeque<(i32, i32)>,
    known: HashSet<i32>,
    /// So many of these, from the first on, are watched anew as well: events were lost, and their watch may be.
    anew: usize,
    /// When the next pass may be.
    pass_at: Instant,
    /// VMs whose threads are passed over, and until when.
    passed: HashMap<VmId, Instant>,
}

impl Task {
    fn run(mut self, orders: &Jobs<Order>) {
        loop {
            let look = (!self.waiting.is_empty()).then(|| self.pass_at + SLACK);
            let goes_on = match orders.wait(self.passed.values().copied().chain(look).min()) {
                Next::Job(order) => self.execute(order),
                Next::Nothing => true,
                Next::End => false,
            };
            if !goes_on {
                return;
            }
            self.hear_again(Instant::now());
            if !self.waiting.is_empty() && self.pass_at <= Instant::now() && !self.pass() {
                return;
            }
        }
    }

    fn execute(&mut self, order: Order) -> bool {
        match order {
            Order::Watch(vm, pid, tid) => {
                self.shared.lock_threads(|threads| threads.insert(tid, Thread { vm, pid, sent: None }));
                self.watch(pid, tid);
                if self.passed.contains_key(&vm) {
                    self.watcher.pass_over(tid, true);
                }
                return self.report(pid, tid);
            }
            Order::Report(pid, tid) => return self.report(pid, tid),
            Order::Unwatch(tid) => {
                if self.shared.lock_threads(|threads| threads.remove(&tid)).is_some() {
                    self.watcher.unwatch(tid);
                }
            }
            Order::Defer(threads, waits) => {
                threads.iter().for_each(|tid| self.watcher.defer(*tid, waits));
                // Moves until now did not wake the core. From now on they have to.
                if !waits {
                    return threads.into_iter().all(|tid| {
                        self.shared.thread(tid).is_none_or(|thread| self.report(thread.pid, tid))
                    });
                }
            }
            Order::PassOver(vm, until) => {
                self.passed.insert(vm, until);
                self.shared.threads_of(vm).iter().for_each(|(_, tid)| self.watcher.pass_over(*tid, true));
            }
            Order::Look(threads) => {
                self.look_at(threads);
                // No more than a pass at once: a VM may have events lost again and again.
                if self.note_health() {
                    self.anew = self.waiting.len();
                    return self.pass();
                }
            }
            Order::Host(host) => {
                if let Err(error) = self.watcher.set_topology(&host) {
                    warn!(%error, "BPF does not know the host's new nodes; moves between them are found by the resync only");
                }
                *self.shared.host.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(host);
            }
        }
        true
    }

    /// Has these threads read by the next passes.
    fn look_at(&mut self, threads: Vec<(i32, i32)>) {
        for (pid, tid) in threads {
            if self.known.insert(tid) {
                self.waiting.push_back((pid, tid));
            }
        }
    }

    /// Threads of VMs that have been passed over for long enough make events again. Where they have gone meanwhile is read.
    fn hear_again(&mut self, now: Instant) {
        let over: Vec<VmId> = self.passed.extract_if(|_, until| *until <= now).map(|(vm, _)| vm).collect();
        for vm in over {
            let threads = self.shared.threads_of(vm);
            threads.iter().for_each(|(_, tid)| self.watcher.pass_over(*tid, false));
            self.look_at(threads);
        }
    }

    /// A thread that cannot be watched is still found by the passes over /proc, which try again to watch it.
    fn watch(&self, pid: i32, tid: i32) {
        match self.watcher.watch(pid, tid) {
            // The thread has ended, which the next read reports. Other errors were logged when they first occurred.
            Ok(())
            | Err(LocationError::NoThread { .. } | LocationError::TooMany { .. } | LocationError::Ended) => {}
            Err(error) => {
                let vm = self.shared.thread(tid).map(|thread| Party::Vm(thread.vm));
                if let Some(more) = vm.and_then(|vm| self.inbox.ledger.line(vm)) {
                    warn!(tid, %error, "the thread is not watched; this is tried again{more}");
                }
            }
        }
    }

    /// Reports a thread's location unless the core knows it. False once the inbox is closed.
    fn report(&self, pid: i32, tid: i32) -> bool {
        let location = self.shared.read(pid, tid);
        let known = self.shared.thread(tid).zip(location);
        if known.is_some_and(|(thread, location)| thread.is_known(location)) {
            return true;
        }
        let event = Message::Event(Event::Located(tid, location));
        // Before it is sent: who has it may say by a read of its own that it is out of date.
        self.shared.note_sent(tid, location);
        match known.is_some_and(|(thread, location)| thread.is_on_known_node(location)) {
            true => self.inbox.send_lazily(event),
            false => self.inbox.send(event),
        }
    }

    /// Reads the threads that were not read for longest. False once the inbox is closed.
    fn pass(&mut self) -> bool {
        self.pass_at = Instant::now() + PAUSE;
        for _ in 0..AT_ONCE.min(self.waiting.len()) {
            let Some((pid, tid)) = self.waiting.pop_front() else { break };
            self.known.remove(&tid);
            let anew = self.anew > 0;
            self.anew = self.anew.saturating_sub(1);
            // A thread that is no longer watched is skipped.
            if self.shared.thread(tid).is_some_and(|thread| thread.pid == pid) {
                if anew || !self.watcher.watches(pid, tid) {
                    self.watch(pid, tid);
                }
                if !self.report(pid, tid) {
                    return false;
                }
            }
        }
        true
    }

    /// Updates the quality of the sources. True if events were lost since the last call.
    fn note_health(&mut self) -> bool {
        let lost = self.watcher.dropped() + self.shared.overflowed.load(Ordering::Relaxed);
        let Health { by, sees_affinity, .. } = self.watcher.health();
        self.inbox.capabilities.publish(by);
        let why = (!sees_affinity).then_some(NO_EVENT);
        self.inbox.capabilities.publish(Capability::either(Capability::AFFINITY, ["event", "resync"], why));
        self.shared.sees_affinity.store(sees_affinity, Ordering::Relaxed);
        let before = self.shared.lost.swap(lost, Ordering::Relaxed);
        if lost > before {
            warn!(lost, "location events were lost; all locations are read again");
        }
        lost > before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{CpuId, HostNode};
    use vnuma_observe::location::{Prefer, monotonic_ns};

    /// A host of one node with all CPUs.
    fn host() -> HostTopology {
        let node = HostNode { id: 0, cpus: (0..8192 as CpuId).collect(), ..HostNode::default() };
        HostTopology { nodes: vec![node], ..HostTopology::default() }
    }

    #[test]
    fn events_are_together_until_one_is_of_a_thread_that_has_one() {
        let event = |tid| LocationEvent { tid, cpu: 0, kind: LocationKind::Migrated, time_ns: 1 };
        let events = [1, 2, 1, 1, 3, 2, 4, 3].map(event);
        let of = |events: &[LocationEvent]| events.iter().map(|event| event.tid).collect::<Vec<_>>();
        let parts: Vec<_> = split(&events).map(of).collect();
        assert_eq!(parts, [vec![1, 2], vec![1], vec![1, 3, 2, 4], vec![3]]);
        assert_eq!(split(&[]).count(), 0);
    }

    /// Long enough for what is to come on a machine that is busy, and for what is not to come.
    const COMES: Duration = Duration::from_secs(60);
    const COMES_NOT: Duration = Duration::from_millis(300);

    /// Locations that come together, within a limit. What wakes up may be of a message that was taken before.
    fn located(inbox: &Inbox, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        loop {
            let messages = inbox.take(until, &[]).expect("open").messages;
            let is_location = |message: &&Message| matches!(message, Message::Event(Event::Located(..)));
            let count = messages.iter().filter(is_location).count();
            if count > 0 || Instant::now() >= until {
                return count;
            }
        }
    }

    /// A locator without an event source, only /proc, and this thread, which cannot move because it may run on one CPU only.
    fn still() -> (Arc<Inbox>, Locator, i32, i32) {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let config =
            Config { location: Prefer::Poll, poll_interval: Duration::from_secs(1000), ..Config::default() };
        let (locator, events) =
            Locator::start(&Workers::default(), &host(), &config, Arc::clone(&inbox)).expect("started");
        assert!(events.is_none(), "polling");
        let (pid, tid) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
        let only = vnuma_process::read_allowed(pid, tid).expect("allowed").iter().next().expect("a CPU");
        let mut set = nix::sched::CpuSet::new();
        set.set(only as usize).expect("in range");
        nix::sched::sched_setaffinity(nix::unistd::gettid(), &set).expect("pinned");
        (inbox, locator, pid, tid)
    }

    #[test]
    fn a_cpu_that_the_kernel_has_taken_offline_is_not_online() {
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join("sys/devices/system/cpu/online");
        let config = Config { root: root.path().into(), location: Prefer::Poll, ..Config::default() };
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let started = Locator::start(&Workers::default(), &host(), &config, inbox);
        let (locator, _) = started.expect("started");
        assert_eq!(locator.reader().online().len(), 8192, "as far as is known");
        fs::create_dir_all(file.parent().expect("a directory")).expect("created");
        fs::write(&file, "0-5,7\n").expect("written");
        assert_eq!(locator.reader().online().to_string(), "0-5,7");
    }

    #[test]
    fn what_has_waited_is_told_once_it_may_wake() {
        let (inbox, locator, pid, tid) = still();
        locator.order(Order::Watch(1, pid, tid));
        assert_eq!(located(&inbox, COMES), 1);
        // As after a move whose record was not taken: the location that was sent is out of date.
        assert!(locator.reader().read(pid, tid).is_some());
        locator.order(Order::Defer(vec![tid], true));
        assert_eq!(located(&inbox, COMES_NOT), 0, "it may wait");
        locator.order(Order::Defer(vec![tid], false));
        assert_eq!(located(&inbox, COMES), 1);
    }

    #[test]
    fn a_look_that_finds_nothing_new_tells_nothing() {
        let (inbox, locator, pid, tid) = still();
        locator.order(Order::Watch(1, pid, tid));
        assert_eq!(located(&inbox, COMES), 1);
        locator.order(Order::Look(vec![(pid, tid)]));
        assert_eq!(located(&inbox, COMES_NOT), 0, "the core knows that");
        // A location that was read for another caller may not reach the core.
        assert!(locator.reader().read(pid, tid).is_some());
        std::thread::sleep(PAUSE);
        locator.order(Order::Look(vec![(pid, tid)]));
        assert_eq!(located(&inbox, COMES), 1);
    }

    #[test]
    fn threads_are_watched_anew_so_many_at_a_time_when_events_were_lost() {
        let (watcher, _) = LocationWatcher::start(
            &Workers::default(),
            &host(),
            Prefer::Poll,
            Duration::from_secs(1000),
            |_| (),
        )
        .expect("started");
        let (shared, inbox) = (Arc::<Shared>::default(), Arc::new(Inbox::new().expect("an inbox")));
        let (waiting, known, passed) = (VecDeque::new(), HashSet::new(), HashMap::new());
        let theirs = Arc::clone(&shared);
        let pass_at = Instant::now();
        let mut task = Task { watcher, shared: theirs, inbox, waiting, known, anew: 0, pass_at, passed };
        shared.overflowed.fetch_add(1, Ordering::Relaxed);
        let threads: Vec<_> = (1..).map(|tid| (1, tid)).take(2 * AT_ONCE + 1).collect();
        assert!(task.execute(Order::Look(threads.clone())));
        let left = |task: &Task| (task.waiting.len(), task.anew);
        assert_eq!(left(&task), (AT_ONCE + 1, AT_ONCE + 1), "one pass at once");
        assert!(task.pass_at >= pass_at + PAUSE, "and then it rests");
        assert!(task.pass());
        assert_eq!(left(&task), (1, 1));
        // What was read may be read again, and what waits is not there twice.
        assert!(task.execute(Order::Look(threads)));
        assert_eq!(left(&task), (2 * AT_ONCE + 1, 1), "no more events were lost");
    }

    #[test]
    fn what_an_event_does_not_say_is_read_by_the_locators_own_thread() {
        let (inbox, locator, pid, tid) = still();
        locator.order(Order::Watch(1, pid, tid));
        assert_eq!(located(&inbox, COMES), 1);
        // Whatever is read now is new to the core.
        assert!(locator.reader().read(pid, tid).is_some());
        let event = |cpu, kind| locator.take(&LocationEvent { tid, cpu, kind, time_ns: monotonic_ns() });
        assert!(event(9000, LocationKind::Migrated).is_none(), "the host has no such CPU");
        assert_eq!(located(&inbox, COMES), 1);
        let Some(Event::Located(of, Some(at))) = event(7, LocationKind::Migrated) else {
            panic!("the event says it");
        };
        assert_eq!((of, at.cpu, at.node), (tid, 7, 0));
        let ended = event(7, LocationKind::Exited);
        assert!(matches!(ended, Some(Event::ThreadEnded(of)) if of == tid), "{ended:?}");
    }

    #[test]
    fn a_vm_that_has_spent_its_budget_is_passed_over_and_no_other_is() {
        let (inbox, mut locator, pid, _) = still();
        // No threads of this process, so that nothing else is known of them.
        let (busy, other) = (i32::MAX - 2, i32::MAX - 1);
        for (vm, tid) in [(1, busy), (2, other)] {
            locator.order(Order::Watch(vm, pid, tid));
            assert_eq!(located(&inbox, COMES), 1, "it is not there");
        }
        let event = |tid, kind| LocationEvent { tid, cpu: 0, kind, time_ns: 1 };
        let mut left_of = |busy_ones: usize| {
            let mut events = vec![event(busy, LocationKind::Migrated); busy_ones];
            events.extend([event(other, LocationKind::Migrated), event(busy, LocationKind::Exited)]);
            locator.afford(&mut events);
            let of = |tid, kind| events.iter().filter(|event| (event.tid, event.kind) == (tid, kind)).count();
            let own = of(busy, LocationKind::Migrated);
            (own, of(other, LocationKind::Migrated), of(busy, LocationKind::Exited))
        };
        let (few, at_once) = (EARNED - 2, Work::ThreadEvents.rate().at_once as usize);
        assert_eq!(left_of(at_once), (at_once, 1, 1), "it has a budget");
        assert_eq!(left_of(at_once), (0, 1, 1), "which is spent");
        assert_eq!(left_of(EARNED), (0, 1, 1), "it is passed over");
        // These are taken without a look at anything.
        assert_eq!(left_of(few), (few, 1, 1));
        let limited: Vec<_> = inbox.ledger.limited().into_iter().map(|(of, times, _)| (of, times)).collect();
        assert_eq!(limited, [((Work::ThreadEvents, Party::Vm(1)), 1)]);
    }

    #[test]
    fn a_vm_that_spends_its_budget_again_and_again_is_passed_over_for_longer() {
        let (mut passed, now, no_wait) = (PassedOver::default(), Instant::now(), Duration::ZERO);
        let mut until = now;
        let mut seconds = || {
            let before = until;
            until = passed.begin(1, no_wait, before);
            assert!(passed.has(1, before) && !passed.has(1, until) && !passed.has(2, before));
            (until - before).as_secs()
        };
        assert_eq!([(); 7].map(|()| seconds()), [2, 4, 8, 16, 32, 60, 60]);
        let later = until + FORGIVEN;
        assert_eq!(passed.begin(1, no_wait, later) - later, Duration::from_secs(2), "it is forgiven");
        assert_eq!(passed.begin(2, FORGIVEN, later) - later, FORGIVEN, "until it can pay");
    }

    #[test]
    fn another_cpu_of_the_same_node_is_nothing_to_wake_up_for() {
        let sent = VcpuLocation { cpu: 3, node: 1, pinned: None, time_ns: 7 };
        let thread = Thread { vm: 1, pid: 1, sent: Some(sent) };
        assert!(thread.is_on_known_node(VcpuLocation { cpu: 2, time_ns: 9, ..sent }));
        for other in [VcpuLocation { node: 0, ..sent }, VcpuLocation { pinned: Some(1), ..sent }] {
            assert!(!thread.is_on_known_node(other), "{other:?}");
        }
        assert!(!Thread { sent: None, ..thread }.is_on_known_node(sent));
    }
}
