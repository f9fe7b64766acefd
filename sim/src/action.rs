//! What is to happen in a run, and how often it goes wrong.

use crate::{
    daemon::{ConfineOrder, Job, Message, MoveOrder},
    world::{Serial, Slot},
};
use vnuma_policy::world::{ConnectionId, VmId};

/// A microsecond, in nanoseconds.
pub const MICRO: u64 = 1_000;
/// A millisecond, in nanoseconds.
pub const MILLI: u64 = 1_000_000;
/// A second, in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;

/// Something that is to happen.
#[derive(Debug)]
pub enum Action {
    /// Something arrives at the daemon.
    Arrive(Message),
    /// A worker goes on.
    Work(ConnectionId),
    /// A command to a machine that hangs has timed out.
    TimedOut(ConnectionId, Job),
    /// A command has been carried out.
    Done(ConnectionId),
    /// A process is looked at.
    LookAtProcess(VmId),
    /// Some threads are looked at.
    LookAtThreads,
    /// The mover makes a move.
    Move(MoveOrder),
    /// The mover sets masks, or gives them back.
    Confine(ConfineOrder),
    /// A period of the counted threads has ended.
    Sample,
    /// A move of a VM's memory ends, if it has not ended already.
    EndMemory(VmId, u64),
    /// A guest takes over what is published.
    Apply(Slot, Serial),
    /// A guest lets go of a device late.
    LetGo(Slot, Serial, Serial),
    /// A machine answers again, or its process runs on.
    Recover(Slot, Serial),
    /// A migration ends.
    EndMigration(Slot, Serial),
    /// The process of a machine ends whose guest has left.
    EndLeft(Slot, Serial),
    /// A guest arrives in a machine that waits for it.
    GuestArrives(Slot, Serial),
    /// Something goes wrong.
    Chaos(Chaos),
    /// A thread is carried elsewhere.
    Carry(i32),
    /// An operator moves a vCPU of this VM.
    AskMove(Slot),
    /// The backends list what there is, as they do now and then, or because something changed.
    Scan(bool),
    /// Everything is looked at again.
    Resync,
    /// The checker checks everything.
    Sweep,
}

/// Something that happens again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumIter)]
pub enum Chaos {
    /// A load balancer carries a thread elsewhere.
    Migrate,
    /// Somebody confines a thread to a node, or no longer.
    Confine,
    /// The kernel changes an affinity without an event.
    SilentAffinity,
    /// An operator moves a vCPU.
    AskMove,
    /// An operator wants a channel.
    AskAttach,
    /// An operator wants none.
    AskDetach,
    /// An operator wants a vCPU replugged.
    AskReplug,
    /// An operator sets a policy.
    AskPolicy,
    /// An operator sets a memory policy, or wants to see where memory is.
    AskMemory,
    /// An operator has a VM migrated, or cancels that.
    AskMigration,
    /// Several operators want different things of one VM, or of one that is not there.
    AskAll,
    /// A thread finds no rest, and is carried on before its dwell is over.
    Wander,
    /// An operator moves vCPUs of one VM more often than may be published.
    Storm,
    /// A QEMU hangs for a while.
    Hang,
    /// A process is stopped for a while.
    Stop,
    /// A connection breaks.
    Disconnect,
    /// A QEMU ends; often another one starts at its handle at once.
    End,
    /// A QEMU starts.
    Start,
    /// A guest boots again.
    Reboot,
    /// A vCPU is plugged or unplugged.
    Hotplug,
    /// A function of the host is plugged or unplugged.
    PassThrough,
    /// The memory of a guest node goes elsewhere.
    Rehome,
    /// A QEMU says that it is called otherwise, perhaps like another VM.
    Rename,
    /// A handle is listed no more, or again.
    Unlist,
    /// A guest lets go of its channel's device unasked.
    Release,
    /// The host has other CPUs, nodes or distances.
    HostChange,
    /// The daemon stops for a while.
    Stall,
    /// The daemon is killed, and another one starts.
    Restart,
}

impl Chaos {
    /// Between two of them, on average.
    pub(crate) fn interval_ns(self) -> u64 {
        match self {
            Self::Migrate => MILLI,
            Self::AskMove => MILLI,
            Self::Confine | Self::AskAttach => 10 * MILLI,
            Self::AskPolicy => 30 * MILLI,
            Self::AskMemory => 40 * MILLI,
            Self::AskMigration => 60 * MILLI,
            Self::SilentAffinity => 50 * MILLI,
            Self::AskDetach | Self::AskReplug | Self::AskAll => 60 * MILLI,
            Self::Hang | Self::Reboot | Self::Disconnect => 100 * MILLI,
            Self::Stop | Self::End | Self::Start => 150 * MILLI,
            Self::Hotplug | Self::PassThrough | Self::Rehome => 150 * MILLI,
            Self::Rename | Self::Unlist | Self::Release | Self::Storm | Self::Wander => SECOND,
            Self::HostChange => 5 * SECOND,
            Self::Stall => 3 * SECOND,
            Self::Restart => 15 * SECOND,
        }
    }
}
