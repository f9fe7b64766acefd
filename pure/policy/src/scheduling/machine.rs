//! The host as a scheduler of vCPUs sees it: nodes, last-level caches, cores, distances, and what a mask reaches.

use std::collections::BTreeSet;
use vnuma_model::{CpuId, CpuLayout, CpuSet, HostNodeId, HostTopology};

/// Distance that Linux assumes where the firmware gives none (`REMOTE_DISTANCE`), and the local one.
const REMOTE: u16 = 20;
const LOCAL: u16 = 10;

/// CPUs of one node that share a last-level cache. Isolated CPUs are not among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Position of the node.
    pub node: usize,
    /// Its CPUs, at least one.
    pub cpus: CpuSet,
    /// Cores that these CPUs are on.
    pub cores: u32,
}

impl Domain {
    /// Cores as far as their CPUs are among these: one of two siblings is half a core.
    pub fn cores_in(&self, usable: &CpuSet) -> f64 {
        let part = self.cpus.count_in(usable) as f64 / self.cpus.len().max(1) as f64;
        f64::from(self.cores) * part
    }
}

/// A host node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number.
    pub id: HostNodeId,
    /// Positions of its domains; none if it has no CPU that may be used.
    pub domains: std::ops::Range<usize>,
}

/// A host, prepared for decisions: everything is found by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Nodes in rising order of their numbers.
    pub nodes: Vec<Node>,
    /// Last-level caches, by node.
    pub domains: Vec<Domain>,
    /// Positions of nodes with CPUs that may be used.
    pub with_cpus: Vec<usize>,
    isolated: CpuSet,
    /// By position, row by row.
    distances: Vec<u16>,
    /// Mean distance of a row.
    means: Vec<u16>,
    /// Nodes with CPUs by distance from each node.
    nearest: Vec<Vec<usize>>,
    /// Domain of each CPU.
    domain_of: Vec<Option<u32>>,
}

impl Machine {
    /// Prepares a host. A node whose caches are not known counts as one domain.
    pub fn new(host: &HostTopology, layout: &CpuLayout) -> Self {
        let count = host.nodes.len();
        let mut machine = Self { isolated: layout.isolated.clone(), ..Self::default() };
        for (position, node) in host.nodes.iter().enumerate() {
            let begin = machine.domains.len();
            let usable: BTreeSet<CpuId> =
                node.cpus.iter().filter(|&cpu| !layout.isolated.contains(cpu)).collect();
            machine.add_domains(host, layout, position, usable);
            machine.nodes.push(Node { id: node.id, domains: begin..machine.domains.len() });
        }
        let distance = |from: usize, to: usize| match host.distances.get(from, to) {
            Some(distance) => u16::from(distance),
            None if from == to => LOCAL,
            None => REMOTE,
        };
        machine.distances = (0..count * count).map(|at| distance(at / count, at % count)).collect();
        machine.means = machine
            .distances
            .chunks(count.max(1))
            .map(|row| (row.iter().map(|&d| u32::from(d)).sum::<u32>() / row.len() as u32) as u16)
            .collect();
        machine.with_cpus = (0..count).filter(|&at| !machine.nodes[at].domains.is_empty()).collect();
        machine.nearest = (0..count)
            .map(|from| {
                let mut order = machine.with_cpus.clone();
                order.sort_by_key(|&to| (to != from, machine.distance(from, to), to));
                order
            })
            .collect();
        machine
    }

    fn add_domains(
        &mut self,
        host: &HostTopology,
        layout: &CpuLayout,
        node: usize,
        mut left: BTreeSet<CpuId>,
    ) {
        while let Some(&first) = left.first() {
            let shared = host.caches.iter().filter(|group| group.cpus.contains(first));
            let cache = shared.max_by_key(|group| group.level);
            let belongs = |cpu: &CpuId| *cpu == first || cache.is_none_or(|group| group.cpus.contains(*cpu));
            let cpus: CpuSet = left.iter().copied().filter(belongs).collect();
            left.retain(|cpu| !cpus.contains(*cpu));
            let core = |cpu: CpuId| {
                layout.cores.iter().find_map(|core| core.contains(cpu).then(|| core.iter().next()))
            };
            let cores: BTreeSet<CpuId> = cpus.iter().map(|cpu| core(cpu).flatten().unwrap_or(cpu)).collect();
            for cpu in cpus.iter() {
                if self.domain_of.len() <= cpu as usize {
                    self.domain_of.resize(cpu as usize + 1, None);
                }
                self.domain_of[cpu as usize] = Some(self.domains.len() as u32);
            }
            self.domains.push(Domain { node, cores: cores.len() as u32, cpus });
        }
    }

    /// Distance from a node to another, by position.
    pub fn distance(&self, from: usize, to: usize) -> u16 {
        self.distances[from * self.nodes.len() + to]
    }

    /// Distances from a node to all, by position.
    pub fn distances_from(&self, from: usize) -> &[u16] {
        &self.distances[from * self.nodes.len()..][..self.nodes.len()]
    }

    /// Nodes with CPUs that may be used, the nearest to `from` first: itself, if it is one.
    pub fn nearest(&self, from: usize) -> &[usize] {
        &self.nearest[from]
    }

    /// Mean distance from a node to all.
    pub fn mean_distance(&self, from: usize) -> u16 {
        self.means[from]
    }

    /// The domain of a CPU; none if it is isolated or offline.
    pub fn domain_of(&self, cpu: CpuId) -> Option<usize> {
        self.domain_of.get(cpu as usize).copied().flatten().map(|domain| domain as usize)
    }

    /// The node of a CPU, by position; none if it is isolated or offline.
    pub fn node_of(&self, cpu: CpuId) -> Option<usize> {
        self.domain_of(cpu).map(|domain| self.domains[domain].node)
    }

    /// May nothing be placed on it?
    pub fn is_isolated(&self, cpu: CpuId) -> bool {
        self.isolated.contains(cpu)
    }

    /// Position of the node with this number.
    pub fn position(&self, id: HostNodeId) -> Option<usize> {
        self.nodes.iter().position(|node| node.id == id)
    }

    /// CPUs of a place that a mask allows.
    pub fn cpus(&self, place: Place, mask: &CpuSet) -> CpuSet {
        let domains = match place {
            Place::Node(node) => self.nodes[node].domains.clone(),
            Place::Cache(domain) => domain..domain + 1,
        };
        let all = domains.flat_map(|domain| self.domains[domain].cpus.iter());
        all.filter(|&cpu| mask.contains(cpu)).collect()
    }

    /// The node of a place, by position.
    pub fn node_at(&self, place: Place) -> usize {
        match place {
            Place::Node(node) => node,
            Place::Cache(domain) => self.domains[domain].node,
        }
    }
}

/// Where a policy confines a vCPU to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// All CPUs of a node, by position.
    Node(usize),
    /// All CPUs that share a cache, by position.
    Cache(usize),
}

/// What a mask of an operator reaches. Many vCPUs have the same one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Usable CPUs of each domain.
    cpus: Vec<u16>,
    /// Usable CPUs in all.
    total: u32,
    /// Of these, how many are not isolated.
    shared: u32,
    /// The mask.
    allowed: CpuSet,
}

impl Reach {
    /// Of this mask on this machine. CPUs that are offline count for nothing.
    pub fn new(machine: &Machine, mask: &CpuSet) -> Self {
        let cpus = vec![0; machine.domains.len()];
        let mut reach = Self { cpus, allowed: mask.clone(), ..Self::default() };
        for cpu in mask.iter() {
            if let Some(domain) = machine.domain_of(cpu) {
                reach.cpus[domain] += 1;
                reach.shared += 1;
                reach.total += 1;
            } else if machine.is_isolated(cpu) {
                reach.total += 1;
            }
        }
        reach
    }

    /// May a vCPU with this mask be on this domain?
    pub fn domain(&self, domain: usize) -> bool {
        self.cpus.get(domain).is_some_and(|&cpus| cpus > 0)
    }

    /// May it be on this CPU?
    pub fn cpu(&self, cpu: CpuId) -> bool {
        self.allowed.contains(cpu)
    }

    /// May it be on this node?
    pub fn node(&self, machine: &Machine, node: usize) -> bool {
        machine.nodes[node].domains.clone().any(|domain| self.domain(domain))
    }

    /// May it be at this place?
    pub fn place(&self, machine: &Machine, place: Place) -> bool {
        match place {
            Place::Node(node) => self.node(machine, node),
            Place::Cache(domain) => self.domain(domain),
        }
    }

    /// The mask.
    pub fn mask(&self) -> &CpuSet {
        &self.allowed
    }

    /// One CPU only: somebody placed it there on purpose.
    pub fn is_one_cpu(&self) -> bool {
        self.total == 1
    }

    /// Nothing but isolated CPUs, or nothing at all.
    pub fn is_isolated(&self) -> bool {
        self.shared == 0
    }

    /// The only domain that it reaches.
    pub fn only_domain(&self) -> Option<usize> {
        let mut reached = (0..self.cpus.len()).filter(|&domain| self.cpus[domain] > 0);
        let first = reached.next()?;
        reached.next().is_none().then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{CacheGroup, DistanceMatrix, HostNode};

    fn set(text: &str) -> CpuSet {
        text.parse().expect("a list")
    }

    /// Node 0 has two caches and SMT, node 2 has no CPUs, node 8 has one CPU that is isolated.
    fn machine() -> Machine {
        let node = |id, cpus| HostNode { id, cpus: set(cpus), ..HostNode::default() };
        let cache = |level, cpus| CacheGroup { level, size_kib: 1 << 14, cpus: set(cpus) };
        let host = HostTopology {
            nodes: vec![node(0, "0-7"), node(2, ""), node(8, "8-11")],
            distances: DistanceMatrix::new(vec![vec![10, 17, 40], vec![17, 10, 40], vec![41, 40, 10]])
                .expect("square"),
            caches: vec![cache(2, "0"), cache(3, "0-1,4-5"), cache(3, "2-3,6-7")],
            ..HostTopology::default()
        };
        let cores = (0..4).map(|core| [core, core + 4].into_iter().collect()).collect();
        Machine::new(&host, &CpuLayout { isolated: set("11"), cores })
    }

    #[test]
    fn a_mean_distance_is_that_to_all_nodes_from_one_side() {
        let machine = machine();
        assert_eq!([0, 1, 2].map(|node| machine.mean_distance(node)), [22, 22, 30]);
    }

    #[test]
    fn caches_of_a_node_are_domains_and_a_node_without_known_caches_is_one() {
        let machine = machine();
        let shown: Vec<_> = machine.domains.iter().map(|d| (d.node, d.cpus.to_string(), d.cores)).collect();
        let expected = [(0, "0-1,4-5", 2), (0, "2-3,6-7", 2), (2, "8-10", 3)];
        assert_eq!(shown, expected.map(|(node, cpus, cores)| (node, cpus.to_owned(), cores)));
        assert_eq!(machine.with_cpus, [0, 2]);
        assert_eq!(
            (machine.domain_of(6), machine.domain_of(11), machine.node_of(9)),
            (Some(1), None, Some(2))
        );
        assert_eq!((machine.distance(0, 2), machine.distance(2, 0)), (40, 41));
        assert_eq!(machine.position(8), Some(2));
        assert_eq!((machine.nearest(2), machine.nearest(1)), (&[2, 0][..], &[0, 2][..]));
    }

    #[test]
    fn masks_reach_what_they_name() {
        let machine = machine();
        let reach = |mask| Reach::new(&machine, &set(mask));
        assert!(reach("3,9").domain(1) && !reach("3,9").domain(0) && reach("3,9").node(&machine, 2));
        assert!(!reach("3,9").node(&machine, 1));
        assert!(reach("3,9").cpu(3) && !reach("3,9").cpu(2), "CPU 2 is of the same domain as CPU 3");
        assert!(reach("11").is_isolated() && reach("11").is_one_cpu() && reach("").is_isolated());
        assert!(reach("3").is_one_cpu() && !reach("3,11").is_one_cpu() && !reach("3,11").is_isolated());
        assert!(reach("3,100").is_one_cpu(), "a CPU that is offline counts for nothing");
        assert_eq!((reach("2-3").only_domain(), reach("0-3").only_domain()), (Some(1), None));
        assert_eq!(machine.cpus(Place::Node(0), &set("1,2,9")).to_string(), "1-2");
        assert_eq!(machine.cpus(Place::Cache(1), &set("1,2,9")).to_string(), "2");
    }
}
