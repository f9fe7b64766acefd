//! A publication in the form of the channel.

use vnuma_abi_topology_channel::Vcpu;
use vnuma_channel::{Content, ContentError};
use vnuma_topology::{ApicId, DistanceMatrix, GuestNodeId};

/// Checks that distances and vCPUs fit into a channel.
pub(crate) fn content(
    distances: DistanceMatrix,
    vcpus: impl Iterator<Item = (ApicId, GuestNodeId)>,
) -> Result<Content, ContentError> {
    let nodes = distances.len();
    let vcpu = |(apic_id, node): (ApicId, GuestNodeId)| {
        let outside = ContentError::Node { apic_id, node, nodes };
        Ok(Vcpu { apic_id, node: u16::try_from(node).map_err(|_| outside)?, flags: 0 })
    };
    Content::new(distances, vcpus.map(vcpu).collect::<Result<_, _>>()?)
}
