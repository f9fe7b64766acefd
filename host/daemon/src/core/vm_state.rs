//! What the core keeps of each VM, beside what is known of it.

use super::{Core, counts::VmCounts};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{ApicId, GuestNodeId};
use vnuma_policy::world::VmId;

/// It is made when the VM is found, and dropped whole when it goes.
#[derive(Default)]
pub(super) struct VmState {
    /// Threads that are watched.
    pub watched: Vec<i32>,
    /// Its process and threads as they were when it was ordered to count them, if it was.
    pub counted: Option<(i32, Vec<(ApicId, i32)>)>,
    /// Its process, if scx_vnuma was told of its threads.
    pub ranked: Option<i32>,
    /// Why steps of its policy were not made, the last time.
    pub confine_problems: BTreeMap<ApicId, String>,
    /// The vCPU that was replugged last, its number since then, and the guest node it went to.
    pub replugged: Option<(ApicId, ApicId, GuestNodeId)>,
    /// Why it could not be attached yet as it is marked.
    pub attach_problem: Option<String>,
    /// What was done to it.
    pub counts: VmCounts,
}

/// VMs whose threads are counted.
#[derive(Default)]
pub(super) struct Counting {
    /// VMs whose threads may have changed since it was ordered.
    pub changed: BTreeSet<VmId>,
    /// VMs because of which threads are counted.
    pub because: BTreeSet<VmId>,
    /// Threads are counted, as some VM has a policy.
    pub on: bool,
}

impl Core {
    /// What is kept of a VM.
    pub(super) fn state(&mut self, id: VmId) -> &mut VmState {
        self.states.entry(id).or_default()
    }
}
