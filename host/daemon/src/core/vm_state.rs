//! What the core keeps of each VM, beside what is known of it.

use super::{Core, counts::VmCounts};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{ApicId, GuestNodeId};
use vnuma_policy::world::VmId;

/// State of a VM. It is made when the VM is found, and dropped whole when the VM goes.
#[derive(Default)]
pub(super) struct VmState {
    /// Threads that are watched.
    pub watched: Vec<i32>,
    /// The process and threads that the last order to count named, if there was one.
    pub counted: Option<(i32, Vec<(ApicId, i32)>)>,
    /// Why the last steps of its policy failed, by vCPU.
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
    /// VMs whose threads may have changed since the last order.
    pub changed: BTreeSet<VmId>,
    /// VMs that need threads to be counted: they have a policy, or masks of one.
    pub because: BTreeSet<VmId>,
    /// Threads are counted.
    pub on: bool,
}

impl Core {
    /// What is kept of a VM.
    pub(super) fn state(&mut self, id: VmId) -> &mut VmState {
        self.states.entry(id).or_default()
    }
}
