//! What VMs have of the host, for those who place another one.

use super::Core;
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{CpuId, GuestNode, HostNodeId};
use vnuma_placement::{BASE_PAGE_BYTES, Claim, Promise};
use vnuma_policy::world::{Vm, VmId};

/// VMs that are looked at in one request.
pub(crate) const AT_ONCE: usize = 64;

/// What a VM has of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VmUse {
    /// Process of its hypervisor.
    pub pid: i32,
    /// When it was found, nanoseconds.
    pub found_ns: u64,
    /// Memory that it has taken on each node, bytes.
    pub resident: BTreeMap<HostNodeId, u64>,
    /// What it has, its name included.
    pub claim: Claim,
}

impl Core {
    /// What each of the next known VMs has of the host: of [`AT_ONCE`] after this one, as events wait meanwhile.
    pub(crate) fn uses(&self, after: Option<VmId>) -> Vec<(VmId, VmUse)> {
        let known = self.world.iter().filter_map(|(id, managed)| Some((id, managed.vm.as_ref()?)));
        let next = known.skip_while(|(id, _)| after.is_some_and(|after| *id <= after));
        next.take(AT_ONCE).map(|(id, vm)| (id, of(vm))).collect()
    }
}

/// Of a vCPU it is known which CPU it runs on now. Each counts as one CPU: that one or, if several run on one, any of its node.
fn of(vm: &Vm) -> VmUse {
    let mut cpus = BTreeSet::<CpuId>::new();
    let mut floating = BTreeMap::<HostNodeId, u32>::new();
    for location in vm.locations.values() {
        if !cpus.insert(location.cpu) {
            *floating.entry(location.pinned.unwrap_or(location.node)).or_default() += 1;
        }
    }
    let mut resident = BTreeMap::<HostNodeId, u64>::new();
    let mut memory = Vec::new();
    for node in &vm.description.guest_nodes {
        let mut taken = 0_u64;
        for (host_node, kib) in vnuma_policy::resident_kib(node, &vm.description.memory_devices) {
            let bytes = kib.saturating_mul(1024);
            taken = taken.saturating_add(bytes);
            let sum = resident.entry(host_node).or_default();
            *sum = sum.saturating_add(bytes);
        }
        let left = node.memory_bytes.saturating_sub(taken);
        // What it will take is taken where its home is, if it has one.
        if let Some(&home) = vm.placement.homes().get(&node.id).filter(|_| left > 0) {
            memory.push(Promise { node: home, page_bytes: page_bytes(node), bytes: left });
        }
    }
    VmUse {
        pid: vm.description.pid,
        found_ns: vm.found_ns,
        resident,
        claim: Claim {
            owner: vm.name().to_owned(),
            cpus: cpus.into_iter().collect(),
            floating: floating.into_iter().collect(),
            memory,
            devices: Vec::new(),
        },
    }
}

/// Size of the pages that a guest node takes: those of a pool, if its memory was found and is of one.
fn page_bytes(node: &GuestNode) -> u64 {
    let mapping = node.memory.as_ref().and_then(|memory| memory.mapping);
    mapping.map_or(BASE_PAGE_BYTES, |found| found.page_kib.saturating_mul(1024).max(BASE_PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{BackingMapping, MemoryBacking};

    #[test]
    fn memory_of_a_pool_is_promised_from_that_pool() {
        let of = |page_kib: Option<u64>| {
            let memory = MemoryBacking {
                id: "m0".into(),
                size_bytes: 1 << 30,
                policy: "bind".into(),
                host_nodes: vec![0],
                resident_kib: Vec::new(),
                mapping: page_kib.map(|page_kib| BackingMapping { start: 1 << 40, page_kib }),
            };
            page_bytes(&GuestNode { id: 0, memory_bytes: 1 << 30, memory: Some(memory) })
        };
        assert_eq!([None, Some(4), Some(2048)].map(of), [BASE_PAGE_BYTES, BASE_PAGE_BYTES, 2 << 20]);
        assert_eq!(of(Some(u64::MAX)), u64::MAX, "whatever is said");
    }
}
