//! The next step of each migration.

use super::{Now, Propose};
use crate::{Action, Reason, Step};

/// Proposes the order that a [`Migration`](crate::migration::Migration) has due.
pub struct Migrating;

impl Propose for Migrating {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let due = now.vms().filter_map(|(id, managed, vm)| {
            let order = vm.migration.as_ref()?.due(managed.responsive().is_some(), now.now_ns)?;
            Some(Step::now(id, Action::Migrate(order, Reason::Migrates)))
        });
        due.collect()
    }
}
