//! Where guest nodes are and the last re-home, in the form of the API.

use std::collections::BTreeSet;
use vnuma_api as api;
use vnuma_model::{GuestNode, GuestNodeId, HostTopology, NumaPolicy};
use vnuma_policy::{
    memory_move::{MemoryPolicy, MemoryReason},
    policies::{Stays, StaysWhy},
    rehome::Rehome,
    rehome_policy::RehomeWhy,
    world::{ChannelState, Vm},
};

/// Where guest nodes are, why memory does not follow its vCPUs, and the last re-home or one that is planned.
pub(in crate::core) fn rehome(
    vm: &Vm,
    host: &HostTopology,
    planned: Option<&Rehome>,
    stays: impl Fn(GuestNodeId) -> Option<Stays>,
) -> api::Rehome {
    let known = planned.or(vm.homing.rehome.as_ref());
    let shown = |stays: Stays| api::MemoryStays {
        reason: stays.why.name().to_owned(),
        text: format!("{}{}", stays.why, way_out(&stays.why)),
        vcpus_on: stays.vcpus_on,
    };
    let node = |node| guest_node(vm, node, stays(node.id).map(shown));
    api::Rehome {
        vm: vm.name().to_owned(),
        guest_nodes: vm.description.guest_nodes.iter().map(node).collect(),
        rehome: known.map(|known| state(vm, host, known, planned.is_some())),
    }
}

/// Why the policy gives a guest node another home.
pub(in crate::core) fn why_rehomed(why: &RehomeWhy) -> String {
    let ms = |ns: u64| ns / 1_000_000;
    format!(
        "its vCPUs have been there for {} s, where no guest node is at home: remote accesses have cost {} ms{}, the move costs {} ms",
        why.stayed_ns / 1_000_000_000,
        ms(why.lost_ns),
        if why.assumed { " (assumed)" } else { "" },
        ms(why.price_ns)
    )
}

/// What an operator can do about it. Pages move against their policy, but not what is spread on purpose.
fn way_out(why: &StaysWhy) -> String {
    match why {
        StaysWhy::Manual { guest_node, node } => {
            format!("; `vnumactl rehome VM --guest-node {guest_node} --node {node}` takes it there")
        }
        StaysWhy::Bound { policy, .. } if *policy != NumaPolicy::Interleave => {
            "; `vnumactl rehome --guest-node --node` moves the pages that are there all the same".to_owned()
        }
        _ => String::new(),
    }
}

fn guest_node(vm: &Vm, node: &GuestNode, stays: Option<api::MemoryStays>) -> api::GuestNodeHome {
    let place = |(node, bytes)| api::NodeBytes { node, bytes };
    api::GuestNodeHome {
        id: node.id,
        home: vm.placement.homes().get(&node.id).copied(),
        bound: bound(vm, node, |_| true),
        places: vm.places_of(node.id).into_iter().filter(|(_, bytes)| *bytes > 0).map(place).collect(),
        stays,
    }
}

/// Nodes that new pages come from, whatever is moved: of what it booted with, and of its virtio-mem devices. Of memory to which
/// this applies.
fn bound(vm: &Vm, node: &GuestNode, applies: impl Fn(&[u32]) -> bool) -> Vec<u32> {
    let memory = vnuma_policy::backings(node, &vm.description.memory_devices);
    let bound = memory.filter(|memory| memory.policy.names_nodes());
    let bound = bound.filter(|memory| applies(&memory.host_nodes));
    let nodes: BTreeSet<u32> = bound.flat_map(|memory| memory.host_nodes.iter().copied()).collect();
    nodes.into_iter().collect()
}

fn state(vm: &Vm, host: &HostTopology, rehome: &Rehome, planned: bool) -> api::RehomeState {
    let places = vm.places_of(rehome.guest_node);
    let sum = |is: &dyn Fn(u32) -> bool| {
        let some = places.iter().filter(|(node, _)| is(*node));
        some.fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes))
    };
    let total_bytes = sum(&|_| true);
    // Counted when the VM was described last; since then the move that is under way has gone on.
    let last = vm.scheduling.memory.task.begun();
    let its = last.filter(|last| last.order.why == MemoryReason::Rehome(rehome.guest_node));
    let since = its.map_or(0, |last| last.moved.bytes);
    api::RehomeState {
        guest_node: rehome.guest_node,
        node: rehome.to,
        state: if planned { "planned" } else { rehome.phase().name() }.to_owned(),
        total_bytes,
        there_bytes: sum(&|node| node == rehome.to).saturating_add(since).min(total_bytes),
        vcpus: rehome.vcpus.clone(),
        vcpus_left: rehome.left.iter().copied().collect(),
        why: rehome.why.as_ref().map(why_rehomed),
        problem: rehome.problem.clone(),
        notes: notes(vm, host, rehome),
    }
}

fn notes(vm: &Vm, host: &HostTopology, rehome: &Rehome) -> Vec<String> {
    let (to, mut notes) = (rehome.to, Vec::new());
    let node = vm.description.guest_nodes.iter().find(|node| node.id == rehome.guest_node);
    let elsewhere = |nodes: &[u32]| !nodes.contains(&to);
    let bound = node.map(|node| bound(vm, node, elsewhere)).unwrap_or_default();
    if !bound.is_empty() {
        notes.push(format!(
            "its policy takes new pages of it from nodes {bound:?}, and nobody but its hypervisor can change that: pages that are freed and \
             touched again go there; start the VM without host-nodes= (or with host-nodes={to}) to avoid it"
        ));
    }
    if matches!(vm.channel, ChannelState::Detached | ChannelState::Lost) {
        notes.push("its guest is not told: it has no topology channel (`vnumactl attach`)".to_owned());
    }
    if host.node(to).is_some_and(|node| node.cpus.is_empty()) {
        notes.push(format!("node {to} has no CPUs, so its vCPUs stay where they are"));
    }
    if vm.homing.policy != MemoryPolicy::None && !rehome.is_active() {
        notes.push(format!(
            "memory policy {} brings what is displaced to the node that most of its memory is on",
            vm.homing.policy
        ));
    }
    notes
}
