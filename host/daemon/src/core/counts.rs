//! What was done to a VM, by outcome: sums for the metrics, dropped with the VM.

use std::collections::BTreeMap;
use vnuma_policy::{rehome::RehomePhase, sizing::ResizePhase};

/// Sums of a VM. Each outcome is there from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmCounts {
    /// Times that a vCPU came to another node of the host.
    pub node_changes: u64,
    /// vCPUs that were moved, by why. Those that a policy moved are counted by its steps.
    pub moves: BTreeMap<&'static str, u64>,
    /// Guest nodes that were to get another home.
    pub rehomes: BTreeMap<&'static str, u64>,
    /// Guest nodes that were to grow or to shrink.
    pub resizes: BTreeMap<&'static str, u64>,
}

/// Why a vCPU was moved.
pub(super) const BY_OPERATOR: &str = "operator";
pub(super) const FOR_REHOME: &str = "rehome";

pub(super) fn none_of<const N: usize>(names: [&'static str; N]) -> BTreeMap<&'static str, u64> {
    names.into_iter().map(|name| (name, 0)).collect()
}

impl Default for VmCounts {
    fn default() -> Self {
        use ResizePhase::{Done, Failed, Partly, Stopped};
        let rehomes = [RehomePhase::Done, RehomePhase::Stopped, RehomePhase::Failed];
        Self {
            node_changes: 0,
            moves: none_of([BY_OPERATOR, FOR_REHOME]),
            rehomes: none_of(rehomes.map(|phase| phase.name())),
            resizes: none_of([Done, Partly, Stopped, Failed].map(|phase| phase.name())),
        }
    }
}

impl VmCounts {
    pub(super) fn moved(&mut self, why: &'static str) {
        *self.moves.entry(why).or_default() += 1;
    }

    /// Counts a re-home that has ended; one that goes on is not counted yet.
    pub(super) fn rehome(&mut self, phase: &RehomePhase) {
        if let Some(count) = self.rehomes.get_mut(phase.name()) {
            *count += 1;
        }
    }

    /// Counts a change of size that has ended; one that goes on is not counted yet.
    pub(super) fn resize(&mut self, phase: &ResizePhase) {
        if let Some(count) = self.resizes.get_mut(phase.name()) {
            *count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_counted_by_outcome_and_what_goes_on_is_not() {
        let mut counts = VmCounts::default();
        [RehomePhase::Memory, RehomePhase::Vcpus, RehomePhase::Done].iter().for_each(|of| counts.rehome(of));
        [ResizePhase::Wanted, ResizePhase::Partly, ResizePhase::Partly]
            .iter()
            .for_each(|of| counts.resize(of));
        [BY_OPERATOR, FOR_REHOME, BY_OPERATOR].into_iter().for_each(|why| counts.moved(why));
        assert_eq!(counts.rehomes, [("done", 1), ("failed", 0), ("stopped", 0)].into());
        assert_eq!(counts.resizes, [("done", 0), ("failed", 0), ("partly", 2), ("stopped", 0)].into());
        assert_eq!(counts.moves, [("operator", 2), ("rehome", 1)].into());
    }
}
