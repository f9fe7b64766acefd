//! Why a connection ended, or was not made.

use std::{fmt, io, time::Duration};
use vnuma_abi_dsm_wire::{Kind, Refusal, WireError};

/// The other end, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The node, once it is known.
    pub node: Option<u8>,
    /// Which of the connections to the node.
    pub lane: u16,
    /// Where it is.
    pub address: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(formatter, "node {node}, lane {} ({})", self.lane, self.address),
            None => write!(formatter, "{}", self.address),
        }
    }
}

/// What is wrong with a connection. Except for [`Fault::Full`] it is at its end.
#[derive(Debug, thiserror::Error)]
#[error("{peer}: {fault}")]
pub struct TransportError {
    /// The other end.
    pub peer: Peer,
    /// What is wrong. It is part of this error's text, and so not a source of its own.
    pub fault: Fault,
}

/// What is wrong with a connection.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The peer sent what is no frame.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A frame that is not the next one.
    #[error("header.sequence: {found}, expected {expected}")]
    Sequence {
        /// What came.
        found: u64,
        /// What was next.
        expected: u64,
    },
    /// The conversation did not begin with a hello, or there was a second one.
    #[error("header.kind: {kind:?} {place}")]
    Order {
        /// What came.
        kind: Kind,
        /// Where it does not belong.
        place: &'static str,
    },
    /// The peer does not want the connection.
    #[error("the peer refuses the connection: {0:?}")]
    Refused(Refusal),
    /// The peer is not who it says it is.
    #[error("hello.node: {0}")]
    Identity(String),
    /// The peer ended the connection, in the middle of a frame or between two.
    #[error("the connection was closed{}", if *.inside { " in the middle of a frame" } else { "" })]
    Closed {
        /// Was it in the middle of a frame?
        inside: bool,
    },
    /// The peer said that it ends the connection.
    #[error("the peer has left")]
    Bye,
    /// Nothing of what waits to be sent was taken for too long.
    #[error("stalled: {bytes} bytes wait to be sent, none was accepted for {limit:?}")]
    Stalled {
        /// What waits.
        bytes: usize,
        /// For how long none may be taken.
        limit: Duration,
    },
    /// A frame was begun, and not finished in time.
    #[error("slow: a frame is incomplete after {limit:?} ({have} bytes of it came)")]
    Slow {
        /// What came.
        have: usize,
        /// The time that a frame may take.
        limit: Duration,
    },
    /// Nothing came, not even the answer to a question.
    #[error("silent: nothing received for {limit:?}")]
    Silent {
        /// For how long nothing may come.
        limit: Duration,
    },
    /// More than may wait is waiting to be sent. The frame was not taken; the connection goes on.
    #[error("full: {bytes} bytes wait to be sent, at most {limit} are allowed")]
    Full {
        /// What waits.
        bytes: usize,
        /// What may wait.
        limit: usize,
    },
    /// The other process broke the memory that it shares.
    #[error("shared ring: {0}")]
    Ring(WireError),
    /// It was not made in time.
    #[error("no connection within {limit:?}")]
    Deadline {
        /// The time that it may take.
        limit: Duration,
    },
    /// There was no room for it any more.
    #[error("gave way to other callers before it had said who it is")]
    GaveWay,
    /// More of this party was not done, or not told.
    #[error("{times} {what}")]
    Limited {
        /// How often.
        times: u64,
        /// What.
        what: &'static str,
    },
    /// TLS or the system refused.
    #[error("{act}: {source}")]
    Io {
        /// What was tried.
        act: &'static str,
        /// What was said.
        source: io::Error,
    },
    /// It ended before, with another error.
    #[error("the connection has ended")]
    Ended,
}

impl Fault {
    pub(crate) fn io(act: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.downcast() {
            Ok(error) => Self::Ring(error),
            Err(source) => Self::Io { act, source },
        }
    }

    pub(crate) fn of(self, peer: &Peer) -> TransportError {
        TransportError { peer: peer.clone(), fault: self }
    }
}
