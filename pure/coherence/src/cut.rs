//! Second copies of what was written, as of one moment: a consistent cut.
//!
//! All nodes begin the same cut while none of their threads uses the memory, as at a barrier. Each then sends the pages that it
//! owns, and that have changed since they were last sent, to two keepers, which depend on the page alone.
//!
//! ```text
//!   begin ──▶ pages to their keepers ──▶ End to all ── End of all ──▶ Kept to all ── Kept of all ──▶ complete
//! ```
//!
//! A channel keeps its order, so who has the End of all has all pages that it is to keep.
//! A cut that is complete on one node is kept by all of them. So if a node is lost, the newest cut that is complete on any of
//! the others can be put together by these: of each page, the newest content up to that cut, from the first of its keepers that
//! is left.
//!
//! Nodes need not begin at the same time. What begins late has the page that it fetched from one that began early, with a higher
//! version, and a keeper takes the highest version of a cut.

use crate::managers::Managers;
use std::collections::BTreeMap;
use vnuma_abi_dsm_wire::{Cut, NodeId, NodeSet, PageId, Version};

/// Another node may have begun so many cuts more than this one: one, or some more where cuts failed. What it says about later ones
/// is ignored, so that nobody has to remember any number of them.
pub const CUTS_AHEAD: u64 = 4;

/// Who keeps the second copies of a page: its manager and the member behind that. One node if there is no other.
pub fn keepers(managers: &Managers, members: NodeSet, page: PageId) -> [NodeId; 2] {
    let first = managers.manager(page, members);
    let behind = members.iter().find(|node| *node > first);
    let second = behind.or_else(|| members.iter().find(|node| *node != first)).unwrap_or(first);
    [first, second]
}

/// Who puts a page back after nodes were lost; none if both keepers were.
pub fn restorer(managers: &Managers, members: NodeSet, survivors: NodeSet, page: PageId) -> Option<NodeId> {
    keepers(managers, members, page).into_iter().find(|keeper| survivors.contains(*keeper))
}

/// What is to be done for a cut, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CutCommand {
    /// Send the content of a page, which no thread writes now, to a keeper (which may be this node).
    Save {
        /// The keeper.
        to: NodeId,
        /// The cut.
        number: u64,
        /// The page.
        page: PageId,
        /// Its content.
        version: Version,
    },
    /// Send a message to all other members, after the pages.
    Tell {
        /// The message.
        message: Cut,
    },
    /// All members have kept the cut: threads may go on.
    Complete {
        /// The cut.
        number: u64,
    },
}

/// One node's part of all cuts.
#[derive(Clone, Debug)]
pub struct Cuts {
    own: NodeId,
    members: NodeSet,
    managers: Managers,
    /// The contents that keepers have of this node.
    saved: BTreeMap<PageId, Version>,
    /// The cut that has begun here and is not complete.
    current: Option<u64>,
    /// The cut that has begun here last.
    begun: u64,
    /// Who has sent the end of a cut, and who has kept it. Others may be ahead.
    ended: BTreeMap<u64, NodeSet>,
    kept: BTreeMap<u64, NodeSet>,
}

impl Cuts {
    /// Of a node of these members.
    pub fn new(own: NodeId, members: NodeSet, managers: Managers) -> Self {
        let (ended, kept) = (BTreeMap::new(), BTreeMap::new());
        Self { own, members, managers, saved: BTreeMap::new(), current: None, begun: 0, ended, kept }
    }

    /// Begins a cut, with the pages that this node owns and that were ever written. The numbers of cuts rise.
    pub fn begin(
        &mut self,
        number: u64,
        owned: impl IntoIterator<Item = (PageId, Version)>,
        out: &mut Vec<CutCommand>,
    ) {
        self.current = Some(number);
        self.begun = number;
        for (page, version) in owned {
            if self.saved.insert(page, version) == Some(version) {
                continue;
            }
            let [first, second] = keepers(&self.managers, self.members, page);
            out.push(CutCommand::Save { to: first, number, page, version });
            if second != first {
                out.push(CutCommand::Save { to: second, number, page, version });
            }
        }
        out.push(CutCommand::Tell { message: Cut::End { number } });
        self.ended.entry(number).or_default().insert(self.own);
        self.go_on(out);
    }

    /// A member has said this. Its pages have come before.
    pub fn receive(&mut self, from: NodeId, message: Cut, out: &mut Vec<CutCommand>) {
        if let Cut::End { number } | Cut::Kept { number } = message
            && !(self.current.unwrap_or(self.begun + 1)..=self.begun.saturating_add(CUTS_AHEAD))
                .contains(&number)
        {
            return;
        }
        match message {
            Cut::End { number } => self.ended.entry(number).or_default().insert(from),
            Cut::Kept { number } => self.kept.entry(number).or_default().insert(from),
            // The shell keeps it.
            Cut::Page { .. } => return,
        }
        self.go_on(out);
    }

    /// A page was not sent to all of its keepers after all. The next cut has it, whether or not it has changed.
    pub fn forget(&mut self, page: PageId) {
        self.saved.remove(&page);
    }

    /// The cut that has begun here and is not complete.
    pub fn current(&self) -> Option<u64> {
        self.current
    }

    fn go_on(&mut self, out: &mut Vec<CutCommand>) {
        let Some(number) = self.current else { return };
        let all =
            |of: &BTreeMap<u64, NodeSet>| of.get(&number).is_some_and(|nodes| self.members.is_subset(*nodes));
        let mine = self.kept.get(&number).is_some_and(|nodes| nodes.contains(self.own));
        if !mine && all(&self.ended) {
            self.kept.entry(number).or_default().insert(self.own);
            out.push(CutCommand::Tell { message: Cut::Kept { number } });
        }
        if self.kept.get(&number).is_some_and(|nodes| self.members.is_subset(*nodes)) {
            self.current = None;
            self.ended.retain(|other, _| *other > number);
            self.kept.retain(|other, _| *other > number);
            out.push(CutCommand::Complete { number });
        }
    }
}

/// What a keeper keeps: of each page the content of the newest complete cut, and newer ones.
#[derive(Clone, Debug)]
pub struct Kept<T> {
    complete: u64,
    /// In rising order of cut and version.
    pages: BTreeMap<PageId, Vec<(u64, Version, T)>>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self { complete: 0, pages: BTreeMap::new() }
    }
}

impl<T> Kept<T> {
    /// Keeps a content of a cut. Of several of the same cut the one with the highest version stays.
    pub fn keep(&mut self, number: u64, page: PageId, version: Version, content: T) {
        let contents = self.pages.entry(page).or_default();
        let place = contents.partition_point(|(other, ..)| *other < number);
        match contents.get_mut(place) {
            Some(same) if same.0 == number => {
                if version > same.1 {
                    *same = (number, version, content);
                }
            }
            _ => contents.insert(place, (number, version, content)),
        }
    }

    /// The cut is complete here: what it has in place of older contents is all that is needed.
    pub fn complete(&mut self, number: u64) {
        self.complete = number;
        for contents in self.pages.values_mut() {
            let newest = contents.partition_point(|(other, ..)| *other <= number);
            contents.drain(..newest.saturating_sub(1));
        }
    }

    /// The newest cut that was complete here; 0 if there is none.
    pub fn newest(&self) -> u64 {
        self.complete
    }

    /// The pages of a cut that is complete on some node, as far as they are kept here.
    pub fn of(&self, number: u64) -> impl Iterator<Item = (PageId, &T)> {
        self.pages.iter().filter_map(move |(page, contents)| {
            let behind = contents.partition_point(|(other, ..)| *other <= number);
            contents[..behind].last().map(|(_, _, content)| (*page, content))
        })
    }
}
