//! A list of the pages that threads waited for, for who wants to replay what a program did.

use crate::NodeError;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::{collections::HashMap, time::Instant};

/// A page that a thread waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Touch {
    /// When the page was there: `CLOCK_MONOTONIC` in nanoseconds, which is one clock for all nodes of a machine.
    pub at_ns: u64,
    /// How long the thread waited, in nanoseconds.
    pub waited_ns: u64,
    /// The node.
    pub node: u8,
    /// The page.
    pub page: u64,
    /// Did the thread write?
    pub write: bool,
    /// Of a write: words of 8 bytes that had changed when another node got the page next, 0 to 512. 0 if none did, or without
    /// deltas.
    pub changed: u16,
}

/// The list of a shard.
#[derive(Debug)]
pub(crate) struct Touches {
    node: u8,
    wanted: bool,
    pub list: Vec<Touch>,
    /// The last write of each page, until another node gets the page: its place in the list.
    written: HashMap<u64, usize>,
}

impl Touches {
    pub fn new(node: u8, wanted: bool) -> Self {
        Self { node, wanted, list: Vec::new(), written: HashMap::new() }
    }

    /// What was done until now is not listed.
    pub fn forget(&mut self) {
        self.list.clear();
        self.written.clear();
    }

    /// A thread has a page that it waited for since then.
    pub fn served(&mut self, page: u64, write: bool, since: Instant) -> Result<(), NodeError> {
        if !self.wanted {
            return Ok(());
        }
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_err(NodeError::system("clock_gettime"))?;
        if write {
            self.written.insert(page, self.list.len());
        }
        let whole = |number: i64| u64::try_from(number).unwrap_or(0);
        self.list.push(Touch {
            at_ns: whole(now.tv_sec()) * 1_000_000_000 + whole(now.tv_nsec()),
            waited_ns: u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX),
            node: self.node,
            page,
            write,
            changed: 0,
        });
        Ok(())
    }

    /// Another node gets a page; `changed` counts the words that this one has changed.
    pub fn gave(
        &mut self,
        page: u64,
        changed: impl FnOnce() -> Result<u16, NodeError>,
    ) -> Result<(), NodeError> {
        if let Some(index) = self.written.remove(&page) {
            self.list[index].changed = changed()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_has_the_words_that_it_changed() {
        let mut touches = Touches::new(3, true);
        let since = Instant::now();
        touches.served(7, true, since).expect("a clock");
        touches.served(8, false, since).expect("a clock");
        touches.gave(7, || Ok(5)).expect("counted");
        // The second one to get it finds nothing new.
        touches.gave(7, || Ok(9)).expect("counted");
        touches.gave(8, || Ok(9)).expect("counted");
        let seen: Vec<_> =
            touches.list.iter().map(|touch| (touch.node, touch.page, touch.write, touch.changed)).collect();
        assert_eq!(seen, [(3, 7, true, 5), (3, 8, false, 0)]);
        assert!(touches.list[0].at_ns > 0 && touches.list[0].at_ns <= touches.list[1].at_ns);
    }

    #[test]
    fn who_wants_no_list_gets_none() {
        let mut touches = Touches::new(0, false);
        touches.served(7, true, Instant::now()).expect("nothing to do");
        touches.gave(7, || panic!("not asked")).expect("nothing to do");
        assert!(touches.list.is_empty());
    }
}
