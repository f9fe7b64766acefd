//! Connections to machines, which answer, are slow, hang, lie, vanish and come back.

use crate::{
    action::{Action, MICRO, MILLI, SECOND},
    daemon::{Job, Message, WorkerState},
    migration,
    simulation::Simulation,
    world::{Device, Driver, Serial, Slot},
};
use vnuma_daemon::core::{
    Refusal,
    event::{Ask, Outcome, Replugged, Report},
};
use vnuma_hypervisor::{Plugged, VmError};
use vnuma_policy::world::{ConnectionId, TaskId};

/// For an answer, until it is given up.
const LIMIT: u64 = SECOND;
/// Between two attempts to make a silent machine answer.
const ATTEMPT: u64 = 2 * SECOND;

impl Simulation {
    /// A report arrives after a time, and never before an earlier one of this connection.
    pub(crate) fn report(&mut self, connection: ConnectionId, after_ns: u64, report: Report) {
        let now_ns = self.now_ns;
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        worker.last_ns = worker.last_ns.max(now_ns + after_ns);
        let after_ns = worker.last_ns - now_ns;
        self.ours(after_ns, Action::Arrive(Message::Report(connection, report)));
    }

    fn set_state(&mut self, connection: ConnectionId, state: WorkerState) {
        if let Some(worker) = self.daemon.workers.get_mut(&connection) {
            worker.state = state;
        }
    }

    fn later_work(&mut self, connection: ConnectionId, after_ns: u64) {
        self.ours(after_ns, Action::Work(connection));
    }

    /// A worker goes on.
    pub(crate) fn work(&mut self, connection: ConnectionId) {
        let Some(worker) = self.daemon.workers.get(&connection) else { return };
        let (slot, machine, state) = (worker.slot, worker.machine, worker.state);
        if matches!(state, WorkerState::Blocked | WorkerState::Over) {
            return;
        }
        let Some(answers) = self.world.machine(slot, machine).map(crate::world::Machine::answers) else {
            return self.over(connection);
        };
        match (state, answers) {
            (WorkerState::Handshake, true) => self.greet(connection, slot, machine),
            (WorkerState::Handshake, false) => self.silent(connection, "QMP: no greeting"),
            (WorkerState::Silent, true) => {
                self.refuse_asks(connection);
                self.set_state(connection, WorkerState::Handshake);
                self.later_work(connection, MILLI);
            }
            (WorkerState::Silent, false) => self.refuse_asks(connection),
            _ => self.serve(connection, slot, machine, answers),
        }
    }

    /// The machine is gone: the worker sees its process end, or only the connection break.
    fn over(&mut self, connection: ConnectionId) {
        let report = match self.rng.chance(800) {
            true => Report::Ended,
            false => Report::Lost(VmError::Disconnected { vm: "a VM".to_owned() }),
        };
        self.set_state(connection, WorkerState::Over);
        let after_ns = self.rng.within(0..20 * MILLI);
        self.report(connection, after_ns, report);
    }

    fn greet(&mut self, connection: ConnectionId, slot: Slot, serial: Serial) {
        self.catch_up(slot, serial);
        let Some(machine) = self.world.machine(slot, serial) else { return };
        let (description, plugged, marked) = (machine.describe(), machine.device.is_some(), machine.marked);
        self.report(connection, 2 * MILLI, Report::Up(description, plugged));
        if marked {
            self.report(connection, 0, Report::FoundMarked);
        }
        self.set_state(connection, WorkerState::Serving);
        self.later_work(connection, 3 * MILLI);
    }

    fn silent(&mut self, connection: ConnectionId, why: &str) {
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        worker.state = WorkerState::Silent;
        let (pid, slot, machine) = (worker.pid, worker.slot, worker.machine);
        self.count("silences");
        self.report(connection, MILLI, Report::Silent(why.to_owned(), pid));
        self.observe(connection, slot, machine);
        self.ours(ATTEMPT, Action::Work(connection));
    }

    fn observe(&mut self, connection: ConnectionId, slot: Slot, serial: Serial) {
        let certain = !self.rng.chance(200);
        let Some(machine) = self.world.machine(slot, serial) else { return };
        let mut vcpus = machine.listed_vcpus();
        vcpus.iter_mut().for_each(|vcpu| vcpu.boot_node = None);
        let pid = machine.pid;
        self.report(connection, MILLI, Report::Observed(pid, vcpus, certain));
    }

    /// What is asked of a machine that does not answer.
    fn refuse_asks(&mut self, connection: ConnectionId) {
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        let (slot, machine) = (worker.slot, worker.machine);
        for job in std::mem::take(&mut worker.jobs) {
            let silent = VmError::Silent { vm: "a VM".to_owned(), why: "it hangs".to_owned() };
            let (task, outcome) = match job {
                Job::Ask(task, Ask::Recover(epoch)) => (task, self.take_over(slot, machine, epoch)),
                Job::Ask(task, ask) => (task, ask.failed(silent)),
                Job::Describe | Job::Probe => continue,
            };
            self.report(connection, 100 * MICRO, Report::Outcome(task, outcome));
        }
    }

    fn serve(&mut self, connection: ConnectionId, slot: Slot, serial: Serial, answers: bool) {
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        if answers && std::mem::take(&mut worker.rebooted) {
            self.report(connection, MILLI, Report::Rebooted);
        }
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        if answers && std::mem::take(&mut worker.released) {
            self.report(connection, MILLI, Report::Released);
        }
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        let described = |worker: &mut crate::daemon::Worker| {
            std::mem::take(&mut worker.describe).then_some(Job::Describe)
        };
        let Some(job) = worker.jobs.pop_front().or_else(|| described(worker)) else { return };
        if let Job::Ask(task, Ask::Recover(epoch)) = job {
            let outcome = self.take_over(slot, serial, epoch);
            self.report(connection, MILLI, Report::Outcome(task, outcome));
            return self.later_work(connection, MILLI);
        }
        if !answers {
            self.set_state(connection, WorkerState::Blocked);
            if job == Job::Probe {
                let pid = self.daemon.workers.get(&connection).map_or(0, |worker| worker.pid);
                self.report(connection, 450 * MILLI, Report::Slow("no answer".to_owned(), pid));
            }
            return self.ours(LIMIT, Action::TimedOut(connection, job));
        }
        let takes_ns = match job {
            Job::Ask(task, ask) => self.execute(connection, (slot, serial), task, &ask),
            Job::Describe => {
                let takes_ns = self.rng.within(MILLI..5 * MILLI);
                let described = self.world.machine(slot, serial).map(crate::world::Machine::describe);
                described.into_iter().for_each(|of| self.report(connection, takes_ns, Report::Described(of)));
                takes_ns
            }
            Job::Probe => self.rng.within(MILLI..5 * MILLI),
        };
        self.set_state(connection, WorkerState::Blocked);
        self.ours(takes_ns, Action::Done(connection));
    }

    /// A worker has carried out what it was asked.
    pub(crate) fn done(&mut self, connection: ConnectionId) {
        self.set_state(connection, WorkerState::Serving);
        self.work(connection);
    }

    /// The time for an answer is over, or the answer has come.
    pub(crate) fn timed_out(&mut self, connection: ConnectionId, job: Job) {
        let Some(worker) = self.daemon.workers.get_mut(&connection) else { return };
        worker.state = WorkerState::Serving;
        let (slot, serial) = (worker.slot, worker.machine);
        let Some(machine) = self.world.machine(slot, serial) else { return self.over(connection) };
        if machine.answers() {
            if job == Job::Probe {
                self.report(connection, 0, Report::Prompt);
            } else if let Some(worker) = self.daemon.workers.get_mut(&connection) {
                worker.jobs.push_front(job);
            }
            return self.work(connection);
        }
        let late = self.rng.chance(500);
        if let Job::Ask(task, ask) = job {
            // What comes before the order itself does not begin a migration.
            let migrates = matches!(ask, Ask::Migrate(..));
            let before = migrates && self.rng.chance(300);
            let command = match migrates {
                true if before => "migrate-set-capabilities".to_owned(),
                true => "migrate".to_owned(),
                false => format!("{ask:?}"),
            };
            if late && !before {
                self.carried_out_late(slot, serial, &ask);
            }
            let timeout = VmError::Timeout { vm: "a VM".to_owned(), command, limit_ms: 1000 };
            self.report(connection, 0, Report::Outcome(task, ask.failed(timeout)));
        }
        self.silent(connection, "no answer in time");
    }

    /// Carries out what a machine that answers is asked. Returns how long it takes.
    fn execute(
        &mut self,
        connection: ConnectionId,
        (slot, serial): (Slot, Serial),
        task: TaskId,
        ask: &Ask,
    ) -> u64 {
        let takes_ns = match ask {
            Ask::Migrate(..) => self.rng.within(MILLI..50 * MILLI),
            Ask::Replug(..) => self.rng.within(200 * MILLI..1500 * MILLI),
            _ => self.rng.within(10 * MILLI..200 * MILLI),
        };
        let outcome = match ask {
            Ask::Attach(epoch) => self.attach(slot, serial, *epoch),
            Ask::Detach => Outcome::Detached(self.detach(slot, serial)),
            Ask::Replug(vcpu, node) => {
                self.machine_event(slot, |worker| worker.describe = true);
                Outcome::Replugged(self.replug(slot, serial, *vcpu, *node))
            }
            Ask::Recover(epoch) => self.take_over(slot, serial, *epoch),
            Ask::Mark(marked) => Outcome::Marked(self.mark(slot, serial, *marked)),
            Ask::Migrate(_, post_copy) => {
                Outcome::MigrationBegun(self.begin_migration(slot, serial, *post_copy))
            }
            Ask::LookAtMigration | Ask::SwitchMigration | Ask::CancelMigration => {
                Outcome::Migration(self.look_at_migration(slot, serial, ask))
            }
            // No request leads to it.
            Ask::Resize(..) => Outcome::Resized(Ok(())),
        };
        self.report(connection, takes_ns, Report::Outcome(task, outcome));
        takes_ns
    }

    pub(crate) fn plug_device(&mut self, slot: Slot, serial: Serial, record: bool) {
        let device = self.world.serial();
        if let Some(machine) = self.world.machine_mut(slot, serial) {
            machine.device = Some(Device { serial: device, page: None, record });
        }
    }

    fn attach(&mut self, slot: Slot, serial: Serial, epoch: u32) -> Outcome {
        let vm = || "a VM".to_owned();
        let Some(machine) = self.world.machine(slot, serial) else {
            return Outcome::Attached(Err(VmError::Disconnected { vm: vm() }.into()));
        };
        if machine.device.is_some() {
            return Outcome::Attached(Err(VmError::AlreadyAttached { vm: vm() }.into()));
        }
        if machine.migrates() {
            return Outcome::Attached(Err(migration::busy("device_add").into()));
        }
        if self.chaotic && self.rng.chance(30) {
            return Outcome::Attached(Err(VmError::NoFreePort { vm: vm() }.into()));
        }
        self.plug_device(slot, serial, true);
        self.count("attaches");
        Outcome::Attached(Ok(u64::from(epoch) << 32 | 1))
    }

    fn detach(&mut self, slot: Slot, serial: Serial) -> Result<(), VmError> {
        let vm = || "a VM".to_owned();
        let chaotic = self.chaotic;
        let Some(machine) = self.world.machine_mut(slot, serial) else {
            return Err(VmError::Disconnected { vm: vm() });
        };
        let Some(device) = &machine.device else { return Err(VmError::NotAttached { vm: vm() }) };
        let device = device.serial;
        if machine.migrates() {
            return Err(migration::busy("device_del"));
        }
        if chaotic && !machine.guest.cooperates {
            // One that boots does not even see it, and has to be asked again.
            if self.rng.chance(500) {
                let after_ns = self.rng.within(SECOND..10 * SECOND);
                self.later(after_ns, Action::LetGo(slot, serial, device));
            }
            return Err(VmError::DetachPending { vm: vm(), limit_ms: 5000 });
        }
        machine.device = None;
        self.count("detaches");
        Ok(())
    }

    /// A guest lets go of a device late.
    pub(crate) fn let_go(&mut self, slot: Slot, serial: Serial, device: Serial) {
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        if machine.device.as_ref().is_some_and(|known| known.serial == device) {
            machine.device = None;
            self.machine_event(slot, |worker| worker.released = true);
        }
    }

    fn take_over(&mut self, slot: Slot, serial: Serial, epoch: u32) -> Outcome {
        let fails = self.chaotic && self.rng.chance(20);
        let device = self.world.machine(slot, serial).and_then(|machine| machine.device.as_ref());
        let can = device.is_some_and(|device| device.record) && !fails;
        let source = std::io::Error::other("no record of its channel");
        self.count(if can { "channels taken over" } else { "channels lost" });
        Outcome::Recovered(match can {
            true => Ok(u64::from(epoch) << 32 | 1),
            false => Err(Refusal::System { vm: "a VM".to_owned(), source }),
        })
    }

    fn replug(&mut self, slot: Slot, serial: Serial, vcpu: u32, node: u32) -> Result<Replugged, VmError> {
        let vm = || "a VM".to_owned();
        let now_ns = self.now_ns;
        let Some(mut machine) = self.world.machine(slot, serial).cloned() else {
            return Err(VmError::Disconnected { vm: vm() });
        };
        if machine.migrates() {
            return Err(migration::busy("device_add"));
        }
        let Some(old) = machine.vcpus.get(&vcpu).copied() else {
            return Err(VmError::NoVcpu { vm: vm(), vcpu });
        };
        let Some(slots) = machine.spare.get_mut(&node).filter(|slots| **slots > 0) else {
            return Err(VmError::NoSpareSlot { vm: vm(), node });
        };
        if self.chaotic && self.rng.chance(100) {
            return Err(VmError::PlugIgnored { vm: vm(), limit_ms: 1000 });
        }
        *slots -= 1;
        let (apic_id, tid) = self.world.plug(slot, &mut machine, node, &mut self.rng, now_ns);
        let before = self.world.threads.get(&old.tid).map(|thread| (thread.at, thread.mask.cpus.clone()));
        if let (Some(thread), Some((at, cpus))) = (self.world.threads.get_mut(&tid), before) {
            thread.at = at;
            // It gets the affinity of the old one.
            thread.mask.set(cpus);
        }
        *machine.spare.entry(old.boot).or_default() += 1;
        let refuses = !machine.guest.cooperates;
        self.world.places[slot].machine = Some(machine);
        if refuses {
            return Err(VmError::UnplugPending { vm: vm(), vcpu, limit_ms: 1000 });
        }
        self.world.unplug(slot, vcpu);
        self.thread_ended(old.tid);
        self.count("replugs");
        if self.chaotic && self.rng.chance(50) {
            let source = Box::new(VmError::Disconnected { vm: vm() });
            return Err(VmError::ReplugUndescribed { vm: vm(), vcpu, new: apic_id, source });
        }
        let pid = self.world.machine(slot, serial).map_or(0, |machine| machine.pid);
        let location = self.world.read(pid, tid, now_ns);
        let described = self.world.machine(slot, serial).map(crate::world::Machine::describe);
        let Some(description) = described else { return Err(VmError::Disconnected { vm: vm() }) };
        Ok(Replugged { plugged: Plugged { apic_id, tid }, description, location })
    }

    /// An event that a machine's monitor reports to its clients.
    pub(crate) fn machine_event(&mut self, slot: Slot, note: impl Fn(&mut crate::daemon::Worker)) {
        let serial = self.world.places[slot].machine.as_ref().map(|machine| machine.serial);
        let mut wake = Vec::new();
        for (connection, worker) in &mut self.daemon.workers {
            if worker.slot == slot && Some(worker.machine) == serial && worker.state != WorkerState::Handshake
            {
                note(worker);
                wake.push(*connection);
            }
        }
        wake.into_iter().for_each(|connection| self.later_work(connection, MILLI));
    }

    /// A machine answers again, or its process runs on.
    pub(crate) fn recover(&mut self, slot: Slot, serial: Serial) {
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        (machine.hung, machine.stopped) = (false, None);
        if machine.guest.driver != Driver::Deaf && machine.device.is_some() {
            self.ring(slot);
        }
        self.process_changed(slot);
        self.machine_event(slot, |_| {});
    }
}
