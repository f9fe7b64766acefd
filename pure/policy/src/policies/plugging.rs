//! VMs that are marked are attached, one that has arrived with its channel gets it anew, and a guest that has not let go of its channel's
//! device is asked again.
//!
//! A guest that boots or stands still does not see a request, nor does its kernel see it afterwards. But QEMU passes on the same request
//! again: at once, or after 5 s, by how it plugs into that port. (If the first one was made before the guest ran at all, it does not,
//! and a reset of the guest takes the device.) So the guest is asked again: at first soon, as most guests boot that fast, and not
//! without end.

use super::{Now, PerVm, Propose};
use crate::{
    Action, Reason, Step,
    world::{ChannelState, ConnectionId, Unplug},
};
use vnuma_model::{Backoff, Rest};

/// Between attempts to attach a VM over one connection. Each costs its hypervisor, and vnumad, a channel.
const REST: Rest = Rest::new(SECOND_NS, 16 * SECOND_NS);

/// Pause between the first request for a device and the second one, and the longest pause. QEMU may refuse to ask sooner.
const PAUSES: Backoff = Backoff::new(6 * SECOND_NS, 30 * SECOND_NS);

/// How long a guest is asked in all. A boot takes less.
pub const UNPLUG_LIMIT_NS: u64 = 600 * SECOND_NS;

const SECOND_NS: u64 = 1_000_000_000;

/// A VM that is marked is attached as soon as its guest runs: after its arrival, or where a migration has failed.
pub struct Plugging;

/// Over which connection it was tried last to attach a VM, and how long it rests from that.
#[derive(Clone, Debug, Default)]
pub struct PluggingMemory(PerVm<Option<(ConnectionId, Rest)>>);

impl Propose for Plugging {
    type Memory = PluggingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut PluggingMemory) -> Vec<Step> {
        now.gone().for_each(|id| memory.0.forget(id));
        let mut steps = Vec::new();
        for (id, managed, vm) in now.vms() {
            if vm.channel.generation().is_some() {
                memory.0.forget(id);
            }
            let (kept, answers) = (vm.waiting_unplug().filter(|_| !vm.came_along), managed.responsive());
            let again = kept.and_then(|unplug| ask_again(unplug, answers.is_some(), now.now_ns));
            steps.extend(again.map(|(not_before_ns, action)| Step { vm: id, action, not_before_ns }));
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
            let Some(connection) = answers else { continue };
            if vm.is_to_be_attached() {
                let tried = memory.0.of(id, vm.found_ns);
                let last = tried.filter(|(known, _)| *known == connection);
                let mut rest = last.map_or(REST, |(_, rest)| rest);
                let not_before_ns = rest.until_ns();
                if not_before_ns <= now.now_ns {
                    rest.begin(now.now_ns);
                    *tried = Some((connection, rest));
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

/// The next step for a device that the guest has kept, and when it is due. `answers`: the hypervisor can be asked.
fn ask_again(unplug: &Unplug, answers: bool, now_ns: u64) -> Option<(u64, Action)> {
    let ask_ns = unplug.kept_ns.saturating_add(PAUSES.pause_after(unplug.ignored));
    let until_ns = unplug.since_ns.saturating_add(UNPLUG_LIMIT_NS);
    let next = match answers && ask_ns.max(now_ns) < until_ns {
        true => (ask_ns, Action::Detach(Reason::Kept)),
        false => (until_ns, Action::GiveUpDetach(Reason::Kept)),
    };
    (!unplug.given_up).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// When it was asked, and when it was given up, if it was. Each answer takes so long, and its hypervisor answers by turns.
    fn asked(took_ns: &[u64], silences_ns: &[u64]) -> (Vec<u64>, Option<u64>) {
        let (mut unplug, mut now_ns, mut asked) = (Unplug::new(0), 0, vec![0]);
        let (mut took_ns, mut silences_ns) = (took_ns.iter().cycle(), silences_ns.iter().cycle());
        now_ns += took_ns.next().copied().unwrap_or_default();
        unplug.kept(now_ns);
        while let Some((due_ns, _)) = ask_again(&unplug, true, now_ns) {
            now_ns = now_ns.max(due_ns) + silences_ns.next().copied().unwrap_or_default();
            match ask_again(&unplug, true, now_ns).filter(|(due_ns, _)| *due_ns <= now_ns) {
                Some((_, Action::Detach(Reason::Kept))) => {
                    asked.push(now_ns);
                    now_ns += took_ns.next().copied().unwrap_or_default();
                    unplug.kept(now_ns);
                }
                Some((_, Action::GiveUpDetach(Reason::Kept))) => return (asked, Some(now_ns)),
                _ => {}
            }
        }
        (asked, None)
    }

    #[test]
    fn a_guest_that_never_lets_go_is_asked_a_bounded_number_of_times() {
        let (asked, given_up) = asked(&[SECOND_NS], &[0]);
        let seconds: Vec<u64> = asked.iter().take(5).map(|asked_ns| asked_ns / SECOND_NS).collect();
        assert_eq!(seconds, [0, 7, 20, 45, 76]);
        assert_eq!((asked.len(), given_up), (21, Some(UNPLUG_LIMIT_NS)));
    }

    #[test]
    fn nobody_is_asked_who_does_not_answer_but_it_is_given_up_all_the_same() {
        let mut unplug = Unplug::new(0);
        unplug.kept(SECOND_NS);
        let end = Some((UNPLUG_LIMIT_NS, Action::GiveUpDetach(Reason::Kept)));
        assert_eq!(ask_again(&unplug, false, 100 * SECOND_NS), end);
        let asked = Some((7 * SECOND_NS, Action::Detach(Reason::Kept)));
        assert_eq!(ask_again(&unplug, true, 100 * SECOND_NS), asked, "as soon as it answers");
        assert_eq!(ask_again(&unplug, true, UNPLUG_LIMIT_NS), end);
        unplug.given_up = true;
        assert_eq!(ask_again(&unplug, true, u64::MAX), None);
    }

    proptest! {
        /// Whatever answers and silences take.
        #[test]
        fn it_is_asked_neither_too_soon_nor_without_end(
            took_ns in prop::collection::vec(0..20 * SECOND_NS, 1..8),
            silences_ns in prop::collection::vec(0..100 * SECOND_NS, 1..8),
        ) {
            let (asked, given_up) = asked(&took_ns, &silences_ns);
            let soon = |pair: &[u64]| pair[1] - pair[0] < PAUSES.pause_after(1);
            prop_assert!(!asked.windows(2).any(soon), "{asked:?}");
            prop_assert!(asked.len() as u64 <= UNPLUG_LIMIT_NS / PAUSES.pause_after(1));
            prop_assert!(asked.iter().all(|asked_ns| *asked_ns < UNPLUG_LIMIT_NS));
            prop_assert!(given_up.is_some_and(|given_up_ns| given_up_ns >= UNPLUG_LIMIT_NS), "{given_up:?}");
        }
    }
}
