//! Where a VM goes.

use serde::{Deserialize, Serialize};
use vnuma_topology::{CpuId, CpuSet, DistanceMatrix, GuestNodeId, HostNodeId};

/// A vCPU and the CPU that it is to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuPin {
    /// QEMU's index, which with one socket for each vCPU is its APIC id, too.
    pub vcpu: u32,
    /// The CPU.
    pub cpu: CpuId,
}

/// A node of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestNodePlan {
    /// Its number.
    pub id: GuestNodeId,
    /// The host node that its memory and its vCPUs are on.
    pub home: HostNodeId,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Its vCPUs; none if it is there for its memory only.
    pub vcpus: Vec<VcpuPin>,
}

/// A device that is passed through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePlan {
    /// Its address on the host.
    pub address: String,
    /// The host node that it is attached to, if the firmware says so.
    pub host_node: Option<HostNodeId>,
    /// The guest node that it is attached to; none if its host node is not known.
    pub guest_node: Option<GuestNodeId>,
    /// That guest node's home is its host node or, if that has no CPUs, the node with CPUs that is nearest to it.
    pub local: bool,
}

/// Where a VM goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The VM's name.
    pub name: String,
    /// Size of its pages, bytes.
    pub page_bytes: u64,
    /// Its nodes, numbered from 0. Those without vCPUs are last.
    pub guest_nodes: Vec<GuestNodePlan>,
    /// Distances between them, by position.
    pub distances: DistanceMatrix,
    /// Its devices, in the order of the request.
    pub devices: Vec<DevicePlan>,
}

impl Placement {
    /// Number of its vCPUs.
    pub fn vcpus(&self) -> u32 {
        self.guest_nodes.iter().map(|node| node.vcpus.len() as u32).sum()
    }

    /// All of its memory, bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.guest_nodes.iter().fold(0, |sum, node| sum.saturating_add(node.memory_bytes))
    }

    /// CPUs of its vCPUs.
    pub fn cpus(&self) -> CpuSet {
        self.guest_nodes.iter().flat_map(|node| &node.vcpus).map(|pin| pin.cpu).collect()
    }

    /// Its pins, by vCPU.
    pub fn pins(&self) -> impl Iterator<Item = VcpuPin> + '_ {
        self.guest_nodes.iter().flat_map(|node| node.vcpus.iter().copied())
    }
}
