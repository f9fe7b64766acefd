//! A simulated daemon: the core that ships, and what the shell around it keeps.

use crate::world::{Serial, Slot};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use vnuma_daemon::core::{
    Core,
    event::{Ask, Event, MaskOrder, Report},
};
use vnuma_model::{ApicId, CpuSet, HostNodeId};
use vnuma_policy::world::{ConnectionId, StopReason, TaskId, VmId};
use vnuma_process::ActError;

/// What a connection's worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// Waiting for the greeting.
    Handshake,
    /// Carrying out what is asked.
    Serving,
    /// In the middle of a command.
    Blocked,
    /// Waiting until the machine answers.
    Silent,
    /// It has reported its end.
    Over,
}

/// What a worker is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    /// To ask a machine something.
    Ask(TaskId, Ask),
    /// To describe it.
    Describe,
    /// To probe whether it answers.
    Probe,
}

/// A connection to a machine.
#[derive(Debug)]
pub struct Worker {
    /// Whose.
    pub vm: VmId,
    /// To which machine.
    pub slot: Slot,
    /// To which machine.
    pub machine: Serial,
    /// Its process.
    pub pid: i32,
    /// What it is doing.
    pub state: WorkerState,
    /// What it is to do.
    pub jobs: VecDeque<Job>,
    /// When its last report arrives: the next one comes no sooner.
    pub last_ns: u64,
    /// The guest rebooted, or let go of the device, and that is to be reported.
    pub rebooted: bool,
    /// The same of the device.
    pub released: bool,
    /// The VM is to be described.
    pub describe: bool,
}

/// A process that is watched.
#[derive(Clone, Copy, Debug)]
pub struct WatchedProcess {
    /// Its number.
    pub pid: i32,
    /// The machine, if there was a pidfd.
    pub machine: Option<(Slot, Serial)>,
    /// How it was found last.
    pub stopped: Option<StopReason>,
}

/// Something that arrives in the inbox.
#[derive(Debug)]
pub enum Message {
    /// An event for the core. Location events are lost when the inbox is full.
    Event(Event),
    /// A guest rang: machine, device, and the generation that it acknowledges.
    Doorbell(Slot, Serial, u64),
    /// A worker reports.
    Report(ConnectionId, Report),
    /// A move has ended.
    Moved(TaskId, i32, bool, i32),
    /// Masks were set, or not.
    Confined(TaskId, i32, Vec<(ApicId, i32, Result<(), ActError>)>),
}

/// A move to be made.
#[derive(Clone, Debug)]
pub struct MoveOrder {
    /// Which one it is.
    pub task: TaskId,
    /// Its process.
    pub pid: i32,
    /// The machine, if there was a pidfd.
    pub machine: Option<(Slot, Serial)>,
    /// Its thread.
    pub tid: i32,
    /// Where to.
    pub node: HostNodeId,
    /// The CPUs of that node, as the core knows it.
    pub cpus: CpuSet,
}

/// Masks to be set, or to be given back.
#[derive(Clone, Debug)]
pub struct ConfineOrder {
    /// Which one it is.
    pub task: TaskId,
    /// Its process.
    pub pid: i32,
    /// The machine, if there was a pidfd.
    pub machine: Option<(Slot, Serial)>,
    /// The masks. `None`: all are given back by the record.
    pub masks: Option<Vec<MaskOrder>>,
    /// They are not set, and said to be.
    pub lost: bool,
}

/// Moves that are under way, of one daemon.
#[derive(Debug, Default)]
pub struct MemoryMoves {
    /// The number of the last one.
    pub last: u64,
    /// The task, the number, and the bytes at most of each.
    pub under_way: BTreeMap<VmId, (TaskId, u64, u64)>,
}

/// A daemon.
pub struct Daemon {
    /// The core that ships.
    pub core: Core,
    /// Open channels: the machine, the device, and the next generation.
    pub channels: BTreeMap<VmId, (Slot, Serial, u64)>,
    /// Connections.
    pub workers: BTreeMap<ConnectionId, Worker>,
    /// The machine that each VM's connection found, and its process.
    pub pidfds: BTreeMap<VmId, (i32, Slot, Serial)>,
    /// Watched threads and their processes.
    pub threads: BTreeMap<i32, i32>,
    /// Watched processes.
    pub processes: BTreeMap<VmId, WatchedProcess>,
    /// Threads that are to be looked at, each once.
    pub looks: VecDeque<(i32, i32)>,
    /// The same, for a quick look.
    pub looked_for: BTreeSet<i32>,
    /// Messages that wait while the daemon is stopped.
    pub inbox: VecDeque<Message>,
    /// When the mover is done with what it has.
    pub mover_ns: u64,
    /// Threads that are counted: the process, vCPUs and threads of each VM.
    pub counted: BTreeMap<VmId, (i32, Vec<(ApicId, i32)>)>,
    /// When they were read last.
    pub sampled_ns: u64,
    /// Moves of memory.
    pub memory: MemoryMoves,
    /// When the last reading arrives: the next one comes no sooner.
    pub reading_due_ns: u64,
}

impl Daemon {
    /// One that has just started.
    pub fn new(core: Core) -> Self {
        Self {
            core,
            channels: BTreeMap::new(),
            workers: BTreeMap::new(),
            pidfds: BTreeMap::new(),
            threads: BTreeMap::new(),
            processes: BTreeMap::new(),
            looks: VecDeque::new(),
            looked_for: BTreeSet::new(),
            inbox: VecDeque::new(),
            mover_ns: 0,
            counted: BTreeMap::new(),
            sampled_ns: 0,
            memory: MemoryMoves::default(),
            reading_due_ns: 0,
        }
    }

    /// The machine that the VM's connection found, if this is its process.
    pub fn machine_of(&self, vm: VmId, pid: i32) -> Option<(Slot, Serial)> {
        self.pidfds.get(&vm).filter(|(known, ..)| *known == pid).map(|(_, slot, serial)| (*slot, *serial))
    }

    /// Does the core serve a channel for it?
    pub fn serves(&self, vm: VmId) -> bool {
        let known = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref());
        known.is_some_and(|vm| vm.channel.generation().is_some())
    }
}
