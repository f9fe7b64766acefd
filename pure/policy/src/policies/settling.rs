//! What is true is published when it has settled.

use super::{Now, PerVm, Propose};
use crate::{Action, SettlePolicy, Settler, Step};

/// When a difference is worth a publication is said by the [`Settler`].
pub struct Settling<'a>(pub &'a SettlePolicy);

impl Propose for Settling<'_> {
    type Memory = PerVm<Settler>;

    fn propose(&self, now: &Now<'_>, memory: &mut PerVm<Settler>) -> Vec<Step> {
        now.gone().for_each(|id| memory.forget(id));
        let publication = |(id, _, vm): (_, _, &crate::world::Vm)| {
            let settler = memory.of(id, vm.found_ns);
            let Some(generation) = vm.may_publish() else {
                settler.see(&vm.placement);
                return None;
            };
            let (not_before_ns, batch, reason) = settler.next(self.0, &vm.placement, now.now_ns)?;
            Some(Step { vm: id, action: Action::Publish(generation, batch, reason), not_before_ns })
        };
        now.vms().filter_map(publication).collect()
    }
}
