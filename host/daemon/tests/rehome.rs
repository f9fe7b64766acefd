//! A guest node gets another home, in the core by itself: what is seen comes in, orders come out.

#[path = "common/asked.rs"]
mod asked;
#[path = "common/gib_nodes.rs"]
mod gib_nodes;
#[path = "common/plugged.rs"]
mod plugged;
#[path = "common/two_nodes.rs"]
mod two_nodes;

use asked::asked;
use std::collections::VecDeque;
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, ReplyTo, Requester,
    event::{Ask, Command, Event, Outcome, Report, Request},
};
use vnuma_model::{
    BackingMapping, DistanceMatrix, HostNode, HugePages, MemoryBacking, PageKind, Party, Vcpu, VcpuLocation,
    VmCandidate, VmDescription, VmDevice,
};
use vnuma_policy::{
    Policies,
    memory_move::{MemoryPolicy, MemoryReason, MoveMemory},
    rehome_policy::RehomeSettings,
    repatriation::MemorySettings,
    residency::{AreaSample, Found, Keeps, MemoryArea, MemoryObservation},
    world::{MemoryMoved, RehomeWish, TaskId, VmId},
};

const SECOND_NS: u64 = 1_000_000_000;
const PID: i32 = 100;
const MIB: u64 = 1 << 20;
const GIB_KIB: u64 = 1 << 20;
const CHANNEL: u64 = 70;

/// Guest nodes of 1 GiB at home on nodes 0 and 1, with a vCPU each.
struct Run {
    core: Core,
    now_ns: u64,
    vm: (VmId, u64),
    /// What is on nodes 0 and 1 of guest node 0, MiB.
    mib: [u64; 2],
    description: VmDescription,
    /// Free on each node, KiB, and nodes that the cpuset allows.
    free_kib: u64,
    allowed: Vec<u32>,
    problem: Option<String>,
    cost_ns: u64,
    kept: Option<Keeps>,
    /// Huge pages of 2 MiB that each host node has free.
    huge: u64,
    /// The host node that has the second part of `mib`.
    far: u32,
    /// In order: what was ordered.
    done: Vec<String>,
    orders: Vec<MoveMemory>,
    stopped: usize,
    /// The last move of memory that was begun.
    moving: TaskId,
    vcpu_fails: bool,
    /// Who was to pay for descriptions.
    payers: Vec<Option<Party>>,
    /// Who wants one cannot pay.
    spent: bool,
    /// VMs that lines of the log are about.
    lines: Vec<Option<VmId>>,
}

fn description() -> VmDescription {
    let vcpu = |id: u32| Vcpu {
        index: u64::from(id).try_into().expect("small"),
        apic_id: id,
        boot_node: Some(id),
        tid: PID + 1 + id as i32,
    };
    gib_nodes::vm(PID, vec![vcpu(0), vcpu(1)])
}

impl Run {
    fn new(policy: MemoryPolicy) -> Self {
        let memory = MemorySettings { policy, ..MemorySettings::default() };
        Self::of(Policies { memory, ..Policies::default() }, description())
    }

    fn of(policies: Policies, description: VmDescription) -> Self {
        let mut run = Self::alone(policies, description);
        run.connect();
        run
    }

    fn alone(policies: Policies, description: VmDescription) -> Self {
        Self {
            core: Core::new(host(), policies, 7),
            now_ns: SECOND_NS,
            vm: (0, 0),
            mib: [1024, 0],
            description,
            free_kib: 4 * GIB_KIB,
            allowed: vec![0, 1],
            problem: None,
            cost_ns: 1_000_000,
            kept: None,
            huge: 0,
            far: 1,
            done: Vec::new(),
            orders: Vec::new(),
            stopped: 0,
            moving: TaskId { vm: 0, number: 0 },
            vcpu_fails: false,
            payers: Vec::new(),
            spent: false,
            lines: Vec::new(),
        }
    }

    /// Without a channel.
    fn describe(&mut self) {
        self.step(Event::Scanned(Ok(vec![VmCandidate::new("/a", "a", 1)])));
        self.step(Event::Hypervisor(self.vm.1, Report::Up(self.described(), false)));
        for vcpu in 0..2 {
            let node = self.description.vcpus[vcpu as usize].boot_node.unwrap_or(vcpu);
            self.locate(vcpu, node, None);
        }
    }

    fn connect(&mut self) {
        self.describe();
        self.step(Event::Requested(1, Request::Attach("a".into(), ReplyTo::new(drop))));
        self.pass(5);
        self.done.clear();
    }

    fn locate(&mut self, vcpu: u32, node: u32, pinned: Option<u32>) {
        let location = VcpuLocation { cpu: node * 4, node, pinned, time_ns: self.now_ns };
        self.step(Event::Located(PID + 1 + vcpu as i32, Some(location)));
    }

    fn described(&self) -> VmDescription {
        let mut described = self.description.clone();
        if let Some(memory) = &mut described.guest_nodes[0].memory {
            memory.resident_kib = vec![(0, self.mib[0] * 1024), (self.far, self.mib[1] * 1024)];
        }
        described
    }

    fn observation(&self, areas: &[MemoryArea]) -> MemoryObservation {
        let kept = self.kept;
        let found = |node, count| Found { node, kind: PageKind::Base, kept, locked: false, count };
        let sample = |area: &MemoryArea| {
            let found = match area.guest_node {
                0 => vec![found(0, self.mib[0]), found(self.far, self.mib[1])],
                _ => vec![found(1, 1024)],
            };
            AreaSample { area: *area, looked: 1024, found, swapped: 0, pages: Vec::new() }
        };
        MemoryObservation {
            began_ns: self.now_ns,
            cost_ns: self.cost_ns,
            areas: areas.iter().map(sample).collect(),
            pools: (0..2)
                .map(|node| (node, HugePages { size_kib: 2048, total: 600, free: self.huge }))
                .collect(),
            nodes: (0..3).map(|node| (node, 8 * GIB_KIB, self.free_kib)).collect(),
            allowed: self.allowed.clone(),
            unmapped: false,
        }
    }

    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.now_ns += 1000;
            for command in self.core.step(self.now_ns, [event]) {
                match command {
                    Command::Connect(vm, connection, _) => self.vm = (vm, connection),
                    Command::RestoreMasks(task, _) => events.push_back(Event::MasksRestored(task, Ok(0))),
                    Command::ObserveMemory(task, _, areas) => {
                        let seen = self.problem.clone().map_or_else(|| Ok(self.observation(&areas)), Err);
                        events.push_back(Event::MemoryObserved(task, seen));
                    }
                    Command::MoveMemory(task, _, order) => {
                        self.moving = task;
                        self.done.push(format!("memory {} to {}", order.from, order.to));
                        self.orders.push(order);
                    }
                    Command::StopMemory(_) => self.stopped += 1,
                    Command::Publish(task, generation, publication) => {
                        let distance = publication.distances.rows()[0].get(1);
                        self.done.push(
                            distance.map_or("publish".into(), |distance| format!("publish {distance}")),
                        );
                        events.push_back(Event::Published(task, Ok(generation + 1)));
                    }
                    Command::Move { task, vcpu, tid, node, .. } => {
                        self.done.push(format!("vcpu {vcpu} to {node}"));
                        let location =
                            VcpuLocation { cpu: node * 4, node, pinned: Some(node), time_ns: self.now_ns };
                        let error = vnuma_process::ActError::Raced { pid: PID, tid };
                        let outcome = if self.vcpu_fails { Err(error) } else { Ok(Some(location)) };
                        events.push_back(Event::Moved(task, outcome));
                    }
                    Command::Ask(task, connection, Ask::Attach(_)) => {
                        let attached = Report::Outcome(task, Outcome::Attached(Ok(CHANNEL)));
                        events.push_back(Event::Hypervisor(connection, attached));
                    }
                    Command::Describe(connection, payer) => {
                        self.payers.push(payer);
                        let described = Report::Described(self.described());
                        let report = if self.spent { Report::NotDescribed } else { described };
                        events.push_back(Event::Hypervisor(connection, report));
                    }
                    Command::Log(about, ..) => self.lines.push(about),
                    Command::Reply(reply) => reply.give(),
                    _ => {}
                }
            }
        }
    }

    fn pass(&mut self, seconds: u64) {
        let end_ns = self.now_ns + seconds * SECOND_NS;
        while let Some(due_ns) = self.core.next_deadline_ns().filter(|due_ns| *due_ns <= end_ns) {
            self.now_ns = self.now_ns.max(due_ns);
            self.step(Event::Woken);
        }
        self.now_ns = end_ns;
    }

    /// So much of guest node 0 was moved to a node.
    fn moved(&mut self, to: usize, mib: u64, problem: Option<&str>) {
        self.mib[1 - to] -= mib;
        self.mib[to] += mib;
        let moved =
            MemoryMoved { bytes: mib * MIB, problem: problem.map(str::to_owned), ..MemoryMoved::default() };
        self.step(Event::MemoryMoved(self.moving, moved, true));
    }

    fn ask(
        &mut self,
        request: u64,
        wanted: impl FnOnce(ReplyTo<api::Rehome>) -> Request,
    ) -> Result<api::Rehome, String> {
        let (to, answer) = asked();
        self.step(Event::Requested(request, wanted(to)));
        answer.try_recv().expect("answered").map_err(|refusal| refusal.to_string())
    }

    fn rehome(&mut self, node: u32) -> Result<api::Rehome, String> {
        self.ask(50, |to| Request::Rehome("a".into(), wish(node), to))
    }

    /// Why the memory of guest node 0 does not follow its vCPUs.
    fn stays(&mut self) -> Option<api::MemoryStays> {
        self.ask(53, |to| Request::ShowRehome("a".into(), to)).expect("shown").guest_nodes[0].stays.take()
    }

    fn state(&mut self) -> api::RehomeState {
        let shown = self.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown");
        shown.rehome.expect("one")
    }
}

#[test]
fn room_that_is_there_again_is_seen_at_once_whatever_a_look_costs() {
    let mut run = Run::new(MemoryPolicy::None);
    (run.cost_ns, run.free_kib) = (SECOND_NS, GIB_KIB);
    assert!(run.rehome(1).expect_err("refused").contains("no room"));
    run.free_kib = 4 * GIB_KIB;
    assert!(run.rehome(1).is_ok());
}

#[test]
fn bound_memory_is_described_before_anything_is_said_or_done() {
    let mut run = Run::new(MemoryPolicy::None);
    // Nobody was told of it: memory that is bound is not described again and again.
    run.pass(60);
    run.mib = [700, 50];
    let shown = run.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown");
    let places: Vec<_> = shown.guest_nodes[0].places.iter().map(|place| place.bytes / MIB).collect();
    assert_eq!(places, [700, 50]);
    run.mib = [600, 100];
    assert_eq!(run.rehome(1).expect("begun").rehome.expect("one").total_bytes, 700 * MIB);
    assert_eq!(run.orders[0].bytes, 600 * MIB);
    let mut run = Run::new(MemoryPolicy::None);
    run.step(Event::Hypervisor(run.vm.1, Report::Silent("qom-get".into(), PID)));
    assert!(run.rehome(1).expect_err("refused").contains("not connected"));
}

#[test]
fn who_may_only_look_pays_for_the_description() {
    for payer in [None, Some(Party::User(7))] {
        let mut run = Run::new(MemoryPolicy::None);
        run.pass(60);
        let to = asked().0.of(Requester::default().paid_by(payer));
        let wanted = Event::Requested(51, Request::ShowRehome("a".into(), to));
        let commands = run.core.step(run.now_ns + 1000, [wanted]);
        let payers = commands.iter().filter_map(|command| match command {
            Command::Describe(_, payer) => Some(*payer),
            _ => None,
        });
        assert_eq!(payers.collect::<Vec<_>>(), [payer]);
    }
}

#[test]
fn who_cannot_pay_for_a_description_is_answered_and_an_operator_gets_it() {
    let mut run = Run::new(MemoryPolicy::None);
    run.pass(60);
    let (to, operator) = asked();
    drop(run.core.step(run.now_ns + 1, [Event::Requested(50, Request::Rehome("a".into(), wish(1), to))]));
    let (to, reader) = asked();
    let to = to.of(Requester::default().paid_by(Some(Party::User(7))));
    // Long enough after the operator's, whose description takes its time.
    run.now_ns += 2 * SECOND_NS;
    drop(run.core.step(run.now_ns, [Event::Requested(51, Request::ShowRehome("a".into(), to))]));
    run.step(Event::Hypervisor(run.vm.1, Report::NotDescribed));
    assert!(reader.try_recv().is_ok() && operator.try_recv().is_err(), "the operator waits for its own");
    run.step(Event::Hypervisor(run.vm.1, Report::Described(run.described())));
    assert!(operator.try_recv().expect("answered").is_ok());
}

fn wish(node: u32) -> RehomeWish {
    RehomeWish { guest_node: 0, node, dry_run: false, move_pinned: false, why: None }
}

#[test]
fn memory_goes_first_then_the_guest_is_told_then_vcpus_follow() {
    let mut run = Run::new(MemoryPolicy::None);
    let shown = run.rehome(1).expect("begun").rehome.expect("one");
    assert_eq!((shown.state.as_str(), shown.there_bytes, &shown.vcpus[..]), ("memory", 0, &[0][..]));
    let order = run.orders[0].clone();
    assert_eq!((order.from, order.to, order.why), (0, 1, MemoryReason::Rehome(0)));
    assert_eq!(order.within, Some((1 << 40, (1 << 40) + 1024 * MIB)), "no memory of the other guest node");
    let moved = MemoryMoved { bytes: 100 * MIB, ..MemoryMoved::default() };
    run.step(Event::MemoryMoved(run.moving, moved, false));
    assert_eq!(run.state().there_bytes, 100 * MIB, "it has got so far");
    run.moved(1, 400, Some("it has worked for 10 s"));
    assert_eq!((run.orders.len(), run.state().state.as_str()), (2, "memory"));
    assert_eq!(run.orders[1].bytes, 624 * MIB);
    run.moved(1, 624, None);
    run.pass(5);
    let (state, done) = (run.state(), run.done.join(", "));
    assert_eq!((state.state.as_str(), state.problem, state.notes), ("done", None, vec![]));
    assert_eq!(done, "memory 0 to 1, memory 0 to 1, publish 11, vcpu 0 to 1");
    // The reverse undoes it.
    run.done.clear();
    run.rehome(0).expect("begun");
    run.moved(0, 1024, None);
    run.pass(5);
    assert_eq!(run.state().state, "done");
    // Its vCPU was on the home of the other guest node in between, and its guest was told so.
    assert_eq!(run.done.join(", "), "memory 1 to 0, publish 21, vcpu 0 to 0, publish 21");
    let counts = run.core.counts(run.vm.0);
    assert_eq!(
        (counts.rehomes, counts.moves["rehome"]),
        ([("done", 2), ("failed", 0), ("stopped", 0)].into(), 2)
    );
}

#[test]
fn what_is_refused_changes_nothing() {
    let refused = |change: &dyn Fn(&mut Run), wish: RehomeWish| {
        let mut run = Run::new(MemoryPolicy::None);
        change(&mut run);
        run.pass(60);
        let described = run.described();
        run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
        run.done.clear();
        let error = run.ask(50, |to| Request::Rehome("a".into(), wish, to)).expect_err("refused");
        run.pass(60);
        assert!(run.done.is_empty(), "{:?}", run.done);
        assert!(run.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown").rehome.is_none());
        error
    };
    let to = |node| wish(node);
    let error = refused(&|run| run.free_kib = GIB_KIB, to(1));
    assert_eq!(
        error,
        "a: guest node 0 cannot get its home on node 1: node 1 has no room: 1024 MiB are to go there, and 512 MiB are \
         free beyond its reserve"
    );
    assert!(refused(&|_| {}, to(9)).contains("the host has no node 9"));
    assert!(refused(&|_| {}, RehomeWish { guest_node: 5, ..to(1) }).contains("there is no guest node 5"));
    assert!(
        refused(&|run| run.allowed = vec![0], to(1))
            .contains("the cpuset of its hypervisor excludes the memory of node 1")
    );
    let device = VmDevice { host: "0000:81:00.0".into(), guest: None };
    assert!(
        refused(&|run| run.description.devices = vec![device.clone()], to(1)).contains("VFIO has pinned")
    );
    let pool = BackingMapping { start: 1 << 40, page_kib: 2048 };
    let with = |run: &mut Run, change: &dyn Fn(&mut MemoryBacking)| {
        run.description.guest_nodes[0].memory.iter_mut().for_each(change);
    };
    let error = refused(&|run| with(run, &|memory| memory.mapping = Some(pool)), to(1));
    assert!(error.contains("node 1 has 0 free huge pages of 2048 KiB, and 512 are to go there"), "{error}");
    let some = &|run: &mut Run| {
        run.huge = 511;
        with(run, &|memory| memory.mapping = Some(pool));
    };
    assert!(refused(some, to(1)).contains("node 1 has 511 free huge pages"));
    let error = refused(&|run| with(run, &|memory| memory.policy = "interleave".into()), to(1));
    assert!(error.contains("interleaved"), "{error}");
    let denied = "move_pages: Operation not permitted";
    assert!(refused(&|run| run.problem = Some(denied.into()), to(1)).contains(denied));
    let error = refused(&|run| run.locate(0, 0, Some(0)), to(1));
    assert!(
        error.contains("vCPUs [0] are confined to other nodes") && error.contains("--move-pinned"),
        "{error}"
    );
}

/// As behind CXL.
#[test]
fn a_node_without_cpus_is_a_home_like_others_and_vcpus_stay() {
    let mut run = Run::alone(Policies::default(), description());
    let mut host = host();
    host.nodes.push(HostNode { id: 2, ..HostNode::default() });
    let rows = vec![vec![10, 21, 14], vec![21, 10, 24], vec![14, 24, 10]];
    host.distances = DistanceMatrix::new(rows).expect("square");
    run.core = Core::new(host, Policies::default(), 7);
    (run.far, run.allowed) = (2, vec![0, 1, 2]);
    run.connect();
    let shown = run.rehome(2).expect("begun").rehome.expect("one");
    assert!(shown.vcpus.is_empty(), "{shown:?}");
    run.moved(1, 1024, None);
    run.pass(5);
    let state = run.state();
    assert_eq!(state.state, "done");
    assert!(state.notes[0].contains("node 2 has no CPUs"), "{:?}", state.notes);
    assert_eq!(run.done.join(", "), "memory 0 to 2, publish 24");
}

#[test]
fn huge_pages_of_a_pool_get_another_home_if_its_pool_has_room() {
    let mut run = Run::new(MemoryPolicy::None);
    run.huge = 512;
    let pool = Some(BackingMapping { start: 1 << 40, page_kib: 2048 });
    run.description.guest_nodes[0].memory.iter_mut().for_each(|memory| memory.mapping = pool);
    // It says nothing of small pages.
    run.free_kib = 0;
    run.step(Event::Hypervisor(run.vm.1, Report::Described(run.described())));
    run.ask(50, |to| Request::Rehome("a".into(), wish(1), to)).expect("begun");
    run.pass(5);
    let [order] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert_eq!((order.from, order.to, order.bytes), (0, 1, 1024 * MIB));
    assert_eq!((order.page_kib, order.reserve_kib), (2048, 0));
}

#[test]
fn a_vcpu_that_somebody_confined_is_moved_if_that_is_asked_for() {
    let mut run = Run::new(MemoryPolicy::None);
    run.locate(0, 0, Some(0));
    run.vcpu_fails = true;
    let wanted = RehomeWish { move_pinned: true, ..wish(1) };
    run.ask(50, |to| Request::Rehome("a".into(), wanted, to)).expect("begun");
    run.moved(1, 1024, None);
    run.pass(5);
    let state = run.state();
    assert_eq!(state.state, "done", "its memory is there");
    assert!(state.problem.is_some_and(|problem| problem.contains("vCPU 0 was not moved to node 1")));
    // The repeat has only that left.
    (run.vcpu_fails, run.done) = (false, Vec::new());
    run.ask(50, |to| Request::Rehome("a".into(), wanted, to)).expect("begun");
    run.pass(5);
    assert_eq!((run.done.join(", ").as_str(), run.state().problem), ("vcpu 0 to 1", None));
}

#[test]
fn a_dry_run_says_what_would_be_done() {
    let mut run = Run::new(MemoryPolicy::None);
    let planned = RehomeWish { dry_run: true, ..wish(1) };
    let shown =
        run.ask(50, |to| Request::Rehome("a".into(), planned, to)).expect("planned").rehome.expect("one");
    assert_eq!((shown.state.as_str(), shown.total_bytes), ("planned", 1024 * MIB));
    run.pass(60);
    assert!(
        run.done.is_empty()
            && run.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown").rehome.is_none()
    );
}

#[test]
fn one_that_is_stopped_stays_where_it_is_until_it_is_repeated_or_undone() {
    let mut run = Run::new(MemoryPolicy::None);
    assert!(
        run.ask(50, |to| Request::StopRehome("a".into(), to)).expect_err("none").contains("no guest node")
    );
    run.rehome(1).expect("begun");
    run.moved(1, 300, Some("it has worked for 10 s"));
    let shown = run.ask(50, |to| Request::StopRehome("a".into(), to)).expect("stopped");
    assert_eq!(run.stopped, 1);
    assert_eq!(shown.rehome.expect("one").state, "stopped");
    run.moved(1, 100, Some("it was stopped"));
    run.pass(60);
    assert_eq!(run.done.join(", "), "memory 0 to 1, memory 0 to 1", "nothing more is begun");
    let shown = run.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown");
    let places: Vec<_> =
        shown.guest_nodes[0].places.iter().map(|place| (place.node, place.bytes / MIB)).collect();
    assert_eq!((shown.guest_nodes[0].home, places), (Some(0), vec![(0, 624), (1, 400)]));
    // Undone while it is repeated.
    run.rehome(1).expect("begun");
    run.rehome(0).expect("begun");
    run.moved(1, 10, Some("it was stopped"));
    run.moved(0, 410, None);
    run.pass(5);
    assert_eq!((run.state().state.as_str(), run.mib), ("done", [1024, 0]));
    // By the operator, and by the next one.
    let rehomes = run.core.counts(run.vm.0).rehomes;
    assert_eq!(rehomes, [("done", 1), ("failed", 0), ("stopped", 2)].into());
}

/// vnumad was killed: the next one knows what it sees.
#[test]
fn the_next_vnumad_shows_what_is_there_and_completes_it() {
    for mib in [200, 800] {
        let mut run = Run::new(MemoryPolicy::None);
        run.rehome(1).expect("begun");
        (run.mib, run.core) = ([1024 - mib, mib], Core::new(host(), Policies::default(), 9));
        run.connect();
        let shown = run.ask(51, |to| Request::ShowRehome("a".into(), to)).expect("shown");
        assert!(shown.rehome.is_none());
        assert_eq!(shown.guest_nodes[0].home, Some(u32::from(mib > 512)));
        assert_eq!(shown.guest_nodes[0].places.len(), 2, "it is shown as partly moved");
        run.rehome(1).expect("begun");
        run.moved(1, 1024 - mib, None);
        run.pass(5);
        assert_eq!(
            (run.state().state.as_str(), run.done.last().map(String::as_str)),
            ("done", Some("vcpu 0 to 1"))
        );
    }
}

#[test]
fn what_fails_ends_it_with_its_reason_and_memory_that_is_bound_moves_all_the_same() {
    let mut run = Run::new(MemoryPolicy::None);
    if let Some(memory) = &mut run.description.guest_nodes[0].memory {
        (memory.policy, memory.host_nodes) = ("bind".into(), vec![0]);
    }
    let described = run.described();
    run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
    run.rehome(1).expect("begun");
    let note = run.state().notes.join("\n");
    assert!(note.contains("takes new pages of it from nodes [0]") && note.contains("host-nodes="), "{note}");
    run.moved(1, 100, None);
    for _ in 0..3 {
        assert_eq!(run.state().state, "memory");
        run.moved(1, 0, Some("node 1 is offline"));
    }
    run.pass(60);
    let state = run.state();
    assert_eq!((state.state.as_str(), state.there_bytes), ("failed", 100 * MIB));
    assert!(state.problem.is_some_and(|problem| problem.contains("node 1 is offline")));
    assert_eq!(run.done.iter().filter(|done| done.starts_with("vcpu")).count(), 0);
}

#[test]
fn no_policy_moves_memory_meanwhile_and_a_vm_that_ends_leaves_nobody_waiting() {
    let mut run = Run::new(MemoryPolicy::Both);
    run.mib = [824, 200];
    run.pass(130);
    assert_eq!(run.orders.len(), 1, "what is displaced comes home");
    run.rehome(1).expect("begun");
    assert_eq!((run.stopped, run.orders.len()), (1, 1), "that ends first");
    run.moved(0, 50, Some("it was stopped"));
    assert_eq!(run.orders[1].why, MemoryReason::Rehome(0));
    run.pass(500);
    assert_eq!(run.orders.len(), 2);
    run.step(Event::Hypervisor(run.vm.1, Report::Ended));
    assert_eq!(run.stopped, 2);
    run.pass(500);
    assert_eq!(run.orders.len(), 2);
}

/// A VM with one guest node, at home on node 0, and two vCPUs.
fn with_one_node(rehome: RehomeSettings) -> Run {
    let mut description = description();
    description.guest_nodes.truncate(1);
    description.vcpus.iter_mut().for_each(|vcpu| vcpu.boot_node = Some(0));
    Run::of(Policies { rehome, ..Policies::default() }, description)
}

const AUTO: RehomeSettings =
    RehomeSettings { auto: true, settle_ns: 60 * SECOND_NS, rest_ns: 600 * SECOND_NS };

#[test]
fn memory_goes_after_vcpus_that_have_come_to_stay() {
    let mut run = with_one_node(AUTO);
    run.pass(300);
    assert_eq!(run.done.join(", "), "", "all is at home");
    run.locate(0, 1, Some(1));
    run.pass(300);
    assert_eq!(run.done.join(", "), "", "one of two vCPUs");
    run.locate(1, 1, Some(1));
    run.pass(59);
    assert_eq!(run.done.join(", "), "", "they may go on");
    run.pass(121);
    assert_eq!(run.done.join(", "), "memory 0 to 1");
    let state = run.state();
    let why = state.why.expect("a reason");
    assert!(why.contains("where no guest node is at home") && why.contains("(assumed)"), "{why}");
    assert_eq!(
        (state.state.as_str(), state.vcpus),
        ("memory", vec![]),
        "vCPUs stay as their operator has them"
    );
    run.moved(1, 1024, None);
    run.pass(300);
    assert_eq!(run.state().state, "done");
    assert!(run.done.iter().all(|done| !done.starts_with("vcpu")), "{:?}", run.done);
    assert_eq!(run.orders.len(), 1);
}

#[test]
fn a_guest_node_that_has_got_another_home_rests() {
    let mut run = with_one_node(AUTO);
    let both = |run: &mut Run, node| (0..2).for_each(|vcpu| run.locate(vcpu, node, None));
    both(&mut run, 1);
    run.pass(180);
    run.moved(1, 1024, None);
    run.pass(5);
    both(&mut run, 0);
    run.pass(400);
    assert_eq!(run.orders.len(), 1, "it rests for ten minutes");
    run.pass(400);
    assert_eq!(run.orders.len(), 2);
    run.moved(0, 1024, None);
    run.pass(5);
    both(&mut run, 1);
    run.pass(850);
    assert_eq!(run.orders.len(), 2, "and for twice as long when it is wanted elsewhere again so soon");
    run.pass(400);
    assert_eq!(run.orders.len(), 3);
}

#[test]
fn another_vm_in_its_place_does_not_rest() {
    let mut run = with_one_node(AUTO);
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    run.pass(180);
    run.moved(1, 1024, None);
    run.pass(5);
    assert_eq!((run.orders.len(), run.state().state.as_str()), (1, "done"));
    // Its process has ended, which was not seen, and was started anew.
    (run.mib, run.description.pid) = ([1024, 0], PID + 50);
    run.describe();
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    run.pass(180);
    assert_eq!(run.orders.len(), 2);
}

#[test]
fn an_operator_that_gives_a_home_or_stops_one_is_not_contradicted() {
    let mut run = with_one_node(AUTO);
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    run.pass(180);
    assert_eq!(run.orders.len(), 1);
    run.ask(52, |to| Request::StopRehome("a".into(), to)).expect("stopped");
    run.moved(1, 100, None);
    run.pass(400);
    assert_eq!((run.orders.len(), run.state().state.as_str()), (1, "stopped"));
    let mut run = with_one_node(AUTO);
    run.vcpu_fails = true;
    run.rehome(1).expect("begun");
    run.moved(1, 1024, None);
    run.pass(400);
    assert_eq!(run.orders.len(), 1, "its vCPUs have stayed on node 0, where no guest node is at home now");
}

#[test]
fn what_cannot_go_after_its_vcpus_stays() {
    let elsewhere = |change: &dyn Fn(&mut Run)| {
        let mut run = with_one_node(AUTO);
        change(&mut run);
        let described = run.described();
        run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
        (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
        run.pass(400);
        run.done.join(", ")
    };
    assert_eq!(elsewhere(&|_| {}), "memory 0 to 1");
    assert_eq!(elsewhere(&|run| run.allowed = vec![0]), "");
    assert_eq!(elsewhere(&|run| run.free_kib = GIB_KIB), "", "there is no room");
    let device = VmDevice { host: "0000:81:00.0".into(), guest: None };
    assert_eq!(elsewhere(&|run| run.description.devices = vec![device.clone()]), "");
    let bound = |run: &mut Run| {
        let memory = run.description.guest_nodes[0].memory.as_mut().expect("one");
        (memory.policy, memory.host_nodes) = ("bind".into(), vec![0]);
    };
    assert_eq!(elsewhere(&bound), "", "new pages would come from node 0");
    // It is a vCPU of guest node 1 now, and its guest is told, if it can be.
    let mut run = Run::of(Policies { rehome: AUTO, ..Policies::default() }, description());
    run.locate(0, 1, None);
    run.pass(400);
    assert_eq!(run.done.join(", "), "publish 21");
    let mut run = Run::alone(Policies { rehome: AUTO, ..Policies::default() }, description());
    run.describe();
    run.locate(0, 1, None);
    run.pass(400);
    assert_eq!(run.done.join(", "), "");
    let mut run = with_one_node(RehomeSettings { auto: false, ..AUTO });
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    run.pass(4000);
    assert_eq!(run.done.join(", "), "", "nobody has asked for it");
}

/// What keeps memory, and what is said of it: the reason, and a part of the text.
type Case<'a> = (&'a dyn Fn(&mut Run), &'a str, &'a str);

#[test]
fn memory_that_does_not_follow_its_vcpus_is_shown_with_its_reason() {
    let behind = |change: &dyn Fn(&mut Run)| {
        let mut run = with_one_node(AUTO);
        change(&mut run);
        let described = run.described();
        run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
        assert_eq!(run.stays(), None, "they are at home");
        (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
        run.pass(400);
        let stays = run.stays().expect("it stays");
        assert_eq!(stays.vcpus_on, [1]);
        (stays.reason, stays.text)
    };
    let with = |run: &mut Run, change: &dyn Fn(&mut MemoryBacking)| {
        run.description.guest_nodes[0].memory.iter_mut().for_each(change);
    };
    let device = VmDevice { host: "0000:81:00.0".into(), guest: None };
    let pool = BackingMapping { start: 1 << 40, page_kib: 2048 };
    let bound = |policy: &'static str| {
        move |memory: &mut MemoryBacking| (memory.policy, memory.host_nodes) = (policy.into(), vec![0])
    };
    let cases: [Case<'_>; 9] = [
        (&|run| run.description.devices = vec![device.clone()], "vfio", "VFIO has pinned all memory"),
        (
            &|run| with(run, &|memory| memory.mapping = Some(pool)),
            "pool",
            "the pool of node 1 has no free one",
        ),
        (&|run| with(run, &bound("bind")), "bound", "(bind) takes its pages from nodes [0]"),
        (&|run| with(run, &bound("interleave")), "bound", "(interleave) takes its pages"),
        (&|run| run.allowed = vec![0], "cpuset", "excludes the memory of node 1"),
        (&|run| run.free_kib = GIB_KIB, "no-room", "1024 MiB would go there, and 512 MiB are free"),
        (&|run| run.kept = Some(Keeps::Shared), "shared", "other processes have most pages"),
        (&|run| run.problem = Some("its pages: no".into()), "unknown", "cannot be seen: its pages: no"),
        (
            &|run| with(run, &|memory| memory.mapping = None),
            "unknown",
            "where its hypervisor has it is not known",
        ),
    ];
    for (change, reason, text) in cases {
        let shown = behind(change);
        assert!(shown.0 == reason && shown.1.contains(text), "{reason}: {shown:?}");
    }
}

#[test]
fn what_memory_waits_for_that_may_follow_is_shown() {
    let reason = |run: &mut Run| run.stays().map(|stays| stays.reason).unwrap_or_default();
    let mut run = with_one_node(AUTO);
    run.pass(130);
    run.locate(0, 1, None);
    let stays = run.stays().expect("one of two vCPUs");
    assert_eq!((stays.reason.as_str(), stays.vcpus_on), ("spread", vec![0, 1]));
    run.locate(1, 1, None);
    let settles = run.stays().expect("it stays");
    assert_eq!(
        (settles.reason.as_str(), settles.text.as_str()),
        ("settles", "its vCPUs have been there for 0 s, and have to be for 60 s")
    );
    run.pass(180);
    assert_eq!((run.orders.len(), reason(&mut run).as_str()), (1, "rehome"));
    run.moved(1, 1024, None);
    run.pass(5);
    assert_eq!(run.stays(), None, "it is there");
    (0..2).for_each(|vcpu| run.locate(vcpu, 0, None));
    run.pass(100);
    let rests = run.stays().expect("it rests");
    assert!(rests.reason == "rests" && rests.text.starts_with("it rests for another "), "{rests:?}");
    // What an operator has to ask for.
    let mut run = with_one_node(RehomeSettings { auto: false, ..AUTO });
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    let manual = run.stays().expect("nobody has asked for it");
    assert!(manual.reason == "manual" && manual.text.contains("--guest-node 0 --node 1"), "{manual:?}");
    // Where a guest node is at home there is nothing to follow.
    let mut run = Run::of(Policies { rehome: AUTO, ..Policies::default() }, description());
    run.locate(0, 1, None);
    assert_eq!(run.stays(), None);
}

#[test]
fn memory_that_is_plugged_goes_with_its_guest_node() {
    let mut run = Run::new(MemoryPolicy::None);
    let mut device = plugged::device(0, 300, 0);
    (device.memory.policy, device.memory.host_nodes) = ("bind".into(), vec![0]);
    run.description.memory_devices = vec![device];
    let described = run.described();
    run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
    assert_eq!(run.rehome(1).expect("begun").rehome.expect("one").total_bytes, 1324 * MIB);
    assert_eq!(run.orders[0].within, Some((1 << 40, (1 << 40) + 1024 * MIB)), "the larger part first");
    run.moved(1, 1024, None);
    let state = run.state();
    assert_eq!((state.state.as_str(), state.there_bytes), ("memory", 1024 * MIB), "the device is left");
    let order = run.orders[1].clone();
    assert_eq!((order.from, order.to, order.bytes), (0, 1, 300 * MIB));
    assert_eq!(order.within, Some((plugged::START, plugged::END)));
    run.description.memory_devices[0].memory.resident_kib = vec![(1, 300 << 10)];
    let moved = MemoryMoved { bytes: 300 * MIB, ..MemoryMoved::default() };
    run.step(Event::MemoryMoved(run.moving, moved, true));
    run.pass(5);
    let state = run.state();
    assert_eq!((state.state.as_str(), state.there_bytes, run.orders.len()), ("done", 1324 * MIB, 2));
    let note = state.notes.join("\n");
    assert!(note.contains("takes new pages of it from nodes [0]"), "of the device: {note}");
    // By itself it goes only if all of it may.
    let mut run = with_one_node(AUTO);
    let mut device = plugged::device(0, 300, 0);
    (device.memory.policy, device.memory.host_nodes) = ("bind".into(), vec![0]);
    run.description.memory_devices = vec![device];
    let described = run.described();
    run.step(Event::Hypervisor(run.vm.1, Report::Described(described)));
    (0..2).for_each(|vcpu| run.locate(vcpu, 1, None));
    run.pass(400);
    assert_eq!((run.orders.len(), run.stays().map(|stays| stays.reason)), (0, Some("bound".to_owned())));
}

#[test]
fn memory_whose_place_is_not_known_keeps_no_re_home_waiting() {
    let mut bound = description();
    for node in &mut bound.guest_nodes {
        let memory = node.memory.as_mut().expect("it has a backend of its own");
        (memory.policy, memory.host_nodes) = ("bind".into(), vec![node.id]);
    }
    let mut device = plugged::device(0, 512, 0);
    (device.memory.policy, device.memory.host_nodes) = ("bind".into(), vec![0]);
    device.memory.mapping = None;
    bound.memory_devices = vec![device];
    let mut run = Run::of(Policies::default(), bound);
    run.rehome(1).expect("begun");
    run.moved(1, 1024, None);
    run.pass(60);
    let state = run.state();
    assert_eq!((run.orders.len(), state.state.as_str()), (1, "done"));
    let problem = state.problem.expect("some stays");
    assert!(problem.contains("where its hypervisor has it is not known any more"), "{problem}");
}

#[test]
fn a_vm_pays_for_what_it_causes_and_not_for_what_operators_want() {
    let mut run = Run::new(MemoryPolicy::None);
    let places_of = |run: &mut Run| {
        run.pass(60);
        let user = Requester::default().paid_by(Some(Party::User(7)));
        let shown = run.ask(51, |to| Request::ShowRehome("a".into(), to.of(user))).expect("shown");
        shown.guest_nodes[0].places.iter().map(|place| place.bytes / MIB).collect::<Vec<_>>()
    };
    run.mib = [700, 50];
    assert_eq!(places_of(&mut run), [700, 50]);
    (run.spent, run.mib) = (true, [600, 150]);
    assert_eq!(places_of(&mut run), [700, 50], "who cannot pay is shown what is known");
    run.spent = false;
    (run.payers, run.lines) = (Vec::new(), Vec::new());
    run.rehome(1).expect("begun");
    assert_eq!((run.orders[0].bytes, &run.payers[..]), (600 * MIB, &[None][..]));
    assert!(!run.lines.is_empty() && run.lines.iter().all(Option::is_none), "{:?}", run.lines);
    (run.payers, run.lines) = (Vec::new(), Vec::new());
    run.step(Event::ThreadEnded(PID + 2));
    assert_eq!(run.payers, [Some(Party::Vm(run.vm.0))]);
    run.lines.clear();
    run.step(Event::Hypervisor(run.vm.1, Report::Silent("qom-get".into(), PID)));
    assert_eq!(run.lines, [Some(run.vm.0)]);
}
