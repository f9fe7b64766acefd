//! Where the memory of a VM is, in the form of the API.

use std::collections::BTreeMap;
use vnuma_api as api;
use vnuma_model::{GuestNode, HostNodeId, PageKind};
use vnuma_policy::{
    Policies,
    hotness::{Hotness, Shares},
    memory_move::MemoryPolicy,
    residency::{AreaSample, Estimate, MemoryObservation},
    scheduling::Policy,
    world::Vm,
};

/// Where the memory of a VM is. What could not be moved rests until `rests_until_ns`.
pub(in crate::core) fn vm_memory(
    vm: &Vm,
    policies: &Policies,
    rests_until_ns: Option<u64>,
    now_ns: u64,
) -> api::VmMemory {
    let observed = vm.homing.observed.as_deref();
    let age_ms = observed.map(|seen| now_ns.saturating_sub(seen.began_ns) / 1_000_000);
    let nodes = vm.description.guest_nodes.iter().map(|node| api::GuestNodeMemory {
        pluggable: super::sizes::pluggable(vm, &policies.sizes, node.id),
        ..guest_node(vm, node, observed, policies)
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
        hotness: hotness(vm, policies, now_ns),
    }
}

/// For a policy that uses heat: how the heat of displaced memory is known.
fn hotness(vm: &Vm, policies: &Policies, now_ns: u64) -> Option<api::HotnessWatch> {
    if vm.homing.policy != MemoryPolicy::Adaptive || !policies.memory.hotness {
        return None;
    }
    let watch = &vm.homing.hotness;
    let known = watch.known.as_deref();
    Some(api::HotnessWatch {
        age_ms: known.map(|known| now_ns.saturating_sub(known.ended_ns) / 1_000_000),
        watched_ms: known.map(|known| known.ended_ns.saturating_sub(known.began_ns) / 1_000_000),
        cost_us: known.map_or(0, |known| known.cost_ns / 1000),
        regions: known.map_or(0, |known| known.regions.len() as u64),
        problem: watch.problem.clone(),
    })
}

/// The heat of the displaced memory that can be moved.
fn displaced_hotness(samples: &[&AreaSample], home: HostNodeId, known: &Hotness) -> api::Hotness {
    let shares: Vec<Shares> = samples.iter().map(|sample| known.shares(sample, home)).collect();
    let sum = |of: &dyn Fn(&Shares) -> Estimate| bytes(Estimate::sum(shares.iter().map(of)));
    api::Hotness { hot: sum(&|one| one.hot), warm: sum(&|one| one.warm), cold: sum(&|one| one.cold) }
}

fn guest_node(
    vm: &Vm,
    node: &GuestNode,
    observed: Option<&MemoryObservation>,
    policies: &Policies,
) -> api::GuestNodeMemory {
    let home = vm.placement.homes().get(&node.id).copied();
    let bare = api::GuestNodeMemory {
        id: node.id,
        home,
        memory_bytes: node.memory_bytes,
        ..api::GuestNodeMemory::default()
    };
    let Some(observed) = observed else { return bare };
    let samples = observed.of(node.id);
    if samples.is_empty() {
        return bare;
    }
    let sum = |of: &dyn Fn(&AreaSample) -> Estimate| bytes(Estimate::sum(samples.iter().map(|one| of(one))));
    api::GuestNodeMemory {
        samples: samples.iter().fold(0, |sum, sample| sum.saturating_add(sample.looked)),
        exact: samples.iter().all(|sample| sample.is_exact()),
        resident: sum(&AreaSample::resident),
        displaced: home.map(|home| sum(&|sample| sample.displaced(home))),
        swapped: sum(&AreaSample::in_swap),
        locked: sum(&AreaSample::locked),
        places: places(&samples),
        hotness: home
            .zip(vm.homing.hotness.known.as_deref())
            .map(|(home, known)| displaced_hotness(&samples, home, known)),
        unmovable: home.map_or_else(Vec::new, |home| {
            let scheduled = vm.memory_goes_to_vcpus(policies).then(|| Policy::Vprobe.into());
            let whole =
                |sample: &AreaSample| vm.obstacle(sample, home, observed).map(<&str>::from).or(scheduled);
            unmovable(&samples, home, whole)
        }),
        ..bare
    }
}

/// Of all memory of a guest node together.
fn places(samples: &[&AreaSample]) -> Vec<api::MemoryPlace> {
    let mut places: BTreeMap<(HostNodeId, PageKind, Option<u64>), Vec<Estimate>> = BTreeMap::new();
    for sample in samples {
        for (node, kind, size) in sample.places() {
            let page_kib = match kind {
                PageKind::Base => Some(4),
                PageKind::Huge => Some(2048),
                PageKind::Pool => Some(sample.area.page_kib),
                PageKind::Unknown => None,
            };
            places.entry((node, kind, page_kib)).or_default().push(size);
        }
    }
    let place = |((node, kind, page_kib), sizes)| {
        let pages = match kind {
            PageKind::Base => "4K",
            PageKind::Huge => "huge",
            PageKind::Pool => "pool",
            PageKind::Unknown => "unknown",
        };
        api::MemoryPlace { node, pages: pages.to_owned(), page_kib, size: bytes(Estimate::sum(sizes)) }
    };
    places.into_iter().map(place).collect()
}

/// Displaced memory that cannot be moved, by reason. `whole`: what keeps all of a part.
fn unmovable(
    samples: &[&AreaSample],
    home: HostNodeId,
    whole: impl Fn(&AreaSample) -> Option<&'static str>,
) -> Vec<api::Unmovable> {
    let mut kept: BTreeMap<&str, Vec<Estimate>> = BTreeMap::new();
    for sample in samples {
        let displaced = sample.displaced(home);
        match whole(sample).filter(|_| displaced.bytes > 0) {
            Some(reason) => kept.entry(reason).or_default().push(displaced),
            None => sample
                .kept(home)
                .iter()
                .for_each(|(keeps, size)| kept.entry(keeps.name()).or_default().push(*size)),
        }
    }
    let one = |(reason, sizes): (&str, Vec<Estimate>)| api::Unmovable {
        reason: reason.to_owned(),
        size: bytes(Estimate::sum(sizes)),
    };
    kept.into_iter().map(one).collect()
}

fn bytes(Estimate { bytes, low, high }: Estimate) -> api::Bytes {
    api::Bytes { bytes, low, high }
}
