//! Memory that goes to its VM's vCPUs, where `vprobe` cannot bring these to it.

use super::{LastPeriod, Now, PerVm, Propose, conflicts::Pages};
use crate::{
    Action, Policies, Step,
    memory_move::{MemoryReason, NodeMemory},
    scheduling::{
        Machine, Policy,
        memory::{MemoryInput, MemoryPart, MemoryToVcpus, VmMemory},
    },
    world::{HostReading, MemoryRange, Vm, VmId, VmReading, World, by_position},
};
use vnuma_model::HostNodeId;

/// Moves memory once a period as [`MemoryToVcpus`] says, with the counts that the schedulers were given.
pub struct MemoryForVcpus<'a> {
    /// Settings.
    pub policies: &'a Policies,
    /// What the schedulers were given.
    pub period: &'a LastPeriod,
}

/// What is remembered of memory that goes to vCPUs.
#[derive(Clone, Debug, Default)]
pub struct VcpuMemory {
    policy: MemoryToVcpus,
    /// Numbers of the last period, and of the machine that positions are of.
    period: u64,
    machine: u64,
    move_ended_ns: PerVm<u64>,
}

impl VcpuMemory {
    /// Notes a move that has ended since the last decision.
    fn notice(&mut self, id: VmId, vm: &Vm) {
        let Some(last) = vm.scheduling.memory.shown() else { return };
        let (Some(ended_ns), MemoryReason::Nearer(_)) = (last.ended_ns, &last.order.why) else { return };
        let noticed_ns = self.move_ended_ns.of(id, vm.found_ns);
        if std::mem::replace(noticed_ns, ended_ns) != ended_ns {
            self.policy.ended(id, last.moved.bytes, last.moved.stayed(), ended_ns);
        }
    }
}

impl Propose for MemoryForVcpus<'_> {
    type Memory = VcpuMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut VcpuMemory) -> Vec<Step> {
        now.gone().for_each(|id| memory.move_ended_ns.forget(id));
        now.vms().for_each(|(id, _, vm)| memory.notice(id, vm));
        let (period, periods) = (self.period, now.world.periods());
        let Some(reading) = periods.last().filter(|_| memory.period != period.number) else {
            return Vec::new();
        };
        memory.period = period.number;
        if std::mem::replace(&mut memory.machine, period.machine) != period.machine {
            memory.policy = MemoryToVcpus::default();
        }
        if !period.vprobe {
            return Vec::new();
        }
        let machine = periods.machine();
        let (nodes, vms) = memory_of_vms((now.world, self.policies), machine, reading, period);
        let input = period.input(machine, reading);
        let all = MemoryInput {
            input: &input,
            nodes: &nodes,
            vms: &vms,
            sharers: now.world.memory_sharers(self.policies),
            now_ns: reading.began_ns,
        };
        let assumes = period.assumed.contains(&true);
        let step = |(id, mut order): (VmId, crate::memory_move::MoveMemory)| {
            if let MemoryReason::Nearer(why) = &mut order.why {
                why.assumed = assumes;
            }
            Step::now(id, Action::MoveMemory(order))
        };
        memory.policy.decide(&self.policies.settings, &all).into_iter().map(step).collect()
    }
}

/// The memory of nodes, and of the VMs whose memory may be moved. First their vCPUs go where they should be.
fn memory_of_vms(
    (world, policies): (&World, &Policies),
    machine: &Machine,
    reading: &HostReading,
    period: &LastPeriod,
) -> (Vec<NodeMemory>, Vec<VmMemory>) {
    if reading.memory.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let of = |id: HostNodeId| reading.memory.iter().find(|(node, ..)| *node == id);
    let node = |id| of(id).map(|&(_, total_kib, free_kib)| NodeMemory { total_kib, free_kib });
    let nodes = machine.nodes.iter().map(|known| node(known.id).unwrap_or_default()).collect();
    let memory = |vm: &VmReading| {
        let known = world.get(vm.vm)?.vm.as_ref().filter(|known| known.description.pid == vm.pid)?;
        if known.effective_policy() != Policy::Vprobe {
            return None;
        }
        let read = vm.memory.as_ref()?;
        let scheduling = &known.scheduling;
        let placed =
            scheduling.masks.values().all(|mask| mask.is_settled()) && !period.placed.contains(&vm.vm);
        let moves = &scheduling.memory;
        let fresh = read.read_ns > moves.ended_ns();
        Some(VmMemory {
            vm: vm.vm,
            parts: read.parts.iter().map(|part| part_of(machine, part)).collect(),
            fixed: by_position(machine, &read.fixed),
            allowed: read.allowed.iter().filter_map(|&node| machine.position(node)).collect(),
            ready: placed
                && fresh
                && moves.task.wanted.is_none()
                && !moves.task.is_under_way()
                && Pages::of(known, policies) == Pages::ToVcpus,
        })
    };
    (nodes, reading.vms.iter().filter_map(memory).collect())
}

fn part_of(machine: &Machine, part: &MemoryRange) -> MemoryPart {
    let positions =
        |nodes: &Vec<HostNodeId>| nodes.iter().filter_map(|&node| machine.position(node)).collect();
    MemoryPart { targets: part.targets.as_ref().map(positions), kib: by_position(machine, &part.kib) }
}
