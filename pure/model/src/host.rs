//! The host: nodes, last-level caches, PCI devices, distances.

use crate::{CpuId, CpuSet, DistanceMatrix, HostNodeId};
use serde::{Deserialize, Serialize};

/// What a host consists of. Nodes are in rising order of their number; numbers may
/// have gaps, and a node may have no CPUs or no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CacheGroup {
    /// Level of the cache, 1 to 4.
    pub level: u32,
    /// Size, KiB.
    pub size_kib: u64,
    /// Who shares it.
    pub cpus: CpuSet,
}

/// What a scheduler has to know of the CPUs beyond their nodes and caches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CpuLayout {
    /// CPUs that the kernel's load balancer leaves alone (`isolcpus=`, isolated cpusets). Nothing is placed on them.
    pub isolated: CpuSet,
    /// CPUs that share a core. A CPU that is in none has a core of its own.
    pub cores: Vec<CpuSet>,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
    /// Its IOMMU group: what is in one group can only be given to one VM. None without an IOMMU.
    #[serde(default)]
    pub iommu_group: Option<u32>,
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
        let mut nodes = self.nodes.iter().filter(|node| node.cpus.intersects(cpus));
        let first = nodes.next()?;
        nodes.next().is_none().then_some(first.id)
    }
    /// SLIT distance between two nodes, by number.
    pub fn distance(&self, from: HostNodeId, to: HostNodeId) -> Option<u8> {
        let position = |id| self.nodes.iter().position(|node| node.id == id);
        self.distances.get(position(from)?, position(to)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes 0 and 8, as on a server whose numbers have gaps, and node 2 without CPUs.
    fn host() -> HostTopology {
        let node = |id, cpus: &str| HostNode { id, cpus: cpus.parse().unwrap(), ..HostNode::default() };
        HostTopology {
            nodes: vec![node(0, "0-3"), node(2, ""), node(8, "4-7")],
            distances: DistanceMatrix::new(vec![vec![10, 17, 40], vec![17, 10, 40], vec![41, 40, 10]])
                .unwrap(),
            ..HostTopology::default()
        }
    }

    #[test]
    fn nodes_are_found_by_number_and_by_cpu() {
        let host = host();
        assert_eq!(host.node(8).unwrap().cpus.to_string(), "4-7");
        assert_eq!(host.node(1), None);
        assert_eq!((host.node_of_cpu(3), host.node_of_cpu(4), host.node_of_cpu(8)), (Some(0), Some(8), None));
    }

    #[test]
    fn cpus_of_one_node_have_it_in_common() {
        let host = host();
        let node_of = |cpus: &str| host.node_of_cpus(&cpus.parse().unwrap());
        assert_eq!(node_of("5-6"), Some(8));
        assert_eq!(node_of("3-4"), None);
        assert_eq!(node_of("3,100"), Some(0), "a CPU that is offline counts for nothing");
        assert_eq!((node_of("100"), node_of("")), (None, None));
    }

    #[test]
    fn distances_are_by_number() {
        let host = host();
        assert_eq!((host.distance(0, 8), host.distance(8, 0)), (Some(40), Some(41)));
        assert_eq!(host.distance(0, 1), None);
    }
}
