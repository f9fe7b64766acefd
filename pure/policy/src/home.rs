//! Homes of guest nodes, and the distances between guest nodes that follow from them.

use std::collections::BTreeMap;
use vnuma_model::{
    DistanceMatrix, GuestNode, GuestNodeId, HostNodeId, HostTopology, LOCAL_DISTANCE, MemoryBacking,
    MemoryDevice,
};

/// Home of each guest node; a guest node that is missing has none that is known.
pub type Homes = BTreeMap<GuestNodeId, HostNodeId>;

/// The distance that Linux assumes between two nodes by default (`REMOTE_DISTANCE`).
const REMOTE_DISTANCE: u8 = 20;

/// Between different guest nodes that have one home. Linux takes 10 for "the same
/// node" and builds no scheduler domain between two nodes at that distance.
const SAME_HOME_DISTANCE: u8 = LOCAL_DISTANCE + 1;

/// Backends of the memory of a guest node: of what it booted with, and of its virtio-mem devices.
pub fn backings<'a>(
    node: &'a GuestNode,
    devices: &'a [MemoryDevice],
) -> impl Iterator<Item = &'a MemoryBacking> {
    let its = devices.iter().filter(|device| device.guest_node == node.id);
    node.memory.iter().chain(its.map(|device| &device.memory))
}

/// Resident memory of a guest node by host node, in rising order, KiB: what it booted with, and what is plugged.
pub fn resident_kib(node: &GuestNode, devices: &[MemoryDevice]) -> Vec<(HostNodeId, u64)> {
    let mut places: BTreeMap<HostNodeId, u64> = BTreeMap::new();
    for &(host_node, kib) in backings(node, devices).flat_map(|memory| &memory.resident_kib) {
        let sum = places.entry(host_node).or_default();
        *sum = sum.saturating_add(kib);
    }
    places.into_iter().collect()
}

/// The home of each guest node: the host node that holds most of its resident memory or, while nothing is resident, the
/// one that its memory is bound to. `present` is the answer given last time. It is kept as long as no node has a
/// majority, so that a home does not flutter.
pub fn homes(guest_nodes: &[GuestNode], devices: &[MemoryDevice], present: &Homes) -> Homes {
    guest_nodes
        .iter()
        .filter_map(|node| {
            // What it booted with counts before what can be plugged.
            let bound = backings(node, devices).next()?.bound_node();
            let (resident, present) = (resident_kib(node, devices), present.get(&node.id).copied());
            // Pages that could not be counted this time are somewhere all the same.
            let counted = !resident.is_empty() || backings(node, devices).any(|one| one.mapping.is_some());
            let home = if counted { home_of(&resident, bound, present) } else { present.or(bound) };
            Some((node.id, home?))
        })
        .collect()
}

/// A binding is a wish for pages that are yet to come: `preferred` gives way when the node is full, and pages can be moved
/// after they were bound. Pages that were counted are facts.
fn home_of(
    resident_kib: &[(HostNodeId, u64)],
    bound: Option<HostNodeId>,
    present: Option<HostNodeId>,
) -> Option<HostNodeId> {
    let total: u128 = resident_kib.iter().map(|&(_, kib)| u128::from(kib)).sum();
    // Rising by size, falling by number: the last one is the largest, of equal ones the lowest.
    let largest = resident_kib
        .iter()
        .filter(|(_, kib)| *kib > 0)
        .max_by_key(|&&(node, kib)| (kib, std::cmp::Reverse(node)));
    let Some(largest) = largest else { return bound };
    if u128::from(largest.1) * 2 > total {
        return Some(largest.0);
    }
    let holds_some = |home: &HostNodeId| resident_kib.iter().any(|(n, kib)| n == home && *kib > 0);
    present.filter(holds_some).or(bound.filter(holds_some)).or(Some(largest.0))
}

/// Resident memory of a guest node that is not on its home, bytes. None while the node has no home, or its pages were not
/// counted.
pub fn displaced_bytes(node: &GuestNode, devices: &[MemoryDevice], home: Option<HostNodeId>) -> Option<u64> {
    let (home, resident) = (home?, resident_kib(node, devices));
    let elsewhere = resident.iter().filter(|(node, _)| *node != home);
    let kib = elsewhere.fold(0_u64, |sum, (_, kib)| sum.saturating_add(*kib));
    (!resident.is_empty()).then(|| kib.saturating_mul(1024))
}

/// Distances between guest nodes, by position: those between their homes. Different guest
/// nodes are never as near as 10, also when they share a home; 20 stands in where a home is
/// not known.
pub fn distances(host: &HostTopology, guest_nodes: &[GuestNodeId], homes: &Homes) -> DistanceMatrix {
    let between = |from: &GuestNodeId, to: &GuestNodeId| {
        if from == to {
            return LOCAL_DISTANCE;
        }
        match (homes.get(from), homes.get(to)) {
            (Some(a), Some(b)) if a == b => SAME_HOME_DISTANCE,
            (Some(&a), Some(&b)) => host.distance(a, b).unwrap_or(REMOTE_DISTANCE).max(SAME_HOME_DISTANCE),
            _ => REMOTE_DISTANCE,
        }
    };
    let rows = guest_nodes.iter().map(|from| guest_nodes.iter().map(|to| between(from, to)).collect());
    DistanceMatrix::new(rows.collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::BackingMapping;

    fn node(id: u32, policy: &str, host_nodes: &[u32], resident_kib: &[(u32, u64)]) -> GuestNode {
        let memory = MemoryBacking {
            id: format!("ram{id}"),
            size_bytes: 1 << 30,
            policy: policy.into(),
            host_nodes: host_nodes.to_vec(),
            resident_kib: resident_kib.to_vec(),
            mapping: Some(BackingMapping { start: 1 << 40, page_kib: 4 }),
        };
        GuestNode { id, memory_bytes: 1 << 30, memory: Some(memory) }
    }

    fn home(guest_node: GuestNode, present: Option<u32>) -> Option<u32> {
        let present = present.map(|home| (guest_node.id, home)).into_iter().collect();
        homes(&[guest_node], &[], &present).into_values().next()
    }

    #[test]
    fn pages_that_were_counted_decide_and_the_binding_does_while_there_are_none() {
        assert_eq!(home(node(0, "bind", &[3], &[]), None), Some(3));
        assert_eq!(home(node(0, "bind", &[3], &[(3, 0)]), None), Some(3));
        assert_eq!(home(node(0, "bind", &[3], &[(1, 1000)]), None), Some(1), "moved after it was bound");
        assert_eq!(home(node(0, "preferred", &[2], &[]), None), None, "a preference binds nothing");
        assert_eq!(home(node(0, "preferred", &[2], &[(1, 70), (2, 30)]), Some(2)), Some(1));
        assert_eq!(home(node(0, "bind", &[2], &[(1, 50), (2, 50)]), None), Some(2));
    }

    #[test]
    fn memory_bound_to_several_nodes_counts_like_unbound() {
        assert_eq!(home(node(0, "bind", &[0, 1], &[(0, 10), (1, 90)]), None), Some(1));
        assert_eq!(home(node(0, "interleave", &[1], &[(0, 10)]), None), Some(0));
    }

    #[test]
    fn a_majority_takes_the_home_and_anything_less_keeps_it() {
        assert_eq!(home(node(0, "default", &[], &[(0, 40), (1, 60)]), Some(0)), Some(1));
        assert_eq!(home(node(0, "default", &[], &[(0, 30), (1, 40), (2, 30)]), Some(0)), Some(0));
        assert_eq!(home(node(0, "default", &[], &[(0, 30), (1, 40), (2, 30)]), None), Some(1));
        assert_eq!(home(node(0, "default", &[], &[(0, 50), (1, 50)]), Some(1)), Some(1));
        assert_eq!(home(node(0, "default", &[], &[(0, 50), (1, 50)]), None), Some(0));
        assert_eq!(home(node(0, "default", &[], &[(0, 50), (1, 50)]), Some(7)), Some(0));
    }

    #[test]
    fn nothing_resident_has_no_home() {
        assert_eq!(home(node(0, "default", &[], &[]), Some(1)), None);
        assert_eq!(home(node(0, "default", &[], &[(0, 0), (1, 0)]), None), None);
        assert!(homes(&[GuestNode { id: 0, memory_bytes: 0, memory: None }], &[], &Homes::new()).is_empty());
    }

    #[test]
    fn what_could_not_be_counted_keeps_its_home() {
        let uncounted = |policy: &str, host_nodes: &[u32]| {
            let mut node = node(0, policy, host_nodes, &[]);
            node.memory.iter_mut().for_each(|memory| memory.mapping = None);
            node
        };
        assert_eq!(home(uncounted("default", &[]), Some(1)), Some(1));
        assert_eq!(home(uncounted("bind", &[3]), Some(1)), Some(1), "it may have been moved since");
        assert_eq!(home(uncounted("bind", &[3]), None), Some(3));
        assert_eq!(home(uncounted("default", &[]), None), None);
    }

    #[test]
    fn what_is_resident_elsewhere_is_displaced() {
        let displaced =
            |resident: &[(u32, u64)], home| displaced_bytes(&node(0, "default", &[], resident), &[], home);
        assert_eq!(displaced(&[(0, 30), (1, 60), (2, 10)], Some(1)), Some(40 << 10));
        assert_eq!(displaced(&[(1, 60)], Some(1)), Some(0));
        assert_eq!(displaced(&[(0, u64::MAX), (2, 1)], Some(1)), Some(u64::MAX));
        assert_eq!((displaced(&[(1, 60)], None), displaced(&[], Some(1))), (None, None));
        assert_eq!(displaced_bytes(&GuestNode { id: 0, memory_bytes: 1, memory: None }, &[], Some(1)), None);
    }

    #[test]
    fn memory_that_is_plugged_counts_as_that_of_its_guest_node() {
        let device = |guest_node, policy: &str, resident: &[(u32, u64)]| MemoryDevice {
            id: Some(format!("vmem{guest_node}")),
            guest_node,
            requested_bytes: 1 << 20,
            plugged_bytes: 1 << 20,
            block_bytes: 1 << 20,
            memory: node(0, policy, &[1], resident).memory.expect("it has some"),
        };
        let boot = node(0, "bind", &[0], &[(0, 40), (1, 10)]);
        let devices = [device(0, "bind", &[(1, 100), (2, 5)]), device(1, "bind", &[(3, 1000)])];
        assert_eq!(resident_kib(&boot, &devices), [(0, 40), (1, 110), (2, 5)]);
        let of = |node: &GuestNode, devices: &[MemoryDevice]| {
            homes(std::slice::from_ref(node), devices, &Homes::new()).into_values().next()
        };
        assert_eq!((of(&boot, &[]), of(&boot, &devices)), (Some(0), Some(1)));
        assert_eq!(displaced_bytes(&boot, &devices, Some(1)), Some(45 << 10));
        // Nothing is there yet: the binding of what it booted with, or of its device if it booted with nothing.
        let empty = [device(0, "bind", &[])];
        assert_eq!(of(&node(0, "bind", &[0], &[]), &empty), Some(0));
        assert_eq!(of(&node(0, "default", &[], &[]), &empty), None);
        assert_eq!(of(&GuestNode { id: 0, memory_bytes: 0, memory: None }, &empty), Some(1));
    }

    #[test]
    fn guest_distances_are_those_of_the_homes() {
        let host = crate::assignment::tests::host(&[&[10, 21, 10], &[21, 10, 31], &[10, 31, 10]]);
        let homes = Homes::from([(0, 0), (1, 1), (2, 1), (3, 2)]);
        let expected = vec![
            vec![10, 21, 21, 11, 20],
            vec![21, 10, 11, 31, 20],
            vec![21, 11, 10, 31, 20],
            vec![11, 31, 31, 10, 20],
            vec![20, 20, 20, 20, 10],
        ];
        assert_eq!(distances(&host, &[0, 1, 2, 3, 4], &homes).rows(), expected);
    }

    #[test]
    fn a_home_that_the_host_does_not_have_is_far() {
        let host = crate::assignment::tests::host(&[&[10]]);
        let homes = Homes::from([(0, 0), (1, 9)]);
        assert_eq!(distances(&host, &[0, 1], &homes).rows(), vec![vec![10, 20], vec![20, 10]]);
    }
}
