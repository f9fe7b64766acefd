//! Which VM is meant: by its handle, its name, a connection to it, or a thread of it.

use std::collections::{BTreeMap, HashMap};
use vnuma_model::{ApicId, VmHandle};
use vnuma_policy::world::{ConnectionId, VmId};

/// The indexes that span all VMs.
#[derive(Default)]
pub(super) struct Registry {
    last_id: u64,
    /// VMs by the backends' names for them.
    pub handles: HashMap<VmHandle, VmId>,
    /// Known VMs by name.
    pub names: HashMap<String, VmId>,
    /// Handles that lead to a process whose VM another handle has, and that process.
    pub twins: HashMap<VmId, i32>,
    /// VM of each connection.
    pub connections: HashMap<ConnectionId, VmId>,
    /// Which vCPU a thread runs.
    pub threads: BTreeMap<i32, (VmId, ApicId)>,
    /// Why the last attempt to list VMs failed.
    pub scan_problem: Option<String>,
}

impl Registry {
    /// A number that was not used before.
    pub(super) fn fresh_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}
