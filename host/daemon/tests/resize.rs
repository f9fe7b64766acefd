//! Guest nodes grow and shrink, in the core by itself: what is seen comes in, what QEMU is asked for comes out.

#[path = "common/asked.rs"]
mod asked;
#[path = "common/gib_nodes.rs"]
mod gib_nodes;
#[path = "common/two_nodes.rs"]
mod two_nodes;

use asked::asked;
use std::{collections::VecDeque, sync::Arc};
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, ReplyTo, Requester,
    event::{Ask, Command, Event, Outcome, Report, Request},
};
use vnuma_hypervisor::VmError;
use vnuma_model::{MemoryBacking, MemoryDevice, Vcpu, VmCandidate, VmDescription};
use vnuma_policy::{
    Policies,
    residency::MemoryObservation,
    sizing::SizeSettings,
    world::{ResizeWish, TaskId, VmId, WantedSize},
};

const SECOND_NS: u64 = 1_000_000_000;
const PID: i32 = 100;
const MIB: u64 = 1 << 20;
const GIB_KIB: u64 = 1 << 20;

/// Guest nodes of 1 GiB at home on nodes 0 and 1. Guest node 1 has a device of 2 GiB.
struct Run {
    core: Core,
    now_ns: u64,
    vm: (VmId, u64),
    description: VmDescription,
    /// Free on node 1, KiB.
    free_kib: u64,
    /// The guest plugs and unplugs at once.
    obeys: bool,
    /// QEMU refuses.
    refuses: bool,
    problem: Option<String>,
    /// What QEMU was asked for, MiB.
    asked: Vec<u64>,
    task: TaskId,
    /// It does not answer.
    unanswered: bool,
    described: usize,
    log: Vec<String>,
}

impl Run {
    fn new(sizes: SizeSettings) -> Self {
        let vcpu = Vcpu { index: 0, apic_id: 0, boot_node: Some(0), tid: PID + 1 };
        let mut description = gib_nodes::vm(PID, vec![vcpu]);
        // Bound memory is not described again and again.
        for node in &mut description.guest_nodes {
            let memory = node.memory.as_mut().expect("a backend");
            (memory.policy, memory.host_nodes) = ("bind".into(), vec![node.id]);
        }
        let memory = MemoryBacking {
            id: "plug1".into(),
            size_bytes: 2048 * MIB,
            policy: "default".into(),
            host_nodes: Vec::new(),
            resident_kib: Vec::new(),
            mapping: None,
        };
        description.memory_devices = vec![MemoryDevice {
            id: Some("vmem1".into()),
            guest_node: 1,
            requested_bytes: 0,
            plugged_bytes: 0,
            block_bytes: 2 * MIB,
            memory,
        }];
        let mut run = Self {
            core: Core::new(host(), Policies { sizes, ..Policies::default() }, 7),
            now_ns: SECOND_NS,
            vm: (0, 0),
            description,
            free_kib: 4 * GIB_KIB,
            obeys: true,
            refuses: false,
            problem: None,
            asked: Vec::new(),
            task: TaskId { vm: 0, number: 0 },
            unanswered: false,
            described: 0,
            log: Vec::new(),
        };
        run.step(Event::Scanned(Ok(vec![VmCandidate::new("/a", "a", 1)])));
        run.step(Event::Hypervisor(run.vm.1, Report::Up(run.description.clone(), false)));
        run
    }

    fn observation(&self) -> MemoryObservation {
        MemoryObservation {
            began_ns: self.now_ns,
            cost_ns: 1_000_000,
            areas: Vec::new(),
            pools: Vec::new(),
            nodes: vec![(0, 8 * GIB_KIB, GIB_KIB), (1, 8 * GIB_KIB, self.free_kib)],
            allowed: vec![0, 1],
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
                    Command::ObserveMemory(task, ..) => {
                        let seen = self.problem.clone().map_or_else(|| Ok(self.observation()), Err);
                        events.push_back(Event::MemoryObserved(task, seen));
                    }
                    Command::Describe(connection, _) => {
                        self.described += 1;
                        let report = Report::Described(self.description.clone());
                        events.push_back(Event::Hypervisor(connection, report));
                    }
                    Command::Ask(task, connection, Ask::Resize(device, bytes)) => {
                        assert_eq!(device, "vmem1");
                        self.asked.push(bytes / MIB);
                        self.task = task;
                        let outcome = Outcome::Resized(self.qemu(bytes));
                        let outcome = Event::Hypervisor(connection, Report::Outcome(task, outcome));
                        events.extend((!self.unanswered).then_some(outcome));
                    }
                    Command::Reply(reply) => reply.give(),
                    Command::Log(_, _, line) => self.log.push(line),
                    _ => {}
                }
            }
        }
    }

    fn qemu(&mut self, bytes: u64) -> Result<(), VmError> {
        if self.refuses {
            let (vm, command, reason) = ("a".to_owned(), "qom-set".to_owned(), "no".to_owned());
            return Err(VmError::Refused { vm, command, reason });
        }
        let device = &mut self.description.memory_devices[0];
        device.requested_bytes = bytes;
        if self.obeys {
            device.plugged_bytes = bytes;
        }
        let (plugged, node) = (device.plugged_bytes, &mut self.description.guest_nodes[1]);
        if node.memory.is_none() {
            node.memory_bytes = plugged;
        }
        Ok(())
    }

    /// Resyncs come every two seconds.
    fn pass(&mut self, seconds: u64) {
        let end_ns = self.now_ns + seconds * SECOND_NS;
        while self.now_ns < end_ns {
            self.now_ns += 2 * SECOND_NS;
            self.step(Event::Resync);
            self.step(Event::Woken);
        }
    }

    fn ask(
        &mut self,
        wanted: impl FnOnce(ReplyTo<api::Sizes>) -> Request,
    ) -> Result<api::GuestNodeSize, String> {
        let (to, answer) = asked();
        self.step(Event::Requested(50, wanted(to)));
        let sizes = answer.try_recv().expect("answered").map_err(|refusal| refusal.to_string())?;
        Ok(sizes.guest_nodes[1].clone())
    }

    fn resize(&mut self, mib: u64) -> Result<api::GuestNodeSize, String> {
        let size = WantedSize::Fixed(mib * MIB);
        self.ask(|to| Request::Resize("a".into(), ResizeWish { guest_node: 1, size, dry_run: false }, to))
    }

    fn auto(&mut self, least_mib: u64, most_mib: Option<u64>) -> Result<api::GuestNodeSize, String> {
        let size = WantedSize::Auto(least_mib * MIB, most_mib.map(|mib| mib * MIB));
        self.ask(|to| Request::Resize("a".into(), ResizeWish { guest_node: 1, size, dry_run: false }, to))
    }

    fn shown(&mut self) -> (String, u64) {
        let node = self.ask(|to| Request::ShowSizes("a".into(), to)).expect("shown");
        let plugged = node.pluggable.expect("a device").plugged_bytes / MIB;
        (node.resize.map(|resize| resize.state).unwrap_or_default(), plugged)
    }
}

fn by_hand() -> Run {
    Run::new(SizeSettings::default())
}

#[test]
fn an_operator_has_a_guest_node_grow_and_shrink() {
    let mut run = by_hand();
    assert_eq!(run.shown(), (String::new(), 0));
    let begun = run.resize(1536).expect("begun");
    assert_eq!((begun.boot_bytes / MIB, begun.plugs_from), (1024, Some(1)));
    run.pass(2);
    assert_eq!((run.shown(), &run.asked[..]), (("done".into(), 512), &[512][..]));
    run.resize(1024).expect("begun");
    run.pass(2);
    assert_eq!((run.shown(), &run.asked[..]), (("done".into(), 0), &[512, 0][..]));
    assert!(
        run.log.iter().any(|line| line == "a: guest node 1: 512 MiB are to be plugged, were 0: an operator")
    );
    let described = run.described;
    run.pass(60);
    assert_eq!(run.described, described, "what is done is not looked at any more");
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_asked() {
    let mut run = by_hand();
    for (mib, reason) in [
        (1023, "guest node 1 cannot get that size: it can have 1024 to 3072 MiB"),
        (3074, "it can have 1024 to 3072 MiB"),
        (1025, "what is plugged has to be a multiple of 2048 KiB beside the 1048576 KiB that it booted with"),
    ] {
        let refused = run.resize(mib).expect_err("refused");
        assert!(refused.ends_with(reason), "{refused}");
    }
    assert!(
        run.auto(2048, Some(1024)).expect_err("refused").contains("the least that it is to have, 2048 MiB")
    );
    assert!(run.auto(0, None).expect_err("refused").contains("it can have 1024 to 3072 MiB"));
    let size = WantedSize::Fixed(1024 * MIB);
    let of = |guest_node, size| {
        move |to| Request::Resize("a".into(), ResizeWish { guest_node, size, dry_run: false }, to)
    };
    assert!(run.ask(of(0, size)).expect_err("refused").contains("it has no virtio-mem device"));
    assert!(run.ask(of(7, size)).expect_err("refused").contains("there is no guest node 7"));
    // A sixteenth of 8 GiB stays free.
    run.free_kib = GIB_KIB;
    let full = run.resize(2048).expect_err("refused");
    assert!(full.contains("node 1 has no room: 1024 MiB more are wanted, and 512 MiB are free"), "{full}");
    run.description.run_state = "paused".into();
    assert!(run.resize(1026).expect_err("refused").contains("its guest does not run (`paused`)"));
    run.description.run_state = "running".into();
    run.problem = Some("no permission".into());
    assert!(run.resize(1026).expect_err("refused").contains("no permission"));
    run.step(Event::Hypervisor(run.vm.1, Report::Silent("qom-get".into(), PID)));
    assert!(run.resize(1026).expect_err("refused").contains("not connected"));
    assert!(run.asked.is_empty());
}

/// Its guest would take it away, and no vCPU could be published there any more.
#[test]
fn a_guest_node_that_booted_without_memory_keeps_a_block() {
    let mut run = by_hand();
    let node = &mut run.description.guest_nodes[1];
    (node.memory, node.memory_bytes) = (None, 0);
    run.resize(0).expect("it has none yet");
    run.resize(64).expect("begun");
    run.pass(2);
    let refused = run.resize(0).expect_err("refused");
    assert!(refused.ends_with("none of its vCPUs could move to it: it keeps 2048 KiB"), "{refused}");
    assert_eq!(run.asked, [64]);
    // Its home lacks all that it has.
    run.free_kib = GIB_KIB / 4;
    run.auto(0, Some(512)).expect("from now on");
    run.pass(60);
    assert_eq!((run.shown().1, run.asked.last()), (2, Some(&2)));
}

/// A VM is described before its size is changed.
#[test]
fn a_change_whose_client_goes_before_it_is_begun_is_not_begun() {
    for stays in [true, false] {
        let (mut run, here) = (by_hand(), Arc::new(()));
        let wish = ResizeWish { guest_node: 1, size: WantedSize::Fixed(1536 * MIB), dry_run: false };
        let (to, answer) = asked::<api::Sizes>();
        let wanted = Request::Resize("a".into(), wish, to.of(Requester::with(&here)));
        run.now_ns += 1000;
        let commands = run.core.step(run.now_ns, [Event::Requested(50, wanted)]);
        assert!(commands.iter().any(|command| matches!(command, Command::Describe(..))));
        let _here = stays.then_some(here);
        run.step(Event::Hypervisor(run.vm.1, Report::Described(run.description.clone())));
        assert_eq!((run.asked.len(), answer.try_recv().is_ok()), (usize::from(stays), stays));
    }
}

#[test]
fn a_guest_is_given_up_only_while_it_can_be_seen_what_it_does() {
    let mut run = by_hand();
    run.obeys = false;
    run.resize(2048).expect("begun");
    run.step(Event::Hypervisor(run.vm.1, Report::Lost(VmError::Disconnected { vm: "a".into() })));
    run.now_ns += 60 * SECOND_NS;
    run.step(Event::Woken);
    run.description.memory_devices[0].plugged_bytes = 1024 * MIB;
    run.step(Event::Hypervisor(run.vm.1, Report::Up(run.description.clone(), false)));
    assert_eq!((run.shown(), &run.asked[..]), (("done".into(), 1024), &[1024][..]));
}

#[test]
fn only_the_answer_to_what_it_has_asked_for_takes_a_change_on() {
    let mut run = by_hand();
    (run.unanswered, run.obeys) = (true, false);
    run.resize(2048).expect("begun");
    let before = run.shown();
    let refused = || VmError::Refused { vm: "a".into(), command: "qom-set".into(), reason: "no".into() };
    for outcome in [Ok(()), Err(refused())] {
        let other = TaskId { number: u64::MAX, ..run.task };
        run.step(Event::Hypervisor(run.vm.1, Report::Outcome(other, Outcome::Resized(outcome))));
        assert_eq!(run.shown(), before);
    }
    let asked = Report::Outcome(run.task, Outcome::Resized(Err(refused())));
    run.step(Event::Hypervisor(run.vm.1, asked));
    assert_eq!(run.shown().0, "failed");
}

/// What the guest does shows whether QEMU was reached.
#[test]
fn a_change_whose_connection_is_lost_goes_on() {
    let mut run = by_hand();
    run.unanswered = true;
    run.resize(2048).expect("begun");
    let lost = VmError::Disconnected { vm: "a".into() };
    run.step(Event::Hypervisor(run.vm.1, Report::Lost(lost)));
    run.pass(20);
    run.step(Event::Hypervisor(run.vm.1, Report::Up(run.description.clone(), false)));
    assert!(run.log.iter().any(|line| line.contains("1024 MiB are plugged")), "{:?}", run.log);
}

#[test]
fn a_change_that_is_stopped_without_a_connection_is_withdrawn_over_the_next_one() {
    let mut run = by_hand();
    run.obeys = false;
    run.resize(1536).expect("begun");
    run.step(Event::Hypervisor(run.vm.1, Report::Lost(VmError::Disconnected { vm: "a".into() })));
    run.ask(|to| Request::StopResize("a".into(), to)).expect("stopped");
    run.pass(20);
    assert_eq!((run.shown().0, &run.asked[..]), ("stopped".into(), &[512][..]));
    run.step(Event::Hypervisor(run.vm.1, Report::Up(run.description.clone(), false)));
    assert_eq!((run.shown().0, &run.asked[..]), ("stopped".into(), &[512, 0][..]));
}

#[test]
fn a_change_that_is_stopped_before_qemu_has_answered_is_withdrawn() {
    let mut run = by_hand();
    (run.unanswered, run.obeys) = (true, false);
    run.resize(1536).expect("begun");
    // What the VM was described with knows nothing of the request.
    run.description.memory_devices[0].requested_bytes = 0;
    run.ask(|to| Request::StopResize("a".into(), to)).expect("stopped");
    assert_eq!((run.shown().0, &run.asked[..]), ("stopped".into(), &[512, 0][..]));
}

#[test]
fn what_was_promised_to_a_guest_node_is_not_given_away() {
    let mut run = by_hand();
    run.free_kib = 2 * GIB_KIB;
    run.resize(2048).expect("begun");
    run.pass(2);
    // Nothing of it was touched: it is still free on the host.
    let full = run.resize(2562).expect_err("refused");
    assert!(full.contains("514 MiB more are wanted, and 512 MiB are free"), "{full}");
    let device = &mut run.description.memory_devices[0];
    device.memory.resident_kib = vec![(1, GIB_KIB)];
    run.free_kib = 2 * GIB_KIB;
    assert!(run.resize(2562).is_ok(), "it was, and as much is free again");
}

#[test]
fn a_guest_that_does_nothing_is_given_up_and_shown() {
    let mut run = by_hand();
    run.obeys = false;
    run.resize(1536).expect("begun");
    run.pass(20);
    assert_eq!(run.shown(), ("waiting".into(), 0));
    run.description.memory_devices[0].plugged_bytes = 128 * MIB;
    run.pass(28);
    assert_eq!(run.shown(), ("waiting".into(), 128));
    run.pass(6);
    assert_eq!((run.shown(), &run.asked[..]), (("partly".into(), 128), &[512, 128][..]));
    assert!(
        run.log.iter().any(|line| line.ends_with("partly; the guest has plugged nothing more for 30 s")),
        "{:?}",
        run.log
    );

    run.resize(1536).expect("begun");
    run.pass(2);
    run.ask(|to| Request::StopResize("a".into(), to)).expect("stopped");
    assert_eq!((run.shown(), &run.asked[2..]), (("stopped".into(), 128), &[512, 128][..]));
    let resizes = run.core.counts(run.vm.0).resizes;
    assert_eq!(resizes, [("done", 0), ("failed", 0), ("partly", 1), ("stopped", 1)].into());
    assert!(
        run.ask(|to| Request::StopResize("a".into(), to))
            .expect_err("refused")
            .contains("no guest node grows or shrinks")
    );
}

#[test]
fn a_qemu_that_refuses_or_goes_away_ends_it() {
    let mut run = by_hand();
    run.refuses = true;
    run.resize(1536).expect("begun");
    assert_eq!(run.shown(), ("failed".into(), 0));
    run.refuses = false;
    run.resize(1536).expect("begun");
    run.pass(2);
    assert_eq!(run.shown().0, "done");
    run.step(Event::ProcessEnded(run.vm.0, PID));
    assert!(run.ask(|to| Request::ShowSizes("a".into(), to)).is_err());
    run.pass(10);
}

#[test]
fn the_controller_follows_what_is_free_within_the_operators_bounds() {
    // 5 and 15 % of 8 GiB: 409 and 1228 MiB beyond the reserve of 512.
    let mut run = by_hand();
    run.pass(120);
    assert!(run.asked.is_empty(), "off by default");
    run.free_kib = 2 * GIB_KIB;
    let shown = run.auto(1024, Some(1024 + 512)).expect("taken");
    assert_eq!(
        shown.pluggable.expect("a device").auto,
        Some(api::SizeBounds { least_bytes: 0, most_bytes: 512 * MIB })
    );
    run.pass(4);
    // 2048 less 512 and 1228.8, in blocks of 2.
    assert_eq!((run.shown(), &run.asked[..]), (("done".into(), 306), &[306][..]));
    run.free_kib = 8 * GIB_KIB;
    run.pass(130);
    assert_eq!(run.asked, [306, 512], "its operator's most");
    run.free_kib = 800 * 1024;
    run.pass(130);
    // 288 are free beyond the reserve, 409.6 are wanted; then none is left.
    assert_eq!(run.asked[2], 512 - 122);
    run.free_kib = 0;
    run.pass(300);
    assert_eq!(run.shown(), ("done".into(), 0));
    // An operator's size ends it.
    run.resize(1024).expect("taken");
    run.free_kib = 8 * GIB_KIB;
    let asked = run.asked.len();
    run.pass(300);
    assert_eq!(run.asked.len(), asked);
}

#[test]
fn the_controller_does_not_ask_a_guest_again_and_again() {
    let settings = SizeSettings { auto: true, ..SizeSettings::default() };
    let mut run = Run::new(settings);
    run.pass(2);
    assert_eq!(run.shown(), ("done".into(), 2048), "all that can be plugged");

    let mut run = by_hand();
    run.obeys = false;
    run.auto(1024, None).expect("taken");
    run.pass(600);
    // Given up after 30 s each: then it rests for 60, 120 and 240 s.
    let grown = run.asked.iter().filter(|mib| **mib > 0).count();
    assert!((2..=4).contains(&grown), "{:?}", run.asked);
    run.obeys = true;
    run.pass(2000);
    assert_eq!(run.shown().0, "done");
}
