//! The host: nodes, last-level caches, PCI devices, distances.

use crate::{CpuId, CpuSet, DistanceMatrix, HostNodeId};
use serde::{Deserialize, Serialize};

/// What a host consists of. Nodes are in rising order of their number; numbers may
/// have gaps, and a node may have no CPUs or no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTopology {
    /// Online nodes.
    pub nodes: Vec<HostNode>,
    /// By position in `nodes`.
    pub distances: DistanceMatrix,
    /// Groups of CPUs that share a last-level cache.
    pub caches: Vec<CacheGroup>,
    /// PCI functions, in order of their address.
    pub pci_devices: Vec<PciDevice>,
}

/// A host node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostNode {
    /// The kernel's number.
    pub id: HostNodeId,
    /// Online CPUs.
    pub cpus: CpuSet,
    /// Memory of the node, KiB.
    pub memory_total_kib: u64,
    /// Free memory when it was read, KiB.
    pub memory_free_kib: u64,
    /// Pools of huge pages, in order of their size.
    pub huge_pages: Vec<HugePages>,
}

/// A pool of huge pages of one size on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Size of one page, KiB.
    pub size_kib: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages not in use.
    pub free: u64,
}

/// CPUs that share a last-level cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    /// Level of the cache, 1 to 4.
    pub level: u32,
    /// Size, KiB.
    pub size_kib: u64,
    /// Who shares it.
    pub cpus: CpuSet,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciDevice {
    /// `domain:bus:device.function`, for example `0000:00:1f.2`.
    pub address: String,
    /// Class code (base class, subclass, interface), 24 bits.
    pub class: u32,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Node that it is attached to, when the firmware says so.
    pub node: Option<HostNodeId>,
}

impl HostTopology {
    /// The node with this number.
    pub fn node(&self, id: HostNodeId) -> Option<&HostNode> {
        self.nodes.iter().find(|node| node.id == id)
    }
    /// The node of a CPU.
    pub fn node_of_cpu(&self, cpu: CpuId) -> Option<HostNodeId> {
        self.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| node.id)
    }
    /// The one node that all of `cpus` belong to, if there is one. Offline CPUs count for nothing.
    pub fn node_of_cpus(&self, cpus: &CpuSet) -> Option<HostNodeId> {
        let mut nodes = cpus.iter().filter_map(|cpu| self.node_of_cpu(cpu));
        let first = nodes.next()?;
        nodes.all(|node| node == first).then_some(first)
    }
    /// SLIT distance between two nodes, by number.
    pub fn distance(&self, from: HostNodeId, to: HostNodeId) -> Option<u8> {
        let position = |id| self.nodes.iter().position(|node| node.id == id);
        self.distances.get(position(from)?, position(to)?)
    }
}
