//! What was done to VMs, and what came of it: summed up for metrics.

use std::collections::BTreeMap;
use vnuma_policy::{migration::Phase, rehome::RehomePhase, sizing::ResizePhase, world::VmId};

/// Sums since vnumad started. Those of a VM are forgotten with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    vms: BTreeMap<VmId, VmCounts>,
    /// Migrations by what came of them. The VMs of most are gone.
    migrations: BTreeMap<&'static str, u64>,
}

/// Sums of a VM. Each outcome is there from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmCounts {
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

fn none_of<const N: usize>(names: [&'static str; N]) -> BTreeMap<&'static str, u64> {
    names.into_iter().map(|name| (name, 0)).collect()
}

impl Default for VmCounts {
    fn default() -> Self {
        use ResizePhase::{Done, Failed, Partly, Stopped};
        let rehomes = [RehomePhase::Done, RehomePhase::Stopped, RehomePhase::Failed];
        Self {
            moves: none_of([BY_OPERATOR, FOR_REHOME]),
            rehomes: none_of(rehomes.map(|phase| phase.name())),
            resizes: none_of([Done, Partly, Stopped, Failed].map(|phase| phase.name())),
        }
    }
}

impl Counts {
    pub(super) fn moved(&mut self, vm: VmId, why: &'static str) {
        *self.vms.entry(vm).or_default().moves.entry(why).or_default() += 1;
    }

    /// Counts a re-home that has ended; one that goes on is not counted yet.
    pub(super) fn rehome(&mut self, vm: VmId, phase: &RehomePhase) {
        if let Some(count) = self.vms.entry(vm).or_default().rehomes.get_mut(phase.name()) {
            *count += 1;
        }
    }

    /// The same of a change of size.
    pub(super) fn resize(&mut self, vm: VmId, phase: &ResizePhase) {
        if let Some(count) = self.vms.entry(vm).or_default().resizes.get_mut(phase.name()) {
            *count += 1;
        }
    }

    /// Counts a migration. One that was under way when its VM ended has failed.
    pub(super) fn migration(&mut self, phase: Phase) {
        let phase = if phase.is_over() { phase } else { Phase::Failed };
        *self.migrations.entry(phase.name()).or_default() += 1;
    }

    pub(super) fn forget(&mut self, vm: VmId) {
        self.vms.remove(&vm);
    }

    /// Those of a VM.
    pub fn of(&self, vm: VmId) -> VmCounts {
        self.vms.get(&vm).cloned().unwrap_or_default()
    }

    /// Migrations, by what came of them.
    pub fn migrations(&self) -> BTreeMap<&'static str, u64> {
        let mut all = none_of([Phase::Done, Phase::Cancelled, Phase::Failed].map(Phase::name));
        all.extend(&self.migrations);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_counted_by_outcome_and_what_goes_on_is_not() {
        let mut counts = Counts::default();
        [RehomePhase::Memory, RehomePhase::Vcpus, RehomePhase::Done]
            .iter()
            .for_each(|of| counts.rehome(1, of));
        [ResizePhase::Wanted, ResizePhase::Partly, ResizePhase::Partly]
            .iter()
            .for_each(|of| counts.resize(1, of));
        [BY_OPERATOR, FOR_REHOME, BY_OPERATOR].into_iter().for_each(|why| counts.moved(1, why));
        let of = counts.of(1);
        assert_eq!(of.rehomes, [("done", 1), ("failed", 0), ("stopped", 0)].into());
        assert_eq!(of.resizes, [("done", 0), ("failed", 0), ("partly", 2), ("stopped", 0)].into());
        assert_eq!(of.moves, [("operator", 2), ("rehome", 1)].into());
        assert_eq!(counts.of(2), VmCounts::default());
        counts.forget(1);
        assert_eq!(counts.of(1), VmCounts::default());
        // Its VM has ended meanwhile.
        [Phase::Done, Phase::Sending, Phase::Failed].into_iter().for_each(|phase| counts.migration(phase));
        assert_eq!(counts.migrations(), [("cancelled", 0), ("done", 1), ("failed", 2)].into());
    }
}
