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
mod managers;
mod node;
mod options;
mod page;
mod table;

pub use command::{Command, Event, Frame, Protest, StopReason};
pub use cut::{CUTS_AHEAD, CutCommand, Cuts, Kept, keepers, restorer};
pub use managers::{Managers, ManagersError};
pub use node::Node;
pub use options::Options;
pub use page::State;
pub use vnuma_abi_dsm_wire::{
    Access, Cut, Entry, Epoch, Grant, Holding, Membership, Message, NodeId, NodeSet, Notice, PageId, Payload,
    Purpose, Request, VERSION_MOST, Version, View,
};
