//! The guest node of each PCI function that a VM has of its host, and what the guest uses.

use crate::acked::{AckedTopology, Update};
use crate::{Homes, NodeAssignment, assignment::state_of, choose_node};
use std::collections::BTreeMap;
use vnuma_model::{GuestNodeId, HostNodeId, HostTopology, PciAddress, VcpuState, VmDevice};

/// How many devices are published at most: the channel has room for so many.
const MAX_DEVICES: usize = 256;

/// What is known of a device of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Host node that it is attached to, if that is known.
    pub host_node: Option<HostNodeId>,
    /// Guest node that was published last.
    pub published_node: Option<GuestNodeId>,
    /// Guest node that the guest's kernel has for it, as far as it has acknowledged.
    pub acked_node: Option<GuestNodeId>,
    /// Guest node that would be right.
    pub target_node: Option<GuestNodeId>,
    /// How true the guest's view of it is, as for a vCPU.
    pub state: VcpuState,
}

#[derive(Clone, Debug)]
struct Device {
    /// Its address on the host.
    host: String,
    host_node: Option<HostNodeId>,
    target: Option<NodeAssignment>,
}

/// The devices of a VM, by the addresses that its guest has for them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Devices {
    devices: BTreeMap<PciAddress, Device>,
    /// Addresses in the last publication. The guest would take another device at such an address for the one that was published.
    published: BTreeMap<PciAddress, GuestNodeId>,
    acked: AckedTopology<PciAddress>,
}

impl Devices {
    /// The VM was described again. One whose address in the guest is not known cannot be published.
    pub(crate) fn describe(&mut self, described: &[VmDevice]) {
        let mut before = std::mem::take(&mut self.devices);
        let placed = described.iter().filter_map(|device| Some((device.guest?, device)));
        for (address, VmDevice { host, .. }) in placed.take(MAX_DEVICES) {
            let kept = before.remove(&address).filter(|kept| kept.host == *host);
            let device = kept.unwrap_or_else(|| {
                self.acked.forget(address);
                self.acked.expect(address);
                Device { host: host.clone(), host_node: None, target: None }
            });
            self.devices.insert(address, device);
        }
        // Of what is left, some may have been replaced.
        before
            .into_keys()
            .filter(|gone| !self.devices.contains_key(gone))
            .for_each(|gone| self.acked.forget(gone));
    }

    /// Works out where they belong: the guest node whose home is the device's host node, or the nearest one. Returns whether
    /// the guest has to be told something.
    pub(crate) fn reassess(&mut self, host: &HostTopology, homes: &Homes) -> bool {
        let present = &self.published;
        for (&address, device) in &mut self.devices {
            let found = host.pci_devices.iter().find(|found| found.address == device.host);
            device.host_node = found.and_then(|found| found.node);
            device.target = device
                .host_node
                .and_then(|node| choose_node(host, homes, node, present.get(&address).copied(), None));
            if device.target.is_none() {
                // The guest gives the device the node back that it had found itself.
                self.acked.forget(address);
                self.acked.expect(address);
            }
        }
        self.right() != self.published
    }

    fn right(&self) -> BTreeMap<PciAddress, GuestNodeId> {
        self.devices.iter().filter_map(|(&address, device)| Some((address, device.target?.node))).collect()
    }

    /// What is to be published. It counts as published from now on.
    pub(crate) fn publish(&mut self, update: Update) -> Vec<(PciAddress, GuestNodeId)> {
        self.published = self.right();
        let published: Vec<_> = self.published.iter().map(|(&address, &node)| (address, node)).collect();
        self.acked.published(update, published.iter().copied());
        published
    }

    /// The guest has acknowledged a generation.
    pub(crate) fn acknowledged(&mut self, generation: u64) {
        self.acked.acknowledged(generation);
    }

    /// What the guest uses is not known until it acknowledges again.
    pub(crate) fn acked_unknown(&mut self) {
        self.acked.unknown();
    }

    /// The guest has given all devices back the nodes that it had found itself.
    pub(crate) fn stop_publishing(&mut self) {
        self.acked.unknown();
        self.published.clear();
    }

    pub(crate) fn status(&self, address: PciAddress) -> Option<DeviceStatus> {
        let device = self.devices.get(&address)?;
        let acked_node = self.acked.node(address);
        Some(DeviceStatus {
            host_node: device.host_node,
            published_node: self.published.get(&address).copied(),
            acked_node,
            target_node: device.target.map(|target| target.node),
            state: state_of(device.target, acked_node),
        })
    }
}
