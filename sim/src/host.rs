//! The simulated host: nodes, CPUs and distances, which change.

use vnuma_model::{CpuId, CpuSet, DistanceMatrix, HostNode, HostNodeId, HostTopology, PciDevice};
use vnuma_random::Rng;

/// Nodes with all of them there.
pub const NODES: u32 = 8;
/// The same of CPUs of a node.
pub const CPUS_PER_NODE: u32 = 8;
/// PCI functions that VMs may have. Of nine functions one is on no node.
const FUNCTIONS: u32 = 36;

/// Address of a function.
pub fn function(number: u32) -> String {
    format!("0000:{:02x}:00.0", 0x10 + number % FUNCTIONS)
}

/// The host as it is.
#[derive(Clone, Debug)]
pub struct Host {
    offline: CpuSet,
    /// A node that was taken away.
    missing: Option<HostNodeId>,
    /// Which of the tables of distances holds.
    table: u64,
    /// What a daemon would read.
    pub topology: HostTopology,
}

impl Host {
    /// A host with everything in place.
    pub fn new() -> Self {
        let mut host =
            Self { offline: CpuSet::new(), missing: None, table: 0, topology: HostTopology::default() };
        host.rebuild();
        host
    }

    /// Something changes.
    pub fn change(&mut self, rng: &mut Rng) {
        match rng.index(4) {
            0 => self.table = rng.within(0..3),
            1 => self.missing = if self.missing.is_some() { None } else { Some(rng.within(1..8) as u32) },
            _ => {
                // The first CPU of each node stays, so that a node that is there has one.
                let cpus = (0..NODES * CPUS_PER_NODE).filter(|cpu| cpu % CPUS_PER_NODE != 0);
                self.offline = cpus.filter(|_| rng.chance(150)).collect();
            }
        }
        self.rebuild();
    }

    /// Everything is in place again.
    pub fn restore(&mut self) {
        (self.offline, self.missing) = (CpuSet::new(), None);
        self.rebuild();
    }

    /// Nodes that are there.
    pub fn nodes(&self) -> impl Iterator<Item = HostNodeId> + '_ {
        self.topology.nodes.iter().map(|node| node.id)
    }

    /// A CPU of a node.
    pub fn a_cpu(&self, node: HostNodeId, rng: &mut Rng) -> Option<CpuId> {
        let cpus: Vec<_> = self.topology.node(node)?.cpus.iter().collect();
        rng.pick(&cpus)
    }

    fn rebuild(&mut self) {
        let ids: Vec<_> = (0..NODES).filter(|id| self.missing != Some(*id)).collect();
        let node = |&id: &u32| HostNode {
            id,
            cpus: (id * CPUS_PER_NODE..(id + 1) * CPUS_PER_NODE)
                .filter(|cpu| !self.offline.contains(*cpu))
                .collect(),
            memory_total_kib: 64 << 20,
            ..HostNode::default()
        };
        let device = |number: u32| PciDevice {
            address: function(number),
            class: 0x02_0000,
            vendor: 1,
            device: 1,
            node: Some(number % (NODES + 1)).filter(|node| ids.contains(node)),
            iommu_group: Some(number),
        };
        let row = |&from: &u32| ids.iter().map(|&to| self.distance(from, to)).collect();
        self.topology = HostTopology {
            nodes: ids.iter().map(node).collect(),
            distances: DistanceMatrix::new(ids.iter().map(row).collect()).unwrap_or_default(),
            pci_devices: (0..FUNCTIONS).map(device).collect(),
            ..HostTopology::default()
        };
    }

    fn distance(&self, from: HostNodeId, to: HostNodeId) -> u8 {
        let (a, b) = (from.min(to), from.max(to));
        match (a == b, self.table) {
            (true, _) => 10,
            // Two nodes in a package, two packages on a board.
            (_, 0) if a / 2 == b / 2 => 12,
            (_, 0) if a / 4 == b / 4 => 16,
            (_, 0) => 32,
            // All are equally far: ties everywhere.
            (_, 1) => 21,
            _ => 12 + ((a * 7 + b * 3) % 5 * 4) as u8,
        }
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}
