//! Threads of a VM's process that run no vCPU: main loop, I/O threads, workers, and since Linux 6.4 those of vhost. They copy
//! between devices and the guest's memory, and follow its vCPUs.
//!
//! ```text
//!                      a policy confines vCPUs to nodes
//!   operators' masks ─────────────────────────────────▶ the CPUs of these nodes, within each one's mask
//!          ▲                                                              │
//!          └──────────────────────────────────────────────────────────────┘
//!                      no vCPU is confined, or vCPUs are on all nodes
//! ```
//!
//! Which threads there are is not known here: they come and go. Who carries it out finds them, keeps their operators' masks,
//! and looks again now and then.

use super::{Task, VcpuMask, Vm, VmId, World};
use std::collections::BTreeSet;
use vnuma_model::CpuSet;

/// Every so many resyncs (10 s by default) threads that follow are looked at, for new threads and for masks that
/// others have set.
const LOOK: u32 = 5;

/// How the other threads of a VM are kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Others {
    /// CPUs that they are kept to, each within its operator's mask. `None`: they have that mask.
    pub kept: Option<CpuSet>,
    /// The CPUs that are being set. Wanted: their vCPUs may have moved, or it is time to look for new threads.
    pub follow: Task<(), Option<CpuSet>>,
    /// Threads that are kept.
    pub threads: usize,
    /// The mask of the main thread, which new threads begin with, and its operator's.
    pub inherited: Option<(CpuSet, CpuSet)>,
    /// Why the last attempt to keep them failed.
    pub problem: Option<String>,
    /// Resyncs since the last look at them.
    pub resyncs: u32,
}

impl Others {
    /// Does any of them have a mask that is not its operator's, or may have?
    pub fn in_use(&self) -> bool {
        self.kept.is_some() || self.follow.is_under_way() || self.problem.is_some()
    }
}

impl Vm {
    /// Is it time to look where its other threads belong? Steps of its vCPUs come first.
    pub(crate) fn others_may_follow(&self) -> bool {
        let Self { scheduling, .. } = self;
        let settled = || scheduling.masks.values().all(VcpuMask::is_settled);
        scheduling.others.follow.wanted.is_some()
            && !scheduling.others.follow.is_under_way()
            && scheduling.clean_ns.is_some()
            && settled()
    }
}

impl World {
    /// CPUs of the nodes that a policy has confined vCPUs of a VM to. `None`: there are none, or it is all nodes.
    pub fn cpus_of_others(&self, id: VmId) -> Option<CpuSet> {
        let vm = self.get(id)?.vm.as_ref().filter(|vm| vm.effective_policy().acts())?;
        let machine = self.periods.machine();
        let places = vm.scheduling.masks.values().filter_map(|mask| mask.policy.as_ref()?.place(machine));
        let nodes: BTreeSet<usize> = places.map(|place| machine.node_at(place)).collect();
        if nodes.is_empty() || machine.with_cpus.iter().all(|node| nodes.contains(node)) {
            return None;
        }
        let domains = nodes.iter().flat_map(|&node| machine.nodes[node].domains.clone());
        Some(domains.flat_map(|domain| machine.domains[domain].cpus.iter()).collect())
    }

    /// The vCPUs of a VM may be on other nodes now: its other threads are to follow.
    pub(super) fn others_look(&mut self, id: VmId) {
        if let Some(vm) = self.vms.get_mut(&id).and_then(|managed| managed.vm.as_mut()) {
            vm.scheduling.others.follow.wanted = Some(());
            self.touched.push(id);
        }
    }

    /// Counts a resync. Threads that follow are looked at again when enough have passed.
    pub fn look_at_others(&mut self) {
        for (&id, managed) in &mut self.vms {
            let Some(others) = managed.vm.as_mut().map(|vm| &mut vm.scheduling.others) else { continue };
            if !others.in_use() {
                continue;
            }
            others.resyncs = others.resyncs.saturating_add(1);
            if others.resyncs >= LOOK {
                others.follow.wanted = Some(());
                self.touched.push(id);
            }
        }
    }
}
