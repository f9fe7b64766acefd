//! With a PMU that does what the test wants. The vCPU is a thread of the test.

use super::*;
use crate::shell::pmu::Opener;
use std::{
    collections::BTreeSet,
    fs,
    sync::{Mutex, mpsc},
};
use vnuma_counters::{CounterError, Reading, detect_by};
use vnuma_model::{Accesses, PassedOver, ThreadCounts};
use vnuma_process::{Heartbeat, open_pidfd};

const VM: VmId = 7;
/// Generous.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// What the PMU does.
#[derive(Debug, Default)]
struct State {
    /// Counters can be found, and not be opened.
    refuses: bool,
    /// The next reading fails.
    loses: bool,
    /// Sources that count nothing.
    silent: BTreeSet<Source>,
    /// Sources of which counters were opened, or were to be.
    opened: Vec<Source>,
}

struct FakePmu {
    root: tempfile::TempDir,
    state: Arc<Mutex<State>>,
}

struct FakeCounters {
    source: Source,
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().expect("no test panicked")
}

impl Pmu for FakePmu {
    type Counters = FakeCounters;

    fn detect(&mut self, given_up: &[PassedOver]) -> Detected {
        detect_by(self.root.path(), given_up, |_| Ok(()))
    }

    fn opener(&self) -> Opener<FakeCounters> {
        let shared = Arc::clone(&self.state);
        Arc::new(move |_, events| {
            let mut state = lock(&shared);
            state.opened.push(events.source);
            match state.refuses {
                true => Err(CounterError::Unsupported { event: "instructions" }),
                false => Ok(FakeCounters { source: events.source, state: Arc::clone(&shared) }),
            }
        })
    }
}

impl Count for FakeCounters {
    fn ids(&self) -> Vec<u64> {
        vec![1]
    }

    fn take(&mut self, _now: Reading, _ran_ns: u64) -> Option<Counted> {
        None
    }

    fn read(&mut self) -> Result<Counted, CounterError> {
        let mut state = lock(&self.state);
        if std::mem::take(&mut state.loses) {
            return Err(CounterError::Lost { tid: 1, source: io::ErrorKind::UnexpectedEof.into() });
        }
        if state.silent.contains(&self.source) {
            return Ok(Counted::Crowded);
        }
        let accesses = match self.source {
            Source::PerNode => Accesses::ByNode(vec![(0, 10)]),
            _ => Accesses::LocalRemote { local: 10, remote: 0 },
        };
        Ok(Counted::Counted(ThreadCounts {
            instructions: 1000,
            permille: WHOLE,
            accesses,
            ..ThreadCounts::default()
        }))
    }
}

/// A reader whose periods end when the test wants it.
struct Bench {
    task: Task<FakePmu>,
    state: Arc<Mutex<State>>,
    inbox: Arc<Inbox>,
    pid: i32,
    tid: i32,
}

impl Bench {
    /// A host with a PMU that counts accesses by node, or else by the kernel's events.
    fn new(tid: i32, state: State) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let events = root.path().join("sys/bus/event_source/devices/cpu/events");
        fs::create_dir_all(&events).expect("made");
        fs::write(events.join("dram-node0"), "event=0x10\n").expect("written");
        let state = Arc::new(Mutex::new(state));
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let pmu = FakePmu { root, state: Arc::clone(&state) };
        let wanted = Wanted { period: Duration::from_secs(1), memory: false, samples: false };
        let host = HostTopology::default();
        let workers = Workers::default();
        let looker = Looker::new(&workers, &Arc::new(Heartbeat::new("sampler")), LIMIT, || ());
        let task = Task::new(
            (workers, looker),
            pmu,
            (PathBuf::from("/"), Prefer::Poll),
            wanted,
            &host,
            Arc::clone(&inbox),
        );
        Self { task, state, inbox, pid: std::process::id().cast_signed(), tid }
    }

    fn count(&mut self) {
        let pidfd = open_pidfd(self.pid).expect("it runs");
        let vcpus = vec![(0, self.tid)];
        self.task.count(Targets { vm: VM, pid: self.pid, pidfd: Some(Arc::new(pidfd)), vcpus });
    }

    /// A period ends: what the core is told of the vCPU.
    fn period(&mut self) -> Counted {
        assert!(self.task.read(), "somebody takes readings");
        match self.inbox.take_messages().pop() {
            Some(Message::Event(Event::Sampled(reading))) => reading.vms[0].vcpus[0].counted.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// A period in which the thread of the test ran.
    fn busy_period(&mut self) -> Counted {
        let ran_ns = || procfs::read_cpu_times(self.pid, self.tid).expect("it runs").ran_ns;
        let (before, began) = (ran_ns(), Instant::now());
        while ran_ns() < before + 2_000_000 {
            assert!(began.elapsed() < HANG_LIMIT, "the kernel counts no time of this thread");
        }
        self.period()
    }

    fn health(&self) -> api::Counters {
        self.inbox.capabilities.counters()
    }
}

fn gettid() -> i32 {
    nix::unistd::gettid().as_raw()
}

fn is_counted(counted: &Counted) -> bool {
    matches!(counted, Counted::Counted(counts) if counts.instructions == 1000)
}

#[test]
fn counters_that_cannot_be_opened_are_tried_again_after_some_periods() {
    let mut bench = Bench::new(gettid(), State { refuses: true, ..State::default() });
    bench.count();
    for period in 1..2 * TRY_AGAIN {
        assert_eq!(bench.period(), Counted::Lost, "period {period}");
        assert_eq!(lock(&bench.state).opened.len() as u32, 1 + period / TRY_AGAIN, "period {period}");
        let health = bench.health();
        assert_eq!((health.threads, health.failed), (1, 1));
        assert_eq!(
            health.why_failed.as_deref(),
            Some("counting instructions: this host has no such counter")
        );
    }
    lock(&bench.state).refuses = false;
    // They are opened at the end of this one, so that none of it was counted.
    assert_eq!(bench.period(), Counted::Lost);
    assert_eq!(lock(&bench.state).opened.len(), 3);
    assert_eq!((bench.health().failed, bench.health().why_failed), (0, None));
    assert!(is_counted(&bench.period()));
    assert_eq!(lock(&bench.state).opened.len(), 3, "they stay open");
}

#[test]
fn counters_that_are_lost_are_opened_anew() {
    let mut bench = Bench::new(gettid(), State::default());
    bench.count();
    assert!(is_counted(&bench.period()));
    lock(&bench.state).loses = true;
    assert_eq!(bench.period(), Counted::Lost);
    let why = bench.health().why_failed.expect("a reason");
    assert!(why.starts_with("the counters of thread 1 were lost"), "{why}");
    (1..TRY_AGAIN).for_each(|period| assert_eq!(bench.period(), Counted::Lost, "period {period}"));
    assert!(is_counted(&bench.period()));
    assert_eq!(bench.health().failed, 0);
}

#[test]
fn a_source_that_counts_nothing_is_given_up_and_tried_again() {
    let mut bench = Bench::new(gettid(), State { silent: [Source::PerNode].into(), ..State::default() });
    bench.count();
    assert!(bench.task.pages.is_none(), "it says by itself where accesses go");
    for _ in 0..PATIENCE {
        assert_eq!(bench.health().source, "per-node");
        assert_eq!(bench.busy_period(), Counted::Crowded);
    }
    let health = bench.health();
    assert_eq!((health.source.as_str(), &health.given_up[..]), ("generic", &["per-node".to_owned()][..]));
    assert!(health.passed_over[0].starts_with("per-node: it counted nothing in 5 periods"), "{health:?}");
    assert_eq!(lock(&bench.state).opened, [Source::PerNode, Source::Generic], "at once");
    assert!(bench.task.pages.is_some(), "remote accesses are spread as pages are");
    let counted = bench.busy_period();
    let expected = Accesses::LocalRemote { local: 10, remote: 0 };
    assert!(matches!(&counted, Counted::Counted(counts) if counts.accesses == expected), "{counted:?}");

    lock(&bench.state).silent.clear();
    let mut periods = 1;
    while bench.health().source == "generic" {
        assert!(is_counted(&bench.period()), "period {periods}");
        periods += 1;
        assert!(periods < 1000, "it is not tried again");
    }
    assert_eq!((bench.health().source.as_str(), bench.health().given_up), ("per-node", vec![]));
    assert!(is_counted(&bench.busy_period()));
    assert_eq!(lock(&bench.state).opened.last(), Some(&Source::PerNode));
    assert!(bench.task.pages.is_none());
}

#[test]
fn all_sources_may_be_given_up() {
    let all = [Source::PerNode, Source::Generic, Source::PageLocation];
    let mut bench = Bench::new(gettid(), State { silent: all.into(), ..State::default() });
    bench.count();
    for source in all {
        assert_eq!(bench.health().source, source.name());
        (0..PATIENCE).for_each(|_| assert_eq!(bench.busy_period(), Counted::Crowded));
    }
    assert_eq!((bench.health().source.as_str(), bench.health().given_up.len()), ("none", 3));
    assert_eq!(bench.busy_period(), Counted::NoCounters, "the place of pages stands in");
    // Who ends its policies and begins anew finds the best one again.
    bench.task.count(Targets { vm: VM, pid: bench.pid, pidfd: None, vcpus: Vec::new() });
    bench.count();
    assert_eq!((bench.health().source.as_str(), bench.health().given_up), ("per-node", vec![]));
}

#[test]
fn a_thread_that_sleeps_is_no_reason_to_give_a_source_up() {
    let (tell, told) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            tell.send(gettid()).expect("the test waits");
            // Until the test has ended, however it ends.
            let _ = ended.recv();
        });
        let tid = told.recv().expect("it runs");
        let mut bench = Bench::new(tid, State { silent: [Source::PerNode].into(), ..State::default() });
        bench.count();
        (0..3 * PATIENCE).for_each(|_| assert_eq!(bench.period(), Counted::Crowded));
        assert_eq!(bench.health().source, "per-node");
        drop(end);
    });
}
