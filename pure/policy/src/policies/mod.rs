//! The policies, and the one decision that is made of what they propose.
//!
//! | policy | proposes |
//! |---|---|
//! | [`Migrating`] | the steps of migrations |
//! | [`Moving`] | moves of vCPUs and memory that were asked for |
//! | [`Scheduling`] | CPUs for vCPUs, and that the other threads of a VM follow them |
//! | [`Ranking`] | what scx_vnuma learns of vCPUs |
//! | [`MemoryForVcpus`] | memory that goes to its vCPUs |
//! | [`Homing`] | looks at memory, and that displaced memory comes home |
//! | [`Rehoming`] | guest nodes that get another home |
//! | [`Sizing`] | guest nodes that grow and shrink |
//! | [`Replugging`] | vCPUs that are replugged to the right guest node |
//! | [`Plugging`] | channels for VMs that are marked or have arrived with one, and that a guest is asked for its device again |
//! | [`Settling`] | publications |
//!
//! A policy is a pure function of all that is known, its own memory, the time and, for some, what scheduling made of the last period.
//! It returns steps and turns its memory into the next one. It changes nothing else. [`settle_conflicts`](conflicts::settle_conflicts) has the last word on each step.

mod conflicts;
mod homing;
mod migrating;
mod moving;
mod plugging;
mod ranking;
mod rehoming;
mod replugging;
mod scheduling;
mod settling;
mod sizing;
mod stays;
mod vcpu_memory;

pub use homing::{Homing, HomingMemory};
pub use migrating::{Migrating, orders_of};
pub use moving::Moving;
pub use plugging::{Plugging, PluggingMemory, UNPLUG_LIMIT_NS};
pub use ranking::{Ranking, RankingMemory};
pub use rehoming::{Rehoming, RehomingMemory};
pub use replugging::{ReplugHistory, ReplugMemory, Replugging};
pub use scheduling::{LastPeriod, Quality, Scheduling, SchedulingMemory, Shown};
pub use settling::Settling;
pub use sizing::{Sizing, SizingMemory};
pub use stays::{Stays, StaysWhy};
pub use vcpu_memory::{MemoryForVcpus, VcpuMemory};

use crate::{
    Plan, Policies, Settler, Step, Suppressed,
    world::{ManagedVm, Vm, VmId, World},
};
use std::collections::BTreeMap;

/// A policy. Pure: the same world, memory and time give the same steps and the same next memory.
pub trait Propose {
    /// What it remembers from one decision to the next. No other policy changes it, and none of it has to survive a restart.
    type Memory;

    /// The steps that it wants. The memory becomes the next one in place: to hand it out and back was 2 % of a vCPU's move.
    /// What scheduling makes of a period ([`LastPeriod`]) is data that later policies of the list get in `self`: `decide` hands it
    /// on, and they only read it.
    fn propose(&self, now: &Now<'_>, memory: &mut Self::Memory) -> Vec<Step>;
}

/// What each policy remembers.
#[derive(Clone, Debug, Default)]
pub struct Memories {
    /// The memory of scheduling. Clients are shown parts of it.
    pub scheduling: SchedulingMemory,
    ranking: RankingMemory,
    vcpu_memory: VcpuMemory,
    homing: HomingMemory,
    rehoming: RehomingMemory,
    sizing: SizingMemory,
    replugging: ReplugMemory,
    plugging: PluggingMemory,
    settling: PerVm<Settler>,
}

/// Decides what is to be done now, for the VMs that changed or whose deadline has passed.
pub fn decide(world: &World, policies: &Policies, memories: &mut Memories, now_ns: u64) -> Plan {
    let now = Now::new(world, now_ns);
    let mut proposed = Migrating.propose(&now, &mut ());
    proposed.extend(Moving.propose(&now, &mut ()));
    proposed.extend(Scheduling(&policies.settings).propose(&now, &mut memories.scheduling));
    proposed.extend(Ranking(&memories.scheduling).propose(&now, &mut memories.ranking));
    let period = &memories.scheduling.last;
    proposed.extend(MemoryForVcpus { policies, period }.propose(&now, &mut memories.vcpu_memory));
    proposed.extend(Homing { policies, period }.propose(&now, &mut memories.homing));
    proposed.extend(Rehoming { policies, period }.propose(&now, &mut memories.rehoming));
    proposed.extend(Sizing(&policies.sizes).propose(&now, &mut memories.sizing));
    proposed.extend(Replugging(policies.replug_after_ns).propose(&now, &mut memories.replugging));
    proposed.extend(Plugging.propose(&now, &mut memories.plugging));
    proposed.extend(Settling(&policies.settle).propose(&now, &mut memories.settling));
    conflicts::settle_conflicts(now, proposed)
}

impl Memories {
    /// Until when memory of a VM rests that could not be moved.
    pub fn memory_rests_until_ns(&self, id: VmId, now_ns: u64) -> Option<u64> {
        self.homing.repatriator.rests_until_ns(id, now_ns)
    }

    /// What was not published to a VM, or not at once, since it was first seen.
    pub fn suppressed(&self, id: VmId) -> Suppressed {
        self.settling.get(id).map(Settler::suppressed).unwrap_or_default()
    }
}

/// What policies decide about.
pub struct Now<'a> {
    /// All that is known.
    pub world: &'a World,
    /// The time, nanoseconds.
    pub now_ns: u64,
    vms: Vec<(VmId, &'a ManagedVm, &'a Vm)>,
    gone: Vec<VmId>,
}

impl<'a> Now<'a> {
    /// VMs that changed or whose deadline has passed.
    fn new(world: &'a World, now_ns: u64) -> Self {
        let gone = world.left().iter().map(|left| left.vm).collect();
        let mut now = Self { world, now_ns, vms: Vec::new(), gone };
        for id in world.due(now_ns) {
            match world.get(id).and_then(|managed| Some((id, managed, managed.vm.as_ref()?))) {
                Some(vm) => now.vms.push(vm),
                None => now.gone.push(id),
            }
        }
        now
    }

    /// Those of them whose vCPUs are known.
    pub fn vms(&self) -> impl Iterator<Item = (VmId, &'a ManagedVm, &'a Vm)> {
        self.vms.iter().copied()
    }

    /// All of them.
    fn ids(&self) -> impl Iterator<Item = VmId> {
        self.vms().map(|(id, ..)| id).chain(self.gone())
    }

    /// Those that are gone. Another one may be in the place of one already.
    pub fn gone(&self) -> impl Iterator<Item = VmId> {
        self.gone.iter().copied()
    }
}

/// What is remembered of each VM. It is forgotten with the VM, and when another one is found in its place.
#[derive(Clone, Debug, Default)]
pub struct PerVm<T>(BTreeMap<VmId, (u64, T)>);

impl<T: Default> PerVm<T> {
    fn of(&mut self, id: VmId, found_ns: u64) -> &mut T {
        let known = self.0.entry(id).or_default();
        if known.0 != found_ns {
            *known = (found_ns, T::default());
        }
        &mut known.1
    }

    fn get(&self, id: VmId) -> Option<&T> {
        self.0.get(&id).map(|(_, known)| known)
    }

    fn forget(&mut self, id: VmId) {
        self.0.remove(&id);
    }
}
