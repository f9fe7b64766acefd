//! What a node knows of one page.
//!
//! ```text
//!              read granted                      write granted, or the owner's
//!            ┌─────────────────▶  Shared  ─────── invalidations acknowledged ──┐
//!            │                    │    ▲                                       ▼
//!  ───▶  Invalid ◀─ invalidated ──┘    └────────── a read was served ────── Modified
//!            ▲                                                                 │
//!            │◀──────────────────── a write was served ────────────────────────┘
//!            └──────── write granted ────────────────────────────────────▶ Modified
//! ```
//!
//! One node is the owner: the one in Modified, or one in Shared, which keeps the copyset.
//! The owner of a page that nobody has touched is its manager; there the page is not mapped yet.

use std::collections::VecDeque;
use vnuma_abi_dsm_wire::{Access, NodeId, NodeSet, Purpose, Request, Version};

/// The three states of GiantVM's section 3.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// This node may read and write, and no other node has a copy.
    Modified,
    /// This node may read.
    Shared,
    /// This node must ask.
    Invalid,
}

/// What the owner waits for until all copies are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Then {
    /// To write itself.
    Upgrade,
    /// To hand the page over.
    Transfer(Request),
}

/// Invalidations under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Invalidating {
    pub then: Then,
    /// Who has not acknowledged.
    pub waiting: NodeSet,
}

/// What waits, kept apart because few pages have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Waiting {
    /// Requests of others that cannot be answered or forwarded yet.
    pub queue: VecDeque<Request>,
    /// The owner's invalidations.
    pub invalidating: Option<Invalidating>,
    /// Who has dropped a copy for this node's write before the page itself came.
    pub dropped: NodeSet,
    /// An invalidation that came during the hold time, or before the copy itself: its sender and the next owner.
    pub deferred: Option<(NodeId, NodeId)>,
    /// A timer was set for the end of the hold time.
    pub timer: bool,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        let nobody = self.queue.is_empty() && self.dropped.is_empty();
        nobody && self.invalidating.is_none() && self.deferred.is_none() && !self.timer
    }
}

/// One page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Page {
    /// What local threads may do.
    pub access: Access,
    pub owner: bool,
    /// Who has a copy besides the owner. Empty unless this node is the owner.
    pub copyset: NodeSet,
    /// The owner, as far as this node knows; another node unless this one is the owner.
    pub hint: NodeId,
    /// Content of the local memory, also if it is not mapped. While the page is writable, the content that is being made.
    pub version: Version,
    /// Content of the twin; 0 if none.
    pub twin: Version,
    /// What this node asked for.
    pub wanted: Option<Purpose>,
    /// What local threads wait for.
    pub fault: Access,
    /// Not taken away before, in nanoseconds.
    pub hold_until: u64,
    /// How sure the owners are that the page is migratory: 0 to [`MIGRATORY_MOST`](vnuma_abi_dsm_wire::MIGRATORY_MOST).
    pub migratory: u8,
    /// Of the owner: those before it that are told of the next one, the last of them first.
    pub before: [Option<NodeId>; 2],
    /// The contents are lost.
    pub poisoned: bool,
    waiting: Option<Box<Waiting>>,
}

/// A page counts as migratory from here on.
pub(crate) const MIGRATORY: u8 = 2;

impl Page {
    /// A page that this node knows nothing of. If nobody has touched it, it has content 1 everywhere and its manager owns it.
    ///
    /// `first` was its manager when all nodes were members. If that was lost, its content is lost, too: a copy that a member has would
    /// be known to the present manager.
    pub fn fresh(own: NodeId, manager: NodeId, first: NodeId) -> Self {
        Self {
            access: Access::None,
            owner: own == manager && first == manager,
            copyset: NodeSet::EMPTY,
            hint: manager,
            version: 1,
            twin: 0,
            wanted: None,
            fault: Access::None,
            hold_until: 0,
            migratory: 0,
            before: [None; 2],
            poisoned: own == manager && first != manager,
            waiting: None,
        }
    }

    pub fn state(&self) -> State {
        match self.access {
            Access::Write => State::Modified,
            Access::Read => State::Shared,
            Access::None => State::Invalid,
        }
    }

    /// This node is the owner or the next one: requests end here.
    pub fn is_root(&self) -> bool {
        self.owner || self.wanted == Some(Purpose::Write)
    }

    pub fn waiting(&self) -> Option<&Waiting> {
        self.waiting.as_deref()
    }

    pub fn waiting_mut(&mut self) -> &mut Waiting {
        self.waiting.get_or_insert_default()
    }

    pub fn invalidating(&self) -> Option<&Invalidating> {
        self.waiting.as_ref().and_then(|waiting| waiting.invalidating.as_ref())
    }

    pub fn deferred(&self) -> Option<(NodeId, NodeId)> {
        self.waiting.as_ref().and_then(|waiting| waiting.deferred)
    }

    /// Who has dropped a copy before the page came. They are forgotten.
    pub fn take_dropped(&mut self) -> NodeSet {
        self.waiting.as_mut().map_or(NodeSet::EMPTY, |waiting| std::mem::take(&mut waiting.dropped))
    }

    pub fn next_request(&mut self) -> Option<Request> {
        self.waiting.as_mut().and_then(|waiting| waiting.queue.pop_front())
    }

    /// A new membership: what was under way is forgotten, and `manager` knows the owner.
    pub fn reset(&mut self, manager: NodeId) {
        self.owner = false;
        self.copyset = NodeSet::EMPTY;
        self.hint = manager;
        self.wanted = None;
        self.hold_until = 0;
        self.before = [None; 2];
        self.waiting = None;
    }

    /// Forgets an empty box, so that equal pages compare equal.
    pub fn tidy(&mut self) {
        if self.waiting.as_ref().is_some_and(|waiting| waiting.is_empty()) {
            self.waiting = None;
        }
    }
}
