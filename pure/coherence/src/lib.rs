//! The coherence protocol of the user-space DSM, as a state machine.
//!
//! [`Node::step`] takes one [`Event`] and returns [`Command`]s in the order in which they must be carried out.
//! It has no I/O, no threads and no clock, and it never sees the contents of a page.
//!
//! The consistency is sequential: a page has one writer or any number of readers at any instant.
//! Mode `ivy` ([`Options::ivy`]) is the protocol of *GiantVM* (section 3.3.1), itself based on Ivy.
//! [`Options::default`] goes beyond it; each difference is one switch.
#![forbid(unsafe_code)]

mod command;
mod cut;
pub mod delta;
mod ids;
mod managers;
mod message;
mod node;
mod options;
mod page;
mod table;

pub use command::{Command, Event, Protest, StopReason};
pub use cut::{CUTS_AHEAD, CutCommand, Cuts, Kept, keepers, restorer};
pub use ids::{Access, Epoch, NodeId, NodeSet, PageId, VERSION_MOST, Version};
pub use managers::{Managers, ManagersError};
pub use message::{
    CutMessage, Entry, Frame, Grant, Holding, Kind, Membership, Message, Notice, Payload, Request, View,
};
pub use node::Node;
pub use options::Options;
pub use page::State;
