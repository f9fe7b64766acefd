//! Which guest node a vCPU belongs to, given where it runs.

use crate::Homes;
use vnuma_model::{GuestNodeId, HostNodeId, HostTopology, VcpuState};

/// The guest node that a vCPU is assigned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAssignment {
    /// The guest node.
    pub node: GuestNodeId,
    /// The vCPU is on a host node that is no guest node's home; `node` is the nearest one.
    pub approximate: bool,
}

/// How true the guest's view is of a vCPU or device whose right node is `target`, and for which the guest uses `used`.
pub(crate) fn state_of(target: Option<NodeAssignment>, used: Option<GuestNodeId>) -> VcpuState {
    match (target, used) {
        (None, _) | (_, None) => VcpuState::Unknown,
        (Some(target), Some(node)) if target.node != node => VcpuState::Stale,
        (Some(NodeAssignment { approximate: true, .. }), _) => VcpuState::Approximate,
        _ => VcpuState::True,
    }
}

/// The guest node whose home is `at`, the vCPU's host node; if there is none, the one whose home
/// is nearest by SLIT, marked approximate. Of several that qualify equally: the one that was published last
/// (`present`), else the one it booted with, else the lowest, so that no publication makes no difference.
/// `None` when no guest node has a known home.
pub fn choose_node(
    host: &HostTopology,
    homes: &Homes,
    at: HostNodeId,
    present: Option<GuestNodeId>,
    boot: Option<GuestNodeId>,
) -> Option<NodeAssignment> {
    const AT_HOME: u16 = 0;
    const NO_DISTANCE: u16 = 256;
    let distance = |home: HostNodeId| match host.distance(at, home) {
        _ if home == at => AT_HOME,
        Some(distance) => u16::from(distance),
        None => NO_DISTANCE,
    };
    let best = homes.values().map(|&home| distance(home)).min()?;
    let qualifies = |node: &GuestNodeId| homes.get(node).is_some_and(|&home| distance(home) == best);
    let node = present
        .filter(qualifies)
        .or(boot.filter(qualifies))
        .or_else(|| homes.keys().copied().find(qualifies))?;
    Some(NodeAssignment { node, approximate: best != AT_HOME })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use vnuma_model::{CpuSet, DistanceMatrix, HostNode};

    /// A host with one CPU per node and these distances.
    pub(crate) fn host(rows: &[&[u8]]) -> HostTopology {
        let node = |id: usize| HostNode {
            id: id as u32,
            cpus: [id as u32].into_iter().collect::<CpuSet>(),
            memory_total_kib: 1 << 20,
            ..HostNode::default()
        };
        HostTopology {
            nodes: (0..rows.len()).map(node).collect(),
            distances: DistanceMatrix::new(rows.iter().map(|row| row.to_vec()).collect()).expect("square"),
            ..HostTopology::default()
        }
    }

    const FOUR: &[&[u8]] = &[&[10, 16, 32, 32], &[16, 10, 32, 32], &[32, 32, 10, 16], &[32, 32, 16, 10]];

    fn choose(homes: &[(u32, u32)], at: u32, present: Option<u32>, boot: Option<u32>) -> Option<(u32, bool)> {
        let homes = homes.iter().copied().collect();
        choose_node(&host(FOUR), &homes, at, present, boot).map(|placed| (placed.node, placed.approximate))
    }

    #[test]
    fn the_guest_node_at_home_is_exact() {
        assert_eq!(choose(&[(0, 2), (1, 3)], 3, Some(0), Some(0)), Some((1, false)));
        assert_eq!(choose(&[(0, 2), (1, 3)], 2, Some(1), Some(1)), Some((0, false)));
    }

    #[test]
    fn elsewhere_the_nearest_is_approximate() {
        assert_eq!(choose(&[(0, 0), (1, 2)], 3, Some(0), Some(0)), Some((1, true)));
        assert_eq!(choose(&[(0, 0), (1, 2)], 1, Some(1), Some(1)), Some((0, true)));
    }

    #[test]
    fn ties_keep_the_present_one_then_the_boot_one_then_the_lowest() {
        let homes = &[(0, 0), (1, 1), (2, 3)];
        assert_eq!(choose(homes, 2, Some(2), Some(0)), Some((2, true)));
        let homes = &[(0, 0), (1, 1)];
        assert_eq!(choose(homes, 2, Some(1), Some(0)), Some((1, true)));
        assert_eq!(choose(homes, 2, Some(5), Some(1)), Some((1, true)));
        assert_eq!(choose(homes, 2, None, None), Some((0, true)));
    }

    #[test]
    fn guest_nodes_with_one_home_keep_the_present_one() {
        let homes = &[(0, 1), (1, 1), (2, 3)];
        assert_eq!(choose(homes, 1, Some(1), Some(0)), Some((1, false)));
        assert_eq!(choose(homes, 1, Some(2), Some(1)), Some((1, false)));
        assert_eq!(choose(homes, 1, Some(2), Some(2)), Some((0, false)));
    }

    #[test]
    fn a_host_node_without_distances_still_gets_an_answer() {
        assert_eq!(choose(&[(0, 0), (1, 1)], 77, Some(1), Some(0)), Some((1, true)));
        assert_eq!(choose(&[(0, 88)], 0, None, None), Some((0, true)));
        assert_eq!(choose(&[], 0, Some(0), Some(0)), None);
    }
}
