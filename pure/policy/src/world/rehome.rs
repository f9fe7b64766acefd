//! Guest nodes that get another home: what is there, and the next step of each re-home.

use super::{ChannelState, Task, Vm, VmId, World};
use crate::{
    backings,
    memory_move::{MemoryReason, MoveMemory},
    plan::{Move, Mover},
    rehome::{Part, Rehome, RehomePhase, RehomeView},
    resident_kib,
};
use vnuma_model::{ApicId, GuestNodeId, HostNodeId, MemoryBacking, VcpuState};

impl Vm {
    /// Resident memory of a guest node, by host node, bytes: what it booted with, and what is plugged.
    pub fn places_of(&self, guest_node: GuestNodeId) -> Vec<(HostNodeId, u64)> {
        let node = self.description.guest_nodes.iter().find(|node| node.id == guest_node);
        let places = node.map(|node| resident_kib(node, &self.description.memory_devices));
        places.into_iter().flatten().map(|(node, kib)| (node, kib.saturating_mul(1024))).collect()
    }

    /// Memory of a guest node by what it is of, and where.
    fn parts_of(&self, guest_node: GuestNodeId) -> Vec<Part> {
        let Some(node) = self.description.guest_nodes.iter().find(|node| node.id == guest_node) else {
            return Vec::new();
        };
        let parts = |memory: &MemoryBacking| {
            // Without a place it is in no area, and cannot be moved.
            let start = memory.mapping.map_or(0, |mapping| mapping.start);
            let part =
                move |&(node, kib): &(HostNodeId, u64)| Part { start, node, bytes: kib.saturating_mul(1024) };
            memory.resident_kib.iter().map(part).collect::<Vec<_>>()
        };
        backings(node, &self.description.memory_devices).flat_map(parts).collect()
    }

    /// vCPUs of a guest node: as its guest was told last or, where no home is near a vCPU, as it booted.
    pub(crate) fn vcpus_of(&self, guest_node: GuestNodeId) -> Vec<ApicId> {
        let is_its = |vcpu: &&vnuma_model::Vcpu| {
            let status = self.placement.vcpu(vcpu.apic_id);
            let approximate = status.is_some_and(|status| status.state == VcpuState::Approximate);
            let told = status.and_then(|status| status.published_node);
            told == Some(guest_node) || (approximate && vcpu.boot_node == Some(guest_node))
        };
        self.description.vcpus.iter().filter(is_its).map(|vcpu| vcpu.apic_id).collect()
    }

    /// The guest knows the homes, or has no channel to learn them by.
    fn is_published(&self) -> bool {
        match self.channel {
            ChannelState::Attached(_) | ChannelState::Detaching(_) => {
                !self.publication.is_under_way() && self.placement.is_published()
            }
            ChannelState::Attaching | ChannelState::Recovering => false,
            _ => true,
        }
    }

    /// The host node that all vCPUs of a guest node run on, if no guest node is at home there.
    pub(crate) fn stays(&self, guest_node: GuestNodeId) -> Option<HostNodeId> {
        let vcpus = self.vcpus_of(guest_node);
        let at = self.locations.get(vcpus.first()?)?.node;
        let there = |vcpu: &ApicId| self.locations.get(vcpu).is_some_and(|location| location.node == at);
        let is_home = self.placement.homes().values().any(|home| *home == at);
        (!is_home && vcpus.iter().all(there)).then_some(at)
    }

    pub(crate) fn rehome_view(&self, guest_node: GuestNodeId) -> RehomeView {
        let memory = &self.scheduling.memory;
        RehomeView {
            parts: self.parts_of(guest_node),
            home: self.placement.homes().get(&guest_node).copied(),
            moving: memory.task.is_under_way() || memory.task.wanted.is_some(),
            published: self.is_published(),
            vcpus: self.description.vcpus.iter().map(|vcpu| vcpu.apic_id).collect(),
        }
    }

    /// A guest node is getting another home: no policy moves its memory meanwhile.
    pub fn is_rehomed(&self) -> bool {
        self.homing.rehome.as_ref().is_some_and(Rehome::is_active)
    }
}

impl World {
    /// Begins a re-home. One that is under way is given up.
    pub fn begin_rehome(&mut self, id: VmId, rehome: Rehome, now_ns: u64) {
        if let Some((_, vm)) = self.vm_mut(id) {
            vm.scheduling.memory.task.wanted = None;
            vm.homing.since_ns = now_ns;
            (vm.homing.rehome, vm.homing.rehome_ns) = (Some(rehome), Some(now_ns));
        }
    }

    /// Ends a re-home on an operator's request. False: there is none.
    pub fn stop_rehome(&mut self, id: VmId) -> bool {
        let Some((_, vm)) = self.vm_mut(id).filter(|(_, vm)| vm.is_rehomed()) else { return false };
        vm.scheduling.memory.task.wanted.take_if(|order| matches!(order.why, MemoryReason::Rehome(_)));
        // Those that are under way end by themselves.
        let left = vm.homing.rehome.as_ref().map(|rehome| rehome.left.clone()).unwrap_or_default();
        let its = |wanted: &Move| wanted.request.is_none() && left.contains(&wanted.vcpu);
        vm.moves.retain(|task| !task.wanted.as_ref().is_some_and(its));
        vm.homing.rehome.iter_mut().for_each(Rehome::stop);
        true
    }

    /// Stores the next state of a re-home. True if its phase has changed.
    pub fn rehome_changed(&mut self, id: VmId, rehome: Rehome) -> bool {
        let Some((_, vm)) = self.vm_mut(id) else { return false };
        let changed = vm.homing.rehome.as_ref().is_none_or(|before| before.phase() != rehome.phase());
        if changed && *rehome.phase() == RehomePhase::Vcpus {
            vm.moves.extend(moves_of(&rehome).map(Task::wanted));
        }
        vm.homing.rehome = Some(rehome);
        changed
    }

    /// A move of a re-home has ended.
    pub(super) fn rehome_moved(&mut self, id: VmId, order: &MoveMemory, problem: Option<String>) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let its = |rehome: &&mut Rehome| {
            order.why == MemoryReason::Rehome(rehome.guest_node) && order.to == rehome.to
        };
        if let Some(rehome) = vm.homing.rehome.as_mut().filter(its) {
            rehome.memory_ended(order.within.map_or(0, |(start, _)| start), order.from, problem);
        }
    }
}

/// Moves of the vCPUs that are being moved.
pub(crate) fn moves_of(rehome: &Rehome) -> impl Iterator<Item = Move> {
    let wanted = |&vcpu| Move { vcpu, node: rehome.to, mover: Mover::Operator, request: None };
    rehome.left.iter().map(wanted)
}
