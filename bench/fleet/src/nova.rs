//! OpenStack Nova with dedicated CPUs, after its documentation (admin/cpu-topologies, `[compute]
//! packing_host_numa_cells_allocation_strategy`) and `numa_fit_instance_to_host`.
//!
//! The flavor of a VM says how many nodes it has: as few as hold it on an empty server, in equal parts. Each goes to a node of the
//! server of its own that has room for all of it. Nodes are tried by what is free: `pack` the fullest first, `spread` the
//! emptiest. A VM without devices tries those without devices first. Devices have the policy `legacy`, the default: a
//! device whose node is known has to be on one of the VM's nodes.

use crate::{
    server::{Amount, CARDS, Server, Strategy},
    workload::Vm,
};

/// Nova.
pub struct Nova {
    /// The fullest nodes first.
    pub pack: bool,
}

impl Strategy for Nova {
    fn place(&mut self, _number: usize, server: &Server, _id: usize, vm: &Vm) -> Option<Vec<Amount>> {
        let cells = server.model.fewest_nodes(vm);
        let part = |cell: usize| Amount {
            cpus: vm.vcpus / cells as u32 + u32::from((cell as u32) < vm.vcpus % cells as u32),
            units: vm.units / cells as u64 + u64::from((cell as u64) < vm.units % cells as u64),
        };
        let parts: Vec<Amount> = (0..cells).map(part).collect();
        let mut order: Vec<usize> = (0..server.free.len()).collect();
        order.sort_by_key(|&at| (server.free[at].cpus, server.free[at].units));
        if !self.pack {
            order.reverse();
        }
        if vm.cards.is_empty() {
            let with_card = |at: usize| (0..CARDS).any(|card| server.model.node_of_card(card) == at);
            order.sort_by_key(|&at| with_card(at));
        }
        let chosen = choose(server, vm, &order, &parts, &mut Vec::new())?;
        let mut given = vec![Amount::default(); server.free.len()];
        chosen.into_iter().zip(parts).for_each(|(at, part)| given[at] = part);
        Some(given)
    }
}

/// The first permutation of nodes that holds the parts and has the devices.
fn choose(
    server: &Server,
    vm: &Vm,
    order: &[usize],
    parts: &[Amount],
    chosen: &mut Vec<usize>,
) -> Option<Vec<usize>> {
    let Some(part) = parts.get(chosen.len()) else {
        let near = |&card: &usize| chosen.contains(&server.model.node_of_card(card));
        return vm.cards.iter().all(near).then(|| chosen.clone());
    };
    for &at in order {
        let free = server.free[at];
        if chosen.contains(&at) || free.cpus < part.cpus || free.units < part.units {
            continue;
        }
        chosen.push(at);
        let found = choose(server, vm, order, parts, chosen);
        chosen.pop();
        if found.is_some() {
            return found;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Model;

    #[test]
    fn pack_fills_and_spread_levels_and_devices_decide() {
        let mut server = Server::new(Model::Eight);
        server.free[3].cpus = 4;
        server.free[5].cpus = 8;
        let vm = Vm { start: 0.0, stop: 1.0, vcpus: 2, units: 512, cards: vec![] };
        let node = |pack, vm: &Vm| {
            let given = Nova { pack }.place(0, &server, 0, vm).expect("placed");
            given.iter().position(|amount| amount.cpus > 0).expect("a node")
        };
        assert_eq!((node(true, &vm), node(false, &vm)), (3, 7));
        let with = Vm { cards: vec![1], ..vm.clone() };
        assert_eq!((node(true, &with), node(false, &with)), (5, 5));
        // A VM of one node cannot be near two cards.
        assert_eq!(Nova { pack: true }.place(0, &server, 0, &Vm { cards: vec![0, 1], ..vm }), None);
    }
}
