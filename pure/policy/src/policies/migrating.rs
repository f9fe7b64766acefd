//! The next step of each migration.

use super::{Now, Propose};
use crate::{Action, Reason, Step};

/// Proposes the next order of each [`Migration`](crate::migration::Migration), which waits in the plan until it is due.
pub struct Migrating;

impl Propose for Migrating {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let due = now.vms().filter_map(|(id, managed, vm)| {
            let migration = vm.migration.as_ref()?;
            let (order, not_before_ns) = migration.due(managed.responsive().is_some(), now.now_ns)?;
            Some(Step { vm: id, action: Action::Migrate(order, Reason::Migrates), not_before_ns })
        });
        due.collect()
    }
}
