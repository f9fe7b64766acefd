//! Watches threads of this test, by polling everywhere and by BPF where the test may.
//!
//! The kernel's view of nodes does not matter here: each test makes up a topology from
//! the CPUs of this machine, in which they are on one node or on one each.

mod taker;
mod workers;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::HashSet,
    fs,
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};
use taker::Watching;
use vnuma_model::{CpuSet, HostNode, HostTopology};
use vnuma_observe::location::{
    KernelEvents, LocationError, LocationEvent, LocationKind, LocationWatcher, Prefer, TAKEN_AT_ONCE,
    monotonic_ns, read_location,
};
use vnuma_process::{Change, Workers};
use workers::{HANG, change, until_it_waits};

const INTERVAL: Duration = Duration::from_millis(5);

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

fn host(nodes: &[&[u32]]) -> HostTopology {
    let node = |(id, cpus): (usize, &&[u32])| HostNode {
        id: u32::try_from(id).unwrap(),
        cpus: cpus.iter().copied().collect(),
        ..HostNode::default()
    };
    HostTopology { nodes: nodes.iter().enumerate().map(node).collect(), ..HostTopology::default() }
}

/// Two CPUs of this machine, whichever of them this process may use now. Without them, nothing can move.
fn two_cpus() -> (u32, u32) {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let cpus: Vec<u32> = list.parse::<CpuSet>().unwrap().iter().collect();
    assert!(cpus.len() >= 2, "these tests need two CPUs, there is only {cpus:?}");
    (cpus[0], cpus[1])
}

/// A thread that moves itself to the CPUs that it receives, and answers, until the channel is closed.
struct Mover {
    tid: i32,
    moves: Option<mpsc::Sender<Vec<u32>>>,
    moved: mpsc::Receiver<()>,
    handle: Option<thread::JoinHandle<()>>,
}

impl Mover {
    fn start(cpu: u32) -> Self {
        let (moves, orders) = mpsc::channel::<Vec<u32>>();
        let (say, moved) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let handle = thread::spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            for cpus in orders {
                let mut set = nix::sched::CpuSet::new();
                cpus.iter().for_each(|&cpu| set.set(cpu as usize).unwrap());
                nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).unwrap();
                say.send(()).unwrap();
            }
        });
        let tid = told.recv().unwrap().as_raw();
        let mover = Self { tid, moves: Some(moves), moved, handle: Some(handle) };
        mover.to(&[cpu]);
        mover
    }
    fn to(&self, cpus: &[u32]) {
        self.moves.as_ref().unwrap().send(cpus.to_vec()).unwrap();
        self.moved.recv_timeout(HANG).unwrap();
    }
    fn end(&mut self) {
        self.moves = None;
        self.handle.take().unwrap().join().unwrap();
    }
}

/// A watcher, and its events in order.
fn watcher(host: &HostTopology, prefer: Prefer) -> (Watching, mpsc::Receiver<LocationEvent>) {
    let (send, events) = mpsc::channel();
    let watcher = taker::start(&Workers::default(), host, prefer, INTERVAL, move |event| {
        let _ = send.send(event);
    });
    (watcher.unwrap_or_else(|error| panic!("{error}")), events)
}

/// A test for each source. BPF needs rights that an ordinary user lacks; with them, it has to work.
macro_rules! for_each_source {
    ($($test:ident)*) => {
        mod poll {
            use super::Prefer;
            $(#[test] fn $test() { super::$test(Prefer::Poll) })*
        }
        mod bpf {
            use super::Prefer;
            $(#[test] #[cfg_attr(not(root), ignore = "BPF needs root")] fn $test() { super::$test(Prefer::Bpf) })*
        }
    };
}

for_each_source! {
    moves_between_nodes_are_reported
    moves_within_a_node_are_not_reported_but_new_limits_are
    threads_that_are_not_watched_are_not_reported
    threads_that_are_not_there_are_refused
    the_topology_can_change_meanwhile
}

fn next(events: &mpsc::Receiver<LocationEvent>, kind: LocationKind) -> LocationEvent {
    loop {
        let event = events.recv_timeout(HANG).unwrap_or_else(|_| panic!("no event {kind:?}"));
        if event.kind == kind {
            return event;
        }
    }
}

#[test]
fn a_panic_and_a_silence_of_the_thread_that_polls_are_seen() {
    let (a, b) = two_cpus();
    let (workers, host) = (Workers::default(), host(&[&[a], &[b]]));
    let ((begin, begun), (release, held)) = (mpsc::channel(), mpsc::channel::<()>());
    let held = Mutex::new(held);
    let on_event = move |_| {
        begin.send(()).unwrap();
        let released = held.lock().unwrap().recv_timeout(HANG);
        panic!("{released:?}");
    };
    let (watcher, _) = LocationWatcher::start(&workers, &host, Prefer::Poll, INTERVAL, on_event).unwrap();
    let mut mover = Mover::start(a);
    watcher.watch(own_pid(), mover.tid).unwrap();
    until_it_waits(&workers);
    mover.to(&[b]);
    begun.recv_timeout(HANG).unwrap();
    assert!(matches!(change(&workers), Change::Silent(silent, _) if silent == "vnuma-poll"));
    release.send(()).unwrap();
    assert_eq!(change(&workers), Change::Panicked("vnuma-poll".to_owned(), "Ok(())".to_owned()));
    mover.end();
}

fn moves_between_nodes_are_reported(prefer: Prefer) {
    let (a, b) = two_cpus();
    let host = host(&[&[a], &[b]]);
    let mut mover = Mover::start(a);
    let (watcher, events) = watcher(&host, prefer);
    watcher.watch(own_pid(), mover.tid).unwrap();
    for cpu in [b, a, b] {
        let before = monotonic_ns();
        mover.to(&[cpu]);
        let event = next(&events, LocationKind::Migrated);
        assert_eq!((event.tid, event.cpu), (mover.tid, cpu), "{prefer:?}");
        assert!(event.time_ns >= before && event.time_ns <= monotonic_ns());
        let location = read_location(&host, own_pid(), mover.tid).unwrap();
        let node = host.node_of_cpu(cpu).unwrap();
        assert_eq!((location.cpu, location.node, location.pinned), (cpu, node, Some(node)));
    }
    mover.end();
    assert_eq!(next(&events, LocationKind::Exited).tid, mover.tid, "{prefer:?}");
    assert_eq!(watcher.dropped(), 0);
}

fn moves_within_a_node_are_not_reported_but_new_limits_are(prefer: Prefer) {
    let (a, b) = two_cpus();
    let host = host(&[&[a, b]]);
    let mut mover = Mover::start(a);
    let (watcher, events) = watcher(&host, prefer);
    watcher.watch(own_pid(), mover.tid).unwrap();
    for cpus in [&[b][..], &[a], &[a, b], &[b]] {
        mover.to(cpus);
        if watcher.health().sees_affinity {
            assert_eq!(next(&events, LocationKind::AffinityChanged).tid, mover.tid, "{prefer:?}");
        }
    }
    mover.end();
    let mut rest = Vec::new();
    while rest.last() != Some(&LocationKind::Exited) {
        rest.push(events.recv_timeout(HANG).unwrap().kind);
    }
    assert!(!rest.contains(&LocationKind::Migrated), "{prefer:?}: {rest:?}");
}

fn threads_that_are_not_watched_are_not_reported(prefer: Prefer) {
    let (a, b) = two_cpus();
    let host = host(&[&[a], &[b]]);
    let (mut watched, mut forgotten, mut unknown) = (Mover::start(a), Mover::start(a), Mover::start(a));
    let (watcher, events) = watcher(&host, prefer);
    watcher.watch(own_pid(), forgotten.tid).unwrap();
    watcher.watch(own_pid(), watched.tid).unwrap();
    watcher.unwatch(forgotten.tid);
    watcher.unwatch(forgotten.tid);
    forgotten.to(&[b]);
    unknown.to(&[b]);
    forgotten.end();
    unknown.end();
    watched.to(&[b]);
    watched.end();
    loop {
        let event = events.recv_timeout(HANG).unwrap();
        assert_eq!(event.tid, watched.tid, "{prefer:?}: {event:?}");
        if event.kind == LocationKind::Exited {
            break;
        }
    }
}

fn the_topology_can_change_meanwhile(prefer: Prefer) {
    let (a, b) = two_cpus();
    let (one, two) = (host(&[&[a, b]]), host(&[&[a], &[b]]));
    let mut mover = Mover::start(a);
    let (watcher, events) = watcher(&one, prefer);
    watcher.watch(own_pid(), mover.tid).unwrap();
    let sees_affinity = watcher.health().sees_affinity;
    // Moves, and waits until that has been noticed: for as long as it takes if it is one between nodes.
    let expect = |crosses: bool, cpu: u32, why: &str| {
        mover.to(&[cpu]);
        let (mut crossed, mut noticed) = (false, !sees_affinity);
        while !noticed || crosses && !crossed {
            match events.recv_timeout(HANG).unwrap_or_else(|_| panic!("{prefer:?}: {why}: no event")).kind {
                LocationKind::Migrated => crossed = true,
                _ => noticed = true,
            }
        }
        let soon = Duration::from_millis(if sees_affinity { 20 } else { 1000 });
        crossed = crossed || events.recv_timeout(soon).is_ok();
        assert_eq!(crossed, crosses, "{prefer:?}: {why}");
    };
    expect(false, b, "within the node");
    expect(false, a, "within the node");
    watcher.set_topology(&two).unwrap();
    expect(true, b, "now it is another node");
    watcher.set_topology(&one).unwrap();
    expect(false, a, "and now it is the same again");
    // A CPU that is gone is of no known node.
    watcher.set_topology(&host(&[&[a]])).unwrap();
    expect(true, b, "to a CPU that is not known");
    mover.end();
}

fn threads_that_are_not_there_are_refused(prefer: Prefer) {
    let host = host(&[&[0]]);
    let (watcher, _events) = watcher(&host, prefer);
    for (pid, tid) in [(own_pid(), 1), (0, 0), (own_pid(), -5), (i32::MAX, i32::MAX)] {
        let error = watcher.watch(pid, tid).unwrap_err();
        assert!(matches!(error, LocationError::NoThread { .. }), "{prefer:?}: {error}");
    }
}

#[test]
fn the_source_is_named() {
    let (poll, _events) = watcher(&host(&[&[0]]), Prefer::Poll);
    let by = poll.health().by;
    assert_eq!((by.in_use.as_str(), by.why_not("bpf")), ("poll", Some("polling was asked for")));
    let (auto, _events) = watcher(&host(&[&[0]]), Prefer::Auto);
    let by = auto.health().by;
    assert_eq!(by.in_use == "poll", by.why_not("bpf").is_some_and(|reason| !reason.is_empty()));
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn root_gets_bpf() {
    let (auto, _events) = watcher(&host(&[&[0]]), Prefer::Auto);
    let by = auto.health().by;
    assert_eq!((by.in_use.as_str(), by.why()), ("bpf", None));
}

/// A thread that may run on both CPUs. It moves by being woken while its own CPU is taken, so that nothing else happens to it.
struct Wanderer {
    tid: i32,
    wake: Option<mpsc::Sender<()>>,
    cpu: mpsc::Receiver<u32>,
    handle: Option<thread::JoinHandle<()>>,
}

impl Wanderer {
    fn start(cpus: [u32; 2]) -> Self {
        let (wake, orders) = mpsc::channel::<()>();
        let (say, cpu) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let handle = thread::spawn(move || {
            allow(&cpus);
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            while orders.recv().is_ok() {
                say.send(nix::sched::sched_getcpu().unwrap() as u32).unwrap();
            }
        });
        Self { tid: told.recv().unwrap(), wake: Some(wake), cpu, handle: Some(handle) }
    }

    fn wake(&self) -> u32 {
        self.wake.as_ref().unwrap().send(()).unwrap();
        self.cpu.recv_timeout(HANG).unwrap()
    }

    /// Until it is on another CPU.
    fn moves(&self) {
        let limit = monotonic_ns() + HANG.as_nanos() as u64;
        let at = self.wake();
        while self.wake() == at {
            assert!(monotonic_ns() < limit, "it stays on CPU {at}");
            allow(&[at]);
            // Its CPU is this thread's now, which wakes it and does not sleep.
            let began = monotonic_ns();
            while monotonic_ns() < began + 1_000_000 {}
        }
    }
}

impl Drop for Wanderer {
    fn drop(&mut self) {
        self.wake = None;
        let _ = self.handle.take().unwrap().join();
    }
}

fn allow(cpus: &[u32]) {
    let mut set = nix::sched::CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu as usize).unwrap());
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).unwrap();
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn moves_of_a_deferred_thread_wake_nobody_and_are_taken_all_the_same() {
    if thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        return eprintln!("skipped: this needs two CPUs");
    }
    let (a, b) = two_cpus();
    let (workers, host) = (Workers::default(), host(&[&[a], &[b]]));
    let started =
        LocationWatcher::start(&workers, &host, Prefer::Bpf, INTERVAL, |_| panic!("polled")).unwrap();
    let (watcher, mut kernel) = (started.0, started.1.expect("the kernel's events"));
    let wanderer = Wanderer::start([a, b]);
    watcher.watch(own_pid(), wanderer.tid).unwrap();
    for waits in [true, false, true] {
        watcher.defer(wanderer.tid, waits);
        kernel.take(&mut Vec::new());
        wanderer.moves();
        let mut fds = [PollFd::new(kernel.fd(), PollFlags::POLLIN)];
        let timeout = if waits { 50_u16 } else { 30_000 };
        let woken = poll(&mut fds, PollTimeout::from(timeout)).unwrap() == 1;
        assert_eq!(woken, !waits, "deferred: {waits}");
        let mut events = Vec::new();
        kernel.take(&mut events);
        let event = events.first().expect("an event");
        assert_eq!((event.tid, event.kind), (wanderer.tid, LocationKind::Migrated), "deferred: {waits}");
    }
    // It is still deferred, and its end is known at once.
    let tid = wanderer.tid;
    drop(wanderer);
    let mut fds = [PollFd::new(kernel.fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut fds, PollTimeout::from(30_000_u16)).unwrap(), 1);
    let mut events = Vec::new();
    kernel.take(&mut events);
    assert!(events.iter().any(|event| event.tid == tid && event.kind == LocationKind::Exited));
}

/// A watcher by BPF whose events the test takes itself.
fn watcher_by_bpf(host: &HostTopology) -> (LocationWatcher, KernelEvents) {
    let started =
        LocationWatcher::start(&Workers::default(), host, Prefer::Bpf, INTERVAL, |_| panic!("polled"));
    let (watcher, kernel) = started.unwrap();
    (watcher, kernel.expect("the kernel's events"))
}

/// Sets the affinity of a thread that sleeps.
fn confine(tid: i32, cpus: &[u32]) -> nix::Result<()> {
    let mut set = nix::sched::CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu as usize).unwrap());
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(tid), &set)
}

fn taken(kernel: &mut KernelEvents) -> Vec<LocationEvent> {
    let mut events = Vec::new();
    kernel.take(&mut events);
    events
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn one_call_takes_so_many_events_and_leaves_the_others_to_the_next() {
    let (a, b) = two_cpus();
    let (watcher, mut kernel) = watcher_by_bpf(&host(&[&[a], &[b]]));
    let mut mover = Mover::start(a);
    watcher.watch(own_pid(), mover.tid).unwrap();
    let moves = 2 * TAKEN_AT_ONCE + 10;
    (0..moves).for_each(|number| mover.to(&[[b, a][number % 2]]));
    let (mut counts, mut more) = (Vec::new(), true);
    while more {
        let events = taken(&mut kernel);
        assert!(events.is_sorted_by_key(|event| event.time_ns));
        counts.push(events.len());
        more = poll(&mut [PollFd::new(kernel.fd(), PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1;
    }
    let last = counts.pop().unwrap();
    // Changes of its affinity are events as well, where the kernel has them.
    assert!(counts.len() >= 2 && counts.iter().all(|count| *count == TAKEN_AT_ONCE), "{counts:?} {last}");
    assert!(counts.iter().sum::<usize>() + last >= moves && last <= TAKEN_AT_ONCE, "{counts:?} {last}");
    assert_eq!((taken(&mut kernel).len(), watcher.dropped()), (0, 0));
    mover.end();
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn an_affinity_that_is_set_to_what_it_is_makes_no_event() {
    let (a, b) = two_cpus();
    let (watcher, mut kernel) = watcher_by_bpf(&host(&[&[a, b]]));
    if !watcher.health().sees_affinity {
        return eprintln!("skipped: changes of affinities make no events here");
    }
    let mut mover = Mover::start(a);
    watcher.watch(own_pid(), mover.tid).unwrap();
    let events_of = |kernel: &mut KernelEvents, cpus: &[u32], times: usize, refused: bool| {
        (0..times).for_each(|_| assert_eq!(confine(mover.tid, cpus).is_err(), refused));
        taken(kernel).len()
    };
    assert_eq!(events_of(&mut kernel, &[a], 100, false), 1, "what it was before is not known");
    assert_eq!(events_of(&mut kernel, &[a, b], 100, false), 1);
    // No machine has this CPU.
    assert_eq!(events_of(&mut kernel, &[1023], 100, true), 0);
    watcher.watch(own_pid(), mover.tid).unwrap();
    assert_eq!(events_of(&mut kernel, &[a, b], 100, false), 1, "who watches it anew knows of none");
    mover.end();
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn a_thread_that_is_passed_over_makes_an_event_at_its_end_only() {
    let (a, b) = two_cpus();
    let (watcher, mut kernel) = watcher_by_bpf(&host(&[&[a], &[b]]));
    let [mut mover, mut other] = [(); 2].map(|()| Mover::start(a));
    [&mover, &other].into_iter().for_each(|mover| watcher.watch(own_pid(), mover.tid).unwrap());
    watcher.pass_over(mover.tid, true);
    // Neither of them makes it be heard again.
    watcher.defer(mover.tid, true);
    watcher.watch(own_pid(), mover.tid).unwrap();
    [b, a].iter().for_each(|cpu| mover.to(&[*cpu]));
    other.to(&[b]);
    let tids: HashSet<i32> = taken(&mut kernel).iter().map(|event| event.tid).collect();
    assert_eq!(tids, [other.tid].into());
    watcher.pass_over(mover.tid, false);
    mover.to(&[b]);
    assert!(taken(&mut kernel).iter().any(|event| event.tid == mover.tid), "it is heard again");
    watcher.pass_over(mover.tid, true);
    let tid = mover.tid;
    mover.end();
    // The kernel reports the end of a thread only after join() may have returned.
    let (began, mut events) = (Instant::now(), Vec::new());
    while events.is_empty() && began.elapsed() < HANG {
        thread::sleep(INTERVAL);
        kernel.take(&mut events);
    }
    let ends: Vec<_> = events.iter().map(|event| (event.tid, event.kind)).collect();
    assert_eq!(ends, [(tid, LocationKind::Exited)]);
    other.end();
}
