//! Takes memory of a process to a node, a part at a time.

use crate::{
    core::{NodeId, ProcessId},
    observe::maps::{self, Movable},
};
use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};
use vnuma_process::{PAGES_AT_ONCE, PageState, find_pages, move_pages, open_pidfd};

const PAGE: u64 = 4096;
/// How long memory is moved at one look, of all programs. They wait for their pages meanwhile, and so does the next look.
pub const WORK: Duration = Duration::from_millis(300);

/// What became of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// How much was moved, KiB.
    pub kib: u64,
    /// All was looked at: the rest cannot be moved.
    pub settled: bool,
    /// Where to go on.
    pub cursor: u64,
}

/// For pages of a program whose mappings took all the time there was.
const LEAST: Duration = Duration::from_millis(100);

/// Moves up to `kib` of what is on other nodes, from the address `from` on and then from the beginning, until `end`.
pub fn move_to(
    root: &Path,
    id: ProcessId,
    node: NodeId,
    kib: u64,
    (from, end): (u64, Instant),
) -> Result<Moved, String> {
    let failed = |error: std::io::Error| error.to_string();
    let pidfd = open_pidfd(id.pid).map_err(failed)?;
    if !super::threads::is_alive(id) {
        return Err("it has ended".to_owned());
    }
    // A program decides how many mappings it has. Those for which there is no time stay.
    let begin = Instant::now();
    let half = begin + end.saturating_duration_since(begin) / 2;
    let goes_on = || Instant::now() < half;
    let mappings = maps::read_movable(root, id.pid, goes_on).map_err(failed)?;
    let mut whole = goes_on();
    // What was read is used: a program that takes long to read is moved, too.
    let end = end.max(Instant::now() + LEAST);
    let ends = maps::read_ranges(root, id.pid, || Instant::now() < end).map_err(failed)?;
    whole &= Instant::now() < end;
    let mut moved = Moved { cursor: from, ..Moved::default() };
    for (start, stop) in ranges(&mappings, &ends, node, from) {
        for first in (start..stop).step_by(PAGES_AT_ONCE * PAGE as usize) {
            if moved.kib >= kib || Instant::now() >= end {
                return Ok(moved);
            }
            let last = stop.min(first + PAGES_AT_ONCE as u64 * PAGE);
            let left = ((kib - moved.kib) / 4) as usize;
            let addresses: Vec<u64> = (first..last).step_by(PAGE as usize).collect();
            let states = find_pages(pidfd.as_fd(), id.pid, &addresses).map_err(failed)?;
            let away = |state: &PageState| matches!(state, PageState::On(on) if *on != node);
            let there = addresses.iter().zip(states).filter(|(_, state)| away(state));
            let pages: Vec<u64> = there.map(|(address, _)| *address).take(left).collect();
            moved.cursor = last;
            if pages.is_empty() {
                continue;
            }
            let states = move_pages(pidfd.as_fd(), id.pid, &pages, node).map_err(failed)?;
            moved.kib += 4 * states.iter().filter(|state| **state == PageState::On(node)).count() as u64;
            if states.contains(&PageState::NoMemory) {
                return Ok(moved);
            }
        }
    }
    // What was not read may be elsewhere.
    Ok(Moved { settled: whole, cursor: if whole { 0 } else { moved.cursor }, ..moved })
}

/// Ranges that have pages on other nodes, those from `from` on first.
fn ranges(mappings: &[Movable], ends: &BTreeMap<u64, u64>, node: NodeId, from: u64) -> Vec<(u64, u64)> {
    let (mut after, mut before) = (Vec::new(), Vec::new());
    for Movable { start, pages } in mappings {
        let away = pages.iter().any(|(on, count)| *on != node && *count > 0);
        let Some(end) = ends.get(start).filter(|_| away) else { continue };
        let middle = (from / PAGE * PAGE).clamp(*start, *end);
        before.extend((*start < middle).then_some((*start, middle)));
        after.extend((middle < *end).then_some((middle, *end)));
    }
    after.extend(before);
    after
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_goes_on_where_the_last_one_ended() {
        let mapping = |start, node| Movable { start, pages: BTreeMap::from([(node, 4)]) };
        let mappings = [mapping(0x1000, 0), mapping(0x9000, 1), mapping(0x20_000, 0), mapping(0x30_000, 0)];
        let ends = BTreeMap::from([(0x1000, 0x5000), (0x9000, 0xa000), (0x20_000, 0x24_000)]);
        assert_eq!(ranges(&mappings, &ends, 1, 0), [(0x1000, 0x5000), (0x20_000, 0x24_000)]);
        let expected = [(0x21_000, 0x24_000), (0x1000, 0x5000), (0x20_000, 0x21_000)];
        assert_eq!(ranges(&mappings, &ends, 1, 0x21_000), expected);
        assert_eq!(ranges(&mappings, &ends, 0, 0), [(0x9000, 0xa000)]);
    }
}
