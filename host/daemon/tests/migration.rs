//! VMs that leave and arrive, in the core by itself: what is seen comes in, orders come out.

#[path = "common/asked.rs"]
mod asked;
#[path = "common/gib_nodes.rs"]
mod gib_nodes;
#[path = "common/two_nodes.rs"]
mod two_nodes;

use asked::asked;
use std::collections::VecDeque;
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, Refusal, ReplyTo,
    event::{Ask, Command, Event, Level, Outcome, Report, Request},
};
use vnuma_hypervisor::VmError;
use vnuma_memory_backend::ABILITIES;
use vnuma_model::{MigrationProgress, MigrationStatus, Vcpu, VcpuLocation, VmCandidate, VmDescription};
use vnuma_policy::{Policies, scheduling::Policy, world::TaskId};

const SECOND_NS: u64 = 1_000_000_000;
const PID: i32 = 100;
const CHANNEL: u64 = 70;
const TO: &str = "tcp:b:4444";

/// A VM, its QEMU as a test wants it, and what was ordered.
struct Run {
    core: Core,
    now_ns: u64,
    vm: u64,
    connection: u64,
    description: VmDescription,
    /// What QEMU has.
    plugged: bool,
    marked: bool,
    status: MigrationStatus,
    problem: Option<String>,
    /// The guest keeps the device when it is asked for it.
    keeps_device: bool,
    /// What is not answered.
    unanswered: fn(&Ask) -> bool,
    /// What was asked last.
    task: TaskId,
    /// The mark is not taken away.
    keeps_mark: bool,
    /// The channel is of another host: there is no record of it.
    came_along: bool,
    done: Vec<String>,
    log: Vec<(Level, String)>,
}

impl Run {
    fn with(run_state: &str, marked: bool, policy: Policy) -> Self {
        let vcpu = |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(id), tid: PID + 1 + id as i32 };
        let description =
            VmDescription { run_state: run_state.into(), ..gib_nodes::vm(PID, vec![vcpu(0), vcpu(1)]) };
        let mut run = Self {
            core: Core::new(host(), Policies { schedule: policy, ..Policies::default() }, 7),
            now_ns: SECOND_NS,
            vm: 0,
            connection: 0,
            description,
            plugged: false,
            marked,
            status: MigrationStatus::None,
            problem: None,
            keeps_device: false,
            unanswered: |_| false,
            task: TaskId { vm: 0, number: 0 },
            keeps_mark: false,
            came_along: false,
            done: Vec::new(),
            log: Vec::new(),
        };
        run.connect();
        run
    }

    fn running() -> Self {
        Self::with("running", false, Policy::Off)
    }

    fn attached() -> Self {
        let mut run = Self::running();
        run.step(Event::Requested(1, Request::Attach("a".into(), ReplyTo::new(drop))));
        run.pass(1);
        assert!(run.shown().attached);
        run.done.clear();
        run
    }

    fn connect(&mut self) {
        self.step(Event::Scanned(Ok(vec![VmCandidate::new("qmp:/a", "a", 1).with(ABILITIES)])));
        self.up();
        for vcpu in 0..2 {
            let location = VcpuLocation { cpu: vcpu * 4, node: vcpu, pinned: None, time_ns: self.now_ns };
            self.step(Event::Located(PID + 1 + vcpu as i32, Some(location)));
        }
    }

    fn up(&mut self) {
        self.report(Report::Up(self.description.clone(), self.plugged));
        if self.marked {
            self.report(Report::FoundMarked);
        }
    }

    fn report(&mut self, report: Report) {
        self.step(Event::Hypervisor(self.connection, report));
    }

    /// What was asked last has ended.
    fn outcome(&mut self, outcome: Outcome) {
        self.report(Report::Outcome(self.task, outcome));
    }

    fn answer(&mut self, ask: Ask) -> Outcome {
        let looked = |run: &Self| {
            let problem = run.problem.clone();
            MigrationProgress {
                status: run.status,
                sent_bytes: 5,
                left_bytes: 6,
                total_bytes: 11,
                passes: 2,
                downtime_ms: None,
                problem,
            }
        };
        match ask {
            Ask::Attach(_) if self.status == MigrationStatus::Active => {
                let (vm, command) = ("a".into(), "device_add".into());
                Outcome::Attached(Err(VmError::Refused { vm, command, reason: "migrating".into() }.into()))
            }
            Ask::Attach(_) => {
                self.plugged = true;
                Outcome::Attached(Ok(CHANNEL))
            }
            Ask::Detach if self.keeps_device => {
                Outcome::Detached(Err(VmError::DetachPending { vm: "a".into(), limit_ms: 1000 }))
            }
            Ask::Detach => {
                self.plugged = false;
                Outcome::Detached(Ok(()))
            }
            Ask::Recover(_) if self.came_along => {
                Outcome::Recovered(Err(Refusal::CameAlong { vm: "a".into(), why: "no record".into() }))
            }
            Ask::Recover(_) => Outcome::Recovered(Ok(CHANNEL + 100)),
            Ask::Mark(false) if self.keeps_mark => {
                let (vm, command) = ("a".into(), "chardev-remove".into());
                Outcome::Marked(Err(VmError::Refused { vm, command, reason: "busy".into() }))
            }
            Ask::Mark(marked) => {
                self.marked = marked;
                Outcome::Marked(Ok(()))
            }
            Ask::LookAtMigration => Outcome::Migration(Ok(looked(self))),
            Ask::SwitchMigration => {
                self.status = MigrationStatus::PostCopy;
                Outcome::Migration(Ok(looked(self)))
            }
            Ask::CancelMigration => {
                self.status = MigrationStatus::Cancelled;
                Outcome::Migration(Ok(looked(self)))
            }
            Ask::Migrate(..) => {
                self.status = MigrationStatus::Active;
                Outcome::MigrationBegun(Ok(()))
            }
            Ask::Replug(..) | Ask::Resize(..) => panic!("nobody wants that"),
        }
    }

    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.now_ns += 1000;
            for command in self.core.step(self.now_ns, [event]) {
                match command {
                    Command::Connect(vm, connection, _) => (self.vm, self.connection) = (vm, connection),
                    Command::Disconnect(_) => self.done.push("disconnect".into()),
                    Command::RestoreMasks(task, _) => events.push_back(Event::MasksRestored(task, Ok(0))),
                    Command::Publish(task, generation, _) => {
                        self.done.push("publish".into());
                        events.push_back(Event::Published(task, Ok(generation + 1)));
                    }
                    Command::Describe(connection, _) => {
                        let described = Report::Described(self.description.clone());
                        events.push_back(Event::Hypervisor(connection, described));
                    }
                    Command::Ask(task, connection, ask) => {
                        self.task = task;
                        match &ask {
                            Ask::LookAtMigration => {}
                            Ask::Migrate(to, post_copy) => {
                                assert!(!self.plugged || !self.marked, "it migrates with its device");
                                self.done.push(format!("migrate {to} {post_copy}"));
                            }
                            ask => self.done.push(format!("{ask:?}")),
                        }
                        if !(self.unanswered)(&ask) {
                            let answer = Report::Outcome(task, self.answer(ask));
                            events.push_back(Event::Hypervisor(connection, answer));
                        }
                    }
                    Command::Confine(..) => self.done.push("confine".into()),
                    Command::Reply(reply) => reply.give(),
                    Command::Log(_, level, line) => self.log.push((level, line)),
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
        self.now_ns = self.now_ns.max(end_ns);
    }

    fn shown(&self) -> api::Vm {
        self.core.show("a").expect("there")
    }

    fn ask<T: Send + 'static>(&mut self, wanted: impl FnOnce(ReplyTo<T>) -> Request) -> Result<T, String> {
        let (to, answer) = asked();
        self.step(Event::Requested(50, wanted(to)));
        answer.try_recv().expect("answered").map_err(|refusal| refusal.to_string())
    }

    fn migrate(&mut self) -> api::Migration {
        self.ask(|to| Request::Migrate("a".into(), TO.into(), false, to)).expect("begun")
    }

    fn state(&mut self) -> api::Migration {
        self.ask(|to| Request::ShowMigration("a".into(), to)).expect("known")
    }

    fn described_as(&mut self, run_state: &str) {
        self.description.run_state = run_state.into();
        self.report(Report::Described(self.description.clone()));
    }

    fn did(&self, what: &str) -> usize {
        self.done.iter().filter(|done| done.starts_with(what)).count()
    }
}

#[test]
fn a_vm_is_detached_migrated_and_forgotten() {
    let mut run = Run::attached();
    run.migrate();
    assert_eq!(run.done, ["Mark(true)", "Detach", "migrate tcp:b:4444 false"]);
    run.pass(2);
    let shown = run.state();
    assert_eq!((shown.state.as_str(), shown.sent_bytes, shown.total_bytes), ("sending", 5, 11));
    run.status = MigrationStatus::Completed;
    run.pass(1);
    assert!(matches!(run.core.show("a"), Err(Refusal::NoVm(_))), "it is still shown");
    assert_eq!((run.state().state, run.did("disconnect")), ("done".into(), 1));
    assert_eq!(run.core.migrations(), [("cancelled", 0), ("done", 1), ("failed", 0)].into());
    assert_eq!(run.did("Attach"), 0);
    // Its QEMU is there as long as nobody ends it.
    run.description.run_state = "left".into();
    for _ in 0..3 {
        run.pass(20);
        run.up();
        assert!(run.core.show("a").is_err(), "it is found where it is no more");
    }
    run.description.run_state = "running".into();
    run.marked = false;
    run.pass(20);
    run.up();
    assert_eq!(run.shown().run_state.as_deref(), Some("running"), "it goes on here");
}

#[test]
fn one_that_somebody_else_has_migrated_is_forgotten_as_well() {
    let mut run = Run::attached();
    run.described_as("leaving");
    assert!(run.shown().attached);
    // QEMU says nothing when the migration ends.
    run.description.run_state = "left".into();
    run.step(Event::Resync);
    assert!(run.core.show("a").is_err());
    let unknown = run.ask(|to| Request::ShowMigration("a".into(), to)).unwrap_err();
    assert!(unknown.starts_with("there is no VM `a`"), "{unknown}");
}

#[test]
fn one_whose_manager_says_that_it_has_left_is_done_whether_its_process_has_ended_or_not() {
    for migrates in [true, false] {
        let mut run = Run::attached();
        if migrates {
            run.migrate();
            run.unanswered = |ask| *ask == Ask::LookAtMigration;
            run.pass(1);
        }
        if migrates {
            // Why it has ended is not known yet.
            run.step(Event::ProcessEnded(run.vm, PID));
            run.outcome(Outcome::Migration(Err(VmError::Disconnected { vm: "a".into() })));
            let shown = run.state();
            assert!(shown.state == "sending" && shown.problem.is_some(), "{shown:?}");
        }
        run.report(Report::Left);
        // Of a connection that is closed by now.
        run.report(Report::Ended);
        assert!(run.core.show("a").is_err(), "it is still shown");
        match migrates {
            true => assert_eq!((run.state().state.as_str(), run.state().problem), ("done", None)),
            false => assert!(run.ask(|to| Request::ShowMigration("a".into(), to)).is_err()),
        }
    }
}

#[test]
fn one_that_fails_is_attached_again_and_not_marked_any_more() {
    let mut run = Run::attached();
    run.migrate();
    (run.status, run.problem) = (MigrationStatus::Failed, Some("no route".into()));
    run.pass(3);
    let shown = run.state();
    assert_eq!((shown.state.as_str(), shown.problem.as_deref()), ("failed", Some("no route")));
    assert_eq!(run.core.migrations()["failed"], 1);
    assert!(run.shown().attached && run.plugged && !run.marked);
    assert_eq!((run.did("Attach"), run.did("publish")), (1, 1));
    assert!(run.log.iter().any(|(level, line)| *level == Level::Warn && line.contains("failed: no route")));
    // And again.
    run.problem = None;
    run.migrate();
    assert_eq!(run.state().state, "sending");
}

#[test]
fn one_that_is_cancelled_is_attached_again() {
    let mut run = Run::attached();
    run.migrate();
    run.pass(1);
    run.ask(|to| Request::CancelMigration("a".into(), to)).expect("cancelled");
    run.pass(3);
    assert_eq!(run.state().state, "cancelled");
    assert!(run.shown().attached && !run.marked);
    let past = run.ask(|to| Request::CancelMigration("a".into(), to)).unwrap_err();
    assert!(past.ends_with("cannot be cancelled any more: it is over"), "{past}");
}

#[test]
fn a_guest_that_lets_go_after_all_gets_its_channel_back() {
    let mut run = Run::attached();
    run.keeps_device = true;
    run.migrate();
    run.pass(60);
    let shown = run.state();
    assert_eq!(shown.state, "failed");
    assert!(shown.problem.expect("why").contains("has not released the channel's device"));
    assert!(run.shown().attached && run.marked, "it may let go yet");
    assert_eq!(run.did("migrate"), 0);
    run.plugged = false;
    run.report(Report::Released);
    run.pass(3);
    assert!(run.shown().attached && run.plugged && !run.marked);
}

#[test]
fn when_qemu_does_not_say_whether_it_has_begun_it_is_asked() {
    for (status, state) in [(MigrationStatus::Active, "sending"), (MigrationStatus::None, "failed")] {
        let mut run = Run::attached();
        run.unanswered = |ask| matches!(ask, Ask::Migrate(..));
        run.migrate();
        let timeout = VmError::Timeout { vm: "a".into(), command: "migrate".into(), limit_ms: 1000 };
        run.outcome(Outcome::MigrationBegun(Err(timeout)));
        run.report(Report::Silent("no answer".into(), PID));
        run.pass(2);
        assert_eq!(run.state().state, "starting");
        run.status = status;
        run.up();
        run.pass(3);
        assert_eq!(run.state().state, state);
        assert_eq!(run.did("migrate"), 1, "it was told twice");
        assert_eq!(run.shown().attached, status == MigrationStatus::None);
    }
}

#[test]
fn a_busy_qemu_is_told_later() {
    let mut run = Run::attached();
    run.unanswered = |ask| matches!(ask, Ask::Migrate(..));
    run.migrate();
    for command in ["migrate-set-capabilities"; 3] {
        let timeout = VmError::Timeout { vm: "a".into(), command: command.into(), limit_ms: 1000 };
        run.outcome(Outcome::MigrationBegun(Err(timeout)));
        run.report(Report::Silent("no answer".into(), PID));
        run.pass(5);
        let told = run.did("migrate");
        assert_eq!(run.state().state, "starting");
        run.up();
        run.pass(1);
        assert_eq!(run.did("migrate"), told + 1, "when it answers again");
    }
}

#[test]
fn only_the_answer_to_what_it_has_asked_takes_a_migration_on() {
    let mut run = Run::attached();
    run.unanswered = |ask| matches!(ask, Ask::Migrate(..));
    run.migrate();
    let other = TaskId { number: u64::MAX, ..run.task };
    let refused = || VmError::Refused { vm: "a".into(), command: "migrate".into(), reason: "no".into() };
    for outcome in [
        Outcome::MigrationBegun(Ok(())),
        Outcome::MigrationBegun(Err(refused())),
        Outcome::Migration(Err(refused())),
    ] {
        run.report(Report::Outcome(other, outcome));
        let shown = run.state();
        assert_eq!((shown.state.as_str(), shown.problem), ("starting", None));
    }
    run.status = MigrationStatus::Active;
    run.outcome(Outcome::MigrationBegun(Ok(())));
    assert_eq!(run.state().state, "sending");
}

#[test]
fn a_guest_that_has_let_go_before_it_is_asked_is_not_asked() {
    let mut run = Run::attached();
    run.unanswered = |ask| matches!(ask, Ask::Mark(_));
    run.migrate();
    run.plugged = false;
    run.report(Report::Released);
    run.outcome(Outcome::Marked(Ok(())));
    assert_eq!(run.done, ["Mark(true)", "migrate tcp:b:4444 false"]);
}

#[test]
fn a_refusal_says_where_to_read_on() {
    let mut run = Run::attached();
    run.unanswered = |ask| matches!(ask, Ask::Migrate(..));
    run.migrate();
    let refused = VmError::Refused { vm: "a".into(), command: "migrate".into(), reason: "a blocker".into() };
    run.outcome(Outcome::MigrationBegun(Err(refused)));
    run.pass(1);
    let problem = run.state().problem.expect("why");
    assert!(problem.contains("a blocker") && problem.ends_with("(docs/migration.md)"), "{problem}");
    let bad = run.ask(|to| Request::Migrate("a".into(), "exec:rm".into(), false, to)).unwrap_err();
    assert!(bad.contains("`exec:rm`") && bad.ends_with("(docs/migration.md)"), "{bad}");
}

#[test]
fn nothing_else_is_done_with_the_channel_of_one_that_migrates() {
    let mut run = Run::attached();
    run.migrate();
    for refused in [
        run.ask(|to| Request::Attach("a".into(), to)).map(drop),
        run.ask(|to| Request::AttachOnArrival("a".into(), to)).map(drop),
        run.ask(|to| Request::Detach("a".into(), to)).map(drop),
        run.ask(|to| Request::Replug("a".into(), 1, to)).map(drop),
        run.ask(|to| Request::Migrate("a".into(), TO.into(), false, to)).map(drop),
    ] {
        let refused = refused.expect_err("refused");
        assert!(refused.starts_with("a: it is migrating to tcp:b:4444"), "{refused}");
    }
}

#[test]
fn a_vm_whose_qemu_ends_on_the_way_has_failed() {
    let mut run = Run::attached();
    run.migrate();
    run.report(Report::Ended);
    let shown = run.state();
    assert_eq!(
        (shown.state.as_str(), shown.problem.as_deref()),
        ("failed", Some("its hypervisor has ended"))
    );
    assert_eq!(run.core.migrations(), [("cancelled", 0), ("done", 0), ("failed", 1)].into());
}

#[test]
fn the_next_vnumad_attaches_a_vm_that_stays() {
    // It finds a VM that is marked, and knows nothing of a migration.
    let run = Run::with("running", true, Policy::Off);
    assert!(run.shown().attached && !run.marked);
    let mut run = Run::with("arriving", false, Policy::Off);
    (run.status, run.marked) = (MigrationStatus::Active, true);
    run.description.run_state = "running".into();
    run.up();
    assert!(!run.shown().attached, "QEMU refuses while it migrates");
    for _ in 0..5 {
        run.pass(2);
        run.step(Event::Resync);
    }
    let said = run.log.iter().filter(|(_, line)| line.contains("could not be attached yet")).count();
    assert_eq!(said, 1, "{:?}", run.log);
    // Each attempt makes a channel, and costs its QEMU something.
    let before = run.did("Attach");
    for _ in 0..60 {
        run.pass(1);
        run.step(Event::Resync);
    }
    let tried = run.did("Attach") - before;
    assert!((3..=6).contains(&tried), "it is tried on, less and less often: {tried} times in a minute");
    run.status = MigrationStatus::Failed;
    run.pass(16);
    run.step(Event::Resync);
    assert!(run.shown().attached && !run.marked);
}

#[test]
fn a_vm_that_arrives_is_attached_if_that_was_wanted() {
    for wanted in [false, true] {
        let mut run = Run::with("arriving", false, Policy::Off);
        if wanted {
            let shown = run.ask(|to| Request::AttachOnArrival("a".into(), to)).expect("marked");
            assert!(shown.attach_on_arrival && !shown.attached);
        }
        run.pass(10);
        assert_eq!(run.did("Attach"), 0, "its guest is not here");
        // Its memory is elsewhere than at home by its binding.
        let memory = run.description.guest_nodes[0].memory.as_mut().expect("backed");
        memory.resident_kib = vec![(1, 1 << 20)];
        run.described_as("running");
        run.pass(3);
        assert_eq!(run.shown().nodes[0].home, Some(1));
        assert_eq!((run.shown().attached, run.marked), (wanted, false));
        assert_eq!(run.did("publish"), usize::from(wanted));
    }
}

#[test]
fn whoever_detaches_it_does_not_want_it_attached_on_arrival_any_more() {
    let mut run = Run::with("running", false, Policy::Off);
    run.marked = true;
    run.report(Report::FoundMarked);
    assert!(run.shown().attached);
    run.step(Event::Requested(3, Request::Detach("a".into(), ReplyTo::new(drop))));
    run.pass(10);
    run.step(Event::Resync);
    assert!(!run.shown().attached && !run.marked, "it came back");
}

/// Otherwise the next vnumad would attach it.
#[test]
fn a_mark_that_stayed_is_taken_away_when_somebody_detaches_the_vm() {
    let mut run = Run::attached();
    run.keeps_mark = true;
    run.migrate();
    run.status = MigrationStatus::Failed;
    run.pass(3);
    assert!(run.shown().attached && run.marked && !run.shown().attach_on_arrival);
    run.keeps_mark = false;
    run.step(Event::Requested(3, Request::Detach("a".into(), ReplyTo::new(drop))));
    run.pass(10);
    run.step(Event::Resync);
    assert!(!run.shown().attached && !run.marked, "{:?}", run.done);
    // And another migration marks it again.
    run.step(Event::Requested(4, Request::Attach("a".into(), ReplyTo::new(drop))));
    run.status = MigrationStatus::None;
    run.migrate();
    assert!(run.marked, "{:?}", run.done);
}

#[test]
fn the_channel_of_a_vm_that_arrives_with_it_is_plugged_anew() {
    for late in [false, true] {
        let mut run = Run::with("arriving", false, Policy::Off);
        run.step(Event::Requested(3, Request::Attach("a".into(), ReplyTo::new(drop))));
        run.pass(1);
        assert!(run.shown().attached);
        run.done.clear();
        run.keeps_device = late;
        run.described_as("running");
        run.pass(3);
        if late {
            assert_eq!(run.done, ["Mark(true)", "Detach"]);
            run.plugged = false;
            run.report(Report::Released);
            run.pass(3);
        }
        assert!(run.shown().attached && run.plugged && !run.marked, "{:?}", run.done);
        assert_eq!((run.did("Detach"), run.did("Attach"), run.did("publish")), (1, 1, 1), "{:?}", run.done);
        run.described_as("paused");
        run.described_as("running");
        assert_eq!(run.did("Detach"), 1, "it has arrived once");
    }
}

/// libvirt has started its QEMU with the device. vnumad finds it while it waits for its guest, when it runs, or when it runs and the guest
/// does not let go at once.
#[test]
fn a_channel_that_came_along_is_plugged_anew_when_the_guest_runs() {
    for (found, late) in [("arriving", false), ("running", false), ("running", true), ("paused", false)] {
        let mut run = Run::with(found, false, Policy::Off);
        (run.plugged, run.came_along, run.keeps_device) = (true, true, late);
        run.up();
        run.pass(3);
        if found == "arriving" {
            assert_eq!(
                (run.done.len(), run.did("Recover")),
                (1, 1),
                "its guest is not here yet: {:?}",
                run.done
            );
            run.described_as("running");
            run.pass(3);
        }
        if late {
            assert_eq!(run.done[1..], ["Mark(true)", "Detach"]);
            run.plugged = false;
            run.report(Report::Released);
            run.pass(3);
        }
        if found == "paused" {
            assert_eq!((run.did("Detach"), run.did("Attach")), (1, 0), "{:?}", run.done);
            run.described_as("running");
            run.pass(3);
        }
        assert!(run.shown().attached && run.plugged && !run.marked, "{found}: {:?}", run.done);
        assert_eq!((run.did("Detach"), run.did("Attach"), run.did("publish")), (1, 1, 1), "{:?}", run.done);
        assert!(run.log.iter().all(|(level, _)| *level != Level::Warn), "{:?}", run.log);
    }
}

#[test]
fn a_vm_that_has_no_channel_any_more_when_it_arrives_is_not_asked_for_it() {
    let mut run = Run::with("arriving", false, Policy::Off);
    run.step(Event::Requested(3, Request::Attach("a".into(), ReplyTo::new(drop))));
    run.pass(1);
    run.done.clear();
    run.plugged = false;
    run.description.run_state = "running".into();
    run.up();
    run.pass(3);
    assert!(!run.shown().attached && run.done.is_empty(), "{:?}", run.done);
}

#[test]
fn it_is_tried_to_attach_a_vm_once_a_second_and_at_once_over_another_connection() {
    let mut run = Run::with("running", false, Policy::Off);
    (run.status, run.marked) = (MigrationStatus::Active, true);
    run.up();
    assert_eq!(run.did("Attach"), 1, "QEMU refuses while it migrates");
    run.described_as("running");
    run.step(Event::Resync);
    assert_eq!(run.did("Attach"), 1, "it was tried just before");
    run.pass(1);
    assert_eq!(run.did("Attach"), 2);
    run.report(Report::Lost(VmError::Disconnected { vm: "a".into() }));
    let before = run.connection;
    while run.connection == before {
        run.now_ns = run.core.next_deadline_ns().expect("another connection");
        run.step(Event::Woken);
    }
    run.now_ns -= SECOND_NS / 2;
    run.up();
    assert_eq!(run.did("Attach"), 3);
}

#[test]
fn what_waits_is_not_migrated_on() {
    let mut run = Run::with("arriving", false, Policy::Off);
    let refused = run.ask(|to| Request::Migrate("a".into(), TO.into(), false, to)).unwrap_err();
    assert_eq!(refused, "a: its guest is not here yet: its hypervisor waits for a migration");
}

#[test]
fn with_post_copy_there_is_no_way_back() {
    let mut run = Run::attached();
    run.ask(|to| Request::Migrate("a".into(), TO.into(), true, to)).expect("begun");
    run.pass(1);
    assert_eq!((run.state().state.as_str(), run.did("SwitchMigration")), ("post-copy", 1));
    let refused = run.ask(|to| Request::CancelMigration("a".into(), to)).unwrap_err();
    assert!(refused.contains("the guest runs at the destination"), "{refused}");
    run.status = MigrationStatus::PostCopyPaused;
    run.pass(1);
    let shown = run.state();
    assert_eq!(shown.state, "post-copy");
    assert!(shown.problem.expect("why").contains("migrate-recover"));
    run.status = MigrationStatus::Completed;
    run.pass(1);
    assert_eq!(run.state().state, "done");
}
