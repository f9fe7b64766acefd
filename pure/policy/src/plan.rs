//! What is to be done, and why.

use crate::memory_move::MoveMemory;
use crate::migration::Order;
use crate::rehome::Rehome;
use crate::rehome_policy::RehomeWhy;
use crate::sizing::Resize;
use crate::task::TaskId;
use crate::world::{Confine, Replug};
use vnuma_model::{ApicId, GuestNodeId, HostNodeId, RequestId, Steal, VmId};

/// Why something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// An operator asked for it.
    Requested,
    /// Its guest cannot be given the truth, and it has been astray for as long as the policy waits.
    Astray,
    /// Its guest node gets another home.
    Rehomed,
    /// It is marked to be attached, and runs.
    Marked,
    /// It is attached, or is not to be.
    NotMarked,
    /// It migrates.
    Migrates,
    /// Its channel came along from another host.
    CameAlong,
    /// An attach that was not answered in time was carried out after all.
    TimedOut,
    /// An earlier vnumad left it.
    LeftBehind,
    /// Another reason takes its place, or there is none any more.
    Ended,
    /// The controller of sizes, or an operator, has set the size.
    Sized,
    /// A period has ended, or it is done every so often.
    Period,
    /// Its memory was moved.
    Moved,
    /// What a move costs depends on it.
    Weighed,
    /// Its guest has kept the device.
    Kept,
    /// Its vCPUs stay where no guest node is at home.
    Away,
    /// scx_vnuma was loaded.
    Loaded,
}

/// Who put a vCPU where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// An operator, through vnuma.
    Operator,
    /// A scheduling policy.
    Policy,
}

/// A move of a vCPU that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The vCPU.
    pub vcpu: ApicId,
    /// The host node it goes to.
    pub node: HostNodeId,
    /// Who wants it.
    pub mover: Mover,
    /// The request that waits for it.
    pub request: Option<RequestId>,
}

/// What an operator wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RehomeWish {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// Its new home.
    pub node: HostNodeId,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Move vCPUs that somebody else has confined to another node as well.
    pub move_pinned: bool,
    /// Why, if no operator wants it: its vCPUs are there already, and stay as they are.
    pub why: Option<RehomeWhy>,
}

/// Why a topology is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishReason {
    /// The channel is new, or was taken over.
    Attached,
    /// The guest boots again.
    Rebooted,
    /// vCPUs or devices came or went, or distances or nodes of devices changed.
    Described,
    /// A vCPU was put on another node on purpose.
    Moved {
        /// One of them.
        vcpu: ApicId,
    },
    /// A vCPU has been on another node for the dwell.
    Drifted {
        /// One of them.
        vcpu: ApicId,
    },
}

/// What goes out together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// vCPUs that have another node now, in rising order of APIC id.
    pub vcpus: Vec<(ApicId, GuestNodeId)>,
    /// Oldest change in it.
    pub changed_ns: u64,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Publish what is true under this generation, with these new nodes of vCPUs.
    Publish(u64, Batch, PublishReason),
    /// Put a vCPU on a host node.
    Move(Move, Reason),
    /// Plug a vCPU anew on another guest node.
    Replug(Replug, Reason),
    /// Ask the guest no more for the device that it has kept.
    GiveUpDetach(Reason),
    /// Confine a vCPU to CPUs that a policy has chosen, or give it its operator's mask again. It has its reason with it.
    Confine(Confine),
    /// Keep the threads of a VM that run no vCPU on the nodes that a policy has confined its vCPUs to, or give them their
    /// operators' masks again. The reason is where the vCPUs are.
    Follow,
    /// See where the memory of a VM is.
    ObserveMemory(Reason),
    /// Watch how hot the memory of a VM is.
    WatchHotness(Reason),
    /// Move memory of a VM to another node. It has its reason with it.
    MoveMemory(MoveMemory),
    /// End this move of a VM's memory.
    StopMemory(TaskId, Reason),
    /// Plug a topology channel.
    Attach(Reason),
    /// Ask the guest to let go of its channel's device.
    Detach(Reason),
    /// Take over the channel of an earlier vnumad.
    Recover(Reason),
    /// Mark the VM to be attached as soon as it runs, or take the mark away.
    Mark(bool, Reason),
    /// Take a migration on.
    Migrate(Order, Reason),
    /// Have a memory device of a guest node offer its guest so much.
    Resize(GuestNodeId, String, u64, Reason),
    /// Tell scx_vnuma which vCPUs of this process a policy schedules.
    Rank(Ranks, Reason),
    /// Tell scx_vnuma of the places that are set by affinities.
    PlaceAgain(Reason),
    /// Give back the masks that policies have set in this process.
    RestoreMasks(i32, Reason),
    /// Give back pins of a VM that no policy wants.
    SettlePins(Reason),
    /// Give a guest node another home. It has its reason with it.
    RehomeNode(RehomeWish),
    /// Take a re-home on: this is what becomes of it.
    Rehome(Rehome, Reason),
    /// Give a guest node another size, or take that on. It says for whom.
    SizeNode(Resize),
}

/// What scx_vnuma is told of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The process.
    pub pid: i32,
    /// Threads of its vCPUs, each with its LLC references in a million instructions (0 if not known); none: its policy does not
    /// act any more.
    pub vcpus: Vec<(i32, u32)>,
    /// Which vCPUs of the host idle CPUs take.
    pub stealing: Steal,
}

/// One thing to do about a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The VM.
    pub vm: VmId,
    /// What.
    pub action: Action,
    /// Not before this time, nanoseconds.
    pub not_before_ns: u64,
}

impl Step {
    /// A step that is to begin now.
    pub fn now(vm: VmId, action: Action) -> Self {
        Self { vm, action, not_before_ns: 0 }
    }
}

/// What is to be done for the host as a whole, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Steps.
    pub steps: Vec<Step>,
    /// Steps that are wanted and cannot begin yet.
    pub waits: Vec<Step>,
    /// The VMs that it is about.
    pub considered: Vec<VmId>,
}
