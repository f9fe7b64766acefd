//! A VM as its hypervisor describes it, and where its vCPUs are.

use crate::{ApicId, CpuId, GuestNodeId, HostNodeId, NumaPolicy, PciAddress, RunState};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

/// What a backend knows of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDescription {
    /// Unique on the host; the name by which an operator calls it.
    pub name: String,
    /// The process of its hypervisor.
    pub pid: i32,
    /// Whether its guest runs.
    pub run_state: RunState,
    /// Guest nodes in rising order of their number. Empty for a UMA VM (no `-numa`).
    pub guest_nodes: Vec<GuestNode>,
    /// vCPUs that are plugged, in rising order of their APIC id.
    pub vcpus: Vec<Vcpu>,
    /// Slots of guest nodes that vCPUs can be plugged into, where there are any.
    pub spare_slots: BTreeMap<GuestNodeId, u32>,
    /// PCI functions of the host that it has.
    #[serde(default)]
    pub devices: Vec<VmDevice>,
    /// Its virtio-mem devices, by which guest nodes grow and shrink.
    #[serde(default)]
    pub memory_devices: Vec<MemoryDevice>,
}

/// A virtio-mem device: memory of a guest node, of which a part is plugged. Its guest plugs and unplugs as it is asked to, or does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryDevice {
    /// Its id; without one it cannot be asked for anything.
    pub id: Option<String>,
    /// Guest node that its memory belongs to.
    pub guest_node: GuestNodeId,
    /// What its guest is to have of it, bytes.
    pub requested_bytes: u64,
    /// What its guest has of it, bytes.
    pub plugged_bytes: u64,
    /// Sizes are multiples of this, bytes; above 0.
    pub block_bytes: u64,
    /// Its memory: `size_bytes` is the most that can be plugged.
    pub memory: MemoryBacking,
}

/// A PCI function of the host that is passed through to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDevice {
    /// Its address on the host, as [`PciDevice::address`](crate::PciDevice::address) has it.
    pub host: String,
    /// Its address in the guest, once that is known.
    pub guest: Option<PciAddress>,
}

/// A node as the guest's firmware tables describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNode {
    /// Its number, as the hypervisor has it.
    pub id: GuestNodeId,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Where that memory comes from.
    pub memory: Option<MemoryBacking>,
}

/// Memory of the hypervisor's process that backs memory of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBacking {
    /// The hypervisor's name for it.
    pub id: String,
    /// Size, bytes.
    pub size_bytes: u64,
    /// Which nodes the kernel takes new pages from.
    pub policy: NumaPolicy,
    /// Host nodes of the policy.
    pub host_nodes: Vec<HostNodeId>,
    /// Pages of it found on each host node, when they were counted: (node, KiB).
    pub resident_kib: Vec<(HostNodeId, u64)>,
    /// Where the hypervisor's process has it, if that was found.
    #[serde(default)]
    pub mapping: Option<BackingMapping>,
}

/// The place of a memory backend in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingMapping {
    /// Address of its first byte.
    pub start: u64,
    /// Size of the pages that it is made of, KiB: those of a pool, or the smallest.
    pub page_kib: u64,
}

impl MemoryBacking {
    /// The host node that the kernel must take its pages from: policy `bind` with that node and no other. Any other
    /// policy (`preferred` included) lets pages be elsewhere, and pages that were there before, or were moved since, can
    /// be elsewhere in any case: [`resident_kib`](Self::resident_kib) tells.
    pub fn bound_node(&self) -> Option<HostNodeId> {
        match self.host_nodes.as_slice() {
            [only] if self.policy == NumaPolicy::Bind => Some(*only),
            _ => None,
        }
    }
}

/// A vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// The hypervisor's number for it. It changes when a vCPU is unplugged and plugged again.
    pub index: u32,
    /// How host and guest name it.
    pub apic_id: ApicId,
    /// Guest node in the firmware tables; none in a UMA VM.
    pub boot_node: Option<GuestNodeId>,
    /// Thread that runs it, checked to belong to the VM's process.
    pub tid: i32,
}

/// Where a vCPU was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuLocation {
    /// CPU that it runs on, or ran on last.
    pub cpu: CpuId,
    /// That CPU's node.
    pub node: HostNodeId,
    /// The node that its allowed CPUs confine it to, if they do.
    pub pinned: Option<HostNodeId>,
    /// `CLOCK_MONOTONIC` of the observation or the event, nanoseconds.
    pub time_ns: u64,
}

/// How true a guest's view of a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum VcpuState {
    /// It runs on the home of the guest node that the guest uses.
    True,
    /// It runs on no guest node's home; the guest uses the nearest one.
    Approximate,
    /// The guest uses another node: the right one is published and not yet acknowledged, or not published yet, or
    /// nothing can be published.
    Stale,
    /// It was not observed, or no guest node has a known home.
    Unknown,
}

impl fmt::Display for VcpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[cfg(test)]
mod memory_tests {
    use super::*;

    #[test]
    fn only_a_policy_that_leaves_no_choice_binds() {
        let memory = |policy: &str, host_nodes: &[HostNodeId]| MemoryBacking {
            id: "ram".into(),
            size_bytes: 1 << 20,
            policy: policy.into(),
            host_nodes: host_nodes.to_vec(),
            resident_kib: vec![(3, 1024)],
            mapping: None,
        };
        assert_eq!(memory("bind", &[1]).bound_node(), Some(1));
        for (policy, nodes) in [
            ("bind", &[0, 1][..]),
            ("bind", &[]),
            ("preferred", &[1]),
            ("default", &[]),
            ("interleave", &[1]),
        ] {
            assert_eq!(memory(policy, nodes).bound_node(), None, "{policy} {nodes:?}");
        }
    }
}
