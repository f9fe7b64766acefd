//! Where memory is and how it comes home, in the core by itself: what is seen comes in, orders come out.

#[path = "common/asked.rs"]
mod asked;
#[path = "common/gib_nodes.rs"]
mod gib_nodes;
#[path = "common/plugged.rs"]
mod plugged;
#[path = "common/two_nodes.rs"]
mod two_nodes;

use asked::asked;
use std::sync::mpsc::Receiver;
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, Refusal, ReplyTo,
    event::{Command, Event, Report, Request},
};
use vnuma_model::{
    BackingMapping, HugePages, MemoryBacking, PageKind, Vcpu, VmCandidate, VmDescription, VmDevice,
    WatchedRegion,
};
use vnuma_policy::{
    Policies,
    hotness::Hotness,
    memory_move::{MemoryPolicy, MoveMemory},
    repatriation::MemorySettings,
    residency::{AreaSample, Found, Keeps, MemoryArea, MemoryObservation},
    world::{MemoryMoved, TaskId, VmId},
};

const SECOND_NS: u64 = 1_000_000_000;
const NONE: TaskId = TaskId { vm: 0, number: 0 };
const PID: i32 = 100;
const MIB: u64 = 1 << 20;
const GIB_KIB: u64 = 1 << 20;
const SAMPLES: u64 = 1000;

/// A VM with two guest nodes, at home on nodes 0 and 1.
fn description() -> VmDescription {
    gib_nodes::vm(PID, vec![Vcpu { index: 0, apic_id: 0, boot_node: Some(0), tid: PID + 1 }])
}

struct Run {
    core: Core,
    now_ns: u64,
    vm: (VmId, u64),
    /// What is displaced of each guest node, in thousandths, and what keeps it.
    displaced: [u64; 2],
    kept: Option<Keeps>,
    /// Huge pages of 2 MiB that each host node has free.
    huge: u64,
    cost_ns: u64,
    /// Why its memory cannot be seen.
    problem: Option<String>,
    /// Observations are answered.
    answers: bool,
    looked: Vec<Vec<MemoryArea>>,
    /// What a watch of how hot it is shows; `None`: it is not answered.
    hotness: Option<Result<Hotness, String>>,
    watched: Vec<Vec<MemoryArea>>,
    orders: Vec<MoveMemory>,
    stopped: usize,
    /// The last ones that were begun.
    observing: TaskId,
    watching: TaskId,
    moving: TaskId,
    steps: Vec<api::MemoryStep>,
    lines: Vec<String>,
}

impl Run {
    fn new(memory: MemorySettings, description: VmDescription) -> Self {
        let mut run = Self {
            core: Core::new(host(), Policies { memory, ..Policies::default() }, 7),
            now_ns: SECOND_NS,
            vm: (0, 0),
            displaced: [0, 0],
            kept: None,
            huge: 0,
            cost_ns: 1_000_000,
            problem: None,
            answers: true,
            looked: Vec::new(),
            hotness: Some(Err("there is no DAMON".into())),
            watched: Vec::new(),
            orders: Vec::new(),
            stopped: 0,
            observing: NONE,
            watching: NONE,
            moving: NONE,
            steps: Vec::new(),
            lines: Vec::new(),
        };
        run.step(Event::Scanned(Ok(vec![VmCandidate::new("/a", "a", 1)])));
        run.report(Report::Up(description, false));
        run
    }

    fn report(&mut self, report: Report) {
        self.step(Event::Hypervisor(self.vm.1, report));
    }

    fn observation(&self, areas: &[MemoryArea]) -> MemoryObservation {
        let sample = |area: &MemoryArea| {
            let displaced = self.displaced[area.guest_node as usize];
            let found = |node, kept, count| Found { node, kind: PageKind::Base, kept, locked: false, count };
            let home = area.guest_node;
            let found = vec![found(home, None, SAMPLES - displaced), found(1 - home, self.kept, displaced)];
            // Those that are displaced are in front.
            let movable = displaced * u64::from(self.kept.is_none());
            let node = |at: u64| if at < displaced { 1 - home } else { home };
            let page = |at: u64| (area.start + at * (area.bytes / SAMPLES / 4096 * 4096), node(at));
            let pages = (displaced - movable..SAMPLES).map(page).collect();
            AreaSample { area: *area, looked: SAMPLES, found, swapped: 0, pages }
        };
        MemoryObservation {
            began_ns: self.now_ns,
            cost_ns: self.cost_ns,
            areas: areas.iter().map(sample).collect(),
            pools: (0..2)
                .map(|node| (node, HugePages { size_kib: 2048, total: 600, free: self.huge }))
                .collect(),
            nodes: vec![(0, 8 * GIB_KIB, 4 * GIB_KIB), (1, 8 * GIB_KIB, 4 * GIB_KIB)],
            allowed: vec![0, 1],
            unmapped: false,
        }
    }

    fn step(&mut self, event: Event) {
        self.now_ns += 1000;
        let mut more = Vec::new();
        for command in self.core.step(self.now_ns, [event]) {
            match command {
                Command::Connect(vm, connection, _) => self.vm = (vm, connection),
                Command::RestoreMasks(task, _) => more.push(Event::MasksRestored(task, Ok(0))),
                Command::ObserveMemory(task, _, areas) => {
                    self.observing = task;
                    let outcome = self.problem.clone().map_or_else(|| Ok(self.observation(&areas)), Err);
                    self.looked.push(areas);
                    more.extend(self.answers.then_some(Event::MemoryObserved(task, outcome)));
                }
                Command::WatchHotness(task, _, areas) => {
                    self.watching = task;
                    self.watched.push(areas);
                    more.extend(self.hotness.clone().map(|outcome| Event::HotnessWatched(task, outcome)));
                }
                Command::MoveMemory(task, _, order) => {
                    self.moving = task;
                    self.orders.push(order);
                }
                Command::StopMemory(_) => self.stopped += 1,
                Command::Reply(reply) => reply.give(),
                Command::Announce(api::Event::Memory { step, .. }) => self.steps.push(step),
                Command::Log(_, _, line) => self.lines.push(line),
                Command::Describe(..) => {}
                _ => {}
            }
        }
        more.into_iter().for_each(|event| self.step(event));
    }

    /// Time passes: what is due is done.
    fn pass(&mut self, seconds: u64) {
        let end_ns = self.now_ns + seconds * SECOND_NS;
        while let Some(due_ns) = self.core.next_deadline_ns().filter(|due_ns| *due_ns <= end_ns) {
            self.now_ns = self.now_ns.max(due_ns);
            self.step(Event::Woken);
        }
        self.now_ns = end_ns;
    }

    fn moved(&mut self, moved: MemoryMoved) {
        self.step(Event::MemoryMoved(self.moving, moved, true));
    }

    fn set(&mut self, request: u64, policy: MemoryPolicy) -> api::VmMemory {
        let (to, answer) = asked();
        self.step(Event::Requested(request, Request::SetMemoryPolicy("a".into(), policy, to)));
        answer.try_recv().expect("answered").expect("set")
    }

    fn ask(&mut self, request: u64) -> Option<Result<api::VmMemory, String>> {
        let answer = self.asked(request).try_recv().ok()?;
        Some(answer.map_err(|refusal| refusal.to_string()))
    }

    fn asked(&mut self, request: u64) -> Receiver<Result<api::VmMemory, Refusal>> {
        let (to, answer) = asked();
        self.step(Event::Requested(request, Request::ShowMemory("a".into(), to)));
        answer
    }
}

fn both() -> MemorySettings {
    MemorySettings { policy: MemoryPolicy::Both, ..MemorySettings::default() }
}

#[test]
fn displaced_memory_of_each_guest_node_comes_to_its_home_with_a_reason() {
    let mut run = Run::new(both(), description());
    assert_eq!(run.looked.len(), 1, "as soon as it is known");
    assert_eq!(run.looked[0].iter().map(|area| area.start).collect::<Vec<_>>(), [1 << 40, 2 << 40]);
    run.displaced = [40, 100];
    run.pass(130);
    let [order] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert_eq!((order.from, order.to), (0, 1), "the larger part first");
    assert_eq!(order.within, Some((2 << 40, (2 << 40) + 1024 * MIB)));
    let begun = &run.steps[0];
    assert_eq!((begun.policy.as_str(), begun.guest_node, begun.ended), ("both", Some(1), false));
    assert!(
        run.lines
            .iter()
            .any(|line| line.contains("guest node 1: up to") && line.contains("more is displaced")),
        "{:?}",
        run.lines
    );
    run.pass(300);
    assert_eq!(run.orders.len(), 1, "one at a time");

    run.displaced = [40, 0];
    let looked = run.looked.len();
    run.moved(MemoryMoved { bytes: 100 * MIB, longest_hold_ns: 1_234_567, ..MemoryMoved::default() });
    run.pass(3);
    assert!(run.looked.len() > looked, "where it is now is looked at");
    assert_eq!(run.steps[1].longest_hold_us, 1234);
    run.pass(30);
    assert_eq!((run.orders.len(), run.orders[1].from, run.orders[1].to), (2, 1, 0));
    run.displaced = [0, 0];
    run.moved(MemoryMoved { bytes: 40 * MIB, ..MemoryMoved::default() });
    run.pass(2000);
    assert_eq!(run.orders.len(), 2, "all of it is at home");
}

fn adaptive() -> MemorySettings {
    MemorySettings { policy: MemoryPolicy::Adaptive, ..MemorySettings::default() }
}

/// The second half of what is displaced of guest node 0, 200 MiB, is hot.
fn second_half() -> Result<Hotness, String> {
    let (start, middle, end) = (1 << 40, (1 << 40) + 100 * MIB, (1 << 40) + 1024 * MIB);
    let regions = [(start, middle, 0), (middle, end, 12)];
    let regions = regions.map(|(start, end, accesses)| WatchedRegion { start, end, accesses });
    Ok(Hotness {
        began_ns: 1,
        ended_ns: 3_000_000_001,
        cost_ns: 50_000_000,
        looks: 20,
        regions: regions.to_vec(),
    })
}

#[test]
fn adaptive_has_it_watched_how_hot_it_is_before_it_moves_it() {
    let mut run = Run::new(adaptive(), description());
    run.hotness = None;
    run.pass(130);
    assert_eq!(run.watched.len(), 0, "nothing is displaced");
    assert_eq!(run.ask(3).expect("answered").expect("known").hotness, Some(api::HotnessWatch::default()));
    run.displaced = [200, 0];
    run.pass(130);
    assert_eq!((run.watched.len(), run.orders.len()), (1, 0), "it waits for that");
    assert_eq!(run.watched[0], run.looked[0], "all memory of the guest");
    run.step(Event::HotnessWatched(run.observing, second_half()));
    assert_eq!(run.orders.len(), 0, "that was something else");
    run.step(Event::HotnessWatched(run.watching, second_half()));
    let [order] = &run.orders[..] else { panic!("{:?}", run.orders) };
    let parts = [((1 << 40) + 100 * MIB, (1 << 40) + 1024 * MIB), (1 << 40, (1 << 40) + 100 * MIB)];
    assert_eq!((order.from, order.parts.as_deref()), (1, Some(parts.as_slice())));
    assert!(
        run.steps[0].hottest_first
            && run.lines.iter().any(|line| line.contains("more than the move, hottest first;"))
    );
    let shown = run.ask(4).expect("answered").expect("known");
    let watch = shown.hotness.expect("it was watched");
    assert_eq!((watch.watched_ms, watch.regions, watch.problem), (Some(3000), 2, None));
    let hotness = shown.nodes[0].hotness.expect("it was watched");
    let mib = [hotness.hot, hotness.warm, hotness.cold].map(|size| size.bytes.div_ceil(MIB));
    assert_eq!(mib, [105, 0, 101], "of a thousand pages each one stands for a bit more than a MiB");
}

#[test]
fn what_was_watched_holds_for_a_minute() {
    let mut run = Run::new(adaptive(), description());
    (run.displaced, run.hotness) = ([200, 0], Some(second_half()));
    run.pass(65);
    assert_eq!((run.watched.len(), run.orders.len()), (1, 1));
    // A move that is under way when it holds no more is not disturbed.
    for (seconds, watched) in [(20, 1), (20, 1), (40, 1), (20, 2)] {
        run.moved(MemoryMoved { bytes: 10 * MIB, ..MemoryMoved::default() });
        run.pass(seconds);
        assert_eq!(run.watched.len(), watched);
    }
    assert!(run.orders.iter().all(|order| order.parts.is_some()), "{:?}", run.orders);
}

#[test]
fn watching_costs_no_more_than_it_may() {
    let mut run = Run::new(adaptive(), description());
    // A thousandth of a CPU: one in ten minutes.
    let dear = second_half().map(|known| Hotness { cost_ns: 600_000_000, ..known });
    (run.displaced, run.hotness) = ([200, 0], Some(dear));
    for _ in 0..40 {
        run.pass(60);
        run.moved(MemoryMoved { bytes: 10 * MIB, ..MemoryMoved::default() });
    }
    assert!((3..=5).contains(&run.watched.len()), "{} watches in 40 minutes", run.watched.len());
    assert!(run.orders.len() > 20 && run.orders.iter().all(|order| order.parts.is_some()));
}

#[test]
fn where_hotness_is_not_known_adaptive_moves_all_the_same_and_says_why() {
    let mut run = Run::new(adaptive(), description());
    run.displaced = [200, 0];
    run.pass(130);
    let [order] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert!(order.parts.is_none() && !run.steps[0].hottest_first);
    let said = "a: how hot its memory is is not known: there is no DAMON";
    assert_eq!(run.lines.iter().filter(|line| *line == said).count(), 1, "{:?}", run.lines);
    let problem = run.ask(3).expect("answered").expect("known").hotness.and_then(|watch| watch.problem);
    assert_eq!(problem.as_deref(), Some("there is no DAMON"));
    // It is tried again after a while, and said no second time.
    run.moved(MemoryMoved { bytes: 10 * MIB, ..MemoryMoved::default() });
    run.pass(130);
    assert!(run.watched.len() > 1 && run.orders.len() > 1, "{} watches", run.watched.len());
    assert_eq!(run.lines.iter().filter(|line| *line == said).count(), 1);
    // One in which nothing was found accessed says nothing.
    let mut run = Run::new(adaptive(), description());
    let cold = second_half().map(|mut known| {
        known.regions.iter_mut().for_each(|region| region.accesses = 0);
        known
    });
    (run.displaced, run.hotness) = ([200, 0], Some(cold));
    run.pass(130);
    assert!(run.orders.len() == 1 && run.orders[0].parts.is_none(), "{:?}", run.orders);
}

#[test]
fn hotness_is_watched_for_adaptive_alone_and_if_it_is_wanted() {
    for settings in [both(), MemorySettings { hotness: false, ..adaptive() }] {
        let mut run = Run::new(settings, description());
        (run.displaced, run.hotness) = ([200, 0], Some(second_half()));
        run.pass(130);
        assert!(run.watched.is_empty() && run.orders.len() == 1 && run.orders[0].parts.is_none());
        assert_eq!(run.ask(3).expect("answered").expect("known").hotness, None);
    }
    // Another policy while it is watched.
    let mut run = Run::new(adaptive(), description());
    (run.displaced, run.hotness) = ([200, 0], None);
    run.pass(130);
    run.set(3, MemoryPolicy::None);
    run.step(Event::HotnessWatched(run.watching, second_half()));
    run.pass(300);
    assert_eq!((run.watched.len(), run.orders.len()), (1, 0));
}

#[test]
fn looking_costs_no_more_than_it_may() {
    let mut run = Run::new(both(), description());
    run.cost_ns = SECOND_NS / 2;
    run.pass(60);
    let looked = run.looked.len();
    run.pass(5000);
    let most = 5000 * SECOND_NS / 1000 / run.cost_ns;
    assert!((run.looked.len() - looked) as u64 <= most, "{} looks", run.looked.len() - looked);
    assert!(run.looked.len() > looked, "but there are some");
    // Somebody who asks again and again is shown what was seen last.
    let looked = run.looked.len();
    for request in 10..60 {
        assert!(run.ask(request).expect("answered").expect("known").age_ms.is_some());
    }
    assert!(run.looked.len() <= looked + 1);
}

#[test]
fn a_vm_without_a_policy_is_looked_at_when_somebody_asks() {
    let mut run = Run::new(MemorySettings::default(), description());
    run.displaced = [40, 0];
    run.pass(5000);
    assert_eq!(run.looked.len(), 0);
    let shown = run.ask(5).expect("answered").expect("known");
    assert_eq!((run.looked.len(), shown.policy.as_str(), shown.nodes.len()), (1, "none", 2));
    let first = &shown.nodes[0];
    assert_eq!(
        (first.home, first.samples, first.displaced.map(|bytes| bytes.bytes / MIB)),
        (Some(0), SAMPLES, Some(40))
    );
    assert!(first.unmovable.is_empty() && first.places.len() == 2, "{first:?}");
    run.pass(5000);
    assert_eq!((run.looked.len(), run.orders.len()), (1, 0));
}

#[test]
fn a_look_that_fails_is_said_with_its_reason() {
    let mut run = Run::new(MemorySettings::default(), description());
    run.problem = Some("its pages: Operation not permitted".into());
    let error = run.ask(5).expect("answered").expect_err("refused");
    assert_eq!(error, "a: where its memory is cannot be seen: its pages: Operation not permitted");
    run.problem = None;
    run.pass(2);
    assert!(run.ask(6).expect("answered").is_ok(), "the next one is tried");
    // QEMU does not say where it has its memory.
    let mut unknown = description();
    unknown.guest_nodes.iter_mut().flat_map(|node| &mut node.memory).for_each(|memory| memory.mapping = None);
    let mut run = Run::new(both(), unknown);
    run.pass(200);
    assert_eq!((run.looked.len(), run.orders.len()), (0, 0));
    assert!(run.ask(5).expect("answered").expect_err("refused").contains("is not known"));
    let mut uma = description();
    uma.guest_nodes.clear();
    let mut run = Run::new(both(), uma);
    assert!(run.ask(5).expect("answered").expect_err("refused").contains("a UMA VM"));
}

#[test]
fn what_cannot_be_moved_is_shown_and_not_tried() {
    let displaced = |description: VmDescription, kept| {
        let mut run = Run::new(both(), description);
        (run.displaced, run.kept) = ([200, 0], kept);
        run.pass(2000);
        assert_eq!(run.orders, [], "nothing is tried");
        let shown = run.ask(5).expect("answered").expect("known");
        let unmovable = &shown.nodes[0].unmovable;
        assert_eq!(unmovable.iter().map(|one| one.size.bytes / MIB).collect::<Vec<_>>(), [204]);
        unmovable[0].reason.clone()
    };
    let device = VmDevice { host: "0000:81:00.0".into(), guest: None };
    assert_eq!(displaced(VmDescription { devices: vec![device], ..description() }, None), "vfio");
    let with = |change: &dyn Fn(&mut MemoryBacking)| {
        let mut described = description();
        described.guest_nodes[0].memory.iter_mut().for_each(change);
        described
    };
    let pool = |memory: &mut MemoryBacking| {
        memory.mapping = Some(BackingMapping { start: 1 << 40, page_kib: 2048 });
    };
    assert_eq!(displaced(with(&pool), None), "pool");
    let bound = |memory: &mut MemoryBacking| (memory.policy, memory.host_nodes) = ("bind".into(), vec![1]);
    assert_eq!(displaced(with(&bound), None), "bound");
    assert_eq!(displaced(description(), Some(Keeps::Merged)), "ksm");
    assert_eq!(displaced(description(), Some(Keeps::Shared)), "shared");
}

#[test]
fn huge_pages_of_a_pool_come_home_while_the_home_has_free_ones() {
    let mut described = description();
    let mapping = Some(BackingMapping { start: 1 << 40, page_kib: 2048 });
    described.guest_nodes[0].memory.iter_mut().for_each(|memory| memory.mapping = mapping);
    let mut run = Run::new(both(), described);
    (run.displaced, run.huge) = ([200, 0], 40);
    run.pass(130);
    let [order] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert_eq!((order.from, order.to, order.bytes, order.page_kib), (1, 0, 80 * MIB, 2048));
    assert_eq!(order.reserve_kib, 0);
    let shown = run.ask(5).expect("answered").expect("known");
    assert!(shown.nodes[0].unmovable.is_empty(), "{shown:?}");
}

#[test]
fn a_policy_is_switched_on_and_off_while_the_vm_runs() {
    let mut run = Run::new(MemorySettings::default(), description());
    run.displaced = [100, 0];
    assert_eq!(run.set(3, MemoryPolicy::Amount).policy, "amount");
    run.pass(60);
    assert_eq!(run.orders.len(), 1);
    run.set(4, MemoryPolicy::None);
    assert_eq!(run.stopped, 1);
    run.moved(MemoryMoved { bytes: MIB, problem: Some("it was stopped".into()), ..MemoryMoved::default() });
    let looked = run.looked.len();
    run.pass(5000);
    assert_eq!((run.orders.len(), run.looked.len()), (1, looked));
    // A scheduling policy that is switched does not end a move home.
    run.set(5, MemoryPolicy::Amount);
    run.pass(120);
    assert_eq!(run.orders.len(), 2);
    let off = vnuma_policy::scheduling::Policy::Observe;
    run.step(Event::Requested(6, Request::SetPolicy("a".into(), off, ReplyTo::new(drop))));
    assert_eq!(run.stopped, 1);
}

#[test]
fn a_vm_that_ends_in_the_middle_leaves_nobody_waiting() {
    let mut run = Run::new(both(), description());
    run.displaced = [100, 0];
    run.pass(130);
    assert_eq!(run.orders.len(), 1);
    (run.answers, run.cost_ns) = (false, 0);
    run.pass(130);
    let answer = run.asked(5);
    assert!(answer.try_recv().is_err(), "it waits for the look");
    run.report(Report::Ended);
    assert!(matches!(answer.try_recv(), Ok(Err(Refusal::Ended { .. }))));
    assert_eq!(run.stopped, 1);
    // What comes late changes nothing.
    let areas = run.looked[0].clone();
    let late = run.observation(&areas);
    run.step(Event::MemoryObserved(run.observing, Ok(late)));
    run.moved(MemoryMoved { bytes: MIB, ..MemoryMoved::default() });
    run.pass(2000);
    assert_eq!(run.orders.len(), 1);
}

#[test]
fn memory_that_is_plugged_is_memory_of_its_guest_node() {
    let with = |plugged_mib, policy: &str| {
        let mut device = plugged::device(1, plugged_mib, 1);
        (device.memory.policy, device.memory.host_nodes) = (policy.into(), vec![0]);
        VmDescription { memory_devices: vec![device], ..description() }
    };
    let (boot, device) = ((2 << 40, (2 << 40) + 1024 * MIB), (plugged::START, plugged::END));
    let mut run = Run::new(both(), with(0, "default"));
    assert_eq!(run.looked[0].len(), 2, "a device of which nothing is plugged is a hole");
    run.report(Report::Described(with(512, "default")));
    run.displaced = [0, 100];
    run.pass(130);
    let last = run.looked.last().expect("looked");
    let sizes: Vec<_> =
        last.iter().map(|area| (area.guest_node, area.guest_bytes / MIB, area.bytes / MIB)).collect();
    assert_eq!(sizes, [(0, 1024, 1024), (1, 1024, 1024), (1, 512, 2048)]);
    assert_eq!((run.orders.len(), run.orders[0].within), (1, Some(device)), "the larger part first");
    run.moved(MemoryMoved { bytes: 204 * MIB, ..MemoryMoved::default() });
    run.pass(30);
    let shown = run.ask(5).expect("answered").expect("known");
    let node = &shown.nodes[1];
    // A tenth of each: 102 and 204 MiB.
    assert_eq!((node.samples, node.displaced.map(|size| size.bytes / MIB)), (2 * SAMPLES, Some(307)));
    assert_eq!(node.places.iter().map(|place| place.node).collect::<Vec<_>>(), [0, 1], "both together");
    assert_eq!(node.unmovable, []);
    // QEMU binds it elsewhere: it stays, and what the guest node booted with comes home.
    let mut run = Run::new(both(), with(512, "bind"));
    run.displaced = [0, 100];
    run.pass(130);
    assert_eq!(run.orders.iter().map(|order| order.within).collect::<Vec<_>>(), [Some(boot)]);
    let shown = run.ask(5).expect("answered").expect("known");
    let [kept] = &shown.nodes[1].unmovable[..] else { panic!("{shown:?}") };
    assert_eq!((kept.reason.as_str(), kept.size.bytes / MIB), ("bound", 204));
}
