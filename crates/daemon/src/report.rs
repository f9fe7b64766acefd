//! VMs in the form of the API.

use crate::vm::{Known, Slot, Vm};
use std::collections::BTreeMap;
use vnuma_api as api;
use vnuma_placement::VcpuState;
use vnuma_topology::DistanceMatrix;

/// All that is known of a VM whose hypervisor answers.
pub(crate) fn answering(known: &Vm) -> api::Vm {
    vm(known, api::Hypervisor::Answers, None)
}

/// All that is known of a VM.
pub(crate) fn vm(vm: &Vm, hypervisor: api::Hypervisor, problem: Option<&str>) -> api::Vm {
    let homes = vm.placement.homes();
    let node = |node: &vnuma_topology::GuestNode| api::GuestNode {
        id: node.id,
        home: homes.get(&node.id).copied(),
        memory_bytes: node.memory_bytes,
    };
    let suppressed = vm.placement.suppressed();
    let channel = match vm.slot {
        Slot::None => api::ChannelState::None,
        Slot::Attaching { .. } | Slot::TakingOver => api::ChannelState::Attaching,
        Slot::Serving(_) => api::ChannelState::Attached,
        Slot::Lost => api::ChannelState::Lost,
    };
    api::Vm {
        name: vm.name().to_owned(),
        pid: Some(vm.description.pid),
        described: vm.known == Known::Described,
        hypervisor,
        attached: channel == api::ChannelState::Attached,
        channel,
        run_state: (vm.known == Known::Described).then(|| vm.description.run_state.clone()),
        problem: problem.map(str::to_owned).or_else(|| stuck(vm)),
        nodes: vm.description.guest_nodes.iter().map(node).collect(),
        distances: vm.placement.distances().clone(),
        vcpus: vm.description.vcpus.iter().filter_map(|described| vcpu(vm, described)).collect(),
        telling: api::Telling {
            suppressed_by_dwell: suppressed.dwell,
            deferred_by_cap: suppressed.cap,
            ..vm.stats
        },
        spare_slots: vm.description.spare_slots.clone(),
    }
}

/// Why a guest that was not asked to stand still does.
fn stuck(vm: &Vm) -> Option<String> {
    let state = vm.description.run_state.as_str();
    let why = match state {
        "internal-error" => "the hypervisor could not go on with it",
        "io-error" => "its disk gave an error",
        "guest-panicked" => "its kernel panicked",
        "watchdog" => "its watchdog ran out",
        _ => return None,
    };
    Some(format!("the guest stands still ({state}): {why}"))
}

/// A VM of which only the socket is known.
pub(crate) fn unreachable(name: &str, hypervisor: api::Hypervisor, problem: &str) -> api::Vm {
    api::Vm {
        name: name.to_owned(),
        pid: None,
        described: false,
        hypervisor,
        attached: false,
        channel: api::ChannelState::None,
        run_state: None,
        problem: Some(problem.to_owned()),
        nodes: Vec::new(),
        distances: DistanceMatrix::default(),
        vcpus: Vec::new(),
        telling: api::Telling::default(),
        spare_slots: BTreeMap::new(),
    }
}

fn vcpu(vm: &Vm, described: &vnuma_topology::Vcpu) -> Option<api::Vcpu> {
    let status = vm.placement.vcpu(described.apic_id)?;
    Some(api::Vcpu {
        apic_id: described.apic_id,
        tid: described.tid,
        host_cpu: vm.locations.get(&described.apic_id).map(|location| location.cpu),
        host_node: status.host_node,
        pinned: status.pinned,
        guest_node: status.told,
        believed_node: status.believed,
        right_node: status.right,
        state: match status.state {
            VcpuState::True => api::VcpuState::True,
            VcpuState::Approximate => api::VcpuState::Approximate,
            VcpuState::Stale => api::VcpuState::Stale,
            VcpuState::Unknown => api::VcpuState::Unknown,
        },
    })
}
