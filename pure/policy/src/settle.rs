//! When a difference between what was published to a guest and where its vCPUs are is published.
//!
//! ```text
//!                differs by drift                 dwell is over
//!   settled ───────────────────▶ dwelling ────────────────────────▶ due
//!      ▲  ▲                        │    │   put there on purpose     ▲│ cap allows
//!      │  └── returned (counted) ──┘    └────────────────────────────┘│
//!      │                                 differs, on purpose ─────────┤
//!      └─────────────────────────── published ────────────────────────┘
//! ```
//!
//! A vCPU that was put on a node on purpose is published at once. A vCPU that a load balancer moved is published when it
//! has stayed for the dwell. The dwell is short for a vCPU that has not drifted for a long time, as most such moves last,
//! and longer for one that drifted recently, as it may be moved to and fro. A vCPU that moves on between
//! foreign nodes starts its dwell anew, but at most until [`PATIENCE`] dwells have passed since it left its published
//! node. A cap bounds the publications of a VM in any one second, as each costs the guest a rebuild of its scheduler
//! domains. What the cap defers goes out together.

use crate::{Batch, PublishReason, VmPlacement};
use std::collections::{BTreeMap, VecDeque};
use vnuma_model::{ApicId, GuestNodeId};

/// Dwells after which a vCPU that never rests is published all the same.
pub const PATIENCE: u64 = 4;

const SECOND_NS: u64 = 1_000_000_000;

/// How patient publishing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettlePolicy {
    /// Drift is published when it has lasted this long.
    pub dwell_ns: u64,
    /// The same for a vCPU that is calm. The shorter of both counts.
    pub calm_dwell_ns: u64,
    /// A vCPU is calm when its last drift ended so long ago.
    pub calm_ns: u64,
    /// Publications to one VM in any one second, at least 1.
    pub max_per_second: u32,
}

impl SettlePolicy {
    /// How long drift has to last, of a vCPU whose last drift ended `still_ns` before.
    fn dwell_after_ns(&self, still_ns: u64) -> u64 {
        if still_ns >= self.calm_ns { self.dwell_ns.min(self.calm_dwell_ns) } else { self.dwell_ns }
    }

    fn cap(&self) -> usize {
        self.max_per_second.max(1) as usize
    }
}

impl Default for SettlePolicy {
    fn default() -> Self {
        let (dwell_ns, calm_dwell_ns, calm_ns) = (250_000_000, 20_000_000, 10_000_000_000);
        Self { dwell_ns, calm_dwell_ns, calm_ns, max_per_second: 10 }
    }
}

/// What was not published, or not at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Suppressed {
    /// Differences that were gone, or had become other ones, before their dwell was over.
    pub dwell: u64,
    /// Publications that had to wait for the cap.
    pub cap: u64,
}

/// A difference that is not published yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    target: GuestNodeId,
    /// When it became true.
    changed_ns: u64,
    /// Since when the guest's view has been wrong, whatever was true in between.
    diverged_ns: u64,
    /// How long before its last drift had ended, 0 if it moved on since.
    still_ns: u64,
    deliberate: bool,
}

impl Pending {
    fn due_ns(&self, policy: &SettlePolicy) -> u64 {
        if self.deliberate {
            return self.changed_ns;
        }
        let rested = self.changed_ns.saturating_add(policy.dwell_after_ns(self.still_ns));
        rested.min(self.diverged_ns.saturating_add(policy.dwell_ns.saturating_mul(PATIENCE)))
    }
}

/// The state machine above, for the vCPUs of one VM.
#[derive(Clone, Debug, Default)]
pub struct Settler {
    /// Since when the VM has the channel that the rest is about.
    channel_since_ns: Option<u64>,
    pending: BTreeMap<ApicId, Pending>,
    /// When the last drift of a vCPU ended, by its return or by a publication.
    drift_ended_ns: BTreeMap<ApicId, u64>,
    /// Times of the last publications, oldest first, as many as the cap needs.
    published_ns: VecDeque<u64>,
    deferred: bool,
    suppressed: Suppressed,
    /// Changes of the VM, and publications to it, that the above takes into account.
    seen: (u64, u64),
}

impl Settler {
    /// What is to be published next, why, and when. If that is now, it counts as published.
    pub fn next(
        &mut self,
        policy: &SettlePolicy,
        vm: &VmPlacement,
        now_ns: u64,
    ) -> Option<(u64, Batch, PublishReason)> {
        self.see(vm);
        // The first publication waits until all vCPUs were looked at, but no longer than drift has to last: a VM whose channel is taken
        // over may have been found just before.
        let look_ns = self.channel_since_ns.filter(|_| vm.waits_for_first_look());
        let not_before_ns = look_ns.map_or(0, |look_ns| look_ns.saturating_add(policy.dwell_ns));
        self.due(policy, vm.news, not_before_ns, now_ns)
    }

    fn due(
        &mut self,
        policy: &SettlePolicy,
        news: Option<(u64, PublishReason)>,
        not_before_ns: u64,
        now_ns: u64,
    ) -> Option<(u64, Batch, PublishReason)> {
        let vcpus = self.pending.values().map(|pending| pending.due_ns(policy));
        let ready_ns = vcpus.chain(news.map(|(since_ns, _)| since_ns)).min()?.max(not_before_ns);
        let due_ns = ready_ns.max(self.allowed_from_ns(policy));
        let (batch, of_vcpu) = self.due_at(policy, due_ns.max(now_ns), news);
        if due_ns <= now_ns {
            self.published(policy, &batch, now_ns);
        } else if ready_ns <= now_ns && !std::mem::replace(&mut self.deferred, true) {
            self.suppressed.cap += 1;
        }
        Some((due_ns, batch, news.map(|(_, reason)| reason).or(of_vcpu)?))
    }

    /// Compares what is true with what was published.
    pub fn see(&mut self, vm: &VmPlacement) {
        // To compare all vCPUs at each event was 2 % of a move.
        if std::mem::replace(&mut self.seen, vm.changes) == vm.changes {
            return;
        }
        let since_ns = vm.channel_since_ns;
        if self.channel_since_ns != since_ns {
            // No earlier publication counts.
            self.pending.clear();
            self.published_ns.clear();
            (self.channel_since_ns, self.deferred) = (since_ns, false);
        }
        if since_ns.is_none() {
            return;
        }
        self.pending.retain(|vcpu, _| vm.has(*vcpu));
        self.drift_ended_ns.retain(|vcpu, _| vm.has(*vcpu));
        for (vcpu, told, now) in vm.told() {
            match now {
                Some((target, seen)) => {
                    self.observe(vcpu, told, target, seen.deliberate, seen.time_ns);
                }
                None => drop(self.pending.remove(&vcpu)),
            }
        }
    }

    /// Since `time_ns`, `vcpu` belongs to `target`, and `published` is what the guest was given.
    fn observe(
        &mut self,
        vcpu: ApicId,
        published: GuestNodeId,
        target: GuestNodeId,
        deliberate: bool,
        time_ns: u64,
    ) {
        let before = self.pending.get(&vcpu).copied();
        if target == published {
            if let Some(pending) = self.pending.remove(&vcpu) {
                self.suppressed.dwell += 1;
                self.note_end(vcpu, &pending, time_ns);
            }
            return;
        }
        let pending = match before {
            Some(same) if same.target == target => {
                Pending { deliberate: same.deliberate || deliberate, ..same }
            }
            Some(other) => {
                self.suppressed.dwell += 1;
                let diverged_ns = other.diverged_ns;
                Pending { target, changed_ns: time_ns, diverged_ns, still_ns: 0, deliberate }
            }
            None => {
                let ended_ns = self.drift_ended_ns.get(&vcpu);
                let still_ns = ended_ns.map_or(u64::MAX, |ended_ns| time_ns.saturating_sub(*ended_ns));
                Pending { target, changed_ns: time_ns, diverged_ns: time_ns, still_ns, deliberate }
            }
        };
        self.pending.insert(vcpu, pending);
    }

    fn note_end(&mut self, vcpu: ApicId, pending: &Pending, time_ns: u64) {
        if !pending.deliberate {
            self.drift_ended_ns.insert(vcpu, time_ns);
        }
    }

    /// What is due at `at_ns`, and why if that is because of a vCPU.
    fn due_at(
        &self,
        policy: &SettlePolicy,
        at_ns: u64,
        news: Option<(u64, PublishReason)>,
    ) -> (Batch, Option<PublishReason>) {
        let due = || self.pending.iter().filter(|(_, pending)| pending.due_ns(policy) <= at_ns);
        let changed_ns =
            due().map(|(_, pending)| pending.changed_ns).chain(news.map(|(since_ns, _)| since_ns));
        let batch = Batch {
            vcpus: due().map(|(vcpu, pending)| (*vcpu, pending.target)).collect(),
            changed_ns: changed_ns.min().unwrap_or(at_ns),
        };
        let reason = due().next().map(|(&vcpu, pending)| match pending.deliberate {
            true => PublishReason::Moved { vcpu },
            false => PublishReason::Drifted { vcpu },
        });
        (batch, reason)
    }

    fn published(&mut self, policy: &SettlePolicy, batch: &Batch, now_ns: u64) {
        for (vcpu, _) in &batch.vcpus {
            if let Some(pending) = self.pending.remove(vcpu) {
                self.note_end(*vcpu, &pending, now_ns);
            }
        }
        // Until the VM counts this publication too, the two differ, and the next look compares everything.
        self.seen.1 += 1;
        self.deferred = false;
        while self.published_ns.len() >= policy.cap() {
            self.published_ns.pop_front();
        }
        self.published_ns.push_back(now_ns);
    }

    /// Counts of what was suppressed since the beginning.
    pub fn suppressed(&self) -> Suppressed {
        self.suppressed
    }

    fn allowed_from_ns(&self, policy: &SettlePolicy) -> u64 {
        let full = self.published_ns.len() >= policy.cap();
        let oldest = self.published_ns.get(self.published_ns.len().saturating_sub(policy.cap()));
        oldest.filter(|_| full).map_or(0, |oldest| oldest.saturating_add(SECOND_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const POLICY: SettlePolicy =
        SettlePolicy { dwell_ns: 250 * MS, calm_dwell_ns: 20 * MS, calm_ns: 10_000 * MS, max_per_second: 2 };

    /// vCPUs and nodes that are published at `ms`.
    fn publish(settler: &mut Settler, ms: u64) -> Vec<(u32, u32)> {
        let due = settler.due(&POLICY, None, 0, ms * MS).filter(|(due_ns, ..)| *due_ns <= ms * MS);
        due.map(|(_, batch, _)| batch.vcpus).unwrap_or_default()
    }

    /// When something is published next, asked at `ms`, and why.
    fn next(settler: &Settler, ms: u64) -> Option<(u64, PublishReason)> {
        settler.clone().due(&POLICY, None, 0, ms * MS).map(|(due_ns, _, reason)| (due_ns / MS, reason))
    }

    fn next_ms(settler: &Settler) -> Option<u64> {
        next(settler, 0).map(|(ms, _)| ms)
    }

    /// vCPUs 1 and 2 have drifted and returned at 900 ms, which counts nothing.
    fn restless() -> Settler {
        let mut settler = Settler::default();
        for vcpu in 1..=2 {
            settler.observe(vcpu, 0, 1, false, 899 * MS);
            settler.observe(vcpu, 0, 0, false, 900 * MS);
        }
        Settler { suppressed: Suppressed::default(), ..settler }
    }

    #[test]
    fn drift_of_a_calm_vcpu_is_published_after_the_short_dwell() {
        let mut settler = Settler::default();
        settler.observe(1, 0, 1, false, 1000 * MS);
        assert_eq!(next_ms(&settler), Some(1020));
        assert_eq!(publish(&mut settler, 1019), []);
        assert_eq!(publish(&mut settler, 1020), [(1, 1)]);
        // The calm counts from the end of the last drift.
        settler.observe(1, 1, 0, false, 11_019 * MS);
        assert_eq!(next_ms(&settler), Some(11_269));
        settler.observe(1, 1, 1, false, 11_100 * MS);
        settler.observe(1, 1, 0, false, 21_100 * MS);
        assert_eq!(next_ms(&settler), Some(21_120));
    }

    #[test]
    fn a_move_on_purpose_is_no_drift_and_leaves_a_vcpu_calm() {
        let mut settler = Settler::default();
        settler.observe(1, 0, 1, true, 1000 * MS);
        assert_eq!(publish(&mut settler, 1000), [(1, 1)]);
        settler.observe(1, 1, 0, false, 1500 * MS);
        assert_eq!(next_ms(&settler), Some(1520));
    }

    #[test]
    fn the_short_dwell_ends_when_a_vcpu_moves_on() {
        let mut settler = Settler::default();
        settler.observe(1, 0, 1, false, 1000 * MS);
        settler.observe(1, 0, 2, false, 1010 * MS);
        assert_eq!(next_ms(&settler), Some(1260));
    }

    #[test]
    fn drift_waits_for_its_dwell() {
        let mut settler = restless();
        settler.observe(1, 0, 1, false, 1000 * MS);
        assert_eq!(next_ms(&settler), Some(1250));
        assert_eq!(publish(&mut settler, 1249), []);
        assert_eq!(next(&settler, 1250), Some((1250, PublishReason::Drifted { vcpu: 1 })));
        assert_eq!(publish(&mut settler, 1250), [(1, 1)]);
        assert_eq!(next(&settler, 9000), None);
        assert_eq!(next_ms(&settler), None);
    }

    #[test]
    fn a_move_on_purpose_does_not_wait_and_hurries_a_drift() {
        let mut settler = restless();
        settler.observe(1, 0, 1, true, 1000 * MS);
        assert_eq!(next(&settler, 1000), Some((1000, PublishReason::Moved { vcpu: 1 })));
        assert_eq!(publish(&mut settler, 1000), [(1, 1)]);
        settler.observe(2, 0, 1, false, 1000 * MS);
        settler.observe(2, 0, 1, true, 1001 * MS);
        assert_eq!(publish(&mut settler, 1001), [(2, 1)]);
    }

    #[test]
    fn a_return_within_the_dwell_is_counted_and_not_published() {
        let mut settler = restless();
        settler.observe(1, 0, 1, false, 1000 * MS);
        settler.observe(1, 0, 0, false, 1100 * MS);
        assert_eq!(settler.suppressed(), Suppressed { dwell: 1, cap: 0 });
        assert_eq!(next(&settler, 5000), None);
        settler.observe(1, 0, 0, false, 1200 * MS);
        assert_eq!(settler.suppressed().dwell, 1, "an unchanged state suppresses nothing");
    }

    #[test]
    fn a_vcpu_that_never_rests_is_published_after_some_dwells() {
        let mut settler = restless();
        for step in 0..10 {
            let ms = 1000 + 200 * u64::from(step);
            settler.observe(1, 0, 1 + step % 2, false, ms * MS);
            let published = !publish(&mut settler, ms).is_empty();
            assert_eq!(published, step == 5, "step {step}");
            if published {
                return;
            }
        }
    }

    #[test]
    fn the_cap_defers_counts_once_and_batches() {
        let mut settler = Settler::default();
        for vcpu in 0..2 {
            settler.observe(vcpu, 0, 1, true, 1000 * MS);
            assert_eq!(publish(&mut settler, 1000).len(), 1);
        }
        settler.observe(2, 0, 1, true, 1001 * MS);
        settler.observe(3, 0, 1, true, 1002 * MS);
        assert_eq!(next(&settler, 1003), Some((2000, PublishReason::Moved { vcpu: 2 })));
        assert!(publish(&mut settler, 1003).is_empty() && publish(&mut settler, 1999).is_empty());
        assert_eq!(settler.suppressed(), Suppressed { dwell: 0, cap: 1 });
        assert_eq!(next_ms(&settler), Some(2000));
        let (_, batch, _) = settler.due(&POLICY, None, 0, 2000 * MS).expect("what was deferred");
        assert_eq!((batch.changed_ns, batch.vcpus), (1001 * MS, vec![(2, 1), (3, 1)]));
    }

    #[test]
    fn what_is_not_yet_due_is_not_swept_along() {
        let mut settler = restless();
        settler.observe(1, 0, 1, false, 1000 * MS);
        settler.observe(2, 0, 1, true, 1001 * MS);
        assert_eq!(publish(&mut settler, 1001), [(2, 1)]);
        assert_eq!(next_ms(&settler), Some(1250));
    }
}
