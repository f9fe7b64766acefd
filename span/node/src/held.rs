//! Frames about pages that device code has pinned: they wait, and nothing else does.
//!
//! The order of the frames about one page stays, and so does the order of a peer's frames before and after one about the
//! membership. Second copies for a cut change no page, and so pass all others.

use crate::lanes::Incoming;
use std::time::{Duration, Instant};
use vnuma_coherence::{Message, NodeId, PageId};

#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Each with when it came.
    frames: Vec<(Instant, Incoming)>,
}

/// Most frames of one peer. A node that says all its pages to a new manager, 512 in each frame, stays far below it.
const MOST: usize = 1 << 14;

fn is_membership(incoming: &Incoming) -> bool {
    matches!(incoming.frame.message, Message::Membership(_))
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// True if no more of this peer can wait.
    pub fn is_full_of(&self, from: NodeId) -> bool {
        self.frames.len() >= MOST && self.frames.iter().filter(|(_, held)| held.from == from).count() >= MOST
    }

    /// Gives a frame back if it need not wait.
    pub fn pass(&mut self, incoming: Incoming, pinned: impl Fn(PageId) -> bool) -> Option<Incoming> {
        if !self.must_wait(&incoming, pinned) {
            return Some(incoming);
        }
        self.frames.push((Instant::now(), incoming));
        None
    }

    /// What is sent for a cut never waits: a keeper puts it beside the region. A page that waited would come behind the end of its
    /// cut, and be missing in it.
    fn must_wait(&self, incoming: &Incoming, pinned: impl Fn(PageId) -> bool) -> bool {
        if matches!(incoming.frame.message, Message::Cut(_)) {
            return false;
        }
        let membership = is_membership(incoming);
        let behind = |held: &Incoming| {
            let ordered = held.from == incoming.from && (membership || is_membership(held));
            let same = |page| held.frame.message.pages().any(|(_, other)| other == page);
            ordered || incoming.frame.message.pages().any(|(_, page)| same(page))
        };
        incoming.frame.message.pages().any(|(_, page)| pinned(page))
            || self.frames.iter().any(|(_, held)| behind(held))
    }

    /// Takes out what need not wait any more, or has waited for as long as device code may keep a page: for `limit`.
    pub fn ready(&mut self, limit: Duration, pinned: impl Fn(PageId) -> bool) -> Vec<Incoming> {
        let mut ready = Vec::new();
        for (since, incoming) in std::mem::take(&mut self.frames) {
            if since.elapsed() < limit && self.must_wait(&incoming, &pinned) {
                self.frames.push((since, incoming));
            } else {
                ready.push(incoming);
            }
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Contents;
    use vnuma_coherence::{Cut, Epoch, Frame, Membership};

    const PINNED: Duration = Duration::from_secs(5);

    fn incoming(from: u8, message: Message) -> Incoming {
        Incoming { from: NodeId(from), frame: Frame { epoch: Epoch(0), message }, contents: Contents::None }
    }

    fn about(from: u8, page: u64) -> Incoming {
        incoming(from, Message::Refuse { page: PageId(page) })
    }

    fn suspicion(from: u8) -> Incoming {
        incoming(from, Message::Membership(Membership::Suspect { node: NodeId(9) }))
    }

    #[test]
    fn frames_about_a_pinned_page_wait_and_others_pass() {
        let mut held = Held::default();
        let pinned = |page: PageId| page.0 == 5;
        assert!(held.pass(about(1, 5), pinned).is_none());
        assert!(held.pass(about(1, 6), pinned).is_some() && held.pass(about(2, 6), pinned).is_some());
        // Not pinned any more, and still behind the first.
        assert!(held.pass(about(2, 5), |_| false).is_none());
        assert!(held.ready(PINNED, pinned).is_empty() && !held.is_empty());
        let order: Vec<u8> = held.ready(PINNED, |_| false).iter().map(|incoming| incoming.from.0).collect();
        assert!(order == [1, 2] && held.is_empty());
    }

    /// The node fails then, which it could not if the frame waited on.
    #[test]
    fn a_frame_waits_as_long_as_device_code_may_keep_a_page() {
        let mut held = Held::default();
        let since = |age| Instant::now().checked_sub(age).expect("the machine runs longer than that");
        held.frames.push((since(PINNED), about(1, 5)));
        held.frames.push((since(PINNED / 2), about(2, 6)));
        let ready = held.ready(PINNED, |_| true);
        assert_eq!(ready.iter().map(|incoming| incoming.from.0).collect::<Vec<_>>(), [1]);
        assert_eq!(held.frames.len(), 1);
    }

    #[test]
    fn a_peer_cannot_make_a_node_keep_any_number_of_frames() {
        let mut held = Held::default();
        let fill = |held: &mut Held, count| {
            let frames = (0..count).map(|_| (Instant::now(), about(1, 5)));
            held.frames.extend(frames);
        };
        fill(&mut held, MOST - 1);
        assert!(!held.is_full_of(NodeId(1)));
        fill(&mut held, 1);
        assert!(held.is_full_of(NodeId(1)) && !held.is_full_of(NodeId(2)));
    }

    /// A keeper says that it has all pages of a cut once the end of the cut has come.
    #[test]
    fn second_copies_wait_for_nothing() {
        let mut held = Held::default();
        let pinned = |page: PageId| page.0 == 5;
        let cut = |message| incoming(1, Message::Cut(message));
        let copy = || cut(Cut::Page { number: 1, page: PageId(5), version: 2 });
        assert!(held.pass(copy(), pinned).is_some());
        // Behind a frame about the same page, and one about the membership.
        assert!(held.pass(about(1, 5), pinned).is_none() && held.pass(suspicion(1), pinned).is_none());
        assert!(held.pass(copy(), pinned).is_some());
        assert!(held.pass(cut(Cut::End { number: 1 }), pinned).is_some());
    }

    #[test]
    fn what_is_said_about_the_membership_overtakes_nothing_of_the_same_peer() {
        let mut held = Held::default();
        let pinned = |page: PageId| page.0 == 5;
        assert!(held.pass(about(1, 5), pinned).is_none());
        assert!(held.pass(suspicion(2), pinned).is_some() && held.pass(suspicion(1), pinned).is_none());
        assert!(held.pass(about(1, 6), pinned).is_none() && held.pass(about(2, 6), pinned).is_none());
        assert!(held.pass(about(2, 7), pinned).is_some());
        let ready = held.ready(PINNED, |_| false);
        let pages =
            ready.iter().map(|incoming| incoming.frame.message.pages().next().map(|(_, page)| page.0));
        assert_eq!(pages.collect::<Vec<_>>(), [Some(5), None, Some(6), Some(6)]);
    }
}
