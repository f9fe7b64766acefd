//! What a read may return, by the times alone.
//!
//! It knows nothing of the protocol. Of each word, which one node writes, a read returns a value that
//!
//! - the word's owner has written, or was writing before the read ended;
//! - is not older than the last one whose write had ended when the read began;
//! - is not older than what a read that had ended before has returned.
//!
//! A node that the others have excluded goes on for a moment with what it has, until it learns that: its reads are not compared
//! with what others write then. What it returns must still be written values, in their order.

use crate::history::{Kind, Record, sequence_of};
use std::{collections::BTreeMap, fmt};

/// What a check has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Reads that were compared.
    pub reads: usize,
    /// Writes that had ended.
    pub writes: usize,
    /// Accesses that were refused.
    pub refused: usize,
    /// What no correct memory returns.
    pub wrong: Vec<String>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reads, writes, refused, wrong } = self;
        write!(formatter, "{reads} reads, {writes} writes, {refused} refused, {} wrong", wrong.len())?;
        wrong.iter().take(5).try_for_each(|text| write!(formatter, "\n  {text}"))
    }
}

/// The writes of a word: when each began and, if it did, ended. The first is number 1.
type Writes = Vec<(u64, Option<u64>)>;
/// What reads of a word have returned, by whom (none are the survivors): when they ended, and highest values.
type Returned = BTreeMap<(Option<usize>, u8, u16), Vec<(u64, u32)>>;

/// Compares the histories of all nodes, in the order of their numbers. `survived` says which of them were members to the end.
pub fn check(histories: &[Vec<Record>], survived: &[bool]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut words: BTreeMap<(u8, u16), Writes> = BTreeMap::new();
    for (node, history) in histories.iter().enumerate() {
        for record in history.iter().filter(|record| usize::from(record.owner) == node) {
            let writes = words.entry((record.owner, record.page)).or_default();
            match record.kind {
                Kind::Writes => writes.push((record.begin_ns, None)),
                Kind::Wrote => {
                    verdict.writes += 1;
                    if let Some((_, end)) = writes.last_mut() {
                        *end = Some(record.end_ns);
                    }
                }
                Kind::Read | Kind::Refused => {}
            }
        }
    }
    // Reads of survivors by the time of their end, and those of each other node by itself.
    let mut reads: Vec<(bool, usize, &Record)> = Vec::new();
    for (node, history) in histories.iter().enumerate() {
        verdict.refused += history.iter().filter(|record| record.kind == Kind::Refused).count();
        reads.extend(
            history
                .iter()
                .filter(|record| record.kind == Kind::Read)
                .map(|record| (survived[node], node, record)),
        );
    }
    reads.sort_by_key(|(_, _, record)| record.end_ns);
    let mut returned = Returned::new();
    for (survivor, node, record) in reads {
        verdict.reads += 1;
        let place = || format!("node {node}, page {}, word of node {}", record.page, record.owner);
        let Some(found) = sequence_of(record.owner, record.page, record.value) else {
            verdict.wrong.push(format!("{}: {:#x} was never written there", place(), record.value));
            continue;
        };
        let writes = words.get(&(record.owner, record.page)).map_or(&[][..], Vec::as_slice);
        let newest = writes.iter().filter(|(begin, _)| *begin < record.end_ns).count() as u32;
        if found > newest {
            verdict.wrong.push(format!("{}: write {found}, before it began", place()));
        }
        let ended = |write: &&(u64, Option<u64>)| write.1.is_some_and(|end| end < record.begin_ns);
        let oldest = if survivor { writes.iter().filter(ended).count() as u32 } else { 0 };
        // No survivor reads an older value than another one has read.
        let group = (!survivor).then_some(node);
        let seen = returned.entry((group, record.owner, record.page)).or_default();
        // Highest values first seen at rising times: the last that ended before this read began.
        let before = seen.partition_point(|(end, _)| *end < record.begin_ns);
        let oldest = oldest.max(if before > 0 { seen[before - 1].1 } else { 0 });
        if found < oldest {
            verdict.wrong.push(format!("{}: write {found}, after write {oldest} had been there", place()));
        }
        if seen.last().is_none_or(|(_, highest)| found > *highest) {
            seen.push((record.end_ns, found));
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::value;

    fn record(kind: Kind, owner: u8, sequence: u32, times: (u64, u64)) -> Record {
        Record { kind, owner, page: 4, value: value(owner, 4, sequence), begin_ns: times.0, end_ns: times.1 }
    }

    fn write(sequence: u32, times: (u64, u64)) -> [Record; 2] {
        [record(Kind::Writes, 0, sequence, times), record(Kind::Wrote, 0, sequence, times)]
    }

    /// Node 0 has written twice, and node 1 reads.
    fn judged(reads: &[Record], survived: bool) -> Vec<String> {
        let writer = [write(1, (10, 20)), write(2, (30, 40))].concat();
        check(&[writer, reads.to_vec()], &[true, survived]).wrong
    }

    fn read(sequence: u32, times: (u64, u64)) -> Record {
        record(Kind::Read, 0, sequence, times)
    }

    #[test]
    fn what_a_correct_memory_returns_is_accepted() {
        let reads = [
            read(0, (1, 5)),
            read(0, (11, 15)),
            read(1, (16, 18)),
            read(1, (21, 35)),
            read(2, (32, 36)),
            read(2, (41, 50)),
        ];
        assert_eq!(judged(&reads, true), [""; 0]);
    }

    #[test]
    fn stale_early_and_foreign_values_are_found() {
        assert_eq!(
            judged(&[read(1, (41, 42))], true),
            ["node 1, page 4, word of node 0: write 1, after write 2 had been there"]
        );
        assert_eq!(judged(&[read(0, (21, 22))], true).len(), 1);
        assert_eq!(
            judged(&[read(2, (21, 29))], true),
            ["node 1, page 4, word of node 0: write 2, before it began"]
        );
        let torn = Record { value: value(0, 4, 1) ^ 1, ..read(1, (21, 22)) };
        assert!(judged(&[torn], true)[0].ends_with("was never written there"));
        // Read while it was written, and then again the old one.
        assert_eq!(judged(&[read(2, (31, 32)), read(1, (33, 34))], true).len(), 1);
        assert_eq!(judged(&[read(2, (31, 34)), read(1, (33, 36))], true), [""; 0]);
    }

    #[test]
    fn a_node_that_was_excluded_may_lag_behind_but_not_go_back() {
        assert_eq!(judged(&[read(1, (41, 42))], false), [""; 0]);
        assert_eq!(judged(&[read(2, (41, 42)), read(1, (43, 44))], false).len(), 1);
        assert_eq!(judged(&[read(3, (41, 42))], false).len(), 1);
    }

    #[test]
    fn a_write_that_was_not_finished_may_be_seen_or_not() {
        let writer = vec![record(Kind::Writes, 0, 1, (10, 10))];
        for sequence in [0, 1] {
            assert_eq!(
                check(&[writer.clone(), vec![read(sequence, (20, 30))]], &[false, true]).wrong,
                [""; 0]
            );
        }
        let verdict =
            check(&[writer, vec![read(0, (5, 8)), record(Kind::Refused, 0, 0, (9, 9))]], &[true, true]);
        assert_eq!((verdict.reads, verdict.writes, verdict.refused), (1, 0, 1));
    }
}
