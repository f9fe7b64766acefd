//! A migration is taken on.

use super::{Now, Propose};
use crate::{Action, Reason, Step};

/// What comes next is in what is [under way](crate::migration::Migration).
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
