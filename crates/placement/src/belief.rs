//! What a guest is known to have taken over, from its acknowledgements.

use std::collections::{BTreeMap, VecDeque};
use vnuma_topology::{ApicId, GuestNodeId};

/// Publications that can wait for an acknowledgement at the same time: a guest says which one
/// it took over by its counter modulo this number.
pub const WINDOW: usize = 8;

/// A publication that the guest has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Updated {
    /// Its generation.
    pub generation: u64,
    /// Oldest change of the host in it.
    pub changed_ns: u64,
    /// When it was published.
    pub told_ns: u64,
}

#[derive(Clone, Debug)]
struct Outstanding {
    updated: Updated,
    nodes: BTreeMap<ApicId, GuestNodeId>,
}

/// The nodes that the guest's kernel uses. An acknowledgement can be forged by the guest, so this is shown
/// and measured, and nothing is decided by it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Belief {
    /// Of each vCPU that is plugged; `None` where it cannot be known.
    nodes: BTreeMap<ApicId, Option<GuestNodeId>>,
    outstanding: VecDeque<Outstanding>,
}

impl Belief {
    pub(crate) fn node(&self, vcpu: ApicId) -> Option<GuestNodeId> {
        self.nodes.get(&vcpu).copied().flatten()
    }

    /// The guest boots with `vcpu` on `node`.
    pub(crate) fn boot(&mut self, vcpu: ApicId, node: GuestNodeId) {
        self.nodes.insert(vcpu, Some(node));
    }

    pub(crate) fn forget(&mut self, vcpu: ApicId) {
        self.nodes.remove(&vcpu);
    }

    /// A publication went out. The oldest of too many is given up: a later one contains it.
    pub(crate) fn told(&mut self, updated: Updated, nodes: BTreeMap<ApicId, GuestNodeId>) {
        if self.outstanding.len() == WINDOW {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(Outstanding { updated, nodes });
    }

    /// The guest acknowledged on `vector`. Its newest publication with that number, and every
    /// older one, is taken over.
    pub(crate) fn acknowledged(&mut self, vector: usize) -> Option<Updated> {
        let number = |generation: u64| (generation as u32 as usize) % WINDOW;
        let found = self.outstanding.iter().rposition(|o| number(o.updated.generation) == vector)?;
        let taken = self.outstanding.drain(..=found).next_back()?;
        for (vcpu, node) in taken.nodes {
            // vCPUs that were unplugged meanwhile stay forgotten.
            self.nodes.entry(vcpu).and_modify(|believed| *believed = Some(node));
        }
        Some(taken.updated)
    }

    /// Somebody else may have told the guest anything.
    pub(crate) fn unknown(&mut self) {
        self.outstanding.clear();
        self.nodes.values_mut().for_each(|believed| *believed = None);
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    pub(crate) fn stop_waiting(&mut self) {
        self.outstanding.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(belief: &mut Belief, counter: u64, node: GuestNodeId) {
        let generation = (77 << 32) | counter;
        belief
            .told(Updated { generation, changed_ns: counter, told_ns: counter }, BTreeMap::from([(1, node)]));
    }

    #[test]
    fn an_acknowledgement_takes_over_the_older_ones_too() {
        let mut belief = Belief::default();
        belief.boot(1, 0);
        told(&mut belief, 1, 5);
        told(&mut belief, 2, 6);
        told(&mut belief, 3, 7);
        assert_eq!(belief.acknowledged(2).map(|u| u.generation as u32), Some(2));
        assert_eq!((belief.node(1), belief.is_waiting()), (Some(6), true));
        assert_eq!(belief.acknowledged(1), None, "given up with its successor");
        assert_eq!(belief.acknowledged(3).map(|u| u.told_ns), Some(3));
        assert_eq!((belief.node(1), belief.is_waiting()), (Some(7), false));
    }

    #[test]
    fn a_forged_acknowledgement_is_ignored() {
        let mut belief = Belief::default();
        belief.boot(1, 0);
        told(&mut belief, 1, 5);
        assert_eq!(belief.acknowledged(4), None);
        assert_eq!(belief.acknowledged(99), None);
        assert_eq!(belief.node(1), Some(0));
    }

    #[test]
    fn the_wait_is_bounded() {
        let mut belief = Belief::default();
        belief.boot(1, 0);
        for counter in 1..=20 {
            told(&mut belief, counter, counter as u32);
        }
        assert_eq!(belief.outstanding.len(), WINDOW);
        assert_eq!(belief.acknowledged(20 % 8).map(|u| u.changed_ns), Some(20));
        assert_eq!(belief.node(1), Some(20));
    }

    #[test]
    fn an_unplugged_vcpu_does_not_come_back() {
        let mut belief = Belief::default();
        belief.boot(1, 0);
        told(&mut belief, 1, 5);
        belief.forget(1);
        assert!(belief.acknowledged(1).is_some());
        assert_eq!(belief.node(1), None);
    }
}
