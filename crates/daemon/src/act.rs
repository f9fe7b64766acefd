//! Act: puts a vCPU on a host node.

use crate::{error::Refusal, message::ConnectionId};
use std::os::fd::{AsFd, OwnedFd};
use vnuma_process::pin_thread;
use vnuma_topology::{CpuSet, HostTopology};

/// A move that can be made.
#[derive(Debug)]
pub(crate) struct MovePlan {
    pub(crate) id: ConnectionId,
    pub(crate) vm: String,
    pub(crate) pidfd: OwnedFd,
    pub(crate) pid: i32,
    pub(crate) tid: i32,
    pub(crate) vcpu: u32,
    pub(crate) node: u32,
    pub(crate) cpus: CpuSet,
}

impl MovePlan {
    /// Makes the move: the thread's affinity is set in one system call, so it is made or not made.
    pub(crate) fn make(&self) -> Result<(), Refusal> {
        pin_thread(self.pidfd.as_fd(), self.pid, self.tid, &self.cpus).map_err(|source| Refusal::Move {
            vm: self.vm.clone(),
            vcpu: self.vcpu,
            node: self.node,
            source,
        })
    }
}

/// CPUs of a node that something can be moved to.
pub(crate) fn cpus_of_node(host: &HostTopology, node: u32) -> Result<CpuSet, Refusal> {
    let Some(found) = host.node(node) else {
        return Err(Refusal::NoNode { node, present: host.nodes.iter().map(|node| node.id).collect() });
    };
    if found.cpus.is_empty() { Err(Refusal::NoCpus { node }) } else { Ok(found.cpus.clone()) }
}
