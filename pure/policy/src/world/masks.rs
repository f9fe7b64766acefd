//! Masks: which CPUs a vCPU may run on, who says so, and what a policy wants of it.
//!
//! ```text
//!                 begin                      done
//!   operator's ──────────▶ being set ──────────────▶ policy's
//!       ▲                      │                         │
//!       └── somebody else ◀────┴── somebody else ◀───────┤ begin, done: given back
//! ```
//!
//! A policy's mask is a subset of the operator's. The operator's is remembered while a policy's is set, and is set again when
//! the policy has no more to say. A mask that somebody else sets meanwhile is the operator's from then on.
//!
//! [`Mechanism`] says how a policy's mask is set. As an affinity it takes the place of the operator's. scx_vnuma is told of it
//! instead, and the affinity stays the operator's.

use super::Task;
use crate::scheduling::{Machine, Place, Why};
use vnuma_model::{ApicId, CpuSet};

/// A part of a policy's mask has to be seen for so long before it counts as set by somebody else.
const NARROWED_NS: u64 = 2_000_000_000;

/// How a policy's mask is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mechanism {
    /// The thread's affinity.
    #[default]
    Affinity,
    /// scx_vnuma, the sched_ext scheduler, is told of it.
    Scheduler,
}

/// CPUs that a policy has confined a vCPU to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyMask {
    /// The CPUs.
    pub cpus: CpuSet,
    /// They are those of a last-level cache, not of a node.
    pub of_cache: bool,
    /// How it is set.
    pub by: Mechanism,
}

impl PolicyMask {
    /// The place that the CPUs belong to on this machine. `None`: the host has changed, and has none of them.
    pub fn place(&self, machine: &Machine) -> Option<Place> {
        let domain = self.cpus.iter().find_map(|cpu| machine.domain_of(cpu))?;
        Some(if self.of_cache { Place::Cache(domain) } else { Place::Node(machine.domains[domain].node) })
    }
}

/// A vCPU is to be confined, or to have its operator's mask again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Confine {
    /// The vCPU.
    pub vcpu: ApicId,
    /// Where. `None`: it gets its operator's mask.
    pub to: Option<Place>,
    /// Why.
    pub why: Why,
}

/// The last change of a mask that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct LastStep {
    /// When.
    pub time_ns: u64,
    /// What it was confined to. `None`: it got its operator's mask.
    pub mask: Option<CpuSet>,
    /// Why.
    pub why: Why,
    /// The name of the VM that is the reason.
    pub caused_by: Option<String>,
}

/// A change of a mask that is under way.
#[derive(Clone, Debug, PartialEq)]
pub struct Confining {
    /// What it is to be confined to. `None`: its operator's mask.
    pub mask: Option<PolicyMask>,
    /// Why.
    pub why: Why,
}

/// A vCPU's mask.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VcpuMask {
    /// CPUs that its operator lets it run on. `None`: not seen yet.
    pub operator: Option<CpuSet>,
    /// What a policy has set. `None`: it has its operator's mask.
    pub policy: Option<PolicyMask>,
    /// Steps of policies.
    pub step: Task<Confine, Confining, LastStep>,
    /// Its VM has another policy: it is to have its operator's mask again.
    pub released: bool,
    /// Before this time the mask was another one: what was read earlier says nothing.
    pub settled_ns: u64,
    /// The last reading showed the CPUs of its place as its affinity, though scx_vnuma had set the place.
    pub own_seen: bool,
    /// Since when readings show a part of what a policy has set.
    pub narrowed_ns: Option<u64>,
    /// Steps that were made.
    pub moves: u64,
}

impl VcpuMask {
    /// The affinity that it is believed to have.
    pub fn expected(&self) -> Option<&CpuSet> {
        let affinity = self.policy.as_ref().filter(|mask| mask.by == Mechanism::Affinity);
        affinity.map(|mask| &mask.cpus).or(self.operator.as_ref())
    }

    /// Does a policy confine it, or is its mask being changed?
    pub fn is_in_use(&self) -> bool {
        self.policy.is_some() || self.step.is_under_way()
    }

    /// Has it the mask that is wanted?
    pub fn is_settled(&self) -> bool {
        !self.step.is_under_way() && self.step.wanted.is_none() && !self.released
    }

    /// Somebody else has set this mask, which is the operator's from now on.
    pub fn set_by_operator(&mut self, mask: Option<CpuSet>, now_ns: u64) {
        self.released = false;
        (self.operator, self.policy, self.step.wanted, self.narrowed_ns) = (mask, None, None, None);
        self.settled_ns = now_ns;
    }

    /// Takes in the mask that was read at `read_ns`. True if somebody else has set it. `online`: all CPUs of the host.
    pub fn seen(&mut self, allowed: &CpuSet, online: &CpuSet, read_ns: u64) -> bool {
        if self.step.is_under_way() || read_ns < self.settled_ns {
            return false;
        }
        let Some(policy) = self.policy.as_ref().filter(|mask| mask.by == Mechanism::Affinity) else {
            // A copy of a large mask costs more than a look.
            if self.operator.as_ref() == Some(allowed) {
                self.own_seen = false;
                return false;
            }
            if let Some(policy) = &self.policy {
                // When scx_vnuma ends, places become affinities, and a reading may come before that is known here.
                let own = policy.cpus.agrees(allowed, online);
                if own && !std::mem::replace(&mut self.own_seen, true) {
                    return false;
                }
                self.own_seen = false;
                self.set_by_operator(Some(allowed.clone()), read_ns);
                return true;
            }
            self.operator = Some(allowed.clone());
            return false;
        };
        // The kernel lets a thread run anywhere when none of its CPUs is left. Nobody has asked for that.
        let lost = !policy.cpus.intersects(online);
        if lost || policy.cpus.agrees(allowed, online) {
            self.narrowed_ns = None;
            return false;
        }
        // CPUs that go offline are missing before the host is known to have changed.
        if allowed.is_subset(&policy.cpus) && !allowed.is_empty() {
            let since_ns = *self.narrowed_ns.get_or_insert(read_ns);
            if read_ns.saturating_sub(since_ns) < NARROWED_NS {
                return false;
            }
        }
        self.set_by_operator(Some(allowed.clone()), read_ns);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::TaskId;

    fn set(list: &str) -> CpuSet {
        list.parse().expect("a list")
    }

    /// Who is believed to have set the mask, and what the operator's is then.
    fn seen(allowed: &str, online: &str, read_ns: u64) -> (bool, bool, String) {
        let policy = PolicyMask { cpus: set("4-7"), of_cache: true, by: Mechanism::Affinity };
        let operator = Some(set("0-15"));
        let mut mask = VcpuMask { operator, policy: Some(policy), settled_ns: 5, ..VcpuMask::default() };
        // What is a part of the policy's own has to be seen for a while.
        let is_part = set(allowed).is_subset(&set("4-7"));
        let changed = mask.seen(&set(allowed), &set(online), read_ns)
            || is_part && mask.seen(&set(allowed), &set(online), read_ns + NARROWED_NS);
        (changed, mask.policy.is_some(), mask.operator.expect("known").to_string())
    }

    #[test]
    fn only_a_mask_that_differs_on_cpus_that_are_online_is_somebody_elses() {
        assert_eq!(seen("4-7", "0-15", 6), (false, true, "0-15".into()));
        assert_eq!(seen("4-5", "0-15", 6), (true, false, "4-5".into()));
        assert_eq!(seen("4-5", "0-5,8-15", 6), (false, true, "0-15".into()), "the others are offline");
        assert_eq!(
            seen("0-15", "0-3,8-15", 6),
            (false, true, "0-15".into()),
            "none is left: the kernel's doing"
        );
        assert_eq!(seen("0-15", "0-15", 4), (false, true, "0-15".into()), "read before it was set");
    }

    #[test]
    fn cpus_that_go_offline_before_that_is_known_are_nobodys_doing() {
        let policy = PolicyMask { cpus: set("4-7"), of_cache: true, by: Mechanism::Affinity };
        let operator = Some(set("0-15"));
        let mut mask = VcpuMask { operator, policy: Some(policy), ..VcpuMask::default() };
        let (all, left, second) = (set("0-15"), set("0-6,8-15"), NARROWED_NS / 2);
        assert!(!mask.seen(&set("4-6"), &all, 1) && !mask.seen(&set("4-6"), &all, 1 + second));
        assert!(!mask.seen(&set("4-6"), &left, 1 + 2 * second), "now it is known");
        // And once more: that was another time.
        assert!(!mask.seen(&set("4-5"), &left, 1 + 3 * second) && mask.policy.is_some());
        assert!(mask.seen(&set("4-5"), &left, 1 + 5 * second), "the operator has set that");
        assert_eq!((mask.policy, mask.operator), (None, Some(set("4-5"))));
    }

    #[test]
    fn what_the_scheduler_is_told_leaves_the_affinity_to_the_operator() {
        let policy = PolicyMask { cpus: set("4-7"), of_cache: true, by: Mechanism::Scheduler };
        let operator = Some(set("0-15"));
        let mut mask = VcpuMask { operator, policy: Some(policy), settled_ns: 5, ..VcpuMask::default() };
        assert_eq!(mask.expected(), Some(&set("0-15")));
        assert!(!mask.seen(&set("0-15"), &set("0-15"), 6) && mask.policy.is_some(), "nobody has changed it");
        assert!(!mask.seen(&set("0-3"), &set("0-15"), 4) && mask.policy.is_some(), "read before");
        let place = set("4-7");
        assert!(!mask.seen(&place, &set("0-15"), 6) && mask.policy.is_some(), "scx_vnuma may have ended");
        assert!(mask.clone().seen(&place, &set("0-15"), 7), "it has not: that is the operator's");
        assert!(
            !mask.seen(&set("0-15"), &set("0-15"), 6) && !mask.seen(&place, &set("0-15"), 6),
            "not in a row"
        );
        assert!(mask.seen(&set("0-5"), &set("0-15"), 7), "the operator has");
        assert_eq!((mask.policy, mask.operator), (None, Some(set("0-5"))));
    }

    #[test]
    fn without_a_policys_mask_what_is_seen_is_the_operators() {
        let mut mask = VcpuMask::default();
        assert!(!mask.seen(&set("0-3"), &set("0-15"), 1) && !mask.seen(&set("0-1"), &set("0-15"), 2));
        assert_eq!(mask.expected(), Some(&set("0-1")));
        let why = Why {
            policy: crate::scheduling::Policy::Vprobe,
            cause: crate::scheduling::Cause::Kept,
            pressure: None,
            before: Default::default(),
            expected: Default::default(),
            caused_by: None,
        };
        mask.step.begin(TaskId { vm: 1, number: 1 }, Confining { mask: None, why });
        assert!(!mask.seen(&set("2"), &set("0-15"), 3), "one is being set");
        assert_eq!(mask.expected(), Some(&set("0-1")));
    }
}
