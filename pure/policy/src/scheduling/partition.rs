//! VCPU periodical partitioning: Algorithm 1 of *vProbe: Scheduling Virtual Machines on NUMA Systems*, section III-C.
//!
//! The numbers in the comments are the lines of the algorithm. What the paper leaves open is decided so that equal input
//! gives equal output: of several nodes or groups that are equal, the first one counts, and vCPUs are in the order in which
//! they are given.

use super::analyzer::VcpuType;
use std::collections::VecDeque;

/// A memory-intensive vCPU, `groupOfVc(c, p)` being those of category `c` with affinity `p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The caller's name for it.
    pub vcpu: usize,
    /// LLC-T or LLC-FI.
    pub kind: VcpuType,
    /// Its memory node affinity, by position.
    pub affinity: usize,
}

/// An assignment: a vCPU and the node that it is migrated to, by position.
pub type Assignment = (usize, usize);

/// Algorithm 1. `nodes` are those that a vCPU can run on. An affinity may be another node, one without CPUs: that group is
/// never the one of MIN-NODE, and is taken from like any other.
pub fn periodical_partitioning(nodes: &[usize], candidates: &[Candidate]) -> Vec<Assignment> {
    let mut decision = Vec::with_capacity(candidates.len());
    if nodes.is_empty() {
        return decision;
    }
    let mut thrashing = Groups::new(candidates, VcpuType::Thrashing);
    let mut fitting = Groups::new(candidates, VcpuType::Fitting);
    let mut reassigned_load = vec![0_u32; nodes.len()];
    // 1
    while thrashing.unassigned + fitting.unassigned > 0 {
        // 2
        let min_node = get_min_node(&reassigned_load);
        // 3
        let mut groups = &mut thrashing;
        // 4
        if groups.unassigned == 0 {
            // 5
            groups = &mut fitting;
            // 6
        }
        // 7: is the group of MIN-NODE not empty?
        let vc = match groups.first_of(nodes[min_node]) {
            // 8
            Some(vc) => vc,
            // 9, 10: of the largest group
            None => match groups.first_of_largest() {
                Some(vc) => vc,
                // Not reached: line 1 says that there is one.
                None => break,
            },
            // 11
        };
        // 12: it is in no group any more
        reassigned_load[min_node] += 1;
        // 13
        decision.push((vc, nodes[min_node]));
        // 14
    }
    // 15
    decision
}

/// `getMinNode()`: the node with the smallest `reassigned_load`.
fn get_min_node(reassigned_load: &[u32]) -> usize {
    let mut least = 0;
    for (position, load) in reassigned_load.iter().enumerate() {
        if *load < reassigned_load[least] {
            least = position;
        }
    }
    least
}

/// `groupOfVc(c, p)` of one category, by `p`.
struct Groups {
    by_affinity: Vec<VecDeque<usize>>,
    unassigned: usize,
}

impl Groups {
    fn new(candidates: &[Candidate], kind: VcpuType) -> Self {
        let affinities = candidates.iter().map(|candidate| candidate.affinity + 1).max().unwrap_or(0);
        let mut groups = Self { by_affinity: vec![VecDeque::new(); affinities], unassigned: 0 };
        for candidate in candidates.iter().filter(|candidate| candidate.kind == kind) {
            groups.by_affinity[candidate.affinity].push_back(candidate.vcpu);
            groups.unassigned += 1;
        }
        groups
    }

    fn first_of(&mut self, affinity: usize) -> Option<usize> {
        let vc = self.by_affinity.get_mut(affinity)?.pop_front()?;
        self.unassigned -= 1;
        Some(vc)
    }

    fn first_of_largest(&mut self) -> Option<usize> {
        let mut largest = 0;
        for (position, group) in self.by_affinity.iter().enumerate() {
            if group.len() > self.by_affinity[largest].len() {
                largest = position;
            }
        }
        self.first_of(largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use VcpuType::{Fitting, Thrashing};
    use proptest::prelude::*;

    fn candidates(of: &[(VcpuType, usize)]) -> Vec<Candidate> {
        let one = |(vcpu, &(kind, affinity)): (usize, &(VcpuType, usize))| Candidate { vcpu, kind, affinity };
        of.iter().enumerate().map(one).collect()
    }

    #[test]
    fn each_goes_to_its_own_node_while_the_nodes_are_even() {
        let decision = periodical_partitioning(
            &[0, 1],
            &candidates(&[(Thrashing, 1), (Thrashing, 0), (Thrashing, 0), (Thrashing, 1)]),
        );
        assert_eq!(decision, [(1, 0), (0, 1), (2, 0), (3, 1)]);
    }

    #[test]
    fn without_one_of_its_own_min_node_takes_from_the_largest_group() {
        let all =
            candidates(&[(Thrashing, 1), (Thrashing, 2), (Thrashing, 2), (Thrashing, 2), (Thrashing, 1)]);
        // Node 0 has none of its own: it takes the first of node 2's three, not of node 1's two.
        assert_eq!(periodical_partitioning(&[0, 1, 2], &all), [(1, 0), (0, 1), (2, 2), (4, 0), (3, 1)]);
    }

    #[test]
    fn thrashing_ones_come_first() {
        let all = candidates(&[(Fitting, 0), (Fitting, 0), (Thrashing, 1), (Thrashing, 1)]);
        // Both nodes get one that thrashes, one of them remote; then both get one that fits.
        assert_eq!(periodical_partitioning(&[0, 1], &all), [(2, 0), (3, 1), (0, 0), (1, 1)]);
    }

    #[test]
    fn memory_on_a_node_without_cpus_is_a_group_like_any_other() {
        let all = candidates(&[(Thrashing, 2), (Thrashing, 2), (Thrashing, 0)]);
        assert_eq!(periodical_partitioning(&[0, 1], &all), [(2, 0), (0, 1), (1, 0)]);
        assert!(periodical_partitioning(&[], &all).is_empty());
    }

    proptest! {
        #[test]
        fn all_are_assigned_once_and_nodes_are_even(
            nodes in 1_usize..9,
            of in proptest::collection::vec((any::<bool>(), 0_usize..9), 0..80),
        ) {
            let of: Vec<_> = of.into_iter().map(|(t, p)| (if t { Thrashing } else { Fitting }, p)).collect();
            let all = candidates(&of);
            let positions: Vec<usize> = (0..nodes).collect();
            let decision = periodical_partitioning(&positions, &all);
            let mut vcpus: Vec<usize> = decision.iter().map(|(vcpu, _)| *vcpu).collect();
            vcpus.sort_unstable();
            prop_assert_eq!(vcpus, (0..all.len()).collect::<Vec<_>>());
            let load = |node| decision.iter().filter(|(_, to)| *to == node).count();
            let loads: Vec<usize> = positions.iter().map(|&node| load(node)).collect();
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1, "{:?}", loads);
            // Those that thrash are even among themselves as well: they are assigned first.
            let thrash = |node| decision.iter().filter(|(vc, to)| *to == node && of[*vc].0 == Thrashing).count();
            let loads: Vec<usize> = positions.iter().map(|&node| thrash(node)).collect();
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1, "{:?}", loads);
        }
    }
}
