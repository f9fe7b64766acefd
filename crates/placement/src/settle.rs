//! When a difference between what a guest was told and what is true is told.
//!
//! ```text
//!                differs, drift                   dwell is over
//!   settled ───────────────────▶ dwelling ────────────────────────▶ due
//!      ▲  ▲                        │    │    pinned                  ▲│ cap allows
//!      │  └── returned (counted) ──┘    └────────────────────────────┘│
//!      │                                        differs, pinned ──────┤
//!      └──────────────────────────── told ────────────────────────────┘
//! ```
//!
//! A vCPU whose affinity confines it to one node was put there on purpose: it is told at once.
//! One that a balancer carried elsewhere is told when it has stayed for the dwell. One that
//! wanders on between foreign nodes starts its dwell anew, but not for ever: after
//! [`PATIENCE`] dwells away from what was told it is told wherever it is.
//! A cap bounds the tellings of a VM in any one second, as each costs the guest a rebuild of
//! its scheduler domains; what the cap defers goes out together.

use crate::Placed;
use std::collections::{BTreeMap, VecDeque};
use vnuma_topology::ApicId;

/// Dwells after which a vCPU that never rests is told all the same.
pub const PATIENCE: u64 = 4;

const SECOND_NS: u64 = 1_000_000_000;

/// How patient the telling is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettlePolicy {
    /// Drift is told when it has lasted this long.
    pub dwell_ns: u64,
    /// Tellings of one VM in any one second; at least 1.
    pub max_per_second: u32,
}

impl Default for SettlePolicy {
    fn default() -> Self {
        Self { dwell_ns: 250_000_000, max_per_second: 10 }
    }
}

/// What was not told, or not at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Suppressed {
    /// Differences that were gone, or had become other ones, before their dwell was over.
    pub dwell: u64,
    /// Tellings that had to wait for the cap.
    pub cap: u64,
}

/// A difference that is not told yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) wanted: Placed,
    /// When it became true.
    pub(crate) changed_ns: u64,
    /// Since when the guest's view has been wrong, whatever was true in between.
    diverged_ns: u64,
    at_once: bool,
}

impl Pending {
    fn due_ns(&self, dwell_ns: u64) -> u64 {
        if self.at_once {
            return self.changed_ns;
        }
        let rested = self.changed_ns.saturating_add(dwell_ns);
        rested.min(self.diverged_ns.saturating_add(dwell_ns.saturating_mul(PATIENCE)))
    }
}

/// The state machine above, for the vCPUs of one VM.
#[derive(Clone, Debug)]
pub struct Settler {
    policy: SettlePolicy,
    pending: BTreeMap<ApicId, Pending>,
    /// Something besides vCPUs has to be told, since this time.
    urgent_since: Option<u64>,
    /// Times of the last `max_per_second` tellings, oldest first.
    tellings: VecDeque<u64>,
    deferred: bool,
    suppressed: Suppressed,
}

impl Settler {
    /// Nothing is pending and nothing was told.
    pub fn new(policy: SettlePolicy) -> Self {
        let policy = SettlePolicy { max_per_second: policy.max_per_second.max(1), ..policy };
        Self {
            policy,
            pending: BTreeMap::new(),
            urgent_since: None,
            tellings: VecDeque::new(),
            deferred: false,
            suppressed: Suppressed::default(),
        }
    }

    /// Since `time_ns`, `vcpu` is at `wanted`, and the guest was told `told`.
    pub fn observe(&mut self, vcpu: ApicId, told: Placed, wanted: Placed, pinned: bool, time_ns: u64) {
        let before = self.pending.get(&vcpu).copied();
        if wanted == told {
            if self.pending.remove(&vcpu).is_some() {
                self.suppressed.dwell += 1;
            }
            return;
        }
        let pending = match before {
            Some(same) if same.wanted == wanted => Pending { at_once: same.at_once || pinned, ..same },
            Some(other) => {
                self.suppressed.dwell += 1;
                Pending { wanted, changed_ns: time_ns, diverged_ns: other.diverged_ns, at_once: pinned }
            }
            None => Pending { wanted, changed_ns: time_ns, diverged_ns: time_ns, at_once: pinned },
        };
        self.pending.insert(vcpu, pending);
    }

    /// Something besides the vCPUs' nodes (distances, the vCPUs that there are) has to be told.
    pub fn tell_at_once(&mut self, time_ns: u64) {
        self.urgent_since.get_or_insert(time_ns);
    }

    /// `vcpu` is gone.
    pub fn forget(&mut self, vcpu: ApicId) {
        self.pending.remove(&vcpu);
    }

    /// Everything is told now, or nothing can be told any more.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.urgent_since = None;
        self.deferred = false;
    }

    /// Counts a telling at `now_ns` towards the cap.
    pub(crate) fn count_telling(&mut self, now_ns: u64) {
        if self.tellings.len() >= self.policy.max_per_second as usize {
            self.tellings.pop_front();
        }
        self.tellings.push_back(now_ns);
    }

    /// What has to be told now. It counts as told: the next call does not return it again.
    /// `None` when nothing is due or the cap is reached.
    pub(crate) fn take_due(&mut self, now_ns: u64) -> Option<Due> {
        let dwell_ns = self.policy.dwell_ns;
        let due: BTreeMap<_, _> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.due_ns(dwell_ns) <= now_ns)
            .map(|(vcpu, pending)| (*vcpu, *pending))
            .collect();
        if due.is_empty() && self.urgent_since.is_none() {
            return None;
        }
        if self.allowed_from_ns() > now_ns {
            if !std::mem::replace(&mut self.deferred, true) {
                self.suppressed.cap += 1;
            }
            return None;
        }
        self.deferred = false;
        self.count_telling(now_ns);
        self.pending.retain(|vcpu, _| !due.contains_key(vcpu));
        let urgent_since = self.urgent_since.take();
        let changed_ns = due.values().map(|pending| pending.changed_ns).chain(urgent_since).min();
        Some(Due { vcpus: due, changed_ns: changed_ns.unwrap_or(now_ns) })
    }

    /// When [`VmPlacement::take_due`](crate::VmPlacement::take_due) has something to say, if nothing else happens.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let vcpus = self.pending.values().map(|pending| pending.due_ns(self.policy.dwell_ns));
        let earliest = vcpus.chain(self.urgent_since).min()?;
        Some(earliest.max(self.allowed_from_ns()))
    }

    /// What was suppressed since the beginning.
    pub fn suppressed(&self) -> Suppressed {
        self.suppressed
    }

    fn allowed_from_ns(&self) -> u64 {
        let full = self.tellings.len() >= self.policy.max_per_second as usize;
        self.tellings.front().filter(|_| full).map_or(0, |oldest| oldest.saturating_add(SECOND_NS))
    }
}

/// One batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) vcpus: BTreeMap<ApicId, Pending>,
    /// Oldest change in it.
    pub(crate) changed_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn at(node: u32) -> Placed {
        Placed { node, approximate: false }
    }

    fn settler() -> Settler {
        Settler::new(SettlePolicy { dwell_ns: 250 * MS, max_per_second: 2 })
    }

    fn nodes(due: Option<Due>) -> Vec<(u32, u32)> {
        due.map(|due| due.vcpus.into_iter().map(|(id, p)| (id, p.wanted.node)).collect()).unwrap_or_default()
    }

    #[test]
    fn drift_waits_for_its_dwell() {
        let mut settler = settler();
        settler.observe(1, at(0), at(1), false, 1000 * MS);
        assert_eq!(settler.next_deadline_ns(), Some(1250 * MS));
        assert_eq!(settler.take_due(1249 * MS), None);
        assert_eq!(nodes(settler.take_due(1250 * MS)), [(1, 1)]);
        assert_eq!((settler.take_due(9000 * MS), settler.next_deadline_ns()), (None, None));
    }

    #[test]
    fn pinning_does_not_wait_and_hurries_a_drift() {
        let mut settler = settler();
        settler.observe(1, at(0), at(1), true, 1000 * MS);
        assert_eq!(nodes(settler.take_due(1000 * MS)), [(1, 1)]);
        settler.observe(2, at(0), at(1), false, 1000 * MS);
        settler.observe(2, at(0), at(1), true, 1001 * MS);
        assert_eq!(nodes(settler.take_due(1001 * MS)), [(2, 1)]);
    }

    #[test]
    fn a_return_within_the_dwell_is_counted_and_not_told() {
        let mut settler = settler();
        settler.observe(1, at(0), at(1), false, 1000 * MS);
        settler.observe(1, at(0), at(0), false, 1100 * MS);
        assert_eq!(settler.suppressed(), Suppressed { dwell: 1, cap: 0 });
        assert_eq!(settler.take_due(5000 * MS), None);
        settler.observe(1, at(0), at(0), false, 1200 * MS);
        assert_eq!(settler.suppressed().dwell, 1, "an unchanged state suppresses nothing");
    }

    #[test]
    fn a_vcpu_that_never_rests_is_told_after_some_dwells() {
        let mut settler = settler();
        for step in 0..10 {
            settler.observe(1, at(0), at(1 + step % 2), false, (1000 + 200 * u64::from(step)) * MS);
            let now = (1000 + 200 * u64::from(step)) * MS;
            let told = settler.take_due(now).is_some();
            assert_eq!(told, step == 5, "step {step}");
            if told {
                return;
            }
        }
    }

    #[test]
    fn the_cap_defers_counts_once_and_batches() {
        let mut settler = settler();
        for vcpu in 0..2 {
            settler.observe(vcpu, at(0), at(1), true, 1000 * MS);
            assert!(settler.take_due(1000 * MS).is_some());
        }
        settler.observe(2, at(0), at(1), true, 1001 * MS);
        settler.observe(3, at(0), at(1), true, 1002 * MS);
        assert_eq!(settler.take_due(1003 * MS), None);
        assert_eq!(settler.take_due(1999 * MS), None);
        assert_eq!(settler.suppressed(), Suppressed { dwell: 0, cap: 1 });
        assert_eq!(settler.next_deadline_ns(), Some(2000 * MS));
        let due = settler.take_due(2000 * MS).expect("allowed again");
        assert_eq!(due.changed_ns, 1001 * MS);
        assert_eq!(nodes(Some(due)), [(2, 1), (3, 1)]);
    }

    #[test]
    fn what_is_not_yet_due_is_not_swept_along() {
        let mut settler = settler();
        settler.observe(1, at(0), at(1), false, 1000 * MS);
        settler.observe(2, at(0), at(1), true, 1001 * MS);
        assert_eq!(nodes(settler.take_due(1001 * MS)), [(2, 1)]);
        assert_eq!(settler.next_deadline_ns(), Some(1250 * MS));
    }
}
