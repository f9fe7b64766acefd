//! What is to be done, and why.

use crate::migration::Order;
use crate::repatriation::MemorySettings;
use crate::scheduling::{Policy, Settings, Stealing, memory::MoveMemory};
use crate::world::{ChannelState, Confine, ManagedVm, Move, Publisher, Replug, UnplugStep, Vm, VmId, World};
use crate::{Due, SettlePolicy, rehome_policy::RehomeSettings, sizing::SizeSettings};
use vnuma_model::{ApicId, GuestNodeId};

/// How an operator wants decisions to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policies {
    /// How patient publishing is.
    pub settle: SettlePolicy,
    /// How long a vCPU of a guest without a channel has to be astray to be replugged, nanoseconds. `None`: it is not.
    pub replug_after_ns: Option<u64>,
    /// How the vCPUs of a VM are scheduled until an operator says otherwise.
    pub schedule: Policy,
    /// Settings of these policies.
    pub settings: Settings,
    /// How displaced memory comes home.
    pub memory: MemorySettings,
    /// How guest nodes are sized by themselves.
    pub sizes: SizeSettings,
    /// When guest nodes get other homes by themselves.
    pub rehome: RehomeSettings,
}

impl Policies {
    /// The policy `vprobe` moves memory to vCPUs.
    pub fn memory_goes_to_vcpus(&self) -> bool {
        self.settings.memory_bytes_per_s > 0
    }
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
    /// A period has ended.
    Period,
    /// scx_vnuma was loaded.
    Loaded,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Publish what is true under this generation.
    Publish(u64, PublishReason),
    /// Put a vCPU on a host node.
    Move(Move, Reason),
    /// Plug a vCPU anew on another guest node.
    Replug(Replug, Reason),
    /// Ask the guest again to let go of its channel's device, or give that up.
    Unplug(UnplugStep),
    /// Confine a vCPU to CPUs that a policy has chosen, or give it its operator's mask again. It has its reason with it.
    Confine(Confine),
    /// Keep the threads of a VM that run no vCPU on the nodes that a policy has confined its vCPUs to, or give them their
    /// operators' masks again. The reason is where the vCPUs are.
    Follow,
    /// See where the memory of a VM is.
    ObserveMemory,
    /// Watch how hot the memory of a VM is.
    WatchHotness,
    /// Move memory of a VM to another node. It has its reason with it.
    MoveMemory(MoveMemory),
    /// End the move of a VM's memory that is under way.
    StopMemory(Reason),
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
    pub stealing: Stealing,
}

/// One thing to do about a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The VM.
    pub vm: VmId,
    /// What.
    pub action: Action,
}

/// What is to be done for the host as a whole, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Steps.
    pub steps: Vec<Step>,
    /// VMs whose publication has to wait for their cap.
    pub deferred: Vec<VmId>,
}

/// Decides what is to be done now. Pure: the same world, policies and time give the same plan.
pub fn decide(world: &World, policies: &Policies, now_ns: u64) -> Plan {
    let mut plan = Plan { steps: world.wanted().to_vec(), ..Plan::default() };
    for id in world.due(now_ns) {
        let Some(managed) = world.get(id) else { continue };
        let Some(vm) = &managed.vm else { continue };
        plan.moves(id, vm);
        vm.steps().for_each(|step| plan.push(id, Action::Confine(step)));
        if vm.others_may_follow() {
            plan.push(id, Action::Follow);
        }
        if vm.observation_due(now_ns) {
            plan.push(id, Action::ObserveMemory);
        }
        if vm.homing.hotness.is_due() {
            plan.push(id, Action::WatchHotness);
        }
        vm.memory_step().into_iter().for_each(|step| plan.push(id, Action::MoveMemory(step)));
        plan.replug(id, managed, vm, policies, now_ns);
        let unplug = vm.unplug_step(managed.responsive().is_some(), now_ns);
        unplug.into_iter().for_each(|step| plan.push(id, Action::Unplug(step)));
        plan.publication(id, vm, &policies.settle, now_ns);
    }
    plan
}

impl Plan {
    fn push(&mut self, vm: VmId, action: Action) {
        self.steps.push(Step { vm, action });
    }

    /// Moves of one vCPU are made one after the other, and none while a policy's step is under way: which of both was last would
    /// not be known.
    fn moves(&mut self, id: VmId, vm: &Vm) {
        for (position, wanted) in vm.moves.iter().enumerate() {
            let first = !vm.moves[..position].iter().any(|before| before.vcpu == wanted.vcpu);
            let confined = vm.scheduling.masks.get(&wanted.vcpu).is_some_and(|mask| mask.begun.is_some());
            if first && !confined && !wanted.in_flight {
                let reason = if wanted.request.is_some() { Reason::Requested } else { Reason::Rehomed };
                self.push(id, Action::Move(*wanted, reason));
            }
        }
    }

    fn replug(&mut self, id: VmId, managed: &ManagedVm, vm: &Vm, policies: &Policies, now_ns: u64) {
        if vm.channel != ChannelState::Detached || managed.responsive().is_none() {
            return;
        }
        if let Some(replug) = vm.replug_wanted {
            return self.push(id, Action::Replug(replug, Reason::Requested));
        }
        let due = |after_ns| vm.replugs.due(&vm.description.spare_slots, after_ns, now_ns);
        if let Some((vcpu, node)) = policies.replug_after_ns.and_then(due) {
            self.push(id, Action::Replug(Replug { vcpu, node }, Reason::Astray));
        }
    }

    fn publication(&mut self, id: VmId, vm: &Vm, policy: &SettlePolicy, now_ns: u64) {
        let Some(Publisher::Ready(generation)) = vm.channel.publisher() else { return };
        match vm.placement.due(policy, now_ns) {
            Due::Nothing => {}
            Due::Deferred => self.deferred.push(id),
            Due::Now(reason) => self.push(id, Action::Publish(generation, reason)),
        }
    }
}
