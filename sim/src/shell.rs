//! What carries out commands: locator, mover, processes, channels and scanner of the simulated daemon.

use crate::{
    action::{Action, MICRO, MILLI, SECOND},
    daemon::{Job, Message, MoveOrder, WatchedProcess, Worker, WorkerState},
    simulation::Simulation,
    world::{Driver, Serial, Slot, World},
};
use std::io;
use vnuma_daemon::core::{
    Refusal,
    event::{Ask, Command, Event, Outcome, Report},
};
use vnuma_hypervisor::VmError;
use vnuma_model::{Abilities, Destinations, VmCandidate};
use vnuma_policy::{
    Publication,
    world::{ConnectionId, TaskId, VmId},
};

/// Threads that are looked at in one go, and the pause after it.
const AT_ONCE: usize = 64;
const PAUSE: u64 = 100 * MILLI;
/// Time between two checks of a process.
const PROCESS: u64 = 500 * MILLI;
/// Between two scans when nothing is seen to change.
const SCAN: u64 = 5 * SECOND;

impl Simulation {
    /// Carries out a command. Returns its outcome if that is known at once. `lost`: it is not done, and the core
    /// believes that it is.
    pub(crate) fn carry_out(&mut self, command: Command, lost: bool) -> Option<Event> {
        match command {
            Command::Connect(vm, connection, handle) => self.connect(vm, connection, handle.as_str()),
            Command::Disconnect(connection) => drop(self.daemon.workers.remove(&connection)),
            Command::Ask(task, connection, Ask::Mark(_)) if lost => {
                self.report(connection, MILLI, Report::Outcome(task, Outcome::Marked(Ok(()))));
            }
            Command::Ask(task, connection, ask) => self.order(connection, Job::Ask(task, ask)),
            Command::Describe(connection, _) => self.order(connection, Job::Describe),
            Command::Probe(connection) => self.order(connection, Job::Probe),
            Command::Publish(task, generation, publication) => {
                return Some(self.publish(task, generation, publication, lost));
            }
            Command::CloseChannel(vm) => drop(self.daemon.channels.remove(&vm)),
            Command::ForgetRecord(pid) => {
                let known = self.world.places.iter_mut().filter_map(|place| place.machine.as_mut());
                let device = known.filter(|machine| machine.pid == pid).find_map(|m| m.device.as_mut());
                device.into_iter().for_each(|device| device.record = false);
            }
            Command::Watch(pid, tid) => {
                self.daemon.threads.insert(tid, pid);
                self.report_location(pid, tid);
            }
            Command::Unwatch(tid) => drop(self.daemon.threads.remove(&tid)),
            // Its kernel tells of all moves at once.
            Command::Defer(..) => {}
            Command::Look(threads) => self.look(threads),
            Command::Move { task, pid, tid, node, cpus, .. } => {
                let machine = self.daemon.machine_of(task.vm, pid);
                let takes_ns = self.rng.within(5 * MICRO..60 * MICRO);
                self.daemon.mover_ns = self.daemon.mover_ns.max(self.now_ns) + takes_ns;
                let after_ns = self.daemon.mover_ns - self.now_ns;
                self.ours(after_ns, Action::Move(MoveOrder { task, pid, machine, tid, node, cpus }));
            }
            Command::Count(vm, pid, vcpus) => self.count_threads(vm, pid, vcpus),
            Command::Confine(task, pid, masks) => self.order_masks(task, pid, Some(masks), lost),
            Command::Follow(task, pid, _, cpus) => self.order_others(task, pid, cpus, lost),
            Command::RestoreMasks(task, pid) => self.order_masks(task, pid, None, false),
            Command::ForgetMask(_, tid) => self.forget_mask(tid),
            Command::WatchProcess(vm, pid) => {
                let machine = self.daemon.machine_of(vm, pid);
                self.daemon.processes.insert(vm, WatchedProcess { pid, machine, stopped: None });
                self.ours(100 * MICRO, Action::LookAtProcess(vm));
            }
            Command::UnwatchProcess(vm, _) => {
                self.daemon.pidfds.remove(&vm);
                self.daemon.processes.remove(&vm);
            }
            // Its hosts have no scheduler of vnuma's.
            Command::Rank { .. } | Command::LookForScheduler => {}
            Command::ObserveMemory(task, pid, areas) => self.observe_memory(task, pid, &areas),
            Command::WatchHotness(task, pid, areas) => self.watch_hotness(task, pid, &areas),
            Command::MoveMemory(task, _, order) => self.move_memory(task, &order),
            Command::StopMemory(task) => self.end_memory(task.vm, None),
            Command::Reply(reply) => reply.give(),
            Command::SettlePins(_) | Command::Announce(_) | Command::Log(..) => {}
        }
        None
    }

    fn order(&mut self, connection: ConnectionId, job: Job) {
        if let Some(worker) = self.daemon.workers.get_mut(&connection) {
            worker.jobs.push_back(job);
            self.ours(50 * MICRO, Action::Work(connection));
        }
    }

    fn connect(&mut self, vm: VmId, connection: ConnectionId, handle: &str) {
        let slot = World::slot_of(handle);
        let machine = self.world.places[slot].machine.as_ref();
        let failure = match machine {
            None => Some(io::ErrorKind::ConnectionRefused),
            Some(_) if self.rng.chance(if self.chaotic { 10 } else { 0 }) => Some(io::ErrorKind::WouldBlock),
            Some(_) => None,
        };
        let (serial, pid) = machine.map_or((0, 0), |machine| (machine.serial, machine.pid));
        let worker = Worker {
            vm,
            slot,
            machine: serial,
            pid,
            state: WorkerState::Handshake,
            jobs: Default::default(),
            last_ns: 0,
            rebooted: false,
            released: false,
            describe: false,
        };
        self.daemon.workers.insert(connection, worker);
        let Some(kind) = failure else {
            let after_ns = self.rng.within(MILLI..20 * MILLI);
            return self.ours(after_ns, Action::Work(connection));
        };
        if let Some(worker) = self.daemon.workers.get_mut(&connection) {
            worker.state = WorkerState::Over;
        }
        let lost = VmError::Connect { socket: handle.into(), source: kind.into() };
        self.ours(MILLI, Action::Arrive(Message::Report(connection, Report::Lost(lost))));
    }

    fn publish(&mut self, task: TaskId, generation: u64, publication: Publication, lost: bool) -> Event {
        let vm = task.vm;
        let Some(open) = self.daemon.channels.get_mut(&vm) else {
            return Event::Published(task, Err(Refusal::NotAttached { vm: vm.to_string() }));
        };
        if open.2 != generation {
            let source = io::Error::other("the channel is at another generation");
            return Event::Published(task, Err(Refusal::System { vm: vm.to_string(), source }));
        }
        open.2 += 1;
        let (slot, device) = (open.0, open.1);
        if self.chaotic && self.rng.chance(1) {
            let source = io::Error::other("the channel cannot be written");
            return Event::Published(task, Err(Refusal::System { vm: vm.to_string(), source }));
        }
        self.count("publications");
        let machine = self.world.places[slot].machine.as_mut();
        if let Some(machine) = machine
            && let Some(known) = machine.device.as_mut().filter(|known| known.serial == device && !lost)
        {
            known.page = Some((generation, publication));
            self.ring(slot);
        }
        Event::Published(task, Ok(generation + 1))
    }

    /// A guest's interrupt.
    pub(crate) fn ring(&mut self, slot: Slot) {
        let now_ns = self.now_ns;
        let Some(machine) = self.world.places[slot].machine.as_mut() else { return };
        let delay_ns = match machine.guest.driver {
            Driver::Honest { delay_ns } => delay_ns,
            Driver::Forger => MILLI,
            Driver::Deaf => return,
        };
        if !std::mem::replace(&mut machine.guest.applying, true) {
            let boots_ns = machine.guest.boots_until_ns.saturating_sub(now_ns);
            let serial = machine.serial;
            self.later(boots_ns + delay_ns, Action::Apply(slot, serial));
        }
    }

    /// A guest takes over what is in the channel's memory now, and acknowledges that.
    pub(crate) fn apply(&mut self, slot: Slot, serial: Serial) {
        let now_ns = self.now_ns;
        let Some(machine) = self.world.machine_mut(slot, serial) else { return };
        machine.guest.applying = false;
        if machine.guest.boots_until_ns > now_ns || machine.stopped.is_some() {
            return self.ring(slot);
        }
        let Some(device) = &machine.device else { return };
        let Some((generation, publication)) = &device.page else { return };
        let (device, mut generation) = (device.serial, *generation);
        if machine.guest.driver == Driver::Forger {
            generation = generation.wrapping_add(self.rng.within(0..21)).wrapping_sub(10);
        } else {
            for (vcpu, node) in &publication.vcpus {
                machine.guest.used.insert(*vcpu, *node);
            }
        }
        let after_ns = self.rng.within(10 * MICRO..3 * MILLI);
        self.ours(after_ns, Action::Arrive(Message::Doorbell(slot, device, generation)));
    }

    fn report_location(&mut self, pid: i32, tid: i32) {
        let at = self.world.read(pid, tid, self.now_ns);
        self.soon(2 * MILLI, Event::Located(tid, at));
    }

    fn look(&mut self, threads: Vec<(i32, i32)>) {
        let idle = self.daemon.looks.is_empty();
        for (pid, tid) in threads {
            if self.daemon.looked_for.insert(tid) {
                self.daemon.looks.push_back((pid, tid));
            }
        }
        if idle {
            self.ours(MICRO, Action::LookAtThreads);
        }
    }

    /// Some threads are looked at, no more of them if events were lost.
    pub(crate) fn look_at_threads(&mut self) {
        let most = if self.chaotic { AT_ONCE } else { usize::MAX };
        for _ in 0..most.min(self.daemon.looks.len()) {
            let Some((pid, tid)) = self.daemon.looks.pop_front() else { break };
            self.daemon.looked_for.remove(&tid);
            if self.daemon.threads.get(&tid) == Some(&pid) {
                self.report_location(pid, tid);
            }
        }
        if !self.daemon.looks.is_empty() {
            self.ours(PAUSE, Action::LookAtThreads);
        }
    }

    /// A thread is somewhere else: an event says so, or is lost, or comes twice.
    pub(crate) fn thread_moved(&mut self, tid: i32) {
        let Some(&pid) = self.daemon.threads.get(&tid) else { return };
        let Some(at) = self.world.threads.get(&tid).filter(|thread| thread.pid == pid).map(|t| t.at) else {
            return;
        };
        self.count("location events");
        let rate = if self.chaotic { 20 } else { 0 };
        if self.rng.chance(rate) {
            return self.count("location events lost");
        }
        let most_ns = if self.rng.chance(20) { 300 * MILLI } else { MILLI };
        self.soon(most_ns, Event::Located(tid, Some(at)));
        if self.rng.chance(rate) {
            self.soon(200 * MILLI, Event::Located(tid, Some(at)));
        }
    }

    /// A thread has ended.
    pub(crate) fn thread_ended(&mut self, tid: i32) {
        let lost = self.chaotic && self.rng.chance(50);
        if self.daemon.threads.contains_key(&tid) && !lost {
            self.soon(3 * MILLI, Event::ThreadEnded(tid));
        }
    }

    /// The mover makes a move.
    pub(crate) fn make_move(&mut self, order: &MoveOrder) {
        let thread = self.world.threads.get(&order.tid);
        let is_it = thread.is_some_and(|thread| Some((thread.slot, thread.machine)) == order.machine);
        let there = self.world.host.topology.node(order.node).is_some_and(|n| !n.cpus.is_empty());
        let done = is_it && there && !(self.chaotic && self.rng.chance(20));
        if done {
            self.world.put(order.tid, order.node, &order.cpus, &mut self.rng, self.now_ns);
            self.forget_mask(order.tid);
            self.thread_moved(order.tid);
        }
        self.count(if done { "moves made" } else { "moves refused" });
        let moved = Message::Moved(order.task, order.pid, done, order.tid);
        let after_ns = self.rng.within(MICRO..2 * MILLI);
        self.ours(after_ns, Action::Arrive(moved));
    }

    /// Watchers of a machine's process will see its new state.
    pub(crate) fn process_changed(&mut self, slot: Slot) {
        let watchers: Vec<_> = self.daemon.processes.iter().map(|(vm, process)| (*vm, *process)).collect();
        for (vm, process) in watchers {
            if process.machine.is_some_and(|(known, _)| known == slot) {
                let after_ns = self.rng.within(0..PROCESS);
                self.ours(after_ns, Action::LookAtProcess(vm));
            }
        }
    }

    /// A look at a process that is watched.
    pub(crate) fn look_at_process(&mut self, vm: VmId) {
        let Some(process) = self.daemon.processes.get_mut(&vm) else { return };
        let (pid, Some((slot, serial))) = (process.pid, process.machine) else { return };
        let Some(machine) = self.world.machine(slot, serial) else {
            self.ours(PROCESS, Action::LookAtProcess(vm));
            return self.event(Event::ProcessEnded(vm, pid));
        };
        let (stopped, hung) = (machine.stopped, machine.hung);
        if std::mem::replace(&mut process.stopped, stopped) != stopped {
            self.event(Event::ProcessState(vm, pid, stopped));
        } else if hung && stopped.is_none() {
            self.ours(PROCESS, Action::LookAtProcess(vm));
            self.event(Event::MainLoopBusy(vm, pid));
        }
    }

    /// The backends list what there is.
    pub(crate) fn scan(&mut self, again: bool) {
        if again {
            self.ours(SCAN, Action::Scan(true));
        } else {
            self.scan_soon = false;
        }
        if self.chaotic && self.rng.chance(50) {
            return self.event(Event::Scanned(Err("the directory cannot be read".to_owned())));
        }
        let migrates = Some(Destinations { schemes: &["tcp:"], programs: &[] });
        let abilities = Abilities { migrates, ..Abilities::default() };
        let candidate = |place: &crate::world::Place| {
            VmCandidate::new(place.handle.as_str(), place.name.as_str(), place.instance).with(abilities)
        };
        let listed = self.world.places.iter().filter(|place| place.listed).map(candidate).collect();
        self.event(Event::Scanned(Ok(listed)));
    }

    /// The backends' directory has changed.
    pub(crate) fn scan_soon(&mut self) {
        if !std::mem::replace(&mut self.scan_soon, true) {
            self.ours(300 * MILLI, Action::Scan(false));
        }
    }
}
