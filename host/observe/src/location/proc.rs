//! Reads a thread's location from /proc.

use super::{LocationError, monotonic_ns};
use vnuma_model::{CpuId, CpuSet, HostNodeId, HostTopology, VcpuLocation};
use vnuma_process::{
    ProcError,
    procfs::{self, read_affinity},
};

/// A thread's state in /proc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThreadState {
    pub(super) cpu: CpuId,
    pub(super) allowed: CpuSet,
}

/// Where a thread is now. `pinned` is the one node that all of its allowed CPUs which are online are on.
pub fn read_location(topology: &HostTopology, pid: i32, tid: i32) -> Result<VcpuLocation, LocationError> {
    // Before the reading, so that any event from now on counts as newer.
    let time_ns = monotonic_ns();
    let ThreadState { cpu, allowed } = read_thread(pid, tid)?;
    let node = topology.node_of_cpu(cpu).ok_or(LocationError::UnknownCpu { tid, cpu })?;
    Ok(VcpuLocation { cpu, node, pinned: topology.node_of_cpus(&allowed), time_ns })
}

/// The node that holds all CPUs on which this thread may run, whichever process it belongs to. `None` if the thread has ended.
pub fn read_pinned(topology: &HostTopology, tid: i32) -> Option<Option<HostNodeId>> {
    read_affinity(tid).ok().map(|allowed| topology.node_of_cpus(&allowed))
}

/// The allowed CPUs first: a program that sets them and then moves the thread does so in this order. The second look is at a
/// thread of this process only, so that the first one was, too.
pub(super) fn read_thread(pid: i32, tid: i32) -> Result<ThreadState, LocationError> {
    let failed = |error| match error {
        ProcError::Gone { .. } => LocationError::NoThread { pid, tid },
        error => LocationError::Proc(error),
    };
    let allowed = read_affinity(tid).map_err(failed)?;
    let cpu = procfs::read_last_cpu(pid, tid).map_err(failed)?;
    Ok(ThreadState { cpu, allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_not_there() {
        for (pid, tid) in [(0, 1), (-1, -1), (1, i32::MAX)] {
            let error = read_location(&HostTopology::default(), pid, tid).unwrap_err();
            assert!(matches!(error, LocationError::NoThread { .. }), "{error}");
        }
    }
}
