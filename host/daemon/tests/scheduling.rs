//! Policies in the core by itself: periods in, masks out. The threads here do what they are told, or something else.

#[path = "scheduling/masks.rs"]
mod masks;
#[path = "scheduling/scx_vnuma.rs"]
mod scx_vnuma;

#[path = "common/answers.rs"]
mod answers;
#[path = "common/two_nodes.rs"]
mod two_nodes;

use answers::Answers;
use std::{collections::BTreeMap, sync::Arc};
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, ReplyTo,
    event::{
        Ask, Command, Event, Followed, Level, Made, MaskOrder, Outcome, Ranked, Report, Request, Switch,
    },
};
use vnuma_model::{
    CpuLayout, CpuSet, GuestNode, MemoryBacking, Steal, ThreadCounts, Vcpu, VcpuLocation, VmCandidate,
    VmDescription,
};
use vnuma_policy::{
    Policies,
    scheduling::{CpuSample, Policy, entitlement::CpuGroup},
    world::{Accesses, Counted, HostReading, Mechanism, RequestId, TaskId, VcpuReading, VmId, VmReading},
};
use vnuma_process::ActError;

const SECOND_NS: u64 = 1_000_000_000;
const PID: i32 = 100;

fn set(list: &str) -> CpuSet {
    list.parse().expect("a list")
}

/// A VM with two guest nodes at home on both host nodes, and two vCPUs.
fn description(name: &str, pid: i32) -> VmDescription {
    let memory = |id: u32| MemoryBacking {
        id: format!("ram{id}"),
        size_bytes: 1 << 30,
        policy: "bind".into(),
        host_nodes: vec![id],
        resident_kib: Vec::new(),
        mapping: None,
    };
    let node = |id: u32| GuestNode { id, memory_bytes: 1 << 30, memory: Some(memory(id)) };
    let vcpu =
        |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(id), tid: pid + 1 + id.cast_signed() };
    VmDescription {
        name: name.into(),
        pid,
        run_state: "running".into(),
        guest_nodes: vec![node(0), node(1)],
        vcpus: vec![vcpu(0), vcpu(1)],
        spare_slots: BTreeMap::new(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}

/// A core, the masks that its threads have, and what came out of it.
struct Run {
    core: Core,
    now_ns: u64,
    connections: Vec<(VmId, u64)>,
    masks: BTreeMap<i32, CpuSet>,
    /// Orders are carried out at once.
    obedient: bool,
    /// Masks that an earlier vnumad left are given back at once.
    restores: bool,
    /// How places are set.
    by: Mechanism,
    ranked: Vec<(VmId, i32, Vec<Ranked>)>,
    /// What scx_vnuma was told last.
    stealing: Option<Steal>,
    /// Times that it was looked for scx_vnuma.
    looks: usize,
    orders: Vec<(TaskId, i32, Vec<MaskOrder>)>,
    /// The last move, restoration or order to other threads.
    task: TaskId,
    /// Orders for threads that run no vCPU: those of vCPUs, and the CPUs.
    followed: Vec<(Vec<i32>, Option<CpuSet>)>,
    /// Why these are not carried out.
    refuses: Option<String>,
    /// They take their time.
    slow: bool,
    counts: Vec<(VmId, usize)>,
    forgotten: Vec<i32>,
    restored: Vec<i32>,
    published: usize,
    moves: usize,
    events: Vec<api::Event>,
    answers: Answers,
    lines: Vec<String>,
    warnings: usize,
}

impl Run {
    fn new() -> Self {
        Self {
            core: Core::new(host(), Policies::default(), 7),
            now_ns: SECOND_NS,
            connections: Vec::new(),
            masks: (PID..PID + 200).map(|tid| (tid, set("0-7"))).collect(),
            obedient: true,
            restores: true,
            by: Mechanism::Affinity,
            ranked: Vec::new(),
            stealing: None,
            looks: 0,
            orders: Vec::new(),
            task: TaskId { vm: 0, number: 0 },
            followed: Vec::new(),
            refuses: None,
            slow: false,
            counts: Vec::new(),
            forgotten: Vec::new(),
            restored: Vec::new(),
            published: 0,
            moves: 0,
            events: Vec::new(),
            answers: Answers::default(),
            lines: Vec::new(),
            warnings: 0,
        }
    }

    fn step(&mut self, event: Event) {
        self.now_ns += 1000;
        let mut more = Vec::new();
        for command in self.core.step(self.now_ns, [event]) {
            match command {
                Command::Connect(vm, connection, _) => self.connections.push((vm, connection)),
                Command::Publish(task, generation, _) => {
                    self.published += 1;
                    more.push(Event::Published(task, Ok(generation + 1)));
                }
                Command::Ask(task, connection, Ask::Attach(epoch)) => {
                    let attached = Outcome::Attached(Ok(u64::from(epoch) << 32 | 1));
                    more.push(Event::Hypervisor(connection, Report::Outcome(task, attached)));
                }
                Command::Count(vm, _, vcpus) => self.counts.push((vm, vcpus.len())),
                Command::Confine(task, pid, masks) => {
                    if self.obedient {
                        more.push(self.obey(task, &masks));
                    }
                    self.orders.push((task, pid, masks));
                }
                Command::Follow(task, _, vcpus, cpus) => {
                    self.task = task;
                    let inherited = cpus.clone().map(|cpus| (cpus, set("0-7")));
                    let followed = Followed { threads: 3, inherited };
                    let outcome = self.refuses.clone().map_or(Ok(followed), Err);
                    if !self.slow {
                        more.push(Event::Followed(task, outcome));
                    }
                    self.followed.push((vcpus, cpus));
                }
                Command::RestoreMasks(task, pid) => {
                    self.task = task;
                    self.restored.push(pid);
                    if self.restores {
                        more.push(Event::MasksRestored(task, Ok(0)));
                    }
                }
                Command::Rank { vm, pid, vcpus, stealing } => {
                    self.ranked.push((vm, pid, vcpus));
                    self.stealing = Some(stealing);
                }
                Command::LookForScheduler => self.looks += 1,
                Command::Move { task, .. } => (self.task, self.moves) = (task, self.moves + 1),
                Command::ForgetMask(_, tid) => self.forgotten.push(tid),
                Command::Announce(event) => self.events.push(event),
                Command::Reply(reply) => reply.give(),
                Command::Log(_, level, line) => {
                    self.warnings += usize::from(level == Level::Warn);
                    self.lines.push(line);
                }
                _ => {}
            }
        }
        more.into_iter().for_each(|event| self.step(event));
    }

    /// What the mover does.
    fn obey(&mut self, task: TaskId, orders: &[MaskOrder]) -> Event {
        let mut outcomes = Vec::new();
        for order in orders {
            let has = self.masks.get_mut(&order.tid).expect("a thread");
            let outcome = if *has != order.expected {
                Err(ActError::MaskChanged { tid: order.tid, found: has.clone() })
            } else {
                let cpus = order.cpus.clone().unwrap_or_else(|| order.operator.clone());
                let at = location(&cpus, self.now_ns);
                if self.by == Mechanism::Affinity {
                    *has = cpus;
                }
                Ok(Made { location: Some(at), by: self.by })
            };
            outcomes.push((order.vcpu, outcome));
        }
        Event::Confined(task, outcomes)
    }

    fn with_vms(names: &[&str]) -> Self {
        let all = names.iter().zip((PID..).step_by(10)).map(|(name, pid)| description(name, pid));
        Self::with(all.collect())
    }

    fn with(vms: Vec<VmDescription>) -> Self {
        let mut run = Self::new();
        let candidate = |vm: &VmDescription| VmCandidate::new(format!("/{}", vm.name), vm.name.as_str(), 1);
        run.step(Event::Scanned(Ok(vms.iter().map(candidate).collect())));
        for (at, vm) in vms.into_iter().enumerate() {
            let connection = run.connections[at].1;
            run.step(Event::Hypervisor(connection, Report::Up(vm, false)));
        }
        run
    }

    fn id(&self, at: usize) -> VmId {
        self.connections[at].0
    }

    fn ask<T: Send + 'static>(&mut self, request: RequestId, wanted: impl FnOnce(ReplyTo<T>) -> Request) {
        let to = self.answers.to(request);
        self.step(Event::Requested(request, wanted(to)));
    }

    fn set_policy(&mut self, request: RequestId, policy: Policy) {
        self.ask(request, |to| Request::SetPolicy("a".into(), policy, to));
    }

    fn answered(&self, request: RequestId) -> Option<bool> {
        self.answers.all().get(&request).map(Option::is_none)
    }

    /// A reading of VM `a`, whose vCPUs are on `cpu` and use memory of `node`.
    fn reading(&self, cpu: u32, node: u32) -> HostReading {
        let vcpu = |vcpu: u32| VcpuReading {
            vcpu,
            tid: PID + 1 + vcpu.cast_signed(),
            cpu: Some(cpu + vcpu),
            allowed: self.masks.get(&(PID + 1 + vcpu.cast_signed())).cloned(),
            real_time: false,
            ran_ns: SECOND_NS,
            waited_ns: 0,
            group: None,
            counted: Counted::Counted(ThreadCounts {
                instructions: 1_000_000_000,
                llc_references: 30_000_000,
                llc_misses: 20_000_000,
                accesses: Accesses::ByNode(vec![(node, 20_000_000)]),
                permille: 1000,
            }),
        };
        HostReading {
            began_ns: self.now_ns,
            period_ns: SECOND_NS,
            source: "per-node",
            layout: Arc::new(CpuLayout::default()),
            cpus: (0..8).map(|cpu| CpuSample { cpu, idle_ns: 0 }).collect(),
            groups: Arc::default(),
            memory: Vec::new(),
            vms: vec![VmReading {
                vm: self.id(0),
                pid: PID,
                pages: Vec::new(),
                memory: None,
                vcpus: vec![vcpu(0), vcpu(1)],
            }],
        }
    }

    /// A period ends; nothing happened since it was read.
    fn period(&mut self, cpu: u32, node: u32) {
        let reading = self.reading(cpu, node);
        self.step(Event::Sampled(Box::new(reading)));
    }

    fn scheduling(&self) -> api::Scheduling {
        self.core.show_scheduling("a").expect("known")
    }

    fn mask(&self, vcpu: i32) -> String {
        self.masks[&(PID + 1 + vcpu)].to_string()
    }
}

fn location(mask: &CpuSet, time_ns: u64) -> VcpuLocation {
    let cpu = mask.iter().next().expect("a CPU");
    let pinned = host().node_of_cpus(mask);
    VcpuLocation { cpu, node: cpu / 4, pinned, time_ns }
}

#[test]
fn threads_are_counted_only_while_some_vm_has_a_policy() {
    let mut run = Run::with_vms(&["a", "b"]);
    assert_eq!(run.counts, []);
    run.set_policy(1, Policy::Observe);
    assert_eq!((&run.counts[..], run.answered(1)), (&[(run.id(0), 2), (run.id(1), 2)][..], Some(true)));
    run.counts.clear();
    run.set_policy(2, Policy::Off);
    assert_eq!(run.counts, [(run.id(0), 0), (run.id(1), 0)]);
    run.ask(3, |to| Request::SetPolicy("none".into(), Policy::Vprobe, to));
    assert_eq!(run.answered(3), Some(false));
}

#[test]
fn a_vm_that_waits_for_its_guest_is_left_alone_until_that_has_arrived() {
    let waits = VmDescription { run_state: "arriving".into(), ..description("a", PID) };
    let mut run = Run::with(vec![waits]);
    run.set_policy(1, Policy::Vprobe);
    assert_eq!(run.answered(1), Some(true), "it has its policy when it arrives");
    for _ in 0..3 {
        run.period(0, 1);
    }
    assert_eq!((&run.orders[..], run.mask(0)), (&[][..], "0-7".to_owned()));
    let connection = run.connections[0].1;
    run.step(Event::Hypervisor(connection, Report::Described(description("a", PID))));
    run.period(0, 1);
    assert_eq!(run.mask(0), "4-7", "its memory is on node 1");
}

#[test]
fn what_control_groups_allow_is_shown_and_recorded() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Observe);
    let mut reading = run.reading(0, 0);
    let group = |weight, limit_permille| CpuGroup { parent: None, weight, limit_permille };
    reading.groups = Arc::new(vec![group(300, Some(600)), group(100, None)]);
    for (group, vcpu) in reading.vms[0].vcpus.iter_mut().enumerate() {
        vcpu.group = Some(group);
        (vcpu.ran_ns, vcpu.waited_ns) = (SECOND_NS / 2, SECOND_NS / 2);
    }
    run.step(Event::Sampled(Box::new(reading)));
    let shown = run.scheduling().vcpus;
    let of = |at: usize| {
        let vcpu = &shown[at];
        (vcpu.weight, vcpu.wait_share, vcpu.throttled_share, vcpu.entitled_share)
    };
    assert_eq!(of(0), (Some(300), Some(0.1), Some(0.4), Some(0.6)));
    assert_eq!(of(1), (Some(100), Some(0.5), Some(0.0), Some(1.0)));
    let recorded = run.core.observation().expect("a period").vms.remove(0).vcpus;
    let of = |at: usize| {
        let vcpu = &recorded[at];
        (vcpu.weight, vcpu.waited_ns, vcpu.throttled_ns, vcpu.entitled_ns)
    };
    assert_eq!(of(0), (300, SECOND_NS / 10, SECOND_NS * 4 / 10, Some(SECOND_NS * 6 / 10)));
    assert_eq!(of(1), (100, SECOND_NS / 2, 0, Some(SECOND_NS)));
}

#[test]
fn time_is_divided_of_cpus_that_vms_may_use() {
    let mut run = Run::with_vms(&["a"]);
    for tid in [101, 102] {
        run.masks.insert(tid, set("1"));
        run.step(Event::Located(tid, Some(location(&set("1"), run.now_ns))));
    }
    run.set_policy(1, Policy::Observe);
    let mut reading = run.reading(0, 0);
    let group = |weight| CpuGroup { parent: None, weight, limit_permille: None };
    reading.groups = Arc::new(vec![group(300), group(100)]);
    for (group, vcpu) in reading.vms[0].vcpus.iter_mut().enumerate() {
        vcpu.group = Some(group);
        (vcpu.ran_ns, vcpu.waited_ns) = (SECOND_NS / 2, SECOND_NS / 2);
    }
    run.step(Event::Sampled(Box::new(reading)));
    let shares: Vec<_> = run.scheduling().vcpus.iter().map(|vcpu| vcpu.entitled_share).collect();
    assert_eq!(shares, [Some(0.75), Some(0.25)], "of one CPU, and not of the host's eight");
}

#[test]
fn a_vcpu_goes_to_its_memory_within_its_operators_mask_and_its_guest_is_told() {
    let mut run = Run::with_vms(&["a"]);
    for tid in [101, 102] {
        run.masks.insert(tid, set("0-2,4-6"));
        let at = location(&set("0-7"), run.now_ns);
        run.step(Event::Located(tid, Some(at)));
    }
    run.ask(1000, |to| Request::Attach("a".into(), to));
    run.set_policy(1, Policy::Vprobe);
    let published = run.published;
    run.period(0, 1);
    let expected = |vcpu: u32| MaskOrder {
        vcpu,
        tid: 101 + vcpu.cast_signed(),
        expected: set("0-2,4-6"),
        operator: set("0-2,4-6"),
        cpus: Some(set("4-6")),
    };
    let [(task, PID, orders)] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert_eq!((task.vm, orders), (run.id(0), &vec![expected(0), expected(1)]));
    assert!(run.published > published, "the guest is told at once, without a dwell");
    let shown = run.scheduling();
    let vcpu = &shown.vcpus[0];
    assert_eq!((shown.policy.as_str(), vcpu.moves, vcpu.kind.as_deref()), ("vprobe", 1, Some("LLC-T")));
    assert_eq!((vcpu.pressure, vcpu.remote_share, vcpu.affinity), (Some(30.0), Some(1.0), Some(1)));
    assert_eq!((&vcpu.operator_cpus, &vcpu.policy_cpus), (&Some(set("0-2,4-6")), &Some(set("4-6"))));
    let steps: Vec<_> =
        run.events.iter().filter(|event| matches!(event, api::Event::Confined { .. })).collect();
    let [api::Event::Confined { vcpu: 0, step, .. }, _] = &steps[..] else { panic!("{steps:?}") };
    assert_eq!(
        (step.from, step.to, step.remote_share, step.expected_remote_share),
        (Some(0), Some(1), Some(1.0), Some(0.0))
    );
    let line = "a: vCPU 0 is confined to CPUs 4-6 of node 1, by vprobe: its memory is there; pressure 30.0; \
                remote share 100 % on node 0, 0 % expected on node 1";
    assert!(run.lines.iter().any(|known| known == line), "{:?}", run.lines);
    // There it stays.
    run.period(4, 1);
    assert_eq!(run.orders.len(), 1);
}

#[test]
fn threads_that_run_no_vcpu_follow_to_the_nodes_of_the_vcpus() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    assert_eq!(run.followed, [], "no vCPU is confined");
    run.period(0, 1);
    let kept = (vec![101, 102], Some(set("4-7")));
    assert_eq!(run.followed, std::slice::from_ref(&kept), "once, after the steps of both vCPUs");
    let shown = api::OtherThreads { threads: 3, cpus: Some(set("4-7")), problem: None };
    assert_eq!(run.scheduling().others, Some(shown));
    let line = "a: 3 threads that run no vCPU follow its vCPUs to CPUs 4-7";
    assert!(run.lines.iter().any(|known| known == line), "{:?}", run.lines);
    // New ones are looked for now and then.
    for _ in 0..9 {
        run.now_ns += 2 * SECOND_NS;
        run.step(Event::Resync);
    }
    assert_eq!(run.followed, [kept.clone(), kept.clone()]);
    run.slow = true;
    run.set_policy(2, Policy::Off);
    assert_eq!((run.followed.last(), run.answered(2)), (Some(&(vec![101, 102], None)), None));
    run.step(Event::Followed(run.task, Ok(Followed::default())));
    assert_eq!((run.scheduling().others, run.followed.len(), run.answered(2)), (None, 3, Some(true)));
    run.slow = false;
    run.now_ns += 60 * SECOND_NS;
    run.step(Event::Resync);
    assert_eq!(run.followed.len(), 3, "nothing is left to be looked at");
}

#[test]
fn other_threads_follow_when_all_vcpus_are_where_they_should_be() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.obedient = false;
    run.period(0, 1);
    let (task, _, orders) = run.orders.last().cloned().expect("orders");
    let first = run.obey(task, &orders[..1]);
    run.step(first);
    assert_eq!((run.followed.len(), orders.len()), (0, 2), "the second vCPU is being moved");
    let second = run.obey(task, &orders[1..]);
    run.step(second);
    assert_eq!(run.followed.len(), 1);
}

#[test]
fn other_threads_that_cannot_follow_are_tried_again() {
    let mut run = Run::with_vms(&["a"]);
    run.refuses = Some("no".into());
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let others = run.scheduling().others.expect("a problem");
    assert_eq!((others.cpus, others.problem.as_deref(), run.followed.len()), (None, Some("no"), 1));
    run.period(4, 1);
    assert_eq!(run.followed.len(), 1, "not each period");
    run.refuses = None;
    for _ in 0..5 {
        run.step(Event::Resync);
    }
    assert_eq!(
        run.scheduling().others.map(|others| (others.cpus, others.problem)),
        Some((Some(set("4-7")), None))
    );
    // A failure does not keep the operator waiting.
    run.refuses = Some("no".into());
    run.set_policy(2, Policy::Off);
    assert_eq!(run.answered(2), Some(true));
}

/// A thread has the mask of the one that made it: a vCPU that is plugged has that of the main loop, which is no operator's.
#[test]
fn a_vcpu_that_is_plugged_meanwhile_gets_the_operators_mask_in_the_end() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let mut more = description("a", PID);
    more.vcpus.push(Vcpu { index: 2, apic_id: 2, boot_node: Some(0), tid: 103 });
    run.masks.insert(103, set("4-7"));
    let connection = run.connections[0].1;
    run.step(Event::Hypervisor(connection, Report::Described(more)));
    let mut reading = run.reading(4, 1);
    let new = VcpuReading { vcpu: 2, tid: 103, allowed: Some(set("4-7")), ..reading.vms[0].vcpus[1].clone() };
    reading.vms[0].vcpus.push(new);
    run.step(Event::Sampled(Box::new(reading)));
    assert_eq!(run.scheduling().vcpus[2].operator_cpus, Some(set("0-7")));
    run.set_policy(2, Policy::Off);
    assert_eq!((run.mask(2), run.answered(2)), ("0-7".into(), Some(true)));
}

#[test]
fn what_is_observed_is_not_acted_upon() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Observe);
    run.period(0, 1);
    assert_eq!((run.orders.len(), run.scheduling().vcpus[0].remote_share), (0, Some(1.0)));
}

#[test]
fn the_scheduler_is_looked_for_more_often_while_a_policy_needs_it() {
    let mut run = Run::with_vms(&["a"]);
    let looks = |run: &mut Run| {
        let before = run.looks;
        for _ in 0..30 {
            run.now_ns += 2 * SECOND_NS;
            run.step(Event::Resync);
        }
        run.looks - before
    };
    assert_eq!(looks(&mut run), 2);
    run.set_policy(1, Policy::Vprobe);
    assert_eq!(looks(&mut run), 6);
    run.set_policy(2, Policy::Off);
    assert_eq!(looks(&mut run), 2);
}

#[test]
fn masks_of_a_vm_that_is_not_followed_any_more_are_given_back_and_requests_answered() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.obedient = false;
    run.set_policy(2, Policy::Off);
    run.restored.clear();
    let connection = run.connections[0].1;
    // Another VM is behind the handle.
    run.step(Event::Hypervisor(connection, Report::Up(description("b", PID + 10), false)));
    assert_eq!((run.answered(2), &run.restored[..]), (Some(false), &[PID, PID + 10][..]));
    // The outcome of the old one's step comes late.
    let (old, ..) = run.orders[run.orders.len() - 1];
    run.step(Event::Confined(old, vec![(0, Ok(None.into())), (1, Ok(None.into()))]));
    assert_eq!(run.core.show_scheduling("b").expect("known").vcpus[0].moves, 0);
}

#[test]
fn masks_of_a_vm_that_has_left_are_given_back_while_it_is_watched_and_connected() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let left = Event::Hypervisor(run.connections[0].1, Report::Left);
    let commands = run.core.step(run.now_ns + 1, [left]);
    let at = |is: fn(&Command) -> bool| commands.iter().position(is);
    let restored = at(|command| matches!(command, Command::RestoreMasks(..)));
    assert!(restored.is_some());
    assert!(at(|command| matches!(command, Command::UnwatchProcess(..))) > restored);
    assert!(at(|command| matches!(command, Command::Disconnect(_))) > restored);
}

#[test]
fn cpus_that_the_host_loses_leave_no_mask_behind() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let mut smaller = host();
    smaller.nodes[1].cpus = CpuSet::new();
    run.step(Event::HostChanged(smaller));
    // The kernel lets threads run anywhere when all CPUs of their mask are gone.
    run.masks.extend([(101, set("0-3")), (102, set("0-3"))]);
    run.obedient = false;
    run.period(0, 1);
    // The policy finds another place for them.
    let (task, pid, orders) = run.orders.last().cloned().expect("orders");
    let elsewhere = |order: &MaskOrder| order.cpus == Some(set("0-3")) && order.operator == set("0-7");
    assert!(orders.iter().all(elsewhere), "{orders:?}");
    let failed = |tid| Err(ActError::Raced { pid, tid });
    run.step(Event::Confined(task, vec![(0, failed(101)), (1, failed(102))]));
    // One that does nothing of itself gives them back.
    run.set_policy(2, Policy::Observe);
    let (_, _, orders) = run.orders.last().expect("orders");
    assert!(orders.iter().all(|order| order.cpus.is_none() && order.operator == set("0-7")), "{orders:?}");
}

#[test]
fn what_a_policy_remembers_of_a_node_that_is_gone_does_not_count() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let mut smaller = host();
    smaller.nodes.pop();
    run.step(Event::HostChanged(smaller));
    run.masks.extend([(101, set("0-3")), (102, set("0-3"))]);
    run.period(0, 0);
    run.period(0, 0);
    assert_eq!(run.scheduling().vcpus[0].affinity, Some(0));
    assert!(run.mask(0) == "0-3" || run.mask(0) == "0-7", "{}", run.mask(0));
}

#[test]
fn without_counters_the_vcpus_of_guest_nodes_go_to_the_memory_of_these() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    let mut reading = run.reading(2, 1);
    reading.vms[0].pages = vec![(0, 1 << 20), (1, 1 << 20)];
    reading.vms[0].vcpus[0].cpu = Some(5);
    reading.vms[0].vcpus.iter_mut().for_each(|vcpu| vcpu.counted = Counted::NoCounters);
    run.step(Event::Sampled(Box::new(reading)));
    assert_eq!((run.mask(0), run.mask(1)), ("0-3".into(), "4-7".into()));
    let shown = run.scheduling();
    let homes: Vec<_> = shown.vcpus.iter().map(|vcpu| (vcpu.affinity, vcpu.remote_share)).collect();
    assert_eq!(homes, [(Some(0), Some(1.0)), (Some(1), Some(1.0))]);
}

#[test]
fn without_counters_the_place_of_pages_decides_and_is_named() {
    let nodes = Vec::new();
    let mut uma = VmDescription { guest_nodes: nodes, ..description("a", PID) };
    uma.vcpus.iter_mut().for_each(|vcpu| vcpu.boot_node = None);
    let mut run = Run::with(vec![uma]);
    run.set_policy(1, Policy::Vprobe);
    let mut reading = run.reading(0, 1);
    reading.vms[0].pages = vec![(1, 1 << 20)];
    reading.vms[0].vcpus.iter_mut().for_each(|vcpu| vcpu.counted = Counted::NoCounters);
    run.step(Event::Sampled(Box::new(reading)));
    assert_eq!((run.mask(0), run.mask(1)), ("4-7".into(), "4-7".into()));
    let shown = run.scheduling();
    let vcpu = &shown.vcpus[0];
    assert_eq!((vcpu.quality.as_deref(), vcpu.pressure, &vcpu.kind), (Some("assumed"), None, &None));
    assert_eq!((vcpu.remote_share, vcpu.last.as_ref().and_then(|step| step.pressure)), (Some(1.0), None));
}

/// As with a libvirt that is gone for long.
#[test]
fn a_step_that_fails_is_tried_again_and_warned_of_once() {
    let mut run = Run::with_vms(&["a"]);
    run.obedient = false;
    run.set_policy(1, Policy::Vprobe);
    let fail = |run: &mut Run, why: &str| {
        let before = run.orders.len();
        // Not in each period, as vCPUs are not to be moved too often.
        for _ in 0..30 {
            if run.orders.len() == before {
                run.period(0, 1);
            }
        }
        assert_eq!(run.orders.len(), before + 1, "it is tried again");
        let error = |vcpu: &MaskOrder| {
            let source = std::io::Error::other(why.to_owned());
            (vcpu.vcpu, Err(ActError::System { pid: PID, tid: vcpu.tid, act: "pinning it", source }))
        };
        let (task, _, orders) = &run.orders[before];
        let confined = Event::Confined(*task, orders.iter().map(error).collect());
        run.step(confined);
    };
    fail(&mut run, "not connected");
    fail(&mut run, "not connected");
    assert_eq!(run.warnings, 2, "one for each vCPU: {:?}", run.lines);
    fail(&mut run, "refused");
    assert_eq!(run.warnings, 4, "{:?}", run.lines);
    run.obedient = true;
    for _ in 0..30 {
        if run.mask(0) != "4-7" {
            run.period(0, 1);
        }
    }
    assert_eq!(run.mask(0), "4-7");
    run.obedient = false;
    // Somebody else frees them.
    run.masks.extend([(101, set("0-7")), (102, set("0-7"))]);
    fail(&mut run, "refused");
    assert_eq!(run.warnings, 6, "it had been made in between: {:?}", run.lines);
}
