//! What should be published to a guest, worked out a second time: the rules stand in the manual, and nothing here is shared with the
//! code that is checked.

use std::collections::BTreeMap;
use vnuma_model::{
    DistanceMatrix, GuestNodeId, HostNodeId, HostTopology, PciAddress, VmDescription, VmDevice,
};

/// The host node of each guest node whose memory's place is known.
pub type Homes = BTreeMap<GuestNodeId, HostNodeId>;

/// Homes by a description: where most pages are; where none are, the node that they are bound to.
pub fn homes(description: &VmDescription) -> Homes {
    let mut homes = Homes::new();
    for node in &description.guest_nodes {
        let Some(memory) = &node.memory else { continue };
        let most = memory.resident_kib.iter().max_by_key(|(_, kib)| *kib).map(|(node, _)| *node);
        if let Some(home) = most.or(memory.host_nodes.first().copied()) {
            homes.insert(node.id, home);
        }
    }
    homes
}

fn distance(host: &HostTopology, from: HostNodeId, to: HostNodeId) -> u32 {
    let position = |id| host.nodes.iter().position(|node| node.id == id);
    match (from == to, position(from), position(to)) {
        (true, ..) => 0,
        (false, Some(from), Some(to)) => host.distances.rows()[from][to].into(),
        _ => u32::MAX,
    }
}

/// Is no guest node nearer to a vCPU on host node `at`? Nothing is nearest where no home is known.
pub fn is_nearest(host: &HostTopology, homes: &Homes, at: HostNodeId, node: GuestNodeId) -> bool {
    let Some(&mine) = homes.get(&node) else { return false };
    let mine = distance(host, at, mine);
    homes.values().all(|home| distance(host, at, *home) >= mine)
}

/// Is a guest node's home where the vCPU is?
pub fn is_home(homes: &Homes, at: HostNodeId) -> bool {
    homes.values().any(|home| *home == at)
}

/// What is wrong with the nodes that a guest is told of its devices: each whose host node and address in the guest are known is told,
/// with a nearest node, and no other is.
pub fn wrong_device(
    host: &HostTopology,
    homes: &Homes,
    devices: &[VmDevice],
    told: &[(PciAddress, GuestNodeId)],
) -> Option<String> {
    let mut wanted = BTreeMap::new();
    for device in devices.iter().filter(|_| !homes.is_empty()) {
        let node =
            host.pci_devices.iter().find(|known| known.address == device.host).and_then(|known| known.node);
        if let (Some(address), Some(node)) = (device.guest, node) {
            wanted.insert(address, node);
        }
    }
    for (address, node) in told {
        match wanted.remove(address) {
            None => {
                return Some(format!("{address} is told node {node}, and is no device whose node is known"));
            }
            Some(at) if !is_nearest(host, homes, at, *node) => {
                return Some(format!("{address} on host node {at} is told node {node}"));
            }
            Some(_) => {}
        }
    }
    wanted.keys().next().map(|address| format!("{address} is not told its node"))
}

/// Are these the distances between the homes of `count` guest nodes?
pub fn distances_hold(host: &HostTopology, homes: &Homes, count: usize, told: &DistanceMatrix) -> bool {
    let expected = |from: u32, to: u32| match (homes.get(&from), homes.get(&to)) {
        _ if from == to => 10,
        (Some(a), Some(b)) => match distance(host, *a, *b) {
            0 => 11,
            u32::MAX => 20,
            other => other.max(11),
        },
        _ => 20,
    };
    let row = |from: usize| {
        (0..count).all(|to| told.get(from, to).map(u32::from) == Some(expected(from as u32, to as u32)))
    };
    told.len() == count && (0..count).all(row)
}
