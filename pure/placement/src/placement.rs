//! Where a VM goes.

use crate::{
    MAX_GUEST_NODES,
    capacity::{BASE_PAGE_BYTES, unit_bytes},
    request::{MAX_DEVICES, MAX_VCPUS, is_name},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use vnuma_model::{CpuId, CpuSet, DistanceMatrix, GuestNodeId, HostNodeId};

/// A vCPU and the CPU that it is to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VcpuPin {
    /// QEMU's index, which with one socket for each vCPU is its APIC id, too.
    pub vcpu: u32,
    /// The CPU.
    pub cpu: CpuId,
}

/// A node of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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

    /// CPUs of the hypervisor's own threads: those of guest nodes without devices, if these have vCPUs. A thread that drives a device runs on the
    /// device's guest node, and a thread of the hypervisor that takes turns with its vCPU there takes the CPU's caches as well.
    pub fn emulator_cpus(&self) -> CpuSet {
        let has_device =
            |node: &GuestNodePlan| self.devices.iter().any(|device| device.guest_node == Some(node.id));
        let others = self.guest_nodes.iter().filter(|node| !has_device(node));
        let others: CpuSet = others.flat_map(|node| &node.vcpus).map(|pin| pin.cpu).collect();
        if others.is_empty() { self.cpus() } else { others }
    }

    /// Its pins, by vCPU.
    pub fn pins(&self) -> impl Iterator<Item = VcpuPin> + '_ {
        self.guest_nodes.iter().flat_map(|node| node.vcpus.iter().copied())
    }
}

/// Largest node number of a host, the kernel's own limit (`MAX_NUMNODES` is 1024 at most).
const MAX_NODE: u32 = 1023;
/// Largest memory of a guest node that is believed, bytes: 52 bits of physical address.
const MAX_MEMORY_BYTES: u64 = 1 << 52;

/// A field of a placement that was read, and what is wrong with its value.
type Fault = (String, String);

fn fault(field: impl Into<String>, value: impl std::fmt::Debug, expected: &str) -> Result<(), Fault> {
    Err((field.into(), format!("{value:?}: expected {expected}")))
}

/// Is it the address of a PCI function, `domain:bus:device.function`, each in lower hexadecimal digits?
fn is_address(text: &str) -> bool {
    let mut parts = text.split([':', '.']);
    let hex = |length: std::ops::RangeInclusive<usize>, part: Option<&str>| {
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        part.is_some_and(|part| length.contains(&part.len()) && part.bytes().all(digit))
    };
    let numbers = hex(4..=8, parts.next()) && hex(2..=2, parts.next()) && hex(2..=2, parts.next());
    let separators: String = text.chars().filter(|c| matches!(c, ':' | '.')).collect();
    numbers && hex(1..=1, parts.next()) && separators == "::."
}

impl Placement {
    /// Is it one that [`place`](crate::place) could have made, as far as that can be told without the host?
    pub(crate) fn check(&self) -> Result<(), Fault> {
        if !is_name(&self.name) {
            return fault("name", self.name.chars().take(64).collect::<String>(), "the name of a VM");
        }
        if !self.page_bytes.is_power_of_two() || self.page_bytes < BASE_PAGE_BYTES {
            return fault("page_bytes", self.page_bytes, "a power of two from 4096");
        }
        let count = self.guest_nodes.len();
        if !(1..=MAX_GUEST_NODES).contains(&count) {
            return fault("guest_nodes", count, "1 to 128 guest nodes");
        }
        if self.distances.len() != count {
            return fault("distances", self.distances.len(), "a row for each guest node");
        }
        let (mut homes, mut cpus, mut next) = (BTreeSet::new(), BTreeSet::new(), 0);
        for (at, node) in self.guest_nodes.iter().enumerate() {
            let field = |name: &str| format!("guest_nodes[{at}].{name}");
            if node.id as usize != at {
                return fault(field("id"), node.id, "its position");
            }
            if node.home > MAX_NODE || !homes.insert(node.home) {
                return fault(
                    field("home"),
                    node.home,
                    "a host node up to 1023 that is the home of no other",
                );
            }
            let multiple = node.memory_bytes.is_multiple_of(unit_bytes(self.page_bytes));
            if node.memory_bytes == 0 || node.memory_bytes > MAX_MEMORY_BYTES || !multiple {
                return fault(
                    field("memory_bytes"),
                    node.memory_bytes,
                    "whole pages, and whole units of 2 MiB",
                );
            }
            for pin in &node.vcpus {
                if pin.vcpu != next || next >= MAX_VCPUS {
                    return fault(field("vcpus"), pin.vcpu, "vCPUs in order, from 0 to 4095");
                }
                next += 1;
                if pin.cpu > CpuSet::MAX_CPU || !cpus.insert(pin.cpu) {
                    return fault(field("vcpus"), pin.cpu, "a CPU up to 8191 for each vCPU");
                }
            }
        }
        self.check_devices()
    }

    fn check_devices(&self) -> Result<(), Fault> {
        let mut named = BTreeSet::new();
        if self.devices.len() > MAX_DEVICES {
            return fault("devices", self.devices.len(), "up to 32 devices");
        }
        for (at, device) in self.devices.iter().enumerate() {
            let field = |name: &str| format!("devices[{at}].{name}");
            if !is_address(&device.address) || !named.insert(&device.address) {
                let shown: String = device.address.chars().take(64).collect();
                return fault(field("address"), shown, "the address of a PCI function that is named once");
            }
            if device.host_node.is_some_and(|node| node > MAX_NODE) {
                return fault(field("host_node"), device.host_node, "a host node up to 1023");
            }
            if device.guest_node.is_some_and(|node| node as usize >= self.guest_nodes.len()) {
                return fault(field("guest_node"), device.guest_node, "one of the guest nodes");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::is_address;

    #[test]
    fn addresses_are_those_of_sysfs() {
        for good in ["0000:81:00.0", "10000:e1:1f.7"] {
            assert!(is_address(good), "{good}");
        }
        for bad in [
            "",
            "81:00.0",
            "0000:81:00",
            "0000:81:00.0.0",
            "0000.81:00:0",
            "0000:8g:00.0",
            "0000:81:00.",
            "0000:81:00.0,x",
        ] {
            assert!(!is_address(bad), "{bad}");
        }
    }
}
