//! What the core keeps of each VM, beside what is known of it.

use super::{Core, counts::VmCounts, migration::Migrated};
use std::collections::{BTreeMap, HashMap};
use vnuma_model::{ApicId, GuestNodeId};
use vnuma_policy::world::VmId;

/// State of a VM. It is made when the VM is found, and dropped whole when the VM goes.
#[derive(Default)]
pub(super) struct VmState {
    /// It needs threads to be counted: it has a policy, or masks of one.
    pub wants_readings: bool,
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

/// What is kept of all VMs.
#[derive(Default)]
pub(super) struct VmStates {
    pub of: HashMap<VmId, VmState>,
    /// Those whose threads may have changed since the last order to count them.
    pub recount: Vec<VmId>,
    /// How many of them need threads to be counted.
    pub want_readings: usize,
    /// Threads are counted.
    pub counted: bool,
    /// Migrations of VMs that are gone.
    pub migrated: Migrated,
}

impl VmStates {
    pub(super) fn remove(&mut self, id: VmId) -> VmState {
        let state = self.of.remove(&id).unwrap_or_default();
        self.want_readings -= usize::from(state.wants_readings);
        state
    }
}

impl Core {
    /// What is kept of a VM.
    pub(super) fn state(&mut self, id: VmId) -> &mut VmState {
        self.states.of.entry(id).or_default()
    }
}
