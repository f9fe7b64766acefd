//! What can be published.

use vnuma_abi_topology_channel::{MAX_NODES, MAX_VCPUS, Vcpu};
use vnuma_topology::DistanceMatrix;

/// A guest's topology, known to fit into a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    distances: DistanceMatrix,
    vcpus: Vec<Vcpu>,
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
        Ok(Self { distances, vcpus })
    }

    /// Distances between guest nodes.
    pub fn distances(&self) -> &DistanceMatrix {
        &self.distances
    }

    /// vCPUs in rising order of APIC id.
    pub fn vcpus(&self) -> &[Vcpu] {
        &self.vcpus
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
}
