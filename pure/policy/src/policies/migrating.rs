//! The next step of each migration.

use super::{Now, Propose};
use crate::{Action, Reason, Step, migration::Order, world::ChannelState};

/// Proposes the next order of each [`Migration`](crate::migration::Migration), which waits in the plan until it is due.
pub struct Migrating;

impl Propose for Migrating {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let due = now.vms().flat_map(|(id, managed, vm)| {
            let answers = managed.responsive().is_some();
            let due = vm.migration.as_ref().map(|migration| migration.due(answers, now.now_ns));
            due.into_iter().flatten().map(move |(order, not_before_ns)| {
                // The guest may have let go of the device before it was asked.
                let gone = order == Order::Detach && vm.channel == ChannelState::Detached;
                let order = if gone { Order::Begin } else { order };
                Step { vm: id, action: Action::Migrate(order, Reason::Migrates), not_before_ns }
            })
        });
        due.collect()
    }
}
