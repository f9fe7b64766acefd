//! A guest that has not let go of its channel's device is asked again.

use super::{Now, Propose};
use crate::{Action, Step};

/// How often, and when that is given up, is in what is [under way](crate::world::Unplug).
pub struct Unplugging;

impl Propose for Unplugging {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): ()) -> (Vec<Step>, ()) {
        let due = now.vms().filter_map(|(id, managed, vm)| {
            let step = vm.unplug_step(managed.responsive().is_some(), now.now_ns)?;
            Some(Step::now(id, Action::Unplug(step)))
        });
        (due.collect(), ())
    }
}
