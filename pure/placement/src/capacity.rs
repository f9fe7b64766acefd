//! What is free on each node of a host: CPUs with their cores and caches, memory, huge pages.
//!
//! The host says which CPUs it has and which memory is free now. Claims say what of it is somebody's already.

use crate::{
    LEAST_UNIT_BYTES,
    cpus::{self, FreeCore},
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{CpuId, CpuLayout, CpuSet, HostNodeId, HostTopology, PciDevice};

/// Size of an ordinary page. What the kernel counts as free memory of a node is memory of ordinary pages.
pub const BASE_PAGE_BYTES: u64 = 4096;

/// Distance that Linux assumes where the firmware gives none (`REMOTE_DISTANCE`), and the local one.
const REMOTE: u16 = 20;
const LOCAL: u16 = 10;

/// Memory of a node that somebody was promised and that the host still counts as free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promise {
    /// The node.
    pub node: HostNodeId,
    /// Size of its pages, bytes: [`BASE_PAGE_BYTES`] or that of a pool of huge pages.
    pub page_bytes: u64,
    /// How much, bytes.
    pub bytes: u64,
}

/// What somebody has of a host: a VM, a reservation, or the host itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Who; the name of a VM.
    pub owner: String,
    /// CPUs of its own.
    pub cpus: CpuSet,
    /// vCPUs that run on a node without a CPU of their own: (node, number). Each counts as one CPU of that node.
    pub floating: Vec<(HostNodeId, u32)>,
    /// Memory that is not taken yet.
    pub memory: Vec<Promise>,
    /// Addresses of PCI functions.
    pub devices: Vec<String>,
}

/// Memory of one page size on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Size of a page, bytes.
    pub page_bytes: u64,
    /// What is neither used nor promised, bytes.
    pub free_bytes: u64,
}

/// What is free on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCapacity {
    /// The kernel's number.
    pub id: HostNodeId,
    /// CPUs that VMs may use, free or not. Isolated CPUs are not among them.
    pub usable_cpus: u32,
    /// CPUs that are free.
    pub free_cpus: u32,
    /// Cores of which all CPUs are free.
    pub free_cores: u32,
    /// Ordinary pages first, then pools of huge pages by rising size.
    pub pools: Vec<Pool>,
    pub(crate) cores: Vec<FreeCore>,
}

impl NodeCapacity {
    /// Free memory of a page size, bytes; 0 if the node has no such pool.
    pub fn free_bytes(&self, page_bytes: u64) -> u64 {
        self.pools.iter().find(|pool| pool.page_bytes == page_bytes).map_or(0, |pool| pool.free_bytes)
    }

    /// Takes CPUs away that are used without being named.
    fn take_some(&mut self, count: u32) {
        let taken: BTreeSet<CpuId> = cpus::pick(&self.cores, count).into_iter().collect();
        for core in &mut self.cores {
            let before = core.cpus.len();
            core.cpus.retain(|cpu| !taken.contains(cpu));
            core.whole &= core.cpus.len() == before;
        }
        self.cores.retain(|core| !core.cpus.is_empty());
        self.count();
    }

    fn count(&mut self) {
        self.free_cpus = self.cores.iter().map(|core| core.cpus.len() as u32).sum();
        self.free_cores = self.cores.iter().filter(|core| core.whole).count() as u32;
    }
}

/// What is free on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Nodes in rising order of their numbers.
    pub nodes: Vec<NodeCapacity>,
    /// By position, row by row.
    distances: Vec<u16>,
    devices: Vec<PciDevice>,
    /// Who has which PCI function.
    holders: BTreeMap<String, String>,
}

impl Capacity {
    /// What claims leave of a host. Several claims may name the same thing: it is taken once, except memory.
    pub fn new(host: &HostTopology, layout: &CpuLayout, claims: &[Claim]) -> Self {
        let count = host.nodes.len();
        let distance = |from: usize, to: usize| match host.distances.get(from, to) {
            Some(distance) => u16::from(distance),
            None if from == to => LOCAL,
            None => REMOTE,
        };
        let cpus = Cpus::new(host, layout, claims);
        let mut nodes: Vec<NodeCapacity> = host
            .nodes
            .iter()
            .map(|node| {
                let (usable_cpus, cores) = cpus.of(&node.cpus);
                let base = Pool {
                    page_bytes: BASE_PAGE_BYTES,
                    free_bytes: node.memory_free_kib.saturating_mul(1024),
                };
                let huge = node.huge_pages.iter().map(|pool| {
                    let page_bytes = pool.size_kib.saturating_mul(1024);
                    Pool { page_bytes, free_bytes: pool.free.saturating_mul(page_bytes) }
                });
                let pools = std::iter::once(base).chain(huge).collect();
                NodeCapacity { id: node.id, usable_cpus, free_cpus: 0, free_cores: 0, pools, cores }
            })
            .collect();
        nodes.iter_mut().for_each(NodeCapacity::count);
        claim_memory(&mut nodes, claims);
        // All of a node at once, so that the order of the claims does not count.
        let mut floating = BTreeMap::<HostNodeId, u32>::new();
        for &(node, vcpus) in claims.iter().flat_map(|claim| &claim.floating) {
            let sum = floating.entry(node).or_default();
            *sum = sum.saturating_add(vcpus);
        }
        for (node, vcpus) in floating {
            if let Ok(at) = nodes.binary_search_by_key(&node, |node| node.id) {
                nodes[at].take_some(vcpus);
            }
        }
        let held = |claim: &Claim| {
            let owner = claim.owner.clone();
            claim.devices.clone().into_iter().map(move |device| (device, owner.clone()))
        };
        Self {
            nodes,
            distances: (0..count * count).map(|at| distance(at / count, at % count)).collect(),
            devices: host.pci_devices.clone(),
            holders: claims.iter().flat_map(held).collect(),
        }
    }

    /// Distance from a node to another, by position.
    pub(crate) fn distance(&self, from: usize, to: usize) -> u16 {
        self.distances[from * self.nodes.len() + to]
    }

    /// Position of the node with this number.
    pub(crate) fn position(&self, id: HostNodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }

    /// The PCI function with this address.
    pub(crate) fn device(&self, address: &str) -> Option<&PciDevice> {
        self.devices.iter().find(|device| device.address == address)
    }

    /// Who has a PCI function.
    pub(crate) fn holder(&self, address: &str) -> Option<&str> {
        self.holders.get(address).map(String::as_str)
    }

    /// Somebody who has another function of the same IOMMU group: the function, and its holder.
    pub(crate) fn group_holder(&self, device: &PciDevice) -> Option<(&str, &str)> {
        let group = device.iommu_group?;
        let others = self.devices.iter().filter(|other| other.iommu_group == Some(group));
        others
            .filter(|other| other.address != device.address)
            .find_map(|other| Some((other.address.as_str(), self.holder(&other.address)?)))
    }

    /// Page sizes that some node has, rising, bytes.
    pub fn page_sizes(&self) -> Vec<u64> {
        let sizes = self.nodes.iter().flat_map(|node| node.pools.iter().map(|pool| pool.page_bytes));
        sizes.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Unit in which memory of a page size is placed, bytes.
pub(crate) fn unit_bytes(page_bytes: u64) -> u64 {
    page_bytes.max(LEAST_UNIT_BYTES)
}

fn claim_memory(nodes: &mut [NodeCapacity], claims: &[Claim]) {
    for promise in claims.iter().flat_map(|claim| &claim.memory) {
        let Ok(at) = nodes.binary_search_by_key(&promise.node, |node| node.id) else { continue };
        let pools = &mut nodes[at].pools;
        if let Some(pool) = pools.iter_mut().find(|pool| pool.page_bytes == promise.page_bytes) {
            pool.free_bytes = pool.free_bytes.saturating_sub(promise.bytes);
        }
    }
}

/// CPUs of the host by their number.
struct Cpus {
    usable: Vec<bool>,
    free: Vec<bool>,
    /// The lowest CPU of its core.
    core: Vec<CpuId>,
    /// The lowest CPU of its last-level cache.
    cache: Vec<CpuId>,
}

impl Cpus {
    fn new(host: &HostTopology, layout: &CpuLayout, claims: &[Claim]) -> Self {
        let online = || host.nodes.iter().flat_map(|node| node.cpus.iter());
        let count = online().max().map_or(0, |cpu| cpu as usize + 1);
        let mut usable = vec![false; count];
        online().for_each(|cpu| usable[cpu as usize] = true);
        set(&mut usable, &layout.isolated, false);
        let mut free = usable.clone();
        claims.iter().for_each(|claim| set(&mut free, &claim.cpus, false));
        let own: Vec<CpuId> = (0..count as CpuId).collect();
        let mut cpus = Self { usable, free, core: own.clone(), cache: own };
        layout.cores.iter().for_each(|core| group(&mut cpus.core, core));
        let mut caches: Vec<_> = host.caches.iter().collect();
        // Of the caches of a CPU the one of the highest level is written last.
        caches.sort_by_key(|cache| cache.level);
        // CPUs of a node whose caches are not known share one.
        host.nodes.iter().for_each(|node| group(&mut cpus.cache, &node.cpus));
        caches.into_iter().for_each(|cache| group(&mut cpus.cache, &cache.cpus));
        cpus
    }

    /// Number of usable CPUs of a node, and its cores with free ones, in order of their lowest CPU.
    fn of(&self, node: &CpuSet) -> (u32, Vec<FreeCore>) {
        let mut usable = 0;
        let mut cores = BTreeMap::<CpuId, FreeCore>::new();
        for cpu in node.iter().filter(|&cpu| self.usable[cpu as usize]) {
            usable += 1;
            let at = cpu as usize;
            let new = FreeCore { cache: self.cache[at], cpus: Vec::new(), whole: true };
            let core = cores.entry(self.core[at]).or_insert(new);
            if self.free[at] {
                core.cpus.push(cpu);
            } else {
                core.whole = false;
            }
        }
        (usable, cores.into_values().filter(|core| !core.cpus.is_empty()).collect())
    }
}

fn set(flags: &mut [bool], cpus: &CpuSet, value: bool) {
    for cpu in cpus.iter() {
        if let Some(flag) = flags.get_mut(cpu as usize) {
            *flag = value;
        }
    }
}

/// Gives CPUs the lowest of them as the name of their group.
fn group(names: &mut [CpuId], cpus: &CpuSet) {
    let Some(first) = cpus.iter().next() else { return };
    for cpu in cpus.iter() {
        if let Some(name) = names.get_mut(cpu as usize) {
            *name = first;
        }
    }
}
