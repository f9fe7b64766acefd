//! From two readings of a group to what happened in between. Pure.

use vnuma_model::{Accesses, Counted, HostNodeId, ThreadCounts};

/// A reading of a group: values since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// In the order of the events.
    pub values: Vec<u64>,
    /// How long the thread was on a CPU, nanoseconds.
    pub enabled_ns: u64,
    /// Of that, how long the group was counting, nanoseconds.
    pub running_ns: u64,
}

/// Which value is what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    Instructions,
    References,
    Misses,
    /// Accesses to memory of this node.
    Node(HostNodeId),
    Local,
    Remote,
    /// Local and remote ones together.
    All,
}

/// No counter counts more in a period; sums of these do not overflow.
const MOST: u64 = 1 << 48;

/// Has a reading most of what a thread did since the one before, in which it was on a CPU for `ran_ns`? One that was made without
/// interrupting the thread ends with its last turn on a CPU.
pub(crate) fn is_recent(before: &Reading, now: &Reading, ran_ns: u64) -> bool {
    now.enabled_ns.saturating_sub(before.enabled_ns) >= ran_ns / 2
}

/// What happened between two readings. A counter that went back (its group was opened anew) counts from zero.
pub(crate) fn period(meanings: &[Meaning], before: &Reading, now: &Reading) -> Counted {
    let enabled = now.enabled_ns.saturating_sub(before.enabled_ns);
    let running = now.running_ns.saturating_sub(before.running_ns).min(enabled);
    match (enabled, running) {
        (0, _) => return Counted::DidNotRun,
        (_, 0) => return Counted::Crowded,
        _ => {}
    }
    let scale = |count: u64| {
        let scaled = u128::from(count) * u128::from(enabled) / u128::from(running);
        u64::try_from(scaled).unwrap_or(MOST).min(MOST)
    };
    let permille = u128::from(running) * 1000 / u128::from(enabled);
    let mut counted = ThreadCounts { permille: permille as u32, ..ThreadCounts::default() };
    let (mut per_node, mut local, mut remote, mut all) = (Vec::<(HostNodeId, u64)>::new(), None, None, None);
    for (at, meaning) in meanings.iter().enumerate() {
        let value = |reading: &Reading| reading.values.get(at).copied().unwrap_or(0);
        let (old, new) = (value(before), value(now));
        let count = scale(new.checked_sub(old).unwrap_or(new));
        match meaning {
            Meaning::Instructions => counted.instructions = count,
            Meaning::References => counted.llc_references = count,
            Meaning::Misses => counted.llc_misses = count,
            Meaning::Local => local = Some(count),
            Meaning::Remote => remote = Some(count),
            Meaning::All => all = Some(count),
            Meaning::Node(node) => match per_node.iter_mut().find(|(known, _)| known == node) {
                Some((_, sum)) => *sum = sum.saturating_add(count),
                None => per_node.push((*node, count)),
            },
        }
    }
    counted.accesses = match (local, remote, all) {
        _ if !per_node.is_empty() => Accesses::ByNode(per_node),
        (Some(local), Some(remote), _) => Accesses::LocalRemote { local, remote },
        (None, Some(remote), Some(all)) => {
            Accesses::LocalRemote { local: all.saturating_sub(remote), remote }
        }
        _ => Accesses::Unknown,
    };
    Counted::Counted(counted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Meaning::{All, Instructions, Local, Misses, Node, References, Remote};
    use proptest::prelude::*;

    fn reading(values: &[u64], enabled_ns: u64, running_ns: u64) -> Reading {
        Reading { values: values.to_vec(), enabled_ns, running_ns }
    }

    fn counted(meanings: &[Meaning], before: &Reading, now: &Reading) -> ThreadCounts {
        match period(meanings, before, now) {
            Counted::Counted(counted) => counted,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn differences_are_counted_and_nodes_are_summed() {
        let meanings = [Instructions, References, Misses, Node(0), Node(2), Node(2)];
        let before = reading(&[100, 10, 5, 1, 2, 3], 1000, 1000);
        let now = reading(&[1100, 40, 15, 1, 12, 8], 3000, 3000);
        let expected = ThreadCounts {
            instructions: 1000,
            llc_references: 30,
            llc_misses: 10,
            accesses: Accesses::ByNode(vec![(0, 0), (2, 15)]),
            permille: 1000,
        };
        assert_eq!(counted(&meanings, &before, &now), expected);
    }

    #[test]
    fn a_group_that_shared_the_counters_is_scaled_and_says_so() {
        let counted = counted(&[Instructions], &reading(&[0], 500, 500), &reading(&[1000], 4500, 1500));
        assert_eq!((counted.instructions, counted.permille), (4000, 250));
    }

    #[test]
    fn a_thread_that_did_not_run_and_counters_that_others_had_are_told_apart() {
        let before = reading(&[7], 100, 100);
        assert_eq!(period(&[Instructions], &before, &reading(&[7], 100, 100)), Counted::DidNotRun);
        assert_eq!(period(&[Instructions], &before, &reading(&[7], 900, 100)), Counted::Crowded);
    }

    #[test]
    fn a_reading_is_recent_with_half_of_the_time_that_the_thread_ran() {
        let before = reading(&[], 100, 100);
        let recent = |enabled_ns, ran_ns| is_recent(&before, &reading(&[], enabled_ns, 0), ran_ns);
        assert!(recent(100, 0) && recent(100, 1) && recent(150, 100) && recent(900, 100));
        assert!(!recent(149, 100) && !recent(100, 2) && !recent(0, 2));
    }

    #[test]
    fn remote_ones_are_told_from_all_where_there_is_no_counter_of_local_ones() {
        let zero = Reading::default();
        let now = reading(&[70, 30], 10, 10);
        let local_remote = |local, remote| Accesses::LocalRemote { local, remote };
        assert_eq!(counted(&[Local, Remote], &zero, &now).accesses, local_remote(70, 30));
        assert_eq!(counted(&[All, Remote], &zero, &now).accesses, local_remote(40, 30));
        // The two need not have been counted in the same instant.
        assert_eq!(counted(&[Remote, All], &zero, &now).accesses, local_remote(0, 70));
        assert_eq!(counted(&[Misses], &zero, &now).accesses, Accesses::Unknown);
    }

    proptest! {
        #[test]
        fn any_readings_are_survived(
            values in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..8),
            times in any::<[u64; 4]>(),
        ) {
            let meanings = [Instructions, References, Misses, Local, Remote, All, Node(0), Node(1)];
            let (old, new): (Vec<_>, Vec<_>) = values.into_iter().unzip();
            let _ = period(&meanings, &reading(&old, times[0], times[1]), &reading(&new, times[2], times[3]));
        }
    }
}
