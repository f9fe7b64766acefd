//! VMs that are marked are attached, one that has arrived with its channel gets it anew, and a guest that has not let go of its channel's
//! device is asked again.

use super::{Now, PerVm, Propose};
use crate::{
    Action, Reason, Step,
    world::{ChannelState, ConnectionId},
};

/// Between two attempts to attach a VM over one connection.
const PAUSE_NS: u64 = 1_000_000_000;

/// A VM that is marked is attached as soon as its guest runs: after its arrival, or where a migration has failed. How often a guest is asked,
/// and when that is given up, is in what is [under way](crate::world::Unplug).
pub struct Plugging;

/// Over which connection it was tried last to attach a VM, and when.
#[derive(Clone, Debug, Default)]
pub struct PluggingMemory(PerVm<Option<(ConnectionId, u64)>>);

impl Propose for Plugging {
    type Memory = PluggingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut PluggingMemory) -> Vec<Step> {
        now.gone().for_each(|id| memory.0.forget(id));
        let mut steps = Vec::new();
        for (id, managed, vm) in now.vms() {
            if vm.channel.generation().is_some() {
                memory.0.forget(id);
            }
            let again = vm.unplug_step(managed.responsive().is_some(), now.now_ns);
            steps.extend(again.map(|step| Step::now(id, Action::Unplug(step, Reason::Kept))));
            if let Some(marked) = vm.mark.wanted {
                let why = if marked { Reason::Requested } else { Reason::NotMarked };
                steps.push(Step::now(id, Action::Mark(marked, why)));
            }
            let asked = vm.plug.wanted.and_then(|why| match vm.channel {
                ChannelState::Attaching => Some(Action::Attach(why)),
                ChannelState::Recovering => Some(Action::Recover(why)),
                ChannelState::Detaching(_) | ChannelState::LostDetaching => Some(Action::Detach(why)),
                _ => None,
            });
            steps.extend(asked.map(|action| Step::now(id, action)));
            let Some(connection) = managed.responsive() else { continue };
            if vm.is_to_be_attached() {
                let tried = memory.0.of(id, vm.found_ns);
                let last = tried.filter(|(known, _)| *known == connection);
                let not_before_ns = last.map_or(0, |(_, tried_ns)| tried_ns.saturating_add(PAUSE_NS));
                if not_before_ns <= now.now_ns {
                    *tried = Some((connection, now.now_ns));
                }
                steps.push(Step { vm: id, action: Action::Attach(Reason::Marked), not_before_ns });
            }
            // The memory has what the other host has published, and with KVM QEMU delivers none of the channel's interrupts any more.
            if vm.came_along && matches!(vm.channel, ChannelState::Attached(_) | ChannelState::Lost) {
                steps.push(Step::now(id, Action::Mark(true, Reason::CameAlong)));
                steps.push(Step::now(id, Action::Detach(Reason::CameAlong)));
            }
        }
        steps
    }
}
