//! Which cells are measured, in which order, and which are still missing. Pure: no files, no clock.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt};

/// A cell: a workload under a policy on a server, once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Id {
    /// Name of the setup.
    pub setup: String,
    /// Name of the workload.
    pub workload: String,
    /// Policy; a variant stands after a colon.
    pub policy: String,
    /// Which repetition, from 0.
    pub repetition: u32,
}

impl fmt::Display for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setup, workload, policy, repetition } = self;
        write!(out, "{setup}, {workload}, {policy}, repetition {repetition}")
    }
}

/// The position of each value by its first appearance.
fn rank(order: &mut Vec<String>, name: &str) -> usize {
    order.iter().position(|known| known == name).unwrap_or_else(|| {
        order.push(name.to_owned());
        order.len() - 1
    })
}

/// All wanted cells, each once. What shares a boot, and then what shares running programs, is together; a repetition is complete
/// before the next one begins, so that a run that is cut off has figures of everything.
pub fn plan(wanted: impl IntoIterator<Item = Id>) -> Vec<Id> {
    let (mut setups, mut workloads, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut cells: Vec<((u32, usize, usize), Id)> = Vec::new();
    for id in wanted {
        if seen.insert(id.clone()) {
            let at = (id.repetition, rank(&mut setups, &id.setup), rank(&mut workloads, &id.workload));
            cells.push((at, id));
        }
    }
    // Stable: policies stay in their order.
    cells.sort_by_key(|(at, _)| *at);
    cells.into_iter().map(|(_, id)| id).collect()
}

/// Cells of the plan that are not done, in its order.
pub fn missing(plan: &[Id], done: &BTreeSet<Id>) -> Vec<Id> {
    plan.iter().filter(|id| !done.contains(id)).cloned().collect()
}

/// The cells of the next boot: the first ones that share setup and repetition, at most so many.
pub fn batch(missing: &[Id], limit: usize) -> Vec<Id> {
    let Some(first) = missing.first() else { return Vec::new() };
    let same = |id: &&Id| id.setup == first.setup && id.repetition == first.repetition;
    missing.iter().take_while(same).take(limit).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> impl Strategy<Value = Id> {
        ("[ab]", "[cde]", "[fgh]", 0_u32..3).prop_map(|(setup, workload, policy, repetition)| Id {
            setup,
            workload,
            policy,
            repetition,
        })
    }

    fn is_together<T: Ord>(of: impl Iterator<Item = T>) -> bool {
        let mut runs: Vec<T> = of.collect();
        runs.dedup();
        let distinct: BTreeSet<&T> = runs.iter().collect();
        distinct.len() == runs.len()
    }

    proptest! {
        #[test]
        fn a_plan_has_each_wanted_cell_once_and_no_other(wanted in prop::collection::vec(id(), 0..80)) {
            let plan = plan(wanted.clone());
            let distinct: BTreeSet<&Id> = wanted.iter().collect();
            prop_assert_eq!(plan.len(), distinct.len());
            prop_assert_eq!(plan.iter().collect::<BTreeSet<_>>(), distinct);
            prop_assert!(plan.is_sorted_by_key(|id| id.repetition));
            prop_assert!(is_together(plan.iter().map(|id| (id.repetition, &id.setup))));
            prop_assert!(is_together(plan.iter().map(|id| (id.repetition, &id.setup, &id.workload))));
        }

        /// Each run is cut off after some of its cells.
        #[test]
        fn resumed_runs_measure_exactly_what_is_missing(
            wanted in prop::collection::vec(id(), 0..80),
            runs in prop::collection::vec((1_usize..9, 0_usize..9), 200),
        ) {
            let plan = plan(wanted);
            let (mut done, mut measured) = (BTreeSet::new(), Vec::new());
            for (limit, cut_off) in runs {
                let missing = missing(&plan, &done);
                prop_assert_eq!(missing.len() + done.len(), plan.len());
                prop_assert!(missing.iter().all(|id| !done.contains(id)));
                let batch = batch(&missing, limit);
                prop_assert_eq!(batch.is_empty(), missing.is_empty());
                prop_assert!(batch.len() <= limit);
                let same = |id: &Id| id.setup == batch[0].setup && id.repetition == batch[0].repetition;
                prop_assert!(batch.iter().all(same));
                for id in batch.into_iter().take(cut_off) {
                    measured.push(id.clone());
                    done.insert(id);
                }
            }
            prop_assert_eq!(&measured[..], &plan[..measured.len()]);
        }

        #[test]
        fn what_is_done_and_not_wanted_changes_nothing(
            wanted in prop::collection::vec(id(), 0..40),
            others in prop::collection::btree_set(id(), 0..40),
        ) {
            let plan = plan(wanted.clone());
            let missing = missing(&plan, &others);
            let expected: BTreeSet<Id> = wanted.into_iter().filter(|id| !others.contains(id)).collect();
            prop_assert_eq!(missing.into_iter().collect::<BTreeSet<_>>(), expected);
        }
    }
}
