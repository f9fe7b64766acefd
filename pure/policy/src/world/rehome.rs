//! Guest nodes that get another home: what is there, and the next step of each re-home.

use super::{ChannelState, Task, Vm, VmId, World};
use crate::{
    backings,
    memory_move::{BASE_KIB, MemoryReason, MoveMemory},
    plan::{Move, Mover, RehomeWish},
    rehome::{Part, Rehome, RehomePhase, RehomeView},
    residency::{AreaSample, Keeps, MemoryObservation},
    resident_kib,
};
use std::collections::BTreeMap;
use vnuma_model::{ApicId, GuestNodeId, HostNodeId, MemoryBacking, NumaPolicy, VcpuState};

/// Why the memory of a guest node cannot get another home.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RehomeObstacle {
    /// VFIO has pinned it.
    #[error("VFIO has pinned all memory of this VM, as it has a device of the host")]
    Devices,
    /// There are not enough huge pages.
    #[error(
        "node {node} has {free} free huge pages of {page_kib} KiB, and {needed} are to go there; /sys/devices/system/node/node{node}/hugepages has its pool"
    )]
    NoHugePages {
        /// The node.
        node: HostNodeId,
        /// Size of a page, KiB.
        page_kib: u64,
        /// What is not there yet.
        needed: u64,
        /// What its pool has free.
        free: u64,
    },
    /// It is spread over nodes on purpose.
    #[error("its memory is interleaved over nodes by its policy")]
    Interleaved,
    /// Its process has no memory of that node.
    #[error("the cpuset of its hypervisor excludes the memory of node {0}")]
    Cpuset(HostNodeId),
    /// The node is offline, or has no memory.
    #[error("node {0} is offline, or has no memory")]
    NoMemory(HostNodeId),
    /// There is not enough room.
    #[error(
        "node {node} has no room: {needed_mib} MiB are to go there, and {free_mib} MiB are free beyond its reserve"
    )]
    NoRoom {
        /// The node.
        node: HostNodeId,
        /// What is not there yet.
        needed_mib: u64,
        /// What may come.
        free_mib: u64,
    },
    /// Somebody else has confined its vCPUs.
    #[error("vCPUs {vcpus:?} are confined to other nodes, and not by this vnumad")]
    Pinned {
        /// The vCPUs.
        vcpus: Vec<ApicId>,
    },
}

impl Vm {
    /// Resident memory of a guest node, by host node, bytes: what it booted with, and what is plugged.
    pub fn places_of(&self, guest_node: GuestNodeId) -> Vec<(HostNodeId, u64)> {
        let node = self.description.guest_nodes.iter().find(|node| node.id == guest_node);
        let places = node.map(|node| resident_kib(node, &self.description.memory_devices));
        places.into_iter().flatten().map(|(node, kib)| (node, kib.saturating_mul(1024))).collect()
    }

    /// Memory of a guest node that is not on `to`, bytes, by the size of its pages, KiB.
    fn away_from(&self, guest_node: GuestNodeId, to: HostNodeId) -> BTreeMap<u64, u64> {
        let mut away = BTreeMap::new();
        let node = self.description.guest_nodes.iter().find(|node| node.id == guest_node);
        for memory in node.into_iter().flat_map(|node| backings(node, &self.description.memory_devices)) {
            let page_kib = memory.mapping.map_or(BASE_KIB, |mapping| mapping.page_kib);
            let sum: &mut u64 = away.entry(page_kib).or_default();
            for (_, kib) in memory.resident_kib.iter().filter(|(place, _)| *place != to) {
                *sum = sum.saturating_add(kib.saturating_mul(1024));
            }
        }
        away
    }

    /// The same by what it is of, and where.
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

    /// vCPUs that somebody else has confined to other nodes.
    fn pinned_elsewhere(&self, vcpus: &[ApicId], node: HostNodeId) -> Vec<ApicId> {
        let by_others = |vcpu: &&ApicId| {
            let pinned = self.locations.get(vcpu).and_then(|location| location.pinned);
            let ours = self.assigned.get(vcpu).map(|(assigned, _)| *assigned);
            pinned.is_some_and(|pinned| pinned != node && ours != Some(pinned))
        };
        vcpus.iter().filter(by_others).copied().collect()
    }
}

impl World {
    /// The re-home that an operator wants, or why it cannot be done.
    pub fn plan_rehome(&self, vm: &Vm, wish: &RehomeWish) -> Result<Rehome, RehomeObstacle> {
        let node = wish.node;
        let observed = vm.homing.observed.as_deref();
        let obstacle = observed.and_then(|seen| {
            seen.of(wish.guest_node).into_iter().find_map(|sample| vm.rehome_obstacle(sample, node, seen))
        });
        if let Some(obstacle) = obstacle {
            return Err(obstacle);
        }
        for (page_kib, needed) in vm.away_from(wish.guest_node, node) {
            let room = observed.map_or(0, |seen| seen.room(node, page_kib).available_of(page_kib));
            if needed > room {
                return Err(no_room(node, page_kib, needed, room));
            }
        }
        // Memory may be at home on a node without CPUs; vCPUs stay then.
        let has_cpus = self.host.node(node).is_some_and(|node| !node.cpus.is_empty());
        let moves_vcpus = has_cpus && wish.why.is_none();
        let vcpus = if moves_vcpus { vm.vcpus_of(wish.guest_node) } else { Vec::new() };
        let pinned = vm.pinned_elsewhere(&vcpus, node);
        if !wish.move_pinned && !pinned.is_empty() {
            return Err(RehomeObstacle::Pinned { vcpus: pinned });
        }
        let mut rehome = Rehome::new(wish.guest_node, node, vcpus);
        rehome.why = wish.why;
        Ok(rehome)
    }

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

impl Vm {
    /// What keeps memory of a guest node from another home.
    fn rehome_obstacle(
        &self,
        sample: &AreaSample,
        to: HostNodeId,
        observed: &MemoryObservation,
    ) -> Option<RehomeObstacle> {
        let policy = self.backing_of(&sample.area).map(|memory| &memory.policy);
        if !self.description.devices.is_empty() {
            Some(RehomeObstacle::Devices)
        } else if policy == Some(&NumaPolicy::Interleave) {
            Some(RehomeObstacle::Interleaved)
        } else if observed.room(to, BASE_KIB).total_kib == 0 {
            Some(RehomeObstacle::NoMemory(to))
        } else if !observed.allowed.contains(&to) {
            Some(RehomeObstacle::Cpuset(to))
        } else {
            None
        }
    }
}

/// Moves of the vCPUs that are being moved.
pub(crate) fn moves_of(rehome: &Rehome) -> impl Iterator<Item = Move> {
    let wanted = |&vcpu| Move { vcpu, node: rehome.to, mover: Mover::Operator, request: None };
    rehome.left.iter().map(wanted)
}

/// What keeps so many pages of a guest node elsewhere that its home would not be there. Most of those that are kept are so for this.
pub(crate) fn too_much_kept(samples: &[&AreaSample], to: HostNodeId) -> Option<Keeps> {
    let resident = samples.iter().fold(0_u64, |sum, one| sum.saturating_add(one.resident().bytes));
    let kept: Vec<_> = samples.iter().flat_map(|sample| sample.kept(to)).collect();
    let stays = kept.iter().fold(0_u64, |sum, (_, size)| sum.saturating_add(size.bytes));
    let most = kept.iter().max_by_key(|(_, size)| size.bytes)?;
    (stays >= resident.saturating_sub(stays)).then_some(most.0)
}

fn no_room(node: HostNodeId, page_kib: u64, needed: u64, room: u64) -> RehomeObstacle {
    if page_kib > BASE_KIB {
        let page = page_kib.saturating_mul(1024);
        return RehomeObstacle::NoHugePages {
            node,
            page_kib,
            needed: needed.div_ceil(page),
            free: room / page,
        };
    }
    RehomeObstacle::NoRoom { node, needed_mib: needed.div_ceil(1 << 20), free_mib: room >> 20 }
}
