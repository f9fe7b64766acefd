//! Converts a publication to the content of a channel.

use vnuma_abi_topology_channel::{Device, Vcpu};
use vnuma_channel::{Content, ContentError};
use vnuma_model::{ApicId, DistanceMatrix, GuestNodeId, PciAddress};

/// Checks that distances, vCPUs and devices fit into a channel.
pub(crate) fn content(
    distances: DistanceMatrix,
    vcpus: impl Iterator<Item = (ApicId, GuestNodeId)>,
    devices: impl Iterator<Item = (PciAddress, GuestNodeId)>,
) -> Result<Content, ContentError> {
    let vcpus = vcpus.map(|(apic_id, node)| Vcpu { apic_id, node });
    let device = |(address, node): (PciAddress, GuestNodeId)| {
        let PciAddress { segment, bus, devfn } = address;
        Device { segment, bus, devfn, node }
    };
    Content::new(distances, vcpus.collect())?.with_devices(devices.map(device).collect())
}
