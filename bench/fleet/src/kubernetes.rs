//! Kubernetes' kubelet with the topology manager's policy `best-effort` and the CPU manager's policy `static`, after their
//! documentation (tasks/administer-cluster/topology-manager) and `pkg/kubelet/cm/topologymanager`.
//!
//! CPUs and each device give hints: sets of nodes that suffice, preferred if no smaller set of the empty server would. Hints are
//! combined by intersection; of those that are not empty the best is preferred, then narrower, then of lower numbers. CPUs are
//! taken from its nodes, the fullest first, and if they lack some, from the others: best effort refuses no VM. Memory
//! has no manager by default: it comes from where the CPUs are.

use crate::{
    server::{Server, Strategy},
    workload::Vm,
};
use std::collections::BTreeSet;

/// The policy.
pub struct BestEffort;

/// A set of nodes, a bit each, and whether it is preferred.
type Hint = (u32, bool);

fn hints(server: &Server, vm: &Vm) -> Vec<BTreeSet<Hint>> {
    let masks = || 1..1_u32 << server.free.len();
    let of = |mask: u32, cpus: &dyn Fn(usize) -> u32| -> u32 {
        (0..server.free.len()).filter(|at| mask >> at & 1 == 1).map(cpus).sum()
    };
    let suffices = |mask: &u32| of(*mask, &|at| server.free[at].cpus) >= vm.vcpus;
    let least = vm.vcpus.div_ceil(server.model.cpus_per_node());
    let cpus: BTreeSet<Hint> =
        masks().filter(suffices).map(|mask| (mask, mask.count_ones() == least)).collect();
    let device = |&card: &usize| -> BTreeSet<Hint> {
        let node = server.model.node_of_card(card);
        let near = masks().filter(|mask| mask >> node & 1 == 1);
        near.map(|mask| (mask, mask.count_ones() == 1)).collect()
    };
    std::iter::once(cpus).chain(vm.cards.iter().map(device)).collect()
}

/// The best set of nodes.
fn merge(server: &Server, vm: &Vm) -> u32 {
    let all = (1_u32 << server.free.len()) - 1;
    let both = |merged: BTreeSet<Hint>, hints: BTreeSet<Hint>| -> BTreeSet<Hint> {
        let pair = |&(mask, preferred): &Hint| {
            hints.iter().map(move |hint| (mask & hint.0, preferred && hint.1)).collect::<Vec<_>>()
        };
        merged.iter().flat_map(pair).filter(|hint| hint.0 != 0).collect()
    };
    let merged = hints(server, vm).into_iter().fold(BTreeSet::from([(all, true)]), both);
    let best = merged.into_iter().min_by_key(|&(mask, preferred)| (!preferred, mask.count_ones(), mask));
    best.map_or(all, |hint| hint.0)
}

impl Strategy for BestEffort {
    fn place(
        &mut self,
        _number: usize,
        server: &Server,
        _id: usize,
        vm: &Vm,
    ) -> Option<Vec<crate::server::Amount>> {
        let near = merge(server, vm);
        let mut order: Vec<usize> = (0..server.free.len()).collect();
        order.sort_by_key(|&at| (near >> at & 1 == 0, server.free[at].cpus, at));
        Some(server.fill(&order, vm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Model;

    #[test]
    fn hints_are_merged_and_nobody_is_refused() {
        let mut server = Server::new(Model::Eight);
        let vm =
            |vcpus, cards: &[usize]| Vm { start: 0.0, stop: 1.0, vcpus, units: 512, cards: cards.to_vec() };
        assert_eq!(merge(&server, &vm(2, &[])), 0b1);
        assert_eq!(merge(&server, &vm(2, &[1])), 0b10_0000);
        assert_eq!(merge(&server, &vm(24, &[])), 0b11);
        // The card's node has too few CPUs. Nothing is preferred then, and of the sets of one node the lowest is the best.
        server.free[5].cpus = 1;
        assert_eq!(merge(&server, &vm(2, &[1])), 0b1);
        let given = BestEffort.place(0, &server, 0, &vm(2, &[1])).expect("placed");
        assert_eq!((given[5].cpus, given[0].cpus), (0, 2));
        // No node has enough for it: it is on two.
        server.free.iter_mut().for_each(|node| node.cpus = 1);
        let given = BestEffort.place(0, &server, 0, &vm(2, &[1])).expect("placed");
        assert_eq!(given.iter().map(|node| node.cpus).sum::<u32>(), 2);
    }
}
