//! Which VM is meant: by its handle, its name, a connection to it, or a thread of it.

use std::collections::{BTreeMap, HashMap};
use vnuma_model::{ApicId, VmHandle};
use vnuma_policy::world::{ConnectionId, VmId};

/// The indexes that span all VMs.
#[derive(Default)]
pub(super) struct Registry {
    pub last_id: u64,
    pub last_epoch: u32,
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

    /// The epoch of a channel, never 0, also across restarts another one: a guest would miss a generation that it has seen before.
    pub(super) fn fresh_epoch(&mut self) -> u32 {
        self.last_epoch = self.last_epoch.checked_add(1).unwrap_or(1);
        self.last_epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_do_not_come_back_and_are_never_0() {
        let mut registry = Registry { last_epoch: u32::MAX - 2, ..Registry::default() };
        assert_eq!([(); 4].map(|()| registry.fresh_epoch()), [u32::MAX - 1, u32::MAX, 1, 2]);
    }
}
