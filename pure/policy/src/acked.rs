//! The topology that a guest's kernel is known to use, from its acknowledgements.

use std::collections::{BTreeMap, VecDeque};
use vnuma_model::GuestNodeId;

/// Publications that can be outstanding at the same time. The oldest of more is merged into the one after it.
const MAX_OUTSTANDING: usize = 8;

/// A publication that the guest has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// Its generation.
    pub generation: u64,
    /// Oldest change of the host that came to the guest with it, those of superseded publications included.
    pub changed_ns: u64,
    /// When it was published.
    pub published_ns: u64,
}

#[derive(Clone, Debug)]
struct Outstanding<K> {
    update: Update,
    /// Those whose node differs from what was published before.
    changes: BTreeMap<K, GuestNodeId>,
}

/// The nodes that the guest's kernel uses for vCPUs, or for devices: for what `K` names. A guest can forge an acknowledgement, so this is shown and measured, and
/// nothing is decided by it.
#[derive(Clone, Debug)]
pub(crate) struct AckedTopology<K> {
    /// The node of each one that is plugged; `None` where it cannot be known.
    nodes: BTreeMap<K, Option<GuestNodeId>>,
    /// What the guest uses once it has acknowledged everything.
    published: BTreeMap<K, GuestNodeId>,
    outstanding: VecDeque<Outstanding<K>>,
}

impl<K> Default for AckedTopology<K> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new(), published: BTreeMap::new(), outstanding: VecDeque::new() }
    }
}

impl<K: Copy + Ord> AckedTopology<K> {
    pub(crate) fn node(&self, one: K) -> Option<GuestNodeId> {
        self.nodes.get(&one).copied().flatten()
    }

    /// The guest boots with it on `node`.
    pub(crate) fn boot(&mut self, one: K, node: GuestNodeId) {
        self.nodes.insert(one, Some(node));
        self.published.remove(&one);
    }

    /// A new one is plugged, and the node that the guest uses for it is not known.
    pub(crate) fn expect(&mut self, one: K) {
        self.nodes.entry(one).or_default();
    }

    pub(crate) fn forget(&mut self, one: K) {
        self.nodes.remove(&one);
        self.published.remove(&one);
    }

    /// A publication was written.
    pub(crate) fn published(&mut self, update: Update, nodes: impl Iterator<Item = (K, GuestNodeId)>) {
        let published = &mut self.published;
        let changes = nodes.filter(|&(one, node)| published.insert(one, node) != Some(node)).collect();
        self.outstanding.push_back(Outstanding { update, changes });
        if self.outstanding.len() > MAX_OUTSTANDING
            && let Some(oldest) = self.outstanding.pop_front()
            && let Some(next) = self.outstanding.front_mut()
        {
            next.update.changed_ns = next.update.changed_ns.min(oldest.update.changed_ns);
            for (one, node) in oldest.changes {
                next.changes.entry(one).or_insert(node);
            }
        }
    }

    /// The guest has acknowledged a generation. If that is outstanding, it and everything published before it is taken
    /// over. Any other value, which the guest may write as it likes, changes nothing.
    pub(crate) fn acknowledged(&mut self, generation: u64) -> Option<Update> {
        let found = self.outstanding.iter().position(|o| o.update.generation == generation)?;
        let mut update = self.outstanding[found].update;
        for superseded in self.outstanding.drain(..=found) {
            update.changed_ns = update.changed_ns.min(superseded.update.changed_ns);
            for (one, node) in superseded.changes {
                // Those that were unplugged meanwhile stay forgotten.
                self.nodes.entry(one).and_modify(|acked| *acked = Some(node));
            }
        }
        Some(update)
    }

    /// Another process may have published anything: what the guest uses is not known.
    pub(crate) fn unknown(&mut self) {
        self.stop_waiting();
        self.nodes.values_mut().for_each(|acked| *acked = None);
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Nothing that was published before counts any more: the next publication contains everything.
    pub(crate) fn stop_waiting(&mut self) {
        self.outstanding.clear();
        self.published.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: u64 = 77 << 32;

    fn publish(acked: &mut AckedTopology<u32>, counter: u64, node: GuestNodeId) {
        let update = Update { generation: EPOCH | counter, changed_ns: counter, published_ns: counter };
        acked.published(update, [(1, node)].into_iter());
    }

    #[test]
    fn an_acknowledgement_takes_over_the_older_ones_with_their_wait() {
        let mut acked = AckedTopology::<u32>::default();
        acked.boot(1, 0);
        publish(&mut acked, 1, 5);
        publish(&mut acked, 2, 6);
        publish(&mut acked, 3, 7);
        let update = acked.acknowledged(EPOCH | 2).expect("outstanding");
        assert_eq!((update.generation, update.changed_ns, update.published_ns), (EPOCH | 2, 1, 2));
        assert_eq!((acked.node(1), acked.is_waiting()), (Some(6), true));
        assert_eq!(acked.acknowledged(EPOCH | 1), None, "superseded");
        assert_eq!(acked.acknowledged(EPOCH | 3).map(|update| update.changed_ns), Some(3));
        assert_eq!((acked.node(1), acked.is_waiting()), (Some(7), false));
    }

    #[test]
    fn a_late_or_forged_acknowledgement_is_credited_to_no_other_generation() {
        let mut acked = AckedTopology::<u32>::default();
        acked.boot(1, 0);
        for counter in 1..=9 {
            publish(&mut acked, counter, 5);
        }
        // Eight generations earlier: the same number modulo eight.
        assert_eq!(acked.acknowledged(EPOCH | 1), None);
        for forged in [0, 9, EPOCH, EPOCH | 10, u64::MAX, (78 << 32) | 9] {
            assert_eq!(acked.acknowledged(forged), None, "{forged:x}");
        }
        assert_eq!(acked.node(1), Some(0));
    }

    #[test]
    fn what_waits_is_bounded_and_loses_neither_node_nor_wait() {
        let mut acked = AckedTopology::<u32>::default();
        acked.boot(1, 0);
        acked.boot(2, 0);
        let update = |counter| Update { generation: counter, changed_ns: counter, published_ns: counter };
        acked.published(update(1), [(1, 0), (2, 3)].into_iter());
        for counter in 2..=20 {
            acked.published(update(counter), [(1, counter as u32), (2, 3)].into_iter());
        }
        assert_eq!(acked.outstanding.len(), MAX_OUTSTANDING);
        assert_eq!(acked.acknowledged(13).map(|update| update.changed_ns), Some(1));
        assert_eq!((acked.node(1), acked.node(2)), (Some(13), Some(3)));
    }

    #[test]
    fn an_unplugged_vcpu_does_not_come_back() {
        let mut acked = AckedTopology::<u32>::default();
        acked.boot(1, 0);
        publish(&mut acked, 1, 5);
        acked.forget(1);
        assert!(acked.acknowledged(EPOCH | 1).is_some());
        assert_eq!(acked.node(1), None);
    }

    #[test]
    fn only_changes_are_kept() {
        let mut acked = AckedTopology::<u32>::default();
        publish(&mut acked, 1, 5);
        publish(&mut acked, 2, 5);
        assert_eq!(acked.outstanding[1].changes, BTreeMap::new());
        acked.stop_waiting();
        publish(&mut acked, 3, 5);
        assert_eq!(acked.outstanding[0].changes, BTreeMap::from([(1, 5)]), "everything again");
    }
}
