//! Converts a publication to the content of a channel.

use vnuma_abi_topology_channel::Vcpu;
use vnuma_channel::{Content, ContentError};
use vnuma_topology::{ApicId, DistanceMatrix, GuestNodeId};

/// Checks that distances and vCPUs fit into a channel.
pub(crate) fn content(
    distances: DistanceMatrix,
    vcpus: impl Iterator<Item = (ApicId, GuestNodeId)>,
) -> Result<Content, ContentError> {
    let vcpus = vcpus.map(|(apic_id, node)| Vcpu { apic_id, node });
    Content::new(distances, vcpus.collect())
}
