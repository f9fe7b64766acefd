//! What happens to a node besides faults.

use std::fmt;
use vnuma_coherence::{Protest, StopReason};

/// What a node tells the program around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// The connection to a peer ended with an error. The peer is suspected.
    PeerEnded {
        /// The peer.
        peer: u8,
        /// The error, which names the peer.
        reason: String,
    },
    /// A peer has left on purpose.
    PeerLeft {
        /// The peer.
        peer: u8,
    },
    /// A peer sent what no correct peer sends. Its connection is ended, and it is suspected.
    Protested {
        /// The peer.
        peer: u8,
        /// The field and what is wrong with it.
        field: String,
    },
    /// A membership is in force in all shards of this node.
    Members {
        /// Who is in it.
        members: Vec<u8>,
        /// Who was in the last one, and is not in this.
        lost: Vec<u8>,
    },
    /// The only copy of a page was on a node that was lost. Accesses end in SIGBUS.
    PageLost {
        /// The page.
        page: u64,
    },
    /// This node is no member any more. Accesses end in SIGBUS.
    Stopped {
        /// Why.
        reason: StopReason,
    },
    /// This node cannot go on. Accesses end in SIGBUS.
    Failed {
        /// Why.
        error: String,
    },
}

impl Happening {
    /// The same thing, as another shard saw it?
    pub(crate) fn repeats(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::PeerEnded { peer, .. }, Self::PeerEnded { peer: other, .. }) => peer == other,
            (Self::Stopped { .. }, Self::Stopped { .. }) => true,
            _ => self == other,
        }
    }
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The reason begins with the peer and its address.
            Self::PeerEnded { reason, .. } => write!(f, "{reason}"),
            Self::PeerLeft { peer } => write!(f, "node {peer} has left"),
            Self::Protested { peer, field } => write!(f, "node {peer} broke the protocol: {field}"),
            Self::Members { members, lost } => {
                write!(f, "nodes {lost:?} are lost; the members are {members:?}")
            }
            Self::PageLost { page } => {
                write!(f, "page {page} is lost: its only copy was on a node that was lost")
            }
            Self::Stopped { reason: StopReason::Fenced } => {
                write!(f, "stopped: the other nodes have gone on without this one")
            }
            Self::Stopped { reason: StopReason::Minority } => {
                write!(f, "stopped: this node reaches no majority of the nodes")
            }
            Self::Failed { error } => write!(f, "failed: {error}"),
        }
    }
}

/// What a protest means.
pub(crate) fn protest(reason: Protest) -> &'static str {
    match reason {
        Protest::NoSuchPage => "there is no such page",
        Protest::NoMember => "it names a node that is no member",
        Protest::UnexpectedGrant => "a grant that was not asked for",
        Protest::UnexpectedInvalidation => "an invalidation by a node that does not own the page",
        Protest::UnexpectedAcknowledgement => "an acknowledgement of an invalidation that was not sent",
        Protest::UnexpectedAnswer => "an answer to a request that was not made",
        Protest::UnexpectedRequest => "a second request before the first was answered",
        Protest::FarEpoch => "a membership whose number is far ahead",
        Protest::UnexpectedPage => "a list of pages with one that does not belong there",
        Protest::TooMuch => "more than a member can have to say before the next membership",
    }
}
