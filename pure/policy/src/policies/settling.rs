//! What is true is published when it has settled.

use super::{Now, Propose};
use crate::{Action, Due, SettlePolicy, Step};

/// When a difference is worth a publication is said by the [`Settler`](crate::Settler).
pub struct Settling<'a>(pub &'a SettlePolicy);

impl Propose for Settling<'_> {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let publication = |(id, _, vm): (_, _, &crate::world::Vm)| {
            let generation = vm.may_publish()?;
            let (reason, not_before_ns) = match vm.placement.due(self.0, now.now_ns) {
                Due::Nothing => return None,
                Due::Deferred(reason) => (reason, vm.placement.next_deadline_ns(self.0)?),
                Due::Now(reason) => (reason, now.now_ns),
            };
            Some(Step { vm: id, action: Action::Publish(generation, reason), not_before_ns })
        };
        now.vms().filter_map(publication).collect()
    }
}
