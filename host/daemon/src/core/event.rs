//! The core's input (events) and output (commands), as plain data.

use super::{
    refusal::Refusal,
    reply::{Reply, ReplyTo},
};
use vnuma_api as api;
use vnuma_hypervisor::{Plugged, VmError};
use vnuma_model::{
    ApicId, CpuSet, GuestNodeId, HostNodeId, HostTopology, MigrationProgress, Party, Steal, Vcpu,
    VcpuLocation, VmCandidate, VmDescription, VmHandle,
};
use vnuma_policy::{
    Publication,
    hotness::Hotness,
    memory_move::{MemoryPolicy, MoveMemory},
    residency::{MemoryArea, MemoryObservation},
    scheduling::Policy,
    world::{
        ConnectionId, DriverStatus, HostReading, Mechanism, MemoryMoved, RehomeWish, RequestId, ResizeWish,
        StopReason, TaskId, VmId,
    },
};
use vnuma_process::ActError;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// The backends listed their VMs, or failed to.
    Scanned(Result<Vec<VmCandidate>, String>),
    /// Over a connection to a hypervisor.
    Hypervisor(ConnectionId, Report),
    /// Where a watched thread is, after it moved or was read again. `None`: it could not be read.
    Located(i32, Option<VcpuLocation>),
    /// A thread that is watched has ended.
    ThreadEnded(i32),
    /// A guest has acknowledged a generation.
    Acknowledged(VmId, u64),
    /// What a guest's driver reports of itself. It may be what it reported before.
    Driver(VmId, DriverStatus),
    /// A publication was written, with the generation of the next one; or it failed.
    Published(TaskId, Result<u64, Refusal>),
    /// A move was made, with the vCPU's location after it; or it failed.
    Moved(TaskId, Result<Option<VcpuLocation>, ActError>),
    /// A period of the counted threads has ended.
    Sampled(Box<HostReading>),
    /// vCPUs were confined, or got their operator's masks again, each with its location after it; or it failed.
    Confined(TaskId, Vec<(ApicId, Result<Made, ActError>)>),
    /// The threads of a process that run no vCPU were kept to CPUs, or got their operators' masks again; or a part of them
    /// was not.
    Followed(TaskId, Result<Followed, String>),
    /// Memory of a process was looked at, or could not be.
    MemoryObserved(TaskId, Result<MemoryObservation, String>),
    /// How hot memory of a process is was watched, or could not be.
    HotnessWatched(TaskId, Result<Hotness, String>),
    /// Memory of a process was moved: how far it has got, and whether that is all.
    MemoryMoved(TaskId, MemoryMoved, bool),
    /// scx_vnuma was loaded, or has ended.
    Switched(Switch),
    /// Masks that policies had set in a process were given back, or a part of them was not.
    MasksRestored(TaskId, Result<usize, String>),
    /// A watched process runs, or is stopped.
    ProcessState(VmId, i32, Option<StopReason>),
    /// Looks at a watched process do not return, or do again.
    LooksHang(VmId, i32, bool),
    /// The main loop of a watched process is busy or stuck. Only a probe shows which.
    MainLoopBusy(VmId, i32),
    /// A process that is watched has ended.
    ProcessEnded(VmId, i32),
    /// The host has other CPUs, nodes or distances.
    HostChanged(HostTopology),
    /// An operator wants something.
    Requested(RequestId, Request),
    /// It is time to read everything again, in case an event was lost.
    Resync,
    /// Time has passed.
    Woken,
}

/// A step that was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Where the vCPU is after it, if that could be read.
    pub location: Option<VcpuLocation>,
    /// How it was made.
    pub by: Mechanism,
}

impl From<Option<VcpuLocation>> for Made {
    /// By an affinity.
    fn from(location: Option<VcpuLocation>) -> Self {
        Self { location, by: Mechanism::Affinity }
    }
}

/// Threads that run no vCPU, after they were kept to CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// How many are kept.
    pub threads: usize,
    /// The mask of the main thread, if it is kept, and its operator's.
    pub inherited: Option<(CpuSet, CpuSet)>,
}

/// Places of policies are set in another way now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// From now on.
    pub to: Mechanism,
    /// What there is to say about it.
    pub why: String,
    /// Threads that had a place, and whether that is set in the new way. If not, they have their operator's mask.
    pub threads: Vec<(i32, bool)>,
}

/// A vCPU that a policy schedules, for scx_vnuma.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranked {
    /// Its thread.
    pub tid: i32,
    /// LLC references in a million instructions; 0 if not known.
    pub pressure: u32,
}

/// What a connection reports.
#[derive(Debug)]
pub enum Report {
    /// The hypervisor has greeted and described the VM. Its channel's device is plugged or not.
    Up(VmDescription, bool),
    /// A probe has not been answered yet: the probe, and the process.
    Slow(String, i32),
    /// It was answered after all.
    Prompt,
    /// Nothing is answered: what was asked, and the process.
    Silent(String, i32),
    /// vCPUs observed without the hypervisor: the process, the vCPUs, and whether their APIC ids are certain.
    Observed(i32, Vec<Vcpu>, bool),
    /// There is no connection, or no more. Nothing follows.
    Lost(VmError),
    /// The VM's process has ended. Nothing follows.
    Ended,
    /// The VM was described again.
    Described(VmDescription),
    /// It was not, as the user who wanted it has wanted too many.
    NotDescribed,
    /// What was asked under this id has ended. It is reported once, unless the connection is lost before.
    Outcome(TaskId, Outcome),
    /// It is marked to be attached as soon as it runs, as was found when it greeted.
    FoundMarked,
    /// The VM is at another host.
    Left,
    /// The channel's device is plugged, which need not have been asked for by this process.
    FoundPlugged,
    /// The guest let go of the channel's device.
    Released,
    /// The guest boots again.
    Rebooted,
}

/// What has come of an [`Ask`].
#[derive(Debug)]
pub enum Outcome {
    /// The channel was plugged, with its first generation; or plugging failed.
    Attached(Result<u64, Refusal>),
    /// The channel was unplugged, or unplugging failed.
    Detached(Result<(), VmError>),
    /// A vCPU was replugged, or the replug failed.
    Replugged(Result<Replugged, VmError>),
    /// The channel of an earlier vnumad was taken over, with its next generation; or that failed.
    Recovered(Result<u64, Refusal>),
    /// It is marked, or not, as was asked for; or that could not be changed.
    Marked(Result<(), VmError>),
    /// A migration has begun, or was refused.
    MigrationBegun(Result<(), VmError>),
    /// How far a migration is.
    Migration(Result<MigrationProgress, VmError>),
    /// The hypervisor has offered a guest node memory, or wants some back; or it has refused.
    Resized(Result<(), VmError>),
}

/// A vCPU that was replugged.
#[derive(Clone, Debug)]
pub struct Replugged {
    /// The new vCPU.
    pub plugged: Plugged,
    /// What the VM consists of now.
    pub description: VmDescription,
    /// Where the new vCPU is.
    pub location: Option<VcpuLocation>,
}

/// A request of an operator: of which VM, what, and who gets the answer.
#[derive(Debug)]
pub enum Request {
    /// Attach a topology channel to a VM.
    Attach(String, ReplyTo<api::Vm>),
    /// The same as soon as its guest runs.
    AttachOnArrival(String, ReplyTo<api::Vm>),
    /// Detach the topology channel of a VM.
    Detach(String, ReplyTo<api::Vm>),
    /// Migrate a VM: where to, and whether its guest goes on there before its memory is there.
    Migrate(String, String, bool, ReplyTo<api::Migration>),
    /// Show how far the last migration of a VM is.
    ShowMigration(String, ReplyTo<api::Migration>),
    /// End it.
    CancelMigration(String, ReplyTo<api::Migration>),
    /// Move a vCPU to a host node.
    Move(String, ApicId, HostNodeId, ReplyTo<api::Vm>),
    /// Replug a vCPU to the guest node of where it runs.
    Replug(String, ApicId, ReplyTo<api::Replugged>),
    /// Schedule the vCPUs of a VM by another policy.
    SetPolicy(String, Policy, ReplyTo<api::Scheduling>),
    /// Show where the memory of a VM is.
    ShowMemory(String, ReplyTo<api::VmMemory>),
    /// Show the homes of a VM's guest nodes, and the last re-home.
    ShowRehome(String, ReplyTo<api::Rehome>),
    /// Give a guest node of a VM another home.
    Rehome(String, RehomeWish, ReplyTo<api::Rehome>),
    /// End that.
    StopRehome(String, ReplyTo<api::Rehome>),
    /// Show how large the guest nodes of a VM are, and may be.
    ShowSizes(String, ReplyTo<api::Sizes>),
    /// Size a guest node of a VM.
    Resize(String, ResizeWish, ReplyTo<api::Sizes>),
    /// End all such changes of a VM.
    StopResize(String, ReplyTo<api::Sizes>),
    /// Bring displaced memory of a VM home by another policy.
    SetMemoryPolicy(String, MemoryPolicy, ReplyTo<api::VmMemory>),
}

/// A mask to be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskOrder {
    /// The vCPU.
    pub vcpu: ApicId,
    /// Its thread.
    pub tid: i32,
    /// The mask that it should have. If it has another one, an operator has set that, and it stays.
    pub expected: CpuSet,
    /// Its operator's mask, to be recorded before another one is set.
    pub operator: CpuSet,
    /// A policy's mask. `None`: it gets its operator's.
    pub cpus: Option<CpuSet>,
}

/// What is asked of a hypervisor. An [`Outcome`] follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Plug a channel whose generations have this epoch.
    Attach(u32),
    /// Unplug the channel.
    Detach,
    /// Move a vCPU to a spare slot of a guest node.
    Replug(ApicId, GuestNodeId),
    /// Take over the channel of an earlier vnumad, for generations of this epoch.
    Recover(u32),
    /// Mark the VM to be attached as soon as it runs, or take the mark away.
    Mark(bool),
    /// Begin to migrate: where to, and whether with post-copy.
    Migrate(String, bool),
    /// Say how far the last migration is.
    LookAtMigration,
    /// Have the guest go on at the destination of its migration, and say how far that is.
    SwitchMigration,
    /// Give the migration up, and say how far it is.
    CancelMigration,
    /// Have a memory device, by its id, offer its guest so many bytes.
    Resize(String, u64),
}

impl Ask {
    /// Its outcome if it has failed.
    pub fn failed(&self, error: VmError) -> Outcome {
        match self {
            Self::Attach(_) => Outcome::Attached(Err(error.into())),
            Self::Detach => Outcome::Detached(Err(error)),
            Self::Replug(..) => Outcome::Replugged(Err(error)),
            Self::Recover(_) => Outcome::Recovered(Err(error.into())),
            Self::Mark(_) => Outcome::Marked(Err(error)),
            Self::Migrate(..) => Outcome::MigrationBegun(Err(error)),
            Self::Resize(..) => Outcome::Resized(Err(error)),
            Self::LookAtMigration | Self::SwitchMigration | Self::CancelMigration => {
                Outcome::Migration(Err(error))
            }
        }
    }
}

/// How urgent a line of the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For debugging.
    Debug,
    /// What happened.
    Info,
    /// An operator should know it.
    Warn,
}

/// Something to do. Giving it never waits.
#[derive(Debug)]
pub enum Command {
    /// Connect to what is behind a handle, which is this VM or may turn out to be.
    Connect(VmId, ConnectionId, VmHandle),
    /// Close a connection; its later reports are ignored.
    Disconnect(ConnectionId),
    /// Ask a hypervisor; [`Report::Outcome`] answers.
    Ask(TaskId, ConnectionId, Ask),
    /// Have a VM described again; [`Report::Described`] answers, as it does when the hypervisor says that something has changed. Whose
    /// budget pays: the VM's, for which it may have to wait, that of a user who looks, or none's, if one who may act wants it.
    Describe(ConnectionId, Option<Party>),
    /// Probe whether a hypervisor still answers. Only one that does not has something to report.
    Probe(ConnectionId),
    /// Publish to a guest; [`Event::Published`] answers.
    Publish(TaskId, u64, Publication),
    /// The host's end of a VM's channel is not used any more.
    CloseChannel(VmId),
    /// Remove the channel record of this process, which has ended.
    ForgetRecord(i32),
    /// Watch a thread of a process, and say where it is.
    Watch(i32, i32),
    /// Watch a thread no longer.
    Unwatch(i32),
    /// Moves of these threads are not published, and may be reported late; or, with `false`, at once again.
    Defer(Vec<i32>, bool),
    /// Read the locations of all these threads, in case an event was lost: (process, thread).
    Look(Vec<(i32, i32)>),
    /// Confine a thread to CPUs of a node; [`Event::Moved`] answers.
    Move {
        /// Which one it is.
        task: TaskId,
        /// Its process.
        pid: i32,
        /// The vCPU.
        vcpu: ApicId,
        /// Its thread.
        tid: i32,
        /// The node.
        node: HostNodeId,
        /// Its CPUs.
        cpus: CpuSet,
    },
    /// Count what these threads of a VM's process do, instead of any others of it, and report it once a period; none: do not count.
    Count(VmId, i32, Vec<(ApicId, i32)>),
    /// Set masks of vCPUs of a process; [`Event::Confined`] answers.
    Confine(TaskId, i32, Vec<MaskOrder>),
    /// Keep all threads of a process to CPUs, each within its operator's mask, but these of its vCPUs; [`Event::Followed`] answers. No CPUs:
    /// they get their operators' masks.
    Follow(TaskId, i32, Vec<i32>, Option<CpuSet>),
    /// These threads of a VM are scheduled by a policy, and no others of it. Given once a period.
    Rank {
        /// The VM.
        vm: VmId,
        /// Its process.
        pid: i32,
        /// Its vCPUs; none: its policy does not act any more.
        vcpus: Vec<Ranked>,
        /// Which vCPUs of the host idle CPUs take.
        stealing: Steal,
    },
    /// See whether scx_vnuma is loaded; [`Event::Switched`] follows if that has changed.
    LookForScheduler,
    /// Look at pages of a process; [`Event::MemoryObserved`] answers.
    ObserveMemory(TaskId, i32, Vec<MemoryArea>),
    /// Watch how hot memory of a process is; [`Event::HotnessWatched`] answers.
    WatchHotness(TaskId, i32, Vec<MemoryArea>),
    /// Move memory of a process to another node; [`Event::MemoryMoved`] answers, several times.
    MoveMemory(TaskId, i32, MoveMemory),
    /// End this move of memory.
    StopMemory(TaskId),
    /// Give back all masks that policies have set in a process, by the record of them; [`Event::MasksRestored`] answers.
    RestoreMasks(TaskId, i32),
    /// Give back pins of a VM that no policy wants: of an earlier vnumad, or made after their order was given up. It has no outcome, as
    /// nothing waits for it: each connection that comes about is an occasion to try again.
    SettlePins(VmId),
    /// The operator has set the mask of this thread of a process: the record of it goes.
    ForgetMask(i32, i32),
    /// Watch whether a VM's process runs, instead of any other process of this VM.
    WatchProcess(VmId, i32),
    /// Watch this process of a VM no longer.
    UnwatchProcess(VmId, i32),
    /// Answer a request.
    Reply(Reply),
    /// Give an event to those who watch events.
    Announce(api::Event),
    /// Write a line of the log; one that a VM can cause as often as it likes, if there is one.
    Log(Option<VmId>, Level, String),
}
