//! Frames about pages that device code has pinned: they wait, and nothing else does.
//!
//! The order of the frames about one page stays, and so does the order of a peer's frames before and after one about the
//! membership. Second copies for a cut change no page, and so pass all others.

use crate::lanes::Incoming;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};
use vnuma_coherence::{Message, NodeId, PageId};

/// Frames that wait, each for one thing at a time: a peer decides how many there are, and a look at those that nothing has happened
/// to would take the longer the more it sends.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// In the order in which they came, each with when.
    frames: BTreeMap<u64, (Instant, Incoming)>,
    /// The number of the next one.
    next: u64,
    /// Those about a page.
    pages: BTreeMap<PageId, BTreeSet<u64>>,
    /// Those of a peer.
    peers: BTreeMap<NodeId, OfPeer>,
    /// What they wait for.
    waits: BTreeMap<Obstacle, Vec<u64>>,
}

#[derive(Debug, Default)]
struct OfPeer {
    all: BTreeSet<u64>,
    membership: BTreeSet<u64>,
}

/// What a frame waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Obstacle {
    /// Device code has this page.
    Pin(PageId),
    /// This frame is before it.
    Frame(u64),
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
        self.peers.get(&from).is_some_and(|peer| peer.all.len() >= MOST)
    }

    /// Gives a frame back if it need not wait.
    pub fn pass(&mut self, incoming: Incoming, pinned: impl Fn(PageId) -> bool) -> Option<Incoming> {
        let Some(obstacle) = self.obstacle(self.next, &incoming, pinned) else { return Some(incoming) };
        self.hold(Instant::now(), incoming, obstacle);
        None
    }

    fn hold(&mut self, since: Instant, incoming: Incoming, obstacle: Obstacle) {
        let number = self.next;
        self.next += 1;
        for (_, page) in incoming.frame.message.pages() {
            self.pages.entry(page).or_default().insert(number);
        }
        let peer = self.peers.entry(incoming.from).or_default();
        peer.all.insert(number);
        if is_membership(&incoming) {
            peer.membership.insert(number);
        }
        self.waits.entry(obstacle).or_default().push(number);
        self.frames.insert(number, (since, incoming));
    }

    /// What a frame with this number has to wait for first. What is sent for a cut never waits: a keeper puts it beside the region. A
    /// page that waited would come behind the end of its cut, and be missing in it.
    fn obstacle(
        &self,
        number: u64,
        incoming: &Incoming,
        pinned: impl Fn(PageId) -> bool,
    ) -> Option<Obstacle> {
        if matches!(incoming.frame.message, Message::Cut(_)) {
            return None;
        }
        let before =
            |frames: &BTreeSet<u64>| frames.range(..number).next_back().map(|it| Obstacle::Frame(*it));
        let peer = self.peers.get(&incoming.from);
        let ordered =
            peer.and_then(|peer| before(if is_membership(incoming) { &peer.all } else { &peer.membership }));
        let of_page = |page: PageId| {
            let same = self.pages.get(&page).and_then(before);
            same.or_else(|| pinned(page).then_some(Obstacle::Pin(page)))
        };
        ordered.or_else(|| incoming.frame.message.pages().find_map(|(_, page)| of_page(page)))
    }

    /// Takes out what need not wait any more, or has waited for as long as device code may keep a page: for `limit`.
    pub fn ready(&mut self, limit: Duration, pinned: impl Fn(PageId) -> bool) -> Vec<Incoming> {
        let late = self.frames.iter().take_while(|(_, (since, _))| since.elapsed() >= limit);
        let late: BTreeSet<u64> = late.map(|(number, _)| *number).collect();
        let mut looked_at = late.clone();
        let first = Obstacle::Pin(PageId(0))..Obstacle::Frame(0);
        let gone: Vec<Obstacle> = self.waits.range(first).map(|(obstacle, _)| *obstacle).collect();
        for obstacle in gone.into_iter().filter(|it| matches!(it, Obstacle::Pin(page) if !pinned(*page))) {
            looked_at.extend(self.waits.remove(&obstacle).unwrap_or_default());
        }
        let mut ready = Vec::new();
        // Those that wait for a frame came after it, so that the order is that in which all came.
        while let Some(number) = looked_at.pop_first() {
            let Some((_, incoming)) = self.frames.get(&number) else { continue };
            let obstacle = self.obstacle(number, incoming, &pinned);
            match obstacle.filter(|_| !late.contains(&number)) {
                Some(obstacle) => self.waits.entry(obstacle).or_default().push(number),
                None => {
                    ready.extend(self.take_out(number));
                    looked_at.extend(self.waits.remove(&Obstacle::Frame(number)).unwrap_or_default());
                }
            }
        }
        ready
    }

    fn take_out(&mut self, number: u64) -> Option<Incoming> {
        let (_, incoming) = self.frames.remove(&number)?;
        for (_, page) in incoming.frame.message.pages() {
            if let Some(frames) = self.pages.get_mut(&page) {
                frames.remove(&number);
                if frames.is_empty() {
                    self.pages.remove(&page);
                }
            }
        }
        if let Some(peer) = self.peers.get_mut(&incoming.from) {
            peer.all.remove(&number);
            peer.membership.remove(&number);
        }
        Some(incoming)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Contents;
    use proptest::prelude::*;
    use std::cell::Cell;
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
        held.hold(since(PINNED), about(1, 5), Obstacle::Pin(PageId(5)));
        held.hold(since(PINNED / 2), about(2, 6), Obstacle::Pin(PageId(6)));
        let ready = held.ready(PINNED, |_| true);
        assert_eq!(ready.iter().map(|incoming| incoming.from.0).collect::<Vec<_>>(), [1]);
        assert_eq!(held.frames.len(), 1);
    }

    #[test]
    fn a_peer_cannot_make_a_node_keep_any_number_of_frames() {
        let mut held = Held::default();
        let fill = |held: &mut Held, count| {
            assert!((0..count).all(|_| held.pass(about(1, 5), |_| true).is_none()));
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

    /// A peer chooses how many frames wait. None is looked at but those that wait for a page itself.
    #[test]
    fn a_look_costs_as_much_as_pages_are_waited_for() {
        let mut held = Held::default();
        let looks = Cell::new(0);
        let pinned = |page: PageId| {
            looks.set(looks.get() + 1);
            page.0 < 2
        };
        assert!(held.pass(about(1, 0), pinned).is_none() && held.pass(suspicion(1), pinned).is_none());
        for number in 0..4000 {
            // Behind the pinned page, the frame about the membership, and each other.
            let (from, page) = [(1, 1 + number), (2, 0), (3, 1)][number as usize % 3];
            assert!(held.pass(about(from, page), pinned).is_none());
        }
        looks.set(0);
        assert!((0..100).all(|_| held.ready(PINNED, pinned).is_empty()));
        assert!(looks.get() <= 100 * 2, "{} looks at pages", looks.get());
        assert_eq!(held.ready(PINNED, |_| false).len(), 4002);
        assert!(held.is_empty() && held.pages.is_empty() && held.waits.is_empty());
    }

    /// The same as if each frame were compared with all before it.
    #[derive(Default)]
    struct Compared(Vec<(u32, Incoming)>);

    impl Compared {
        fn must_wait(&self, incoming: &Incoming, pinned: &dyn Fn(PageId) -> bool) -> bool {
            let membership = is_membership(incoming);
            let behind = |held: &Incoming| {
                let ordered = held.from == incoming.from && (membership || is_membership(held));
                let same = |page| held.frame.message.pages().any(|(_, other)| other == page);
                ordered || incoming.frame.message.pages().any(|(_, page)| same(page))
            };
            incoming.frame.message.pages().any(|(_, page)| pinned(page))
                || self.0.iter().any(|(_, held)| behind(held))
        }

        fn ready(&mut self, pinned: &dyn Fn(PageId) -> bool) -> Vec<u32> {
            let mut ready = Vec::new();
            for (number, incoming) in std::mem::take(&mut self.0) {
                if self.must_wait(&incoming, pinned) {
                    self.0.push((number, incoming));
                } else {
                    ready.push(number);
                }
            }
            ready
        }
    }

    proptest! {
        #[test]
        fn frames_are_released_as_if_each_were_compared_with_all_before_it(
            steps in proptest::collection::vec((0_u8..3, 0_u64..5, 0_u8..8, 0_u32..32), 1..80),
        ) {
            let (mut held, mut compared) = (Held::default(), Compared::default());
            for (number, (from, page, kind, pins)) in steps.into_iter().enumerate() {
                let number = number as u32;
                let pinned = |page: PageId| pins >> page.0 & 1 == 1;
                let make = || match kind {
                    0 => suspicion(from),
                    _ => about(from, page),
                };
                // The epoch tells frames from each other.
                let mut incoming = make();
                incoming.frame.epoch = Epoch(number.into());
                let waits = compared.must_wait(&incoming, &pinned);
                prop_assert_eq!(held.pass(incoming, pinned).is_none(), waits);
                if waits {
                    compared.0.push((number, make()));
                }
                let ready: Vec<u32> =
                    held.ready(PINNED, pinned).iter().map(|incoming| incoming.frame.epoch.0 as u32).collect();
                prop_assert_eq!(ready, compared.ready(&pinned));
            }
        }
    }
}
