//! What nodes send to each other. The contents of pages travel beside these messages: the shell fills them in and applies them, the
//! core only names them.

use crate::ids::{Access, Epoch, NodeId, NodeSet, PageId, Version};
pub use vnuma_abi_dsm_wire::{Payload, Purpose as Kind};

/// A message with the epoch in which it was sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The sender's epoch.
    pub epoch: Epoch,
    /// What it says.
    pub message: Message,
}

/// Message-1 and Message-1-non-owner (GiantVM, section 3.3.1): forwarded unchanged until it finds the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The page.
    pub page: PageId,
    /// Who asked first.
    pub requester: NodeId,
    /// What for.
    pub kind: Kind,
    /// The content that the requester's memory has, also if it is not mapped. 0 if none.
    pub have: Version,
}

/// Message-2-read and Message-2-write (GiantVM, section 3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The page.
    pub page: PageId,
    /// Who asked.
    pub to: NodeId,
    /// What the requester may do.
    pub access: Access,
    /// The requester is the owner from now on. Always with [`Access::Write`].
    pub owner: bool,
    /// The owner that sent it.
    pub from: NodeId,
    /// The content.
    pub version: Version,
    /// What travels beside the message.
    pub payload: Payload,
    /// How sure the owners are that the page is migratory.
    pub migratory: u8,
    /// For a new owner: the owner before the one that sent it, unless the page goes back and forth between two nodes.
    pub before: Option<NodeId>,
    /// For a new owner: who still has a copy. They were told to drop it, and say to the new owner that they have. It writes then.
    pub copies: NodeSet,
}

/// One invalidation or its acknowledgement, in [`Message::Notices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// Drop the copy of the page; `owner` is about to write it. With direct acknowledgements `owner` is told when that is done, else
    /// the sender.
    Invalidate {
        /// The page.
        page: PageId,
        /// The next owner.
        owner: NodeId,
    },
    /// The copy was dropped.
    Invalidated {
        /// The page.
        page: PageId,
    },
}

/// What a node tells another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a page.
    Request(Request),
    /// Answers a request.
    Grant(Grant),
    /// A request for prefetch is not answered with the page.
    Refuse {
        /// The page.
        page: PageId,
    },
    /// An invalidation or an acknowledgement.
    Notice(Notice),
    /// Several of them.
    Notices(Vec<Notice>),
    /// A page has a new owner. Of a migratory page that was handed over at a read, the new owner tells the manager. The old
    /// owner tells those before it.
    OwnerIs {
        /// The page.
        page: PageId,
        /// The owner.
        owner: NodeId,
        /// The content that the owner got.
        version: Version,
    },
    /// The only copy of the page was on a node that was lost.
    Lost {
        /// The page.
        page: PageId,
    },
    /// About the membership; valid in any epoch.
    Membership(Membership),
    /// About a cut: see [`Cuts`](crate::Cuts), not for [`Node::step`](crate::Node::step).
    Cut(CutMessage),
}

/// About a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CutMessage {
    /// A page for its keeper. The whole content travels beside it.
    Page {
        /// The cut.
        number: u64,
        /// The page.
        page: PageId,
        /// The content.
        version: Version,
    },
    /// The sender has sent all its pages of the cut.
    End {
        /// The cut.
        number: u64,
    },
    /// The sender has all pages of the cut that it is to keep.
    Kept {
        /// The cut.
        number: u64,
    },
}

/// A membership: proposed, accepted or in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Its number.
    pub epoch: Epoch,
    /// Who is in it.
    pub members: NodeSet,
}

/// A page that a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holding {
    /// The page.
    pub page: PageId,
    /// As the owner.
    pub owner: bool,
}

/// A page whose owner is told who else has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The page.
    pub page: PageId,
    /// Who has a copy besides the owner.
    pub copyset: NodeSet,
}

/// How the members agree on the next membership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Membership {
    /// The sender suspects a node. Goes to the lowest node that it does not suspect.
    Suspect {
        /// The node.
        node: NodeId,
    },
    /// The sender has accepted the view. In round 1 it makes no new messages of its epoch from now on, in round 2 it has
    /// passed on what it relays.
    Accept {
        /// The view.
        view: View,
        /// 1 or 2.
        round: u8,
    },
    /// The sender has accepted another view, which this one contradicts.
    Conflict {
        /// What it has accepted.
        view: View,
    },
    /// Pages that the sender has, to their manager in the view.
    Holdings {
        /// The view.
        epoch: Epoch,
        /// Some of them.
        pages: Vec<Holding>,
        /// There are no more.
        last: bool,
    },
    /// Pages that the receiver owns in the view.
    Directory {
        /// The view.
        epoch: Epoch,
        /// Some of them.
        pages: Vec<Entry>,
        /// There are no more.
        last: bool,
    },
    /// The receiver is no member any more.
    Fenced {
        /// The view.
        view: View,
    },
}
