//! Faults put in on purpose, between the core and everything else: a core that had them would be found.

use std::collections::BTreeMap;
use vnuma_daemon::core::event::{Ask, Command, Event, Report};
use vnuma_policy::{
    Publication, SettlePolicy,
    world::{TaskId, VmId},
};
use vnuma_random::Rng;

/// What a buggy core would do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Fault {
    /// A publication is lost on the way out.
    DropPublication,
    /// One goes out twice.
    RepeatPublication,
    /// One has the node of a vCPU that was right before.
    StaleNode,
    /// Two VMs get each other's.
    SwapPublications,
    /// One has a generation that was used before.
    OldGeneration,
    /// Distances between guest nodes are not published.
    OldDistances,
    /// Nodes of devices are not published.
    OldDevices,
    /// More are published in a second than the policy allows.
    IgnoreCap,
    /// Drift is published at once.
    IgnoreDwell,
    /// A vCPU counts as calm too soon.
    IgnoreCalm,
    /// Deadlines are announced too late.
    LateDeadline,
    /// A request is not answered.
    DropAnswer,
    /// A failed move is said to be made.
    DenyFailure,
    /// A thread stays watched.
    ForgetUnwatch,
    /// A thread is not watched.
    DropWatch,
    /// A process stays watched.
    ForgetUnwatchProcess,
    /// A process is not watched.
    DropWatchProcess,
    /// A connection stays open.
    LeakConnection,
    /// A channel stays open.
    LeakChannel,
    /// An acknowledgement counts for another generation.
    MisreadAcknowledgement,
    /// The thread of another VM is moved.
    MoveForeignThread,
    /// A vCPU is moved to the CPUs of another node.
    MoveElsewhere,
    /// A policy confines a vCPU to CPUs that its operator does not allow.
    MaskBeyondOperator,
    /// A mask that was read before another one was set is believed.
    StaleMask,
    /// A mask is not given back.
    KeepMask,
    /// Threads that run no vCPU do not get their masks again.
    KeepOthers,
    /// Memory of a guest node goes to another node than its home.
    MemoryElsewhere,
    /// Memory of a VM is moved while it is being moved.
    MemoryTwice,
    /// A VM gets the order to migrate twice.
    MigrateTwice,
    /// A VM that is to migrate is not marked.
    DropMark,
    /// Something is asked while it is being done.
    AskTwice,
    /// Lost events are not healed.
    IgnoreResync,
    /// The end of a process is not noticed.
    IgnoreEnd,
}

/// Something to be done.
#[derive(Debug)]
pub struct Todo {
    /// What.
    pub command: Command,
    /// A failure is reported to the core as a success.
    pub lost: bool,
}

/// A fault at work.
#[derive(Debug)]
pub struct Saboteur {
    fault: Option<Fault>,
    rng: Rng,
    kept: Option<(VmId, Publication)>,
    before: BTreeMap<VmId, Publication>,
    last_move: Option<(i32, i32)>,
    /// How often it struck.
    pub strikes: u64,
}

impl Saboteur {
    /// A fault, or none.
    pub fn new(fault: Option<Fault>, seed: u64) -> Self {
        Self { fault, rng: Rng::new(!seed), kept: None, before: BTreeMap::new(), last_move: None, strikes: 0 }
    }

    fn strikes(&mut self, per_mille: u64) -> bool {
        let strikes = self.rng.chance(per_mille);
        self.strikes += u64::from(strikes);
        strikes
    }

    /// The policy that the core gets.
    pub fn policy(&self, policy: SettlePolicy) -> SettlePolicy {
        match self.fault {
            Some(Fault::IgnoreCap) => SettlePolicy { max_per_second: policy.max_per_second * 4, ..policy },
            Some(Fault::IgnoreDwell) => SettlePolicy { dwell_ns: policy.dwell_ns / 4, ..policy },
            Some(Fault::IgnoreCalm) => SettlePolicy { calm_ns: policy.calm_ns / 4, ..policy },
            _ => policy,
        }
    }

    /// The deadline that the core announces.
    pub fn deadline(&self, deadline_ns: Option<u64>) -> Option<u64> {
        let late_ns = if self.fault == Some(Fault::LateDeadline) { 3_000_000_000 } else { 0 };
        deadline_ns.map(|deadline_ns| deadline_ns + late_ns)
    }

    /// What the core takes an event for.
    pub fn event(&mut self, event: Event) -> Event {
        match (self.fault, event) {
            (Some(Fault::MisreadAcknowledgement), Event::Acknowledged(vm, generation)) => {
                let off = u64::from(self.strikes(200));
                Event::Acknowledged(vm, generation + off)
            }
            (Some(Fault::StaleMask), Event::Sampled(mut reading)) => {
                self.strikes += 1;
                reading.began_ns = u64::MAX;
                Event::Sampled(reading)
            }
            (Some(Fault::IgnoreResync), Event::Resync) => Event::Woken,
            (Some(Fault::IgnoreEnd), Event::ProcessEnded(..)) => Event::Woken,
            (Some(Fault::DenyFailure), Event::Moved(task, Err(error))) => match self.strikes(500) {
                true => Event::Moved(task, Ok(None)),
                false => Event::Moved(task, Err(error)),
            },
            (Some(Fault::IgnoreEnd), Event::Hypervisor(connection, Report::Ended)) => {
                let lost = vnuma_hypervisor::VmError::Disconnected { vm: String::new() };
                Event::Hypervisor(connection, Report::Lost(lost))
            }
            (_, event) => event,
        }
    }

    /// What comes of commands.
    pub fn commands(&mut self, commands: Vec<Command>) -> Vec<Todo> {
        let Some(fault) = self.fault else {
            return commands.into_iter().map(|command| Todo { command, lost: false }).collect();
        };
        let mut todo = Vec::new();
        for command in commands {
            self.spoil(fault, command, &mut todo);
        }
        todo
    }

    fn spoil(&mut self, fault: Fault, command: Command, todo: &mut Vec<Todo>) {
        let mut push = |command| todo.push(Todo { command, lost: false });
        match (fault, command) {
            (_, Command::Publish(task, generation, publication)) => {
                self.spoil_publication(fault, task, generation, publication, todo);
            }
            (Fault::DropAnswer, Command::Reply(_)) if self.strikes(10) => {}
            (Fault::ForgetUnwatch, Command::Unwatch(_)) if self.strikes(100) => {}
            (Fault::DropWatch, Command::Watch(..)) if self.strikes(2) => {}
            (Fault::ForgetUnwatchProcess, Command::UnwatchProcess(..)) if self.strikes(100) => {}
            (Fault::DropWatchProcess, Command::WatchProcess(..)) if self.strikes(20) => {}
            (Fault::LeakConnection, Command::Disconnect(_)) if self.strikes(100) => {}
            (Fault::LeakChannel, Command::CloseChannel(_)) if self.strikes(200) => {}
            (Fault::MoveForeignThread, Command::Move { task, pid, vcpu, tid, node, cpus }) => {
                let other = self.last_move.replace((pid, tid)).filter(|other| *other != (pid, tid));
                let strikes = self.strikes(50);
                let (_, tid) = other.filter(|_| strikes).unwrap_or((pid, tid));
                push(Command::Move { task, pid, vcpu, tid, node, cpus });
            }
            (Fault::MoveElsewhere, Command::Move { task, pid, vcpu, tid, node, cpus }) => {
                let cpus = if self.strikes(50) { [1 + 8 * (node ^ 1)].into_iter().collect() } else { cpus };
                push(Command::Move { task, pid, vcpu, tid, node, cpus });
            }
            (Fault::MaskBeyondOperator, Command::Confine(task, pid, mut masks)) => {
                for cpus in masks.iter_mut().filter_map(|order| order.cpus.as_mut()) {
                    if self.strikes(50) {
                        (0..64).for_each(|cpu| cpus.insert(cpu));
                    }
                }
                push(Command::Confine(task, pid, masks));
            }
            (Fault::KeepMask, Command::Confine(task, pid, masks)) => {
                let back = masks.iter().any(|order| order.cpus.is_none());
                let lost = back && self.strikes(500);
                todo.push(Todo { command: Command::Confine(task, pid, masks), lost });
            }
            (Fault::KeepOthers, Command::Follow(task, pid, vcpus, cpus)) => {
                let lost = cpus.is_none() && self.strikes(500);
                todo.push(Todo { command: Command::Follow(task, pid, vcpus, cpus), lost });
            }
            (Fault::MemoryElsewhere, Command::MoveMemory(task, pid, mut order)) => {
                if self.strikes(100) {
                    (order.from, order.to) = (order.to, order.from);
                }
                push(Command::MoveMemory(task, pid, order));
            }
            (Fault::MemoryTwice, Command::MoveMemory(task, pid, order)) => {
                push(Command::MoveMemory(task, pid, order.clone()));
                if self.strikes(100) {
                    push(Command::MoveMemory(task, pid, order));
                }
            }
            (Fault::MigrateTwice | Fault::DropMark, command) => self.spoil_migration(fault, command, todo),
            (Fault::AskTwice, Command::Ask(task, connection, ask)) => {
                push(Command::Ask(task, connection, ask.clone()));
                if !matches!(ask, Ask::Migrate(..)) && self.strikes(100) {
                    push(Command::Ask(task, connection, ask));
                }
            }
            (_, command) => push(command),
        }
    }

    fn spoil_migration(&mut self, fault: Fault, command: Command, todo: &mut Vec<Todo>) {
        match (fault, command) {
            (Fault::MigrateTwice, Command::Ask(task, connection, ask @ Ask::Migrate(..))) => {
                let again = self.strikes(100).then(|| ask.clone());
                for ask in [Some(ask), again].into_iter().flatten() {
                    todo.push(Todo { command: Command::Ask(task, connection, ask), lost: false });
                }
            }
            (Fault::DropMark, Command::Ask(task, connection, Ask::Mark(true))) => {
                let lost = self.strikes(200);
                todo.push(Todo { command: Command::Ask(task, connection, Ask::Mark(true)), lost });
            }
            (_, command) => todo.push(Todo { command, lost: false }),
        }
    }

    fn spoil_publication(
        &mut self,
        fault: Fault,
        task: TaskId,
        generation: u64,
        mut publication: Publication,
        todo: &mut Vec<Todo>,
    ) {
        let vm = task.vm;
        let known = self.before.insert(vm, publication.clone());
        let before = known.filter(|before| before.vcpus.len() == publication.vcpus.len());
        let (mut lost, mut again, mut used) = (false, false, generation);
        match fault {
            Fault::DropPublication => lost = self.strikes(10),
            Fault::RepeatPublication => again = self.strikes(10),
            Fault::OldGeneration => used -= u64::from(generation as u32 > 2 && self.strikes(10)) * 2,
            Fault::StaleNode => {
                if let Some(before) = before.filter(|before| before.vcpus != publication.vcpus) {
                    publication.vcpus = before.vcpus;
                    self.strikes += 1;
                }
            }
            Fault::OldDistances => {
                if let Some(before) = before.filter(|before| before.distances != publication.distances) {
                    publication.distances = before.distances;
                    self.strikes += 1;
                }
            }
            Fault::OldDevices => {
                if let Some(before) = before.filter(|before| before.devices != publication.devices) {
                    publication.devices = before.devices;
                    self.strikes += 1;
                }
            }
            Fault::SwapPublications => {
                if let Some((other, kept)) = self.kept.take()
                    && other != vm
                    && kept.vcpus.len() == publication.vcpus.len()
                {
                    publication.vcpus = kept.vcpus;
                    self.strikes += 1;
                } else {
                    self.kept = Some((vm, publication.clone()));
                }
            }
            _ => {}
        }
        let copy = again.then(|| publication.clone());
        todo.push(Todo { command: Command::Publish(task, used, publication), lost });
        todo.extend(copy.map(|copy| Todo { command: Command::Publish(task, used, copy), lost: false }));
    }
}
