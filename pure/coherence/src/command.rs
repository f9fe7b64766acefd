//! What happens to a node, and what it wants done.

use vnuma_abi_dsm_wire::{Access, Epoch, Message, NodeId, NodeSet, PageId, Payload};

/// A message with the epoch in which it was sent. The contents of pages travel beside it: the shell fills them in and applies them, the
/// core only names them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The sender's epoch.
    pub epoch: Epoch,
    /// What it says.
    pub message: Message,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A local thread faulted on a page and waits. Repeated faults of one page are harmless.
    Fault {
        /// The page.
        page: PageId,
        /// It wants to write.
        write: bool,
    },
    /// A frame came from a peer. Frames of one peer come in the order in which they were sent.
    Receive {
        /// Who sent it, as authenticated by the transport.
        from: NodeId,
        /// What it sent.
        frame: Frame,
    },
    /// The time of a [`Command::SetTimer`] has come. One that comes late, early or twice is harmless.
    Timer {
        /// The page.
        page: PageId,
    },
    /// A thread that waited for this page has used it: the minimal hold time of this page ends.
    Progress {
        /// The page.
        page: PageId,
    },
    /// The shell has heard nothing from a node for too long. It may be wrong.
    Suspect {
        /// The node.
        node: NodeId,
    },
    /// All events that were ready have been given: what was held back for a shared message goes out.
    Flush,
}

/// What is to be done, in order.
///
/// The shell has the region mapped twice: local threads use one mapping, the shell reads and writes through the other
/// (the alias). "Map" and "unmap" mean the mapping of the threads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Send a message without contents.
    Send {
        /// To whom.
        to: NodeId,
        /// What.
        frame: Frame,
    },
    /// Change the access of local threads to `access` first, then read the page through the alias and send it, as the
    /// [`Grant`](crate::Grant)'s payload says.
    SendPage {
        /// To whom.
        to: NodeId,
        /// The message; a [`Message::Grant`].
        frame: Frame,
        /// The page.
        page: PageId,
        /// What local threads may do from now on: [`Access::Read`] or [`Access::None`].
        access: Access,
    },
    /// Send the message that was just received, with the contents that came beside it.
    Relay {
        /// To whom.
        to: NodeId,
        /// The message.
        frame: Frame,
    },
    /// Write the received contents through the alias, keep a twin if asked for, then map the page.
    Install {
        /// The page.
        page: PageId,
        /// From now on. With [`Access::None`] the page was not mapped, and stays so; it is mapped by [`Command::SetAccess`] later.
        access: Access,
        /// What came: [`Payload::Page`] or [`Payload::Delta`].
        payload: Payload,
        /// Keep a second copy of these contents (the twin), from which a later difference starts. It replaces the last.
        twin: bool,
    },
    /// Keep a twin if asked for, then change what local threads may do. The contents are in memory.
    SetAccess {
        /// The page.
        page: PageId,
        /// From now on.
        access: Access,
        /// As in [`Command::Install`]; only with [`Access::Write`].
        twin: bool,
    },
    /// Wake the threads that wait for the page. Those that want more fault again.
    Wake {
        /// The page.
        page: PageId,
    },
    /// Give [`Event::Timer`] at this time.
    SetTimer {
        /// The page.
        page: PageId,
        /// Nanoseconds, on the clock of `now`.
        at_ns: u64,
    },
    /// The contents of the page are lost: local accesses must fail with an error and not wait.
    Poison {
        /// The page.
        page: PageId,
    },
    /// This node is no member any more: local threads must stop, and nothing more may be sent. All events are ignored.
    Stop {
        /// Why.
        reason: StopReason,
    },
    /// A membership is in force. The shell ends its connections to other nodes.
    Members {
        /// Who is in it.
        members: NodeSet,
    },
    /// A peer sent what no correct peer sends. It was ignored; the shell should end the connection.
    Protest {
        /// Who.
        peer: NodeId,
        /// Why.
        reason: Protest,
    },
}

/// Why a node stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The others have gone on without it.
    Fenced,
    /// Those that it can reach are not the majority of the configured nodes.
    Minority,
}

/// Why a message was ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protest {
    /// The page is beyond the region.
    NoSuchPage,
    /// The message names a node that is no member, or the sender is none.
    NoMember,
    /// A grant that was not asked for.
    UnexpectedGrant,
    /// An invalidation of a page by a node that does not own it.
    UnexpectedInvalidation,
    /// An acknowledgement of an invalidation that was not sent.
    UnexpectedAcknowledgement,
    /// An answer to a request that was not made.
    UnexpectedAnswer,
    /// A second request for a page before the first was answered.
    UnexpectedRequest,
    /// A membership whose number is far ahead of all others.
    FarEpoch,
    /// A page in a list of pages that does not belong there.
    UnexpectedPage,
    /// More frames of the next membership than a correct peer can have sent.
    TooMuch,
}

impl Command {
    /// The message of a command that sends one, and its receiver.
    pub fn sends(&self) -> Option<(NodeId, &Message)> {
        match self {
            Self::Send { to, frame } | Self::SendPage { to, frame, .. } | Self::Relay { to, frame } => {
                Some((*to, &frame.message))
            }
            _ => None,
        }
    }
}
