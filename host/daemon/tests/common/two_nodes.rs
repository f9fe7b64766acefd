//! A host that is only described.

use vnuma_model::{DistanceMatrix, HostNode, HostTopology};

/// Two nodes of four CPUs each.
pub fn host() -> HostTopology {
    let node = |id: u32| HostNode { id, cpus: (id * 4..id * 4 + 4).collect(), ..HostNode::default() };
    HostTopology {
        nodes: vec![node(0), node(1)],
        distances: DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square"),
        ..HostTopology::default()
    }
}
