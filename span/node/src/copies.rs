//! Second copies of pages, and the cut that is under way on this node.

use crate::NodeError;
use std::{
    fmt,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vnuma_coherence::{CUTS_AHEAD, Kept, Managers, NodeId, NodeSet, PageId, restorer};
use vnuma_dsm_pager::Page;

/// The second copies that a node keeps. They outlive the node, so that survivors can start anew with them.
pub struct Copies {
    own: NodeId,
    members: NodeSet,
    managers: Managers,
    inside: Mutex<Inside>,
    changed: Condvar,
}

struct Inside {
    kept: Kept<Box<Page>>,
    /// The cut that threads of the program wait for.
    wanted: u64,
    /// The last one that they did not wait for any longer.
    given_up: u64,
    /// Shards for which it is not complete.
    missing: usize,
    /// Why no cut can be complete any more.
    over: Option<&'static str>,
}

impl fmt::Debug for Copies {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Copies").field("own", &self.own).field("newest", &self.newest()).finish()
    }
}

impl Copies {
    pub(crate) fn new(own: NodeId, members: NodeSet, managers: Managers) -> Self {
        let inside = Inside { kept: Kept::default(), wanted: 0, given_up: 0, missing: 0, over: None };
        Self { own, members, managers, inside: Mutex::new(inside), changed: Condvar::new() }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest cut that is complete on this node; 0 if there is none. The newest of all survivors is the one to go back to.
    pub fn newest(&self) -> u64 {
        self.inside().kept.newest()
    }

    /// Gives each page that this node is to put back, of a cut that is complete on one of the survivors, to `put`. All other
    /// pages are put back by other survivors, or were never written. The nodes keep the numbers that they had.
    pub fn restore(&self, number: u64, survivors: &[u8], mut put: impl FnMut(u64, &Page)) {
        let survivors: NodeSet = survivors.iter().map(|node| NodeId(*node)).collect();
        let mine = |page| restorer(&self.managers, self.members, survivors, page) == Some(self.own);
        for (page, content) in self.inside().kept.of(number).filter(|(page, _)| mine(*page)) {
            put(page.0, content);
        }
    }

    /// Keeps a page of a cut, unless the cut is over or further ahead than a member can be: each takes memory.
    pub(crate) fn keep(&self, number: u64, page: PageId, version: u64, content: Box<Page>) {
        let mut inside = self.inside();
        if number > inside.kept.newest() && number <= inside.wanted.saturating_add(CUTS_AHEAD) {
            inside.kept.keep(number, page, version, content);
        }
    }

    /// The cut that shards should begin, if they have not; 0 if there is none.
    pub(crate) fn wanted(&self) -> u64 {
        let inside = self.inside();
        if inside.wanted > inside.given_up { inside.wanted } else { 0 }
    }

    /// The last cut that took too long. Threads use the memory again.
    pub(crate) fn given_up(&self) -> u64 {
        self.inside().given_up
    }

    /// The next cut, which all shards are to begin.
    pub(crate) fn want(&self, shards: usize) -> u64 {
        let mut inside = self.inside();
        inside.wanted += 1;
        inside.missing = shards;
        inside.wanted
    }

    /// It is complete for one more shard. When that comes too late, the cut before stays the newest: survivors may have looked
    /// at it already, and its pages must not go.
    pub(crate) fn complete(&self, number: u64) {
        let mut inside = self.inside();
        if inside.wanted == number && inside.over.is_none() {
            inside.missing = inside.missing.saturating_sub(1);
            if inside.missing == 0 {
                inside.kept.complete(number);
            }
            self.changed.notify_all();
        }
    }

    /// A member was lost, or this node has stopped: no cut can be complete any more.
    pub(crate) fn over(&self, reason: &'static str) {
        self.inside().over.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Waits until a cut is complete for all shards.
    pub(crate) fn wait(&self, number: u64, limit: Duration) -> Result<(), NodeError> {
        let begin = Instant::now();
        let mut inside = self.inside();
        loop {
            if inside.kept.newest() >= number {
                return Ok(());
            }
            if let Some(reason) = inside.over {
                return Err(NodeError::Cut { number, reason });
            }
            let left = limit.saturating_sub(begin.elapsed());
            if left.is_zero() {
                inside.given_up = number;
                return Err(NodeError::Cut { number, reason: "not all nodes have begun it in time" });
            }
            inside = self.changed.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    fn copies() -> Copies {
        let managers = Managers::new(&[(4, NodeId(0)), (4, NodeId(1))]).expect("ranges");
        Copies::new(NodeId(0), NodeSet::first(2), managers)
    }

    fn keep(copies: &Copies, number: u64) {
        copies.keep(number, PageId(1), number + 1, Box::new([number as u8; 4096]));
    }

    fn restored(copies: &Copies, number: u64) -> Vec<(u64, u8)> {
        let mut pages = Vec::new();
        copies.restore(number, &[0], |page, content| pages.push((page, content[9])));
        pages
    }

    #[test]
    fn a_cut_is_complete_with_the_last_shard() {
        let copies = copies();
        assert_eq!((copies.wanted(), copies.newest()), (0, 0));
        let number = copies.want(2);
        keep(&copies, number);
        copies.complete(number);
        assert!((copies.wanted(), copies.newest()) == (1, 0) && copies.wait(1, Duration::ZERO).is_err());
        copies.complete(number);
        copies.wait(number, LIMIT).expect("complete");
        assert_eq!(restored(&copies, 1), [(1, 1)]);
        // The next one replaces it when it is complete, and not before.
        let number = copies.want(2);
        keep(&copies, number);
        copies.complete(1);
        copies.complete(number);
        assert_eq!((copies.newest(), restored(&copies, 1)), (1, vec![(1, 1)]));
        copies.complete(number);
        assert_eq!((copies.newest(), restored(&copies, 1), restored(&copies, 2)), (2, vec![], vec![(1, 2)]));
    }

    #[test]
    fn pages_of_cuts_that_are_over_or_far_ahead_are_not_kept() {
        let copies = copies();
        let number = copies.want(1);
        keep(&copies, number);
        copies.complete(number);
        for number in (0..=number).chain(number + CUTS_AHEAD + 1..20).chain([u64::MAX]) {
            copies.keep(number, PageId(1), 99, Box::new([99; 4096]));
            copies.keep(number, PageId(2), 99, Box::new([99; 4096]));
        }
        assert_eq!(restored(&copies, u64::MAX), [(1, 1)]);
        keep(&copies, number + CUTS_AHEAD);
        assert_eq!(restored(&copies, u64::MAX), [(1, (number + CUTS_AHEAD) as u8)]);
    }

    /// Survivors have agreed on the cut before by then, and want its pages.
    #[test]
    fn a_cut_that_is_complete_after_a_loss_takes_nothing_away() {
        let copies = copies();
        for number in [copies.want(1), 2] {
            keep(&copies, number);
            if number == 1 {
                copies.complete(1);
            }
        }
        assert_eq!(copies.want(1), 2);
        copies.over("a member was lost");
        copies.complete(2);
        assert_eq!(
            (copies.newest(), restored(&copies, 1), restored(&copies, 2)),
            (1, vec![(1, 1)], vec![(1, 2)])
        );
        let reason = copies.wait(2, LIMIT).expect_err("not complete").to_string();
        assert_eq!(reason, "cut 2: a member was lost");
        copies.over("this node has left");
        assert_eq!(copies.wait(2, LIMIT).expect_err("not complete").to_string(), reason, "the first reason");
        copies.wait(1, LIMIT).expect("it was complete before");
    }
}
