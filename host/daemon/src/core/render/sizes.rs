//! How large guest nodes are and may be, in the form of the API.

use vnuma_api as api;
use vnuma_model::GuestNodeId;
use vnuma_policy::{
    sizing::{Resize, SizeSettings, most, sums},
    world::Vm,
};

/// Of all guest nodes, with their last changes or one that is planned.
pub(in crate::core) fn sizes(vm: &Vm, settings: &SizeSettings, planned: Option<&Resize>) -> api::Sizes {
    let nodes = vm.description.guest_nodes.iter().map(|node| api::GuestNodeSize {
        id: node.id,
        plugs_from: vm.plugs_from(node.id),
        boot_bytes: vm.boot_bytes(node.id),
        pluggable: pluggable(vm, settings, node.id),
        resize: match planned {
            Some(planned) => (planned.guest_node == node.id).then(|| state(planned, true)),
            None => {
                vm.homing.sizes.get(&node.id).and_then(|sizing| Some(state(sizing.resize.as_ref()?, false)))
            }
        },
    });
    api::Sizes { vm: vm.name().to_owned(), guest_nodes: nodes.collect() }
}

/// What can be plugged of a guest node.
pub(in crate::core) fn pluggable(
    vm: &Vm,
    settings: &SizeSettings,
    node: GuestNodeId,
) -> Option<api::Pluggable> {
    let devices = vm.devices_of(node);
    if devices.is_empty() {
        return None;
    }
    let (plugged_bytes, requested_bytes) = sums(&devices);
    let bounds = vm.size_bounds(node, settings);
    let resident: Vec<_> = devices.iter().flat_map(|device| &device.memory.resident_kib).collect();
    let mut hosts: Vec<u32> = resident.iter().map(|(host, _)| *host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let place = |host: u32| {
        let its = resident.iter().filter(|(known, _)| *known == host);
        let kib = its.fold(0_u64, |sum, (_, kib)| sum.saturating_add(*kib));
        api::NodeBytes { node: host, bytes: kib.saturating_mul(1024) }
    };
    Some(api::Pluggable {
        requested_bytes,
        plugged_bytes,
        most_bytes: most(&devices),
        block_bytes: devices.iter().map(|device| device.block_bytes).max().unwrap_or(0),
        devices: devices.len(),
        places: hosts.into_iter().map(place).filter(|place| place.bytes > 0).collect(),
        auto: bounds.map(|bounds| api::SizeBounds { least_bytes: bounds.least, most_bytes: bounds.most }),
    })
}

fn state(resize: &Resize, planned: bool) -> api::ResizeState {
    api::ResizeState {
        state: if planned { "planned" } else { resize.phase().name() }.to_owned(),
        before_bytes: resize.before,
        bytes: resize.bytes,
        by: resize.by.to_string(),
        problem: resize.problem.clone(),
    }
}
