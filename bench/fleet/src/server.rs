//! A server: what it has, what is free of it, and what a rule says about a VM.

use crate::workload::Vm;

/// Network cards of a server, one on each socket.
pub const CARDS: usize = 2;
/// Virtual functions of a card.
pub const FUNCTIONS: usize = 32;
/// Units of 2 MiB that a CPU has: 4 GiB.
pub const UNITS_PER_CPU: u64 = 2048;

/// What kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// Two nodes of 64 CPUs.
    Two,
    /// Eight nodes of 16 CPUs, four on each socket.
    Eight,
}

impl Model {
    /// All.
    pub const ALL: [Self; 2] = [Self::Two, Self::Eight];

    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Two => "2 x 64",
            Self::Eight => "8 x 16",
        }
    }

    /// Number of nodes.
    pub fn nodes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Eight => 8,
        }
    }

    /// CPUs of a node.
    pub fn cpus_per_node(self) -> u32 {
        self.cpus() / self.nodes() as u32
    }

    /// CPUs of all nodes.
    pub fn cpus(self) -> u32 {
        128
    }

    /// Distance between nodes, as an EPYC server reports it: 12 within a socket, 32 between sockets.
    pub fn distance(self, from: usize, to: usize) -> u8 {
        let socket = |node: usize| node * 2 / self.nodes();
        match from == to {
            true => 10,
            false if socket(from) == socket(to) => 12,
            false => 32,
        }
    }

    /// The node of a card: the second one of its socket, if there are several.
    pub fn node_of_card(self, card: usize) -> usize {
        let per_socket = self.nodes() / 2;
        card * per_socket + per_socket.min(2) - 1
    }

    /// Fewest nodes of an empty server that hold a VM.
    pub fn fewest_nodes(self, vm: &Vm) -> usize {
        let cpus = vm.vcpus.div_ceil(self.cpus_per_node()) as usize;
        let units = vm.units.div_ceil(u64::from(self.cpus_per_node()) * UNITS_PER_CPU) as usize;
        cpus.max(units)
    }
}

/// What a node has, or gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// CPUs.
    pub cpus: u32,
    /// Memory in units.
    pub units: u64,
}

/// What is free of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its kind.
    pub model: Model,
    /// Free of each node.
    pub free: Vec<Amount>,
    /// Free functions of each card.
    pub functions: [usize; CARDS],
}

impl Server {
    /// An empty one.
    pub fn new(model: Model) -> Self {
        let cpus = model.cpus_per_node();
        let all = Amount { cpus, units: u64::from(cpus) * UNITS_PER_CPU };
        Self { model, free: vec![all; model.nodes()], functions: [FUNCTIONS; CARDS] }
    }

    /// Has it what a VM needs, wherever?
    pub fn suffices(&self, vm: &Vm) -> bool {
        let cpus: u32 = self.free.iter().map(|node| node.cpus).sum();
        let units: u64 = self.free.iter().map(|node| node.units).sum();
        cpus >= vm.vcpus && units >= vm.units && vm.cards.iter().all(|&card| self.functions[card] > 0)
    }

    /// Gives a VM what it gets, or takes it back.
    pub fn change(&mut self, vm: &Vm, allotment: &[Amount], give: bool) {
        for (free, amount) in self.free.iter_mut().zip(allotment) {
            if give {
                // A rule that gives what is not there is wrong, and ends the simulation.
                free.cpus = free.cpus.checked_sub(amount.cpus).expect("CPUs that are free");
                free.units = free.units.checked_sub(amount.units).expect("memory that is free");
            } else {
                free.cpus += amount.cpus;
                free.units += amount.units;
            }
        }
        for &card in &vm.cards {
            self.functions[card] = if give { self.functions[card] - 1 } else { self.functions[card] + 1 };
        }
    }

    /// vCPUs on nodes in an order, as many as each has; memory in proportion to them, and what does not fit in the same order.
    /// The server suffices.
    pub fn fill(&self, order: &[usize], vm: &Vm) -> Vec<Amount> {
        let mut given = vec![Amount::default(); self.free.len()];
        let mut left = vm.vcpus;
        for &at in order {
            given[at].cpus = self.free[at].cpus.min(left);
            left -= given[at].cpus;
        }
        let mut left = vm.units;
        for &at in order {
            let share = vm.units * u64::from(given[at].cpus) / u64::from(vm.vcpus);
            given[at].units = share.min(self.free[at].units);
            left -= given[at].units;
        }
        for &at in order {
            let more = (self.free[at].units - given[at].units).min(left);
            given[at].units += more;
            left -= more;
        }
        given
    }
}

/// A rule: where on a server a VM goes.
pub trait Strategy {
    /// What each node gives; nothing if the rule refuses the VM on this server.
    fn place(&mut self, number: usize, server: &Server, id: usize, vm: &Vm) -> Option<Vec<Amount>>;

    /// A VM has stopped.
    fn stopped(&mut self, _number: usize, _id: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_on_both_sockets() {
        let nodes = |model: Model| [0, 1].map(|card| model.node_of_card(card));
        assert_eq!((nodes(Model::Two), nodes(Model::Eight)), ([0, 1], [1, 5]));
        assert_eq!(
            (Model::Two.distance(0, 1), Model::Eight.distance(0, 3), Model::Eight.distance(3, 4)),
            (32, 12, 32)
        );
    }

    #[test]
    fn memory_goes_with_vcpus_and_then_anywhere() {
        let mut server = Server::new(Model::Two);
        server.free = vec![Amount { cpus: 2, units: 10 }, Amount { cpus: 9, units: 100 }];
        let vm = Vm { start: 0.0, stop: 1.0, vcpus: 4, units: 60, cards: vec![] };
        let given = server.fill(&[0, 1], &vm);
        assert_eq!(given, [Amount { cpus: 2, units: 10 }, Amount { cpus: 2, units: 50 }]);
        assert!(server.suffices(&vm) && !server.suffices(&Vm { vcpus: 12, ..vm.clone() }));
        assert_eq!(Model::Eight.fewest_nodes(&Vm { vcpus: 17, ..vm }), 2);
    }
}
