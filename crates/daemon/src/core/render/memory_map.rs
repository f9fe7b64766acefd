//! Where the memory of a VM is, in the form of the API.

use vnuma_api as api;
use vnuma_placement::{
    residency::{AreaSample, Estimate, MemoryObservation, PageKind},
    sizing::SizeSettings,
    world::Vm,
};
use vnuma_topology::GuestNode;

/// Where the memory of a VM is. What could not be moved rests until `rests_until_ns`.
pub(in crate::core) fn vm_memory(
    vm: &Vm,
    sizes: &SizeSettings,
    moves_to_vcpus: bool,
    rests_until_ns: Option<u64>,
    now_ns: u64,
) -> api::VmMemory {
    let observed = vm.homing.observed.as_deref();
    let age_ms = observed.map(|seen| now_ns.saturating_sub(seen.began_ns) / 1_000_000);
    let nodes = vm.description.guest_nodes.iter().map(|node| api::GuestNodeMemory {
        pluggable: super::sizes::pluggable(vm, sizes, node.id),
        ..guest_node(vm, node, observed, moves_to_vcpus)
    });
    api::VmMemory {
        vm: vm.name().to_owned(),
        policy: vm.homing.policy.to_string(),
        observed_ns: observed.map(|seen| seen.began_ns),
        age_ms,
        cost_us: observed.map_or(0, |seen| seen.cost_ns / 1000),
        nodes: nodes.collect(),
        unmapped: observed.is_some_and(|seen| seen.unmapped),
        moves: super::memory(vm),
        rests_ms: rests_until_ns.map(|until_ns| until_ns.saturating_sub(now_ns) / 1_000_000),
        problem: vm.homing.problem.clone(),
    }
}

fn guest_node(
    vm: &Vm,
    node: &GuestNode,
    observed: Option<&MemoryObservation>,
    moves_to_vcpus: bool,
) -> api::GuestNodeMemory {
    let home = vm.placement.homes().get(&node.id).copied();
    let bare = api::GuestNodeMemory {
        id: node.id,
        home,
        memory_bytes: node.memory_bytes,
        ..api::GuestNodeMemory::default()
    };
    let sample = observed.and_then(|seen| seen.areas.iter().find(|one| one.area.guest_node == node.id));
    let Some((observed, sample)) = observed.zip(sample) else { return bare };
    api::GuestNodeMemory {
        samples: sample.looked,
        exact: sample.is_exact(),
        resident: bytes(sample.resident()),
        displaced: home.map(|home| bytes(sample.displaced(home))),
        swapped: bytes(sample.in_swap()),
        locked: bytes(sample.locked()),
        places: places(sample),
        unmovable: home.map_or_else(Vec::new, |home| {
            let whole = vm.obstacle(sample, home, observed, moves_to_vcpus);
            match whole.filter(|_| sample.displaced(home).bytes > 0) {
                Some(obstacle) => vec![unmovable(obstacle.name(), sample.displaced(home))],
                None => {
                    sample.kept(home).iter().map(|(keeps, size)| unmovable(keeps.name(), *size)).collect()
                }
            }
        }),
        ..bare
    }
}

fn places(sample: &AreaSample) -> Vec<api::MemoryPlace> {
    let place = |(node, kind, size)| {
        let (pages, page_kib) = match kind {
            PageKind::Base => ("4K", Some(4)),
            PageKind::Huge => ("huge", Some(2048)),
            PageKind::Pool => ("pool", Some(sample.area.page_kib)),
            PageKind::Unknown => ("unknown", None),
        };
        api::MemoryPlace { node, pages: pages.to_owned(), page_kib, size: bytes(size) }
    };
    sample.places().into_iter().map(place).collect()
}

fn unmovable(reason: &str, size: Estimate) -> api::Unmovable {
    api::Unmovable { reason: reason.to_owned(), size: bytes(size) }
}

fn bytes(Estimate { bytes, low, high }: Estimate) -> api::Bytes {
    api::Bytes { bytes, low, high }
}
