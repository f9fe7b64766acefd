//! The core by itself: events in, commands out. What the simulation found is kept here.

#[path = "common/answers.rs"]
mod answers;

use answers::Answers;
use std::time::Duration;
use vnuma_daemon::core::{
    Core, Refusal,
    event::{Ask, Command, Event, Outcome, Report, Request},
};
use vnuma_hypervisor::VmError;
use vnuma_memory_backend::ABILITIES;
use vnuma_model::{
    DistanceMatrix, GuestNode, HostNode, HostTopology, MemoryBacking, Vcpu, VcpuLocation, VmCandidate,
    VmDescription,
};
use vnuma_policy::{
    Policies, Publication,
    world::{
        ChannelState, ConnectionId, DriverStatus, HostReading, RequestId, TaskId, VcpuReading, VmId,
        VmReading,
    },
};
use vnuma_process::ActError;

const SECOND_NS: u64 = 1_000_000_000;

/// A host of this many nodes, with one CPU each.
fn host(nodes: u32) -> HostTopology {
    let node = |id| HostNode { id, cpus: [id].into_iter().collect(), ..HostNode::default() };
    let row = |from| (0..nodes).map(|to| if from == to { 10 } else { 20 }).collect();
    HostTopology {
        nodes: (0..nodes).map(node).collect(),
        distances: DistanceMatrix::new((0..nodes).map(row).collect()).expect("square"),
        ..HostTopology::default()
    }
}

/// A VM with two guest nodes at home on host nodes 0 and 1, and two vCPUs that booted on them.
fn description(name: &str, pid: i32) -> VmDescription {
    let node = |id: u32| GuestNode {
        id,
        memory_bytes: 1 << 30,
        memory: Some(MemoryBacking {
            id: format!("ram{id}"),
            size_bytes: 1 << 30,
            policy: "bind".into(),
            host_nodes: vec![id],
            resident_kib: Vec::new(),
            mapping: None,
        }),
    };
    VmDescription {
        name: name.into(),
        pid,
        run_state: "running".into(),
        guest_nodes: vec![node(0), node(1)],
        vcpus: (0..2)
            .map(|id| Vcpu { index: id, apic_id: id, boot_node: Some(id), tid: pid + 1 + id as i32 })
            .collect(),
        spare_slots: Default::default(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}

fn at(node: u32, time_ns: u64) -> Option<VcpuLocation> {
    Some(VcpuLocation { cpu: node, node, pinned: None, time_ns })
}

/// A core and what came out of it.
struct Run {
    core: Core,
    now_ns: u64,
    last: ConnectionId,
    answers: Answers,
    asked: Vec<(ConnectionId, Ask)>,
    /// The last of these.
    task: TaskId,
    described: Vec<ConnectionId>,
    published: Vec<(VmId, u64, Publication)>,
    watched: Vec<(VmId, i32)>,
    moves: Vec<TaskId>,
    /// Threads of the last look.
    looked: Vec<i32>,
    lines: Vec<String>,
}

impl Run {
    fn new() -> Self {
        Self {
            core: Core::new(host(3), Policies::default(), 7),
            now_ns: SECOND_NS,
            last: 0,
            answers: Answers::default(),
            asked: Vec::new(),
            task: TaskId { vm: 0, number: 0 },
            described: Vec::new(),
            published: Vec::new(),
            watched: Vec::new(),
            moves: Vec::new(),
            looked: Vec::new(),
            lines: Vec::new(),
        }
    }

    fn step(&mut self, event: Event) {
        self.step_together([event]);
    }

    fn step_together(&mut self, events: impl IntoIterator<Item = Event>) {
        self.now_ns += 1000;
        let mut more = Vec::new();
        for command in self.core.step(self.now_ns, events) {
            self.lines.push(format!("{command:?}"));
            match command {
                Command::Connect(_, connection, _) => self.last = connection,
                Command::Ask(task, connection, ask) => {
                    self.task = task;
                    self.asked.push((connection, ask));
                }
                Command::Describe(connection, _) => self.described.push(connection),
                Command::Publish(task, generation, publication) => {
                    self.published.push((task.vm, generation, publication));
                    more.push(Event::Published(task, Ok(generation + 1)));
                }
                Command::WatchProcess(vm, pid) => self.watched.push((vm, pid)),
                Command::UnwatchProcess(vm, pid) => self.watched.retain(|known| *known != (vm, pid)),
                Command::Move { task, .. } => self.moves.push(task),
                Command::Look(threads) => self.looked = threads.into_iter().map(|(_, tid)| tid).collect(),
                Command::Reply(reply) => reply.give(),
                _ => {}
            }
        }
        more.into_iter().for_each(|event| self.step(event));
    }

    fn report(&mut self, report: Report) {
        self.step(Event::Hypervisor(self.last, report));
    }

    /// What was asked last has ended.
    fn outcome(&mut self, outcome: Outcome) {
        self.report(Report::Outcome(self.task, outcome));
    }

    fn list(&mut self, names: &[&str]) {
        let candidate = |name: &&str| VmCandidate::new(format!("/{name}"), *name, 1).with(ABILITIES);
        self.step(Event::Scanned(Ok(names.iter().map(candidate).collect())));
    }

    /// A VM `a` that answers, its vCPUs at home.
    fn with_vm() -> Self {
        let mut run = Self::new();
        run.list(&["a"]);
        run.report(Report::Up(description("a", 100), false));
        run.step(Event::Located(101, at(0, 1)));
        run.step(Event::Located(102, at(1, 1)));
        run
    }

    fn attach(&mut self) {
        self.step(Event::Requested(1000, Request::Attach("a".into(), self.answers.to(1000))));
        self.outcome(Outcome::Attached(Ok(8 << 32 | 1)));
    }

    fn answered(&self, request: RequestId) -> Option<bool> {
        self.answers.all().get(&request).map(Option::is_none)
    }
}

#[test]
fn a_move_that_is_seen_before_it_is_reported_waits_for_no_dwell() {
    let mut run = Run::with_vm();
    run.attach();
    run.step(Event::Requested(1, Request::Move("a".into(), 0, 1, run.answers.to(1))));
    let now_ns = run.now_ns;
    run.step(Event::Located(101, at(1, now_ns)));
    assert_eq!(run.published.len(), 1, "a drift, as far as is known");
    run.step(Event::Moved(run.moves[0], Ok(at(1, now_ns + 20))));
    assert_eq!(run.answered(1), Some(true));
    let last = &run.published.last().expect("published").2;
    assert_eq!((run.published.len(), &last.vcpus[..]), (2, &[(0, 1), (1, 1)][..]));
}

/// Lists handles, whose candidates have this name.
fn list_handles(run: &mut Run, name: &str, handles: &[&str]) {
    let of = |handle: &&str| VmCandidate::new(*handle, name, 1);
    run.step(Event::Scanned(Ok(handles.iter().map(of).collect())));
}

#[test]
fn a_vm_of_two_backends_or_connections_is_one() {
    for [first, second] in [
        ["qmp:/a", "libvirt:u@qemu:///system"],
        ["libvirt:u@qemu:///system", "libvirt:u@qemu+unix:///system?socket=/s"],
        ["qmp:/a", "qmp:/b"],
    ] {
        let mut run = Run::new();
        list_handles(&mut run, "a", &[first]);
        run.report(Report::Up(description("a", 100), false));
        list_handles(&mut run, "a", &[first, second]);
        run.report(Report::Up(description("a", 100), false));
        let is_one = |run: &Run| {
            assert_eq!(run.core.names(), ["a"], "{second}: the one that had it has it");
            let shown = run.core.show("a").expect("it is there");
            assert_eq!((shown.pid, shown.problem), (Some(100), None));
            assert!(run.core.show(second).is_err(), "{second}");
        };
        is_one(&run);
        // Nor is it another one as soon as the second connection has a problem.
        run.now_ns += 60 * SECOND_NS;
        run.step(Event::Woken);
        run.report(Report::Silent("no answer".into(), 100));
        is_one(&run);
        run.report(Report::Lost(VmError::Disconnected { vm: "a".into() }));
        is_one(&run);
    }
}

#[test]
fn two_vms_of_one_name_are_two_names() {
    let (first, second) = ("libvirt:u@qemu:///system", "libvirt:v@qemu:///session");
    let mut run = Run::new();
    list_handles(&mut run, "web", &[first]);
    run.report(Report::Up(description("web", 100), false));
    list_handles(&mut run, "web", &[first, second]);
    run.report(Report::Up(description("web", 200), false));
    assert_eq!(run.core.names(), [second, "web"]);
    let shown = |run: &Run, name: &str| {
        let vm = run.core.show(name).expect("it is there");
        assert_eq!(vm.name, name);
        assert_eq!(run.core.show_scheduling(name).expect("it is there").vm, name);
        (vm.pid, vm.problem)
    };
    let taken = format!("its name `web` is taken by the VM at {first}");
    assert_eq!(shown(&run, "web"), (Some(100), None));
    assert_eq!(shown(&run, second), (None, Some(taken)));
    run.step(Event::Requested(1, Request::Attach(second.into(), run.answers.to(1))));
    assert_eq!(run.answered(1), Some(false));
    // It has the name as soon as the other one is gone.
    run.step(Event::ProcessEnded(1, 100));
    assert_eq!(run.core.names(), ["web"]);
    assert!(run.core.show(second).is_err());
    run.now_ns += 60 * SECOND_NS;
    run.step(Event::Woken);
    run.report(Report::Up(description("web", 200), false));
    assert_eq!(shown(&run, "web"), (Some(200), None));
}

#[test]
fn a_name_is_of_the_vm_that_its_operator_calls_so() {
    let listed = |names: &[&str]| {
        let of = |name: &&str| VmCandidate::new(format!("qmp:/{name}"), *name, 1);
        Event::Scanned(Ok(names.iter().map(of).collect()))
    };
    // A QEMU can say of itself that it is another VM, before that one comes or afterwards.
    for order in [["other", "web"], ["web", "other"]] {
        let mut run = Run::new();
        for there in [&order[..1], &order] {
            run.step(listed(there));
            let pid = if there[there.len() - 1] == "web" { 100 } else { 200 };
            run.report(Report::Up(description("web", pid), false));
        }
        assert_eq!(run.core.names(), ["other", "web"]);
        let shown = |name: &str| run.core.show(name).map(|vm| (vm.pid, vm.problem)).ok();
        assert_eq!(shown("web"), Some((Some(100), None)), "{order:?}");
        let taken = "its name `web` is taken by the VM at qmp:/web".to_owned();
        assert_eq!(shown("other"), Some((None, Some(taken))), "{order:?}");
    }
}

#[test]
fn of_two_that_nobody_could_ask_one_has_the_name() {
    let (first, second) = ("libvirt:u@qemu:///system", "libvirt:v@qemu:///session");
    let mut run = Run::new();
    for (handles, pid) in [(&[first][..], 100), (&[first, second], 200)] {
        list_handles(&mut run, "web", handles);
        run.report(Report::Silent("no answer".into(), pid));
    }
    assert_eq!(run.core.names(), [second, "web"]);
    assert_eq!(run.core.show(second).map(|vm| vm.name).ok().as_deref(), Some(second));
}

#[test]
fn an_attach_is_answered_once_everything_true_is_published() {
    let mut run = Run::with_vm();
    run.step(Event::Located(102, at(0, 2)));
    run.step(Event::Requested(1000, Request::Attach("a".into(), run.answers.to(1000))));
    assert_eq!(run.answered(1000), None);
    run.outcome(Outcome::Attached(Ok(8 << 32 | 1)));
    assert_eq!(run.answered(1000), Some(true));
    assert_eq!(run.published[0].2.vcpus, [(0, 0), (1, 0)]);
    let place = |start: &str| run.lines.iter().position(|line| line.starts_with(start));
    assert!(place("Publish(").is_some() && place("Publish(") < place("Reply("));
}

/// The state of the channel of the one VM.
fn channel(run: &Run) -> Option<ChannelState> {
    run.core.world().iter().find_map(|(_, managed)| Some(managed.vm.as_ref()?.channel))
}

#[test]
fn a_publication_that_is_not_under_way_has_no_outcome() {
    let mut run = Run::with_vm();
    run.attach();
    let (vm, before) = (run.published[0].0, channel(&run));
    let other = TaskId { vm, number: u64::MAX };
    run.step(Event::Published(other, Err(Refusal::NotAttached { vm: "a".into() })));
    run.step(Event::Published(other, Ok(1)));
    assert_eq!((channel(&run), run.answered(1000)), (before, Some(true)));
}

/// A VM whose attach, detach, replug or mark has begun: what was asked by then, and an outcome that would end it.
#[test]
fn what_is_under_way_ends_by_its_own_outcome_only() {
    let refused = || VmError::Refused { vm: "a".into(), command: "device_add".into(), reason: "no".into() };
    let outcomes = || {
        [
            Outcome::Attached(Ok(9 << 32 | 1)),
            Outcome::Attached(Err(refused().into())),
            Outcome::Detached(Ok(())),
            Outcome::Detached(Err(refused())),
            Outcome::Recovered(Ok(9 << 32 | 1)),
            Outcome::Recovered(Err(refused().into())),
            Outcome::Replugged(Err(refused())),
            Outcome::Marked(Ok(())),
            Outcome::Marked(Err(refused())),
        ]
    };
    type Begin = fn(&mut Run);
    let begun: [Begin; 5] = [
        |run| run.step(Event::Requested(1, Request::Attach("a".into(), run.answers.to(1)))),
        |run| {
            run.attach();
            run.step(Event::Requested(1, Request::Detach("a".into(), run.answers.to(1))));
        },
        |run| {
            run.step(Event::Located(102, at(0, 2)));
            run.step(Event::Requested(1, Request::Replug("a".into(), 1, run.answers.to(1))));
        },
        |run| {
            run.report(Report::Described(VmDescription {
                run_state: "paused".into(),
                ..description("a", 100)
            }));
            run.step(Event::Requested(1, Request::AttachOnArrival("a".into(), run.answers.to(1))));
        },
        |run| run.report(Report::FoundPlugged),
    ];
    for (case, begin) in begun.into_iter().enumerate() {
        let mut run = Run::with_vm();
        begin(&mut run);
        let (before, task, asked) = (channel(&run), run.task, run.asked.len());
        let marked = |run: &Run| run.core.show("a").map(|vm| vm.attach_on_arrival).ok();
        for outcome in outcomes() {
            let shown = format!("{case}: {outcome:?}");
            run.report(Report::Outcome(TaskId { number: u64::MAX, ..task }, outcome));
            assert_eq!((channel(&run), run.answered(1)), (before, None), "{shown}");
            assert_eq!((run.asked.len(), marked(&run)), (asked, Some(false)), "{shown}");
        }
    }
}

#[test]
fn a_guest_is_published_to_before_watchers_and_the_log_are_served() {
    let mut run = Run::with_vm();
    run.attach();
    run.lines.clear();
    let pinned = VcpuLocation { pinned: Some(1), ..at(1, run.now_ns).expect("a location") };
    // That the host has changed is a line of the log.
    run.step_together([Event::HostChanged(host(2)), Event::Located(101, Some(pinned))]);
    let place = |start: &str| run.lines.iter().position(|line| line.starts_with(start));
    let publish = place("Publish(");
    assert!(publish.is_some() && place("Announce(") > publish && place("Log(") > publish, "{:?}", run.lines);
}

/// Nobody is told of moves of a VM without a channel, so that these need not wake the core.
#[test]
fn moves_wake_the_core_while_they_are_published_and_not_else() {
    let mut run = Run::with_vm();
    let deferred = |run: &Run| {
        let lines = run.lines.iter().filter(|line| line.starts_with("Defer(")).cloned();
        lines.collect::<Vec<_>>()
    };
    assert_eq!(deferred(&run), ["Defer([101, 102], true)"]);
    run.lines.clear();
    run.attach();
    assert_eq!(deferred(&run), ["Defer([101, 102], false)"]);
    // A vCPU that is plugged into a VM with a channel.
    run.lines.clear();
    let mut more = description("a", 100);
    more.vcpus.push(Vcpu { index: 2, apic_id: 2, boot_node: Some(1), tid: 103 });
    run.report(Report::Described(more));
    assert_eq!(deferred(&run), [""; 0]);
    run.step(Event::Requested(1001, Request::Detach("a".into(), run.answers.to(1001))));
    run.outcome(Outcome::Detached(Ok(())));
    assert_eq!(deferred(&run), ["Defer([101, 102, 103], true)"]);
}

#[test]
fn a_vm_that_loses_a_thread_to_another_process_is_described_again() {
    let mut run = Run::with_vm();
    let first = run.last;
    run.list(&["a", "b"]);
    let mut stale = description("b", 200);
    stale.vcpus[0].tid = 101;
    run.report(Report::Up(stale, false));
    assert_eq!(run.described, [first]);
    run.step(Event::Hypervisor(first, Report::Described(description("a", 100))));
    assert_eq!(run.described.last(), Some(&run.last));
    run.step(Event::Located(101, at(2, run.now_ns)));
    let node = |name: &str| run.core.show(name).map(|vm| vm.vcpus[0].host_node).ok().flatten();
    assert_eq!((node("a"), node("b")), (Some(2), None));
}

#[test]
fn unbound_memory_is_looked_at_as_often_as_is_configured() {
    let mut run = Run::new();
    run.core = Core::new(host(3), Policies::default(), 7).describing_every(Duration::from_secs(150));
    let mut unbound = description("a", 100);
    unbound.guest_nodes[0].memory = None;
    run.list(&["a"]);
    run.report(Report::Up(unbound.clone(), false));
    let (found_ns, mut seconds) = (run.now_ns, Vec::new());
    for second in 1..=320 {
        run.now_ns = found_ns + second * SECOND_NS;
        run.described.clear();
        run.step(Event::Resync);
        if !run.described.is_empty() {
            seconds.push(second);
            run.report(Report::Described(unbound.clone()));
        }
    }
    // A young one after a fifteenth of that. Reports come some microseconds after the second begins.
    assert_eq!(seconds, [10, 161, 312]);
}

/// A period of the VM `a`, in which these vCPUs were on these CPUs.
fn period(began_ns: u64, vm: VmId, vcpus: &[(u32, u32)]) -> Event {
    let vcpu = |&(vcpu, cpu): &(u32, u32)| VcpuReading {
        vcpu,
        tid: 101 + vcpu.cast_signed(),
        cpu: Some(cpu),
        allowed: Some(if vcpu == 0 { (0..3).collect() } else { [cpu].into_iter().collect() }),
        ..VcpuReading::default()
    };
    let vms =
        vec![VmReading { vm, pid: 100, vcpus: vcpus.iter().map(vcpu).collect(), ..VmReading::default() }];
    Event::Sampled(Box::new(HostReading { began_ns, period_ns: SECOND_NS, vms, ..HostReading::default() }))
}

#[test]
fn a_period_shows_where_vcpus_are_and_is_as_good_as_a_look() {
    let mut run = Run::with_vm();
    let vm = run.watched[0].0;
    let nodes = |run: &Run| {
        let shown = run.core.show("a").expect("known");
        shown.vcpus.iter().map(|vcpu| vcpu.host_node).collect::<Vec<_>>()
    };
    let looked = |run: &mut Run, seconds: u64| {
        run.now_ns += seconds * SECOND_NS;
        run.looked.clear();
        run.step(Event::Resync);
        std::mem::take(&mut run.looked)
    };
    assert_eq!(looked(&mut run, 40), [101, 102], "nothing was read");
    run.step(period(run.now_ns, vm, &[(0, 2), (1, 1)]));
    assert_eq!(nodes(&run), [Some(2), Some(1)]);
    let known = run.core.world().get(vm).and_then(|managed| managed.vm.as_ref()).expect("known");
    assert_eq!([0, 1].map(|vcpu| known.locations[&vcpu].pinned), [None, Some(1)]);
    assert_eq!(looked(&mut run, 2), [0; 0], "all were read");
    assert_eq!(looked(&mut run, 2), [101, 102], "not since the last time");
    // An event is newer than what was read before it, and a CPU of no node says nothing.
    let before_ns = run.now_ns;
    run.step(Event::Located(101, at(1, run.now_ns + 500)));
    run.step(period(before_ns, vm, &[(0, 0), (1, 7)]));
    assert_eq!(nodes(&run), [Some(1), Some(1)]);
    assert_eq!(looked(&mut run, 2), [102], "it was not seen");
    // It has ended, or another VM has its number.
    run.step(period(run.now_ns, vm + 1, &[(0, 0), (1, 0)]));
    run.step(period(run.now_ns, vm, &[(0, 0)]));
    assert_eq!(nodes(&run), [Some(0), Some(1)]);
    assert_eq!(looked(&mut run, 2), [102]);
    // All of them now and then: two of the resyncs above come after the last time that they were.
    for resync in 3..=30 {
        run.step(period(run.now_ns, vm, &[(0, 0), (1, 1)]));
        let all: &[i32] = if resync % 15 == 0 { &[101, 102] } else { &[] };
        assert_eq!(looked(&mut run, 2), all, "resync {resync}");
    }
}

#[test]
fn a_vm_seen_through_two_monitors_is_one_vm() {
    let mut run = Run::new();
    run.list(&["a"]);
    run.report(Report::Silent("no greeting".into(), 100));
    run.report(Report::Observed(100, description("a", 100).vcpus, true));
    assert_eq!(run.core.names(), ["a"]);
    run.list(&["a", "b"]);
    run.report(Report::Up(description("web", 100), false));
    // What is left of the first is the problem with its monitor.
    let described: Vec<_> = run.core.names().iter().filter_map(|name| run.core.show(name).ok()).collect();
    let with_vcpus: Vec<_> = described.iter().filter(|vm| !vm.vcpus.is_empty()).map(|vm| &vm.name).collect();
    assert_eq!(with_vcpus, ["web"]);
}

#[test]
fn an_attach_that_timed_out_is_not_tried_again_before_it_is_undone() {
    let mut run = Run::with_vm();
    let timeout = || VmError::Timeout { vm: "a".into(), command: "device_add".into(), limit_ms: 1 };
    run.step(Event::Requested(1, Request::Attach("a".into(), run.answers.to(1))));
    run.outcome(Outcome::Attached(Err(Refusal::Vm(timeout()))));
    run.step(Event::Requested(2, Request::Attach("a".into(), run.answers.to(2))));
    assert_eq!((run.answered(1), run.answered(2)), (Some(false), Some(false)));
    run.report(Report::Silent("device_add".into(), 100));
    run.report(Report::Up(description("a", 100), true));
    assert_eq!(run.asked.last().map(|(_, ask)| ask), Some(&Ask::Detach), "it was carried out after all");
}

/// A VM whose guest keeps the device when it is asked for it, as one does that boots.
struct Keeper(Run);

impl Keeper {
    fn new() -> Self {
        let mut run = Run::with_vm();
        run.attach();
        let mut keeper = Self(run);
        keeper.0.step(Event::Requested(1, Request::Detach("a".into(), keeper.0.answers.to(1))));
        keeper.answer_all();
        keeper
    }

    fn asked(&self) -> usize {
        self.0.asked.iter().filter(|(_, ask)| *ask == Ask::Detach).count()
    }

    /// What was asked is answered a second later, as nobody gets an answer earlier from such a guest.
    fn answer_all(&mut self) {
        while self.0.core.world().iter().any(|(_, managed)| {
            managed.vm.as_ref().is_some_and(|vm| matches!(vm.channel, ChannelState::Detaching(..)))
        }) {
            self.0.now_ns += SECOND_NS;
            self.0.outcome(Outcome::Detached(Err(VmError::DetachPending { vm: "a".into(), limit_ms: 1000 })));
        }
    }

    fn pass(&mut self, seconds: u64) {
        let end_ns = self.0.now_ns + seconds * SECOND_NS;
        while let Some(due_ns) = self.0.core.next_deadline_ns().filter(|due_ns| *due_ns <= end_ns) {
            self.0.now_ns = self.0.now_ns.max(due_ns);
            self.0.step(Event::Woken);
            self.answer_all();
        }
        self.0.now_ns = self.0.now_ns.max(end_ns);
    }

    fn problem(&self) -> Option<String> {
        self.0.core.show("a").expect("there").problem
    }
}

#[test]
fn a_guest_that_keeps_the_channels_device_is_asked_again_until_it_lets_go() {
    let mut keeper = Keeper::new();
    let refusal = keeper.0.answers.all().remove(&1).flatten().expect("refused");
    assert_eq!(
        refusal.to_string(),
        "a: the guest has not released the channel's device within 1000 ms; it is asked again, for 600 s at most"
    );
    let once =
        "the guest has not released the channel's device, which it was asked for once; it is asked again";
    assert_eq!((keeper.asked(), keeper.problem().as_deref()), (1, Some(once)));
    keeper.pass(5);
    assert_eq!(keeper.asked(), 1, "QEMU may not take it yet");
    keeper.pass(2);
    assert_eq!(keeper.asked(), 2);
    assert!(keeper.problem().is_some_and(|problem| problem.contains("2 times")));
    let shown = keeper.0.core.show("a").expect("there");
    assert!(shown.attached, "it is served meanwhile");
    // The guest is up now.
    keeper.0.now_ns += 20 * SECOND_NS;
    keeper.0.step(Event::Woken);
    assert_eq!(keeper.asked(), 3);
    keeper.0.outcome(Outcome::Detached(Ok(())));
    let shown = keeper.0.core.show("a").expect("there");
    assert_eq!((shown.channel, shown.problem), (vnuma_api::ChannelState::None, None));
    keeper.pass(1000);
    assert_eq!(keeper.asked(), 3, "nobody is asked for what is not there");
    // An attach is not undone by what was wanted before.
    keeper.0.step(Event::Requested(2, Request::Attach("a".into(), keeper.0.answers.to(2))));
    keeper.0.outcome(Outcome::Attached(Ok(9 << 32 | 1)));
    keeper.pass(1000);
    assert_eq!((keeper.asked(), keeper.0.answered(2)), (3, Some(true)));
}

#[test]
fn a_guest_that_never_lets_go_is_given_up_and_asked_anew_when_an_operator_asks() {
    let mut keeper = Keeper::new();
    keeper.pass(700);
    assert_eq!(keeper.asked(), 21);
    let told = |run: &Run, what: &str| run.lines.iter().filter(|line| line.contains(what)).count();
    assert_eq!(told(&keeper.0, "asked for 21 times; it is asked no more"), 1, "a line of the log");
    assert_eq!(told(&keeper.0, "and is asked again"), 1, "said once");
    let problem = keeper.problem().expect("shown");
    assert!(problem.ends_with("21 times; it is asked no more (`vnumactl detach` asks again)"), "{problem}");
    keeper.pass(10_000);
    assert_eq!(keeper.asked(), 21);
    keeper.0.step(Event::Requested(2, Request::Detach("a".into(), keeper.0.answers.to(2))));
    keeper.answer_all();
    keeper.pass(60);
    assert!(keeper.asked() > 23, "it begins again");
}

#[test]
fn a_guest_whose_hypervisor_refuses_is_not_asked_again() {
    let mut keeper = Keeper(Run::with_vm());
    keeper.0.attach();
    keeper.0.step(Event::Requested(1, Request::Detach("a".into(), keeper.0.answers.to(1))));
    let refused = VmError::Libvirt { vm: "a".into(), reason: "no such device".into() };
    keeper.0.outcome(Outcome::Detached(Err(refused)));
    assert_eq!((keeper.0.answered(1), keeper.problem()), (Some(false), None));
    keeper.pass(1000);
    assert_eq!(keeper.asked(), 1);
}

#[test]
fn a_hypervisor_that_does_not_answer_is_not_asked_for_the_device_until_it_does() {
    let mut keeper = Keeper::new();
    keeper.0.report(Report::Silent("nothing".into(), 100));
    keeper.pass(100);
    assert_eq!(keeper.asked(), 1);
    keeper.0.report(Report::Up(description("a", 100), true));
    assert_eq!(keeper.asked(), 2, "at once");
    keeper.answer_all();
    assert!(keeper.problem().is_some_and(|problem| problem.contains("2 times")));
}

/// The migration asks for the device itself, and gives it back when it fails.
#[test]
fn what_an_operator_wants_unplugged_before_a_migration_is_not_unplugged_after_it() {
    let mut keeper = Keeper::new();
    keeper.0.step(Event::Requested(
        2,
        Request::Migrate("a".into(), "tcp:b:4444".into(), false, keeper.0.answers.to(2)),
    ));
    keeper.0.outcome(Outcome::Marked(Ok(())));
    keeper.answer_all();
    keeper.0.step(Event::Requested(3, Request::CancelMigration("a".into(), keeper.0.answers.to(3))));
    assert_eq!((keeper.0.answered(2), keeper.0.answered(3)), (Some(true), Some(true)));
    let asked = keeper.asked();
    keeper.pass(1000);
    assert_eq!((keeper.asked(), keeper.problem()), (asked, None));
}

#[test]
fn a_guest_that_sees_devices_come_and_go_is_looked_at_but_not_without_end() {
    let mut run = Run::with_vm();
    run.attach();
    let describes = |run: &Run| run.described.len();
    let driver =
        |device_changes| DriverStatus { knows_devices: true, device_changes, ..DriverStatus::default() };
    run.now_ns += 10 * SECOND_NS;
    run.step(Event::Driver(1, DriverStatus { device_changes: 5, ..DriverStatus::default() }));
    assert_eq!(describes(&run), 0, "a driver that does nothing with them");
    run.step(Event::Driver(1, driver(0)));
    assert_eq!(describes(&run), 1, "it has started");
    // A hundred a second for two seconds, each another one.
    for changes in 1..200 {
        run.now_ns += SECOND_NS / 100;
        run.step(Event::Driver(1, driver(changes)));
    }
    assert_eq!(describes(&run), 1);
    let due_ns = run.core.next_deadline_ns().expect("a look");
    run.now_ns = run.now_ns.max(due_ns);
    run.step(Event::Woken);
    assert_eq!(describes(&run), 2, "the last one is not lost");
    run.now_ns += 60 * SECOND_NS;
    run.step(Event::Woken);
    run.step(Event::Driver(1, driver(199)));
    assert_eq!(describes(&run), 2, "nothing new");
    // What is found is published.
    let before = run.published.len();
    let mut host = host(3);
    host.pci_devices = vec![vnuma_model::PciDevice {
        address: "0000:81:00.0".into(),
        class: 0x02_0000,
        vendor: 1,
        device: 2,
        node: Some(1),
        iommu_group: Some(3),
    }];
    run.step(Event::HostChanged(host));
    let guest = vnuma_model::PciAddress { segment: 0, bus: 2, devfn: 0 };
    let device = vnuma_model::VmDevice { host: "0000:81:00.0".into(), guest: Some(guest) };
    run.report(Report::Described(VmDescription { devices: vec![device], ..description("a", 100) }));
    let found = &run.published[before..];
    assert_eq!(found.iter().map(|(.., one)| one.devices.clone()).collect::<Vec<_>>(), [[(guest, 1)]]);
}

#[test]
fn a_replug_does_not_restart_the_clock_of_other_vcpus() {
    let mut run = Run::new();
    let policies = Policies { replug_after_ns: Some(100 * SECOND_NS), ..Policies::default() };
    run.core = Core::new(host(3), policies, 7);
    run.list(&["a"]);
    let mut vm = description("a", 100);
    let vcpu = |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(1), tid: 101 + id as i32 };
    (vm.vcpus, vm.spare_slots) = ((1..4).map(vcpu).collect(), [(0, 3)].into());
    run.report(Report::Up(vm, false));
    for tid in 102..105 {
        run.step(Event::Located(tid, at(0, 1)));
    }
    run.now_ns += 100 * SECOND_NS;
    run.step(Event::Woken);
    assert_eq!(run.asked.last().map(|(_, ask)| ask), Some(&Ask::Replug(1, 0)));
    // It comes to nothing, and one minute later the next is due at once.
    run.outcome(Outcome::Replugged(Err(VmError::NoSpareSlot { vm: "a".into(), node: 0 })));
    run.now_ns += 60 * SECOND_NS;
    run.step(Event::Woken);
    assert_eq!(run.asked.iter().filter(|(_, ask)| matches!(ask, Ask::Replug(..))).count(), 2);
}

#[test]
fn a_move_is_answered_though_the_hypervisor_answers_meanwhile() {
    let mut run = Run::new();
    run.list(&["a"]);
    run.report(Report::Silent("no greeting".into(), 100));
    run.report(Report::Observed(100, description("a", 100).vcpus, true));
    run.step(Event::Requested(1, Request::Move("a".into(), 0, 1, run.answers.to(1))));
    run.step(Event::Requested(2, Request::Move("a".into(), 0, 0, run.answers.to(2))));
    run.report(Report::Up(description("a", 100), false));
    assert_eq!(run.moves.len(), 1, "one at a time");
    run.step(Event::Moved(run.moves[0], Ok(at(1, 10))));
    run.step(Event::Moved(run.moves[1], Err(ActError::Exited { pid: 100 })));
    assert_eq!((run.answered(1), run.answered(2)), (Some(true), Some(false)));
}

#[test]
fn an_outcome_of_a_vm_that_is_gone_is_not_taken_for_one_of_the_next() {
    let mut run = Run::with_vm();
    run.step(Event::Requested(1, Request::Move("a".into(), 0, 1, run.answers.to(1))));
    run.report(Report::Ended);
    assert_eq!(run.answered(1), Some(false));
    // The next one has its name and the number of its process, and the same is wanted of it.
    run.now_ns += 2 * SECOND_NS;
    run.step(Event::Woken);
    run.report(Report::Up(description("a", 100), false));
    run.step(Event::Requested(2, Request::Move("a".into(), 0, 1, run.answers.to(2))));
    run.step(Event::Moved(run.moves[0], Err(ActError::Exited { pid: 100 })));
    assert_eq!((run.moves.len(), run.answered(2)), (2, None));
    run.step(Event::Moved(run.moves[1], Ok(at(1, 10))));
    assert_eq!(run.answered(2), Some(true));
}

#[test]
fn the_process_of_a_vm_that_takes_anothers_place_stays_watched() {
    let mut run = Run::with_vm();
    let lost = || VmError::Disconnected { vm: "a".into() };
    run.report(Report::Lost(lost()));
    run.now_ns += 2 * SECOND_NS;
    run.step(Event::Woken);
    run.report(Report::Up(description("a", 200), false));
    assert_eq!(run.watched.last(), Some(&(1, 200)));
    run.report(Report::Lost(lost()));
    run.now_ns += 2 * SECOND_NS;
    run.step(Event::Woken);
    run.report(Report::Silent("no greeting".into(), 300));
    assert_eq!(run.watched.last(), Some(&(1, 300)));
    let unwatched = run.lines.iter().any(|line| line.starts_with("UnwatchProcess"));
    assert!(!unwatched, "that would give up the new process, too");
}

#[test]
fn a_move_to_a_node_that_is_taken_away_meanwhile_is_refused() {
    let mut run = Run::with_vm();
    run.step(Event::Requested(1, Request::Move("a".into(), 0, 1, run.answers.to(1))));
    run.step(Event::Requested(2, Request::Move("a".into(), 0, 2, run.answers.to(2))));
    run.step(Event::HostChanged(host(2)));
    run.step(Event::Moved(run.moves[0], Ok(at(1, 10))));
    assert_eq!((run.answered(1), run.answered(2), run.moves.len()), (Some(true), Some(false), 1));
}

#[test]
fn a_move_that_waits_behind_one_that_is_refused_is_made_without_another_event() {
    let mut run = Run::with_vm();
    for (request, node) in [(1, 1), (2, 2), (3, 0)] {
        run.step(Event::Requested(request, Request::Move("a".into(), 0, node, run.answers.to(request))));
    }
    run.step(Event::HostChanged(host(2)));
    run.step(Event::Moved(run.moves[0], Ok(at(1, 10))));
    assert_eq!((run.answered(2), run.answered(3), run.moves.len()), (Some(false), None, 1));
    assert!(run.core.next_deadline_ns().is_some_and(|due_ns| due_ns <= run.now_ns), "it is due");
    run.step(Event::Woken);
    assert_eq!((run.moves.len(), run.core.next_deadline_ns()), (2, None));
}

#[test]
fn a_vm_that_takes_anothers_name_leaves_no_request_unanswered_and_gets_none_of_its_events() {
    let mut run = Run::with_vm();
    run.list(&["a", "b"]);
    run.report(Report::Up(description("b", 200), false));
    run.step(Event::Located(201, at(0, 1)));
    run.step(Event::Requested(1, Request::Attach("b".into(), run.answers.to(1))));
    run.report(Report::Described(description("a", 200)));
    assert_eq!(run.core.names(), ["a", "b"]);
    assert_eq!(run.core.show("b").map(|vm| vm.name).ok().as_deref(), Some("b"));
    run.report(Report::Up(description("a", 200), false));
    assert_eq!(run.answered(1), Some(false), "its connection is closed");
    assert!(run.asked.iter().any(|(_, ask)| matches!(ask, Ask::Attach(_))));
}

#[test]
fn the_same_events_give_the_same_commands() {
    let lines = || {
        let mut run = Run::new();
        run.list(&["a"]);
        let mut many = description("a", 100);
        let vcpu = |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(0), tid: 101 + id as i32 };
        many.vcpus = (0..32).map(vcpu).collect();
        run.report(Report::Up(many, false));
        run.report(Report::Ended);
        run.lines
    };
    assert_eq!(lines(), lines());
}
