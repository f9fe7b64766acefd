//! What keeps a guest node from another home.

use crate::{
    backings,
    memory_move::BASE_KIB,
    rehome::Rehome,
    residency::{AreaSample, Keeps, MemoryObservation},
    world::{RehomeWish, Vm, World},
};
use std::collections::BTreeMap;
use vnuma_model::{ApicId, GuestNodeId, HostNodeId, NumaPolicy};

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
}

impl Vm {
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

    /// vCPUs that somebody else has confined to other nodes.
    fn pinned_elsewhere(&self, vcpus: &[ApicId], node: HostNodeId) -> Vec<ApicId> {
        let by_others = |vcpu: &&ApicId| {
            let pinned = self.locations.get(vcpu).and_then(|location| location.pinned);
            let ours = self.assigned.get(vcpu).map(|(assigned, _)| *assigned);
            pinned.is_some_and(|pinned| pinned != node && ours != Some(pinned))
        };
        vcpus.iter().filter(by_others).copied().collect()
    }

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
