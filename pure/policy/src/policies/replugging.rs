//! Which vCPU of a guest without a channel is re-plugged on the right guest node, and when.
//!
//! A replug costs more than a publication: a second of the guest's time, another CPU number, tasks that lose their affinity.
//! So vCPUs are replugged late, one at a time, and only to a spare slot. After each failure of a guest the pause is longer.

use super::{Now, PerVm, Propose};
use crate::{
    Action, Reason, Step,
    world::{ManagedVm, Replug, ReplugEnd, Vm, VmId},
};
use std::collections::BTreeMap;
use vnuma_model::{ApicId, Backoff, GuestNodeId};

const SECOND_NS: u64 = 1_000_000_000;
/// Pause after the first failure, and the longest one. A guest that boots accepts the next attempt, one that refuses will
/// refuse again.
const FIRST_PAUSE_NS: u64 = 60 * SECOND_NS;
const LAST_PAUSE_NS: u64 = 3600 * SECOND_NS;

const PAUSES: Backoff = Backoff::new(FIRST_PAUSE_NS, LAST_PAUSE_NS);

/// Replugs vCPUs that have been astray for so long, nanoseconds, and those that an operator has asked for.
pub struct Replugging(pub Option<u64>);

/// What is remembered of vCPUs that are astray.
#[derive(Clone, Debug, Default)]
pub struct ReplugMemory(PerVm<ReplugHistory>);

impl Propose for Replugging {
    type Memory = ReplugMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut ReplugMemory) -> Vec<Step> {
        now.gone().for_each(|id| memory.0.forget(id));
        let step = |(id, managed, vm): (VmId, &ManagedVm, &Vm)| {
            let next = self.0.and_then(|after_ns| {
                let history = memory.0.of(id, vm.found_ns);
                history.note(vm.astray_now(), now.now_ns);
                vm.replug.last.into_iter().for_each(|(end, ended_ns)| history.notice(end, ended_ns));
                history.next(&vm.description.spare_slots, after_ns)
            });
            if !vm.is_free() || managed.responsive().is_none() {
                return None;
            }
            let (action, not_before_ns) = match (vm.replug.wanted, next) {
                (Some(replug), _) => (Action::Replug(replug, Reason::Requested), 0),
                (None, Some((vcpu, node, due_ns))) => {
                    (Action::Replug(Replug { vcpu, node }, Reason::Astray), due_ns)
                }
                (None, None) => return None,
            };
            Some(Step { vm: id, action, not_before_ns })
        };
        now.vms().filter_map(step).collect()
    }
}

/// What is known about replugs of one VM.
#[derive(Clone, Debug)]
pub struct ReplugHistory {
    /// vCPUs that are not on the node that the guest uses: the right node, and since when it has been the right one.
    astray: BTreeMap<ApicId, (GuestNodeId, u64)>,
    pauses: Backoff,
    not_before_ns: u64,
    noticed_ns: Option<u64>,
}

impl Default for ReplugHistory {
    fn default() -> Self {
        Self { astray: BTreeMap::new(), pauses: PAUSES, not_before_ns: 0, noticed_ns: None }
    }
}

impl ReplugHistory {
    /// These are all vCPUs that can be replugged and should be now, each with the right guest node.
    pub fn note(&mut self, astray: impl IntoIterator<Item = (ApicId, GuestNodeId)>, now_ns: u64) {
        let before = std::mem::take(&mut self.astray);
        for (vcpu, node) in astray {
            let known = before.get(&vcpu).filter(|(then, _)| *then == node);
            self.astray.insert(vcpu, known.copied().unwrap_or((node, now_ns)));
        }
    }

    /// The vCPU to be replugged next, if there is one, the guest node to plug it to, and when. `spare` are the slots of each node.
    /// The one that has been astray longest is the first, once it has been so for `after_ns`.
    pub fn next(
        &self,
        spare: &BTreeMap<GuestNodeId, u32>,
        after_ns: u64,
    ) -> Option<(ApicId, GuestNodeId, u64)> {
        let has_slot = |node| spare.get(node).is_some_and(|&slots| slots > 0);
        let may = self.astray.iter().filter(|(_, (node, _))| has_slot(node));
        let (&vcpu, &(node, since_ns)) = may.min_by_key(|(vcpu, (_, since_ns))| (*since_ns, **vcpu))?;
        Some((vcpu, node, since_ns.saturating_add(after_ns).max(self.not_before_ns)))
    }

    /// The last replug has ended, which may be known already.
    fn notice(&mut self, end: ReplugEnd, ended_ns: u64) {
        if self.noticed_ns.is_none_or(|noticed_ns| noticed_ns < ended_ns) {
            self.noticed_ns = Some(ended_ns);
            self.ended(end, ended_ns);
        }
    }

    /// A replug has ended. If the guest keeps both vCPUs nothing more is replugged by itself until a requested replug has
    /// succeeded: each attempt would leave it with one vCPU more.
    pub fn ended(&mut self, end: ReplugEnd, now_ns: u64) {
        (self.not_before_ns, self.pauses) = match end {
            ReplugEnd::Done => (now_ns, PAUSES),
            ReplugEnd::Both => (u64::MAX, Backoff::new(LAST_PAUSE_NS, LAST_PAUSE_NS)),
            ReplugEnd::Undone => {
                let mut pauses = self.pauses;
                (now_ns.saturating_add(pauses.pause()), pauses)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AFTER_NS: u64 = 10 * SECOND_NS;

    impl ReplugHistory {
        fn next_now(
            &mut self,
            astray: impl IntoIterator<Item = (ApicId, GuestNodeId)>,
            spare: &BTreeMap<GuestNodeId, u32>,
            after_ns: u64,
            now_ns: u64,
        ) -> Option<(ApicId, GuestNodeId)> {
            self.note(astray, now_ns);
            let (vcpu, node, due_ns) = self.next(spare, after_ns)?;
            (due_ns <= now_ns).then_some((vcpu, node))
        }
    }

    fn slots(spare: &[(GuestNodeId, u32)]) -> BTreeMap<GuestNodeId, u32> {
        spare.iter().copied().collect()
    }

    #[test]
    fn one_that_stays_astray_is_due_and_one_that_wanders_is_not() {
        let (mut history, spare) = (ReplugHistory::default(), slots(&[(0, 1), (1, 1)]));
        let mut at = |second: u64, astray: &[(ApicId, GuestNodeId)]| {
            history.next_now(astray.iter().copied(), &spare, AFTER_NS, second * SECOND_NS)
        };
        assert_eq!(at(0, &[(3, 1)]), None);
        assert_eq!(at(9, &[(3, 1), (2, 0)]), None);
        assert_eq!(at(10, &[(3, 1), (2, 0)]), Some((3, 1)));
        // Home again for a moment, and on another node than before: both start anew.
        assert_eq!(at(11, &[(2, 1)]), None);
        assert_eq!(at(20, &[(3, 1), (2, 1)]), None);
        assert_eq!(at(21, &[(3, 1), (2, 1)]), Some((2, 1)));
        assert_eq!(at(31, &[(3, 1)]), Some((3, 1)));
    }

    #[test]
    fn without_a_slot_the_next_one_has_its_turn() {
        let mut history = ReplugHistory::default();
        let astray = [(1, 0), (2, 1)];
        assert_eq!(history.next_now(astray, &slots(&[]), 0, 5), None);
        assert_eq!(history.next_now(astray, &slots(&[(0, 0), (1, 1)]), 0, 6), Some((2, 1)));
        assert_eq!(history.next_now(astray, &slots(&[(0, 1), (1, 1)]), 0, 7), Some((1, 0)));
    }

    #[test]
    fn after_each_failure_the_pause_is_longer_until_one_is_done() {
        let (mut history, spare) = (ReplugHistory::default(), slots(&[(0, 1)]));
        let due = |history: &mut ReplugHistory, second: u64| {
            history.next_now([(1, 0)], &spare, 0, second * SECOND_NS).is_some()
        };
        assert!(due(&mut history, 0));
        history.ended(ReplugEnd::Undone, 0);
        assert!(!due(&mut history, 59) && due(&mut history, 60));
        history.ended(ReplugEnd::Undone, 60 * SECOND_NS);
        assert!(!due(&mut history, 179) && due(&mut history, 180));
        (0..10).for_each(|_| history.ended(ReplugEnd::Undone, 0));
        assert!(!due(&mut history, 3599) && due(&mut history, 3600));
        history.ended(ReplugEnd::Done, 0);
        assert!(due(&mut history, 1));
        history.ended(ReplugEnd::Undone, 0);
        assert!(due(&mut history, 60));
        history.ended(ReplugEnd::Both, 0);
        assert!(!due(&mut history, 1 << 32));
        history.ended(ReplugEnd::Done, 0);
        assert!(due(&mut history, 1));
    }

    proptest! {
        /// Whatever is chosen has been astray to that node, at every look, for as long as it takes, and has a slot.
        #[test]
        fn only_who_has_been_astray_long_enough_is_chosen(
            looks in prop::collection::vec(
                (0..4 * SECOND_NS, prop::collection::btree_map(0_u32..4, 0_u32..3, 0..4)), 1..40),
            spare in prop::collection::btree_map(0_u32..3, 0_u32..2, 0..3),
        ) {
            let (mut history, mut now_ns) = (ReplugHistory::default(), 0);
            let mut past: Vec<(u64, BTreeMap<ApicId, GuestNodeId>)> = Vec::new();
            for (pause_ns, astray) in looks {
                now_ns += pause_ns;
                past.push((now_ns, astray.clone()));
                let chosen = history.next_now(astray.clone(), &spare, AFTER_NS, now_ns);
                let since = |vcpu: &ApicId, node: &GuestNodeId| {
                    let same = past.iter().rev().take_while(|(_, astray)| astray.get(vcpu) == Some(node));
                    same.last().map_or(now_ns, |(ns, _)| *ns)
                };
                let ready = |vcpu: &ApicId, node: &GuestNodeId| {
                    now_ns - since(vcpu, node) >= AFTER_NS && spare.get(node).is_some_and(|slots| *slots > 0)
                };
                match chosen {
                    Some((vcpu, node)) => prop_assert!(astray.get(&vcpu) == Some(&node) && ready(&vcpu, &node)),
                    None => prop_assert!(!astray.iter().any(|(vcpu, node)| ready(vcpu, node))),
                }
            }
        }
    }
}
