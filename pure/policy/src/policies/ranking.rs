//! What scx_vnuma learns when it is loaded, and of the vCPUs that policies schedule: it lets idle CPUs steal these between two periods.

use super::{Now, Propose, SchedulingMemory};
use crate::{
    Action, Ranks, Reason, Step,
    scheduling::{Policy, Standing},
    world::{Vm, VmId},
};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::Vcpu;

/// Tells it of places that were set by affinities, and ranks the vCPUs of VMs whose policies act, once a period, by what scheduling
/// remembers of them.
pub struct Ranking<'a>(pub &'a SchedulingMemory);

/// What is remembered of ranks.
#[derive(Clone, Debug, Default)]
pub struct RankingMemory {
    /// How often scx_vnuma had been loaded at the last decision.
    loads: u64,
    /// Number of the last reading.
    reading: u64,
    /// VMs that scx_vnuma knows: when each was found, and its process.
    ranked: BTreeMap<VmId, (u64, i32)>,
}

impl Propose for Ranking<'_> {
    type Memory = RankingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut RankingMemory) -> Vec<Step> {
        let (world, ranked, number) = (now.world, &mut memory.ranked, now.world.periods().reading_number());
        let period = std::mem::replace(&mut memory.reading, number) != number;
        let ids: BTreeSet<VmId> = match period {
            true => world.iter().map(|(id, _)| id).chain(now.gone()).collect(),
            false => now.ids().filter(|id| ranked.contains_key(id)).collect(),
        };
        let (mut steps, mut ranks) = (Vec::new(), Vec::new());
        if std::mem::replace(&mut memory.loads, world.scheduler_loads) != world.scheduler_loads {
            let again = |(id, _)| Step::now(id, Action::PlaceAgain(Reason::Loaded));
            steps.extend(world.iter().map(again));
        }
        for id in ids {
            let vm = world.get(id).and_then(|managed| managed.vm.as_ref());
            // Where a policy has ended, ranks stay while masks are given back, until the next period at the latest.
            let stays = |vm: &&Vm| match period {
                true => vm.scheduling.policy.acts(),
                false => vm.scheduling.wants_readings(),
            };
            let vm = vm.filter(stays).map(|vm| (vm, (vm.found_ns, vm.description.pid)));
            if let Some(known) = ranked.get(&id).copied().filter(|known| vm.map(|vm| vm.1) != Some(*known)) {
                ranked.remove(&id);
                ranks.push((id, known.1, Vec::new(), Reason::Ended));
            }
            if let Some((vm, known)) = vm.filter(|_| period) {
                ranked.insert(id, known);
                ranks.push((id, known.1, self.free_vcpus(id, vm), Reason::Period));
            }
        }
        if ranks.is_empty() {
            return steps;
        }
        let vms = world.iter().filter_map(|(_, managed)| managed.vm.as_ref());
        let stealing = Policy::stealing_of_host(vms.map(|vm| vm.scheduling.policy));
        let step = |(id, pid, vcpus, why)| Step::now(id, Action::Rank(Ranks { pid, vcpus, stealing }, why));
        steps.extend(ranks.into_iter().map(step));
        steps
    }
}

impl Ranking<'_> {
    /// Threads of the vCPUs that its policy may place, and how much each presses on a cache.
    fn free_vcpus(&self, id: VmId, vm: &Vm) -> Vec<(i32, u32)> {
        let of = |vcpu: &Vcpu| {
            let shown = self.0.shown(id, vm, vcpu.apic_id)?;
            let pressure = (shown.analysis.pressure.unwrap_or(0.0) * 1000.0) as u32;
            (shown.analysis.standing == Standing::Free).then_some((vcpu.tid, pressure))
        };
        vm.description.vcpus.iter().filter_map(of).collect()
    }
}
