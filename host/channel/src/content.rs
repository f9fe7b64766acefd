//! What can be published.

use vnuma_abi_topology_channel::{Device, MAX_DEVICES, MAX_NODES, MAX_VCPUS, Vcpu};
use vnuma_model::DistanceMatrix;

/// A guest's topology, known to fit into a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    distances: DistanceMatrix,
    vcpus: Vec<Vcpu>,
    devices: Vec<Device>,
}

/// Why a topology cannot be published.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ContentError {
    /// Too many guest nodes, or none.
    #[error("{0} guest nodes; the channel takes 1 to {MAX_NODES}")]
    Nodes(usize),
    /// Too many vCPUs, or none.
    #[error("{0} vCPUs; the channel takes 1 to {MAX_VCPUS}")]
    Vcpus(usize),
    /// A vCPU on a guest node that is not there.
    #[error("vCPU with APIC id {apic_id} is on guest node {node}, but there are {nodes}")]
    Node {
        /// The vCPU.
        apic_id: u32,
        /// Its node.
        node: u32,
        /// Guest nodes.
        nodes: usize,
    },
    /// Two vCPUs with one name.
    #[error("APIC id {0} occurs twice")]
    Twice(u32),
    /// Too many PCI functions.
    #[error("{0} PCI functions; the channel takes up to {MAX_DEVICES}")]
    Devices(usize),
    /// A PCI function on a guest node that is not there.
    #[error("PCI function {} is on guest node {}, but there are {nodes}", text(.device), .device.node)]
    DeviceNode {
        /// The function, with its node.
        device: Device,
        /// Guest nodes.
        nodes: usize,
    },
    /// Two PCI functions with one address.
    #[error("PCI function {} occurs twice", text(.0))]
    DeviceTwice(Device),
}

/// The address of a PCI function, as Linux shows it.
fn text(device: &Device) -> String {
    let Device { segment, bus, devfn, .. } = device;
    format!("{segment:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7)
}

impl Content {
    /// Checks a topology; distances are by guest node number. vCPUs may come in any order.
    pub fn new(distances: DistanceMatrix, mut vcpus: Vec<Vcpu>) -> Result<Self, ContentError> {
        let nodes = distances.len();
        if nodes == 0 || nodes > MAX_NODES {
            return Err(ContentError::Nodes(nodes));
        }
        if vcpus.is_empty() || vcpus.len() > MAX_VCPUS {
            return Err(ContentError::Vcpus(vcpus.len()));
        }
        if let Some(vcpu) = vcpus.iter().find(|vcpu| vcpu.node as usize >= nodes) {
            return Err(ContentError::Node { apic_id: vcpu.apic_id, node: vcpu.node, nodes });
        }
        vcpus.sort_by_key(|vcpu| vcpu.apic_id);
        if let Some(pair) = vcpus.windows(2).find(|pair| pair[0].apic_id == pair[1].apic_id) {
            return Err(ContentError::Twice(pair[0].apic_id));
        }
        Ok(Self { distances, vcpus, devices: Vec::new() })
    }

    /// The same with nodes of PCI functions, by the addresses that the guest has for them. They may come in any order.
    pub fn with_devices(self, mut devices: Vec<Device>) -> Result<Self, ContentError> {
        let nodes = self.distances.len();
        if devices.len() > MAX_DEVICES {
            return Err(ContentError::Devices(devices.len()));
        }
        if let Some(&device) = devices.iter().find(|device| device.node as usize >= nodes) {
            return Err(ContentError::DeviceNode { device, nodes });
        }
        let address = |device: &Device| (device.segment, device.bus, device.devfn);
        devices.sort_by_key(address);
        if let Some(pair) = devices.windows(2).find(|pair| address(&pair[0]) == address(&pair[1])) {
            return Err(ContentError::DeviceTwice(pair[0]));
        }
        Ok(Self { devices, ..self })
    }

    /// Distances between guest nodes.
    pub fn distances(&self) -> &DistanceMatrix {
        &self.distances
    }

    /// vCPUs in rising order of APIC id.
    pub fn vcpus(&self) -> &[Vcpu] {
        &self.vcpus
    }

    /// PCI functions in rising order of address.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distances(nodes: usize) -> DistanceMatrix {
        let distance = |from, to| if from == to { 10 } else { 20 };
        DistanceMatrix::new((0..nodes).map(|f| (0..nodes).map(|t| distance(f, t)).collect()).collect())
            .expect("square")
    }

    fn vcpu(apic_id: u32, node: u32) -> Vcpu {
        Vcpu { apic_id, node }
    }

    #[test]
    fn the_limits_of_the_layout() {
        let full: Vec<_> = (0..MAX_VCPUS as u32).map(|id| vcpu(id, 63)).collect();
        assert!(Content::new(distances(64), full.clone()).is_ok());
        assert_eq!(Content::new(distances(65), full.clone()), Err(ContentError::Nodes(65)));
        assert_eq!(Content::new(distances(0), full.clone()), Err(ContentError::Nodes(0)));
        let more = full.into_iter().chain([vcpu(9999, 0)]).collect();
        assert_eq!(Content::new(distances(64), more), Err(ContentError::Vcpus(4097)));
        assert_eq!(Content::new(distances(1), vec![]), Err(ContentError::Vcpus(0)));
    }

    #[test]
    fn what_a_guest_would_refuse_is_refused_here() {
        let error = Content::new(distances(2), vec![vcpu(4, 2)]);
        assert_eq!(error, Err(ContentError::Node { apic_id: 4, node: 2, nodes: 2 }));
        let error = Content::new(distances(2), vec![vcpu(4, 0), vcpu(5, 0), vcpu(4, 1)]);
        assert_eq!(error, Err(ContentError::Twice(4)));
    }

    #[test]
    fn the_same_of_devices() {
        let content = || Content::new(distances(2), vec![vcpu(4, 0)]).expect("within limits");
        let device = |devfn: usize, node| Device { segment: 1, bus: 2, devfn: devfn as u8, node };
        let full: Vec<_> = (0..MAX_DEVICES).rev().map(|devfn| device(devfn, 1)).collect();
        let sorted = content().with_devices(full.clone()).expect("within limits");
        assert!(sorted.devices().is_sorted_by_key(|device| device.devfn));
        let more = [full, vec![Device::default()]].concat();
        assert_eq!(content().with_devices(more), Err(ContentError::Devices(MAX_DEVICES + 1)));
        let error = content().with_devices(vec![device(0x11, 2)]).expect_err("no such node");
        assert_eq!(error.to_string(), "PCI function 0001:02:02.1 is on guest node 2, but there are 2");
        let error =
            content().with_devices(vec![device(3, 0), device(4, 0), device(3, 1)]).expect_err("twice");
        assert_eq!(error.to_string(), "PCI function 0001:02:00.3 occurs twice");
    }
}
