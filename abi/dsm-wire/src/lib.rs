//! What the hosts of a distributed shared memory send to each other.
//!
//! A connection carries frames in both directions. Numbers are little-endian, without padding:
//!
//! ```text
//! offset  bytes  field of the header
//!      0      4  length: bytes of the body, at most the limit of the kind
//!      4      1  kind
//!      5      3  reserved: 0
//!      8      8  epoch: the sender's membership
//!     16      8  sequence: 0 for the first frame of a direction, one more for each frame
//! ```
//!
//! The first frame of each direction is a [`Hello`]. It has the same layout in all versions, and says which versions the
//! sender speaks. Both sides speak the highest version that both know ([`Hello::agree`]); where there is none, or the two
//! do not belong together, the answer is a [`Refusal`] and the end of the connection.
//!
//! # Reading
//!
//! Everything here comes from another host. Decoding takes any bytes, reads nothing outside of them, allocates no more
//! than a few times their length, and refuses with an error that names field and value. Lengths are known to be within their limits
//! from the header, before a body is read. What is decoded encodes to the same bytes.
//!
//! # How to change it
//!
//! 1. A layout of a version that was released does not change. A new layout is a new version: raise [`VERSION_MAX`], and
//!    have encoder and decoder take the agreed version.
//! 2. Raise [`VERSION_MIN`] when support of a version ends.
//! 3. The bytes of each version are written down in `tests/bytes.rs`: add to them, do not edit them.

#![forbid(unsafe_code)]

mod delta;
mod error;
mod frame;
mod hello;
mod ids;
mod membership;
mod message;
mod reader;

pub use delta::{DELTA_LIMIT, Delta, RUN_LIMIT, diff};
pub use error::WireError;
pub use frame::{BODY_LIMIT, Body, HEADER, Header, Kind, OPAQUE_LIMIT, encode};
pub use hello::{HELLO, Hello, MAGIC, Refusal};
pub use ids::{Epoch, NODE_LIMIT, NodeId, NodeSet, PageId, VERSION_MOST, Version};
pub use membership::{EPOCH_MOST, Entry, Holding, Membership, PAGES_LIMIT, View};
pub use message::{
    Access, Contents, Cut, Grant, MIGRATORY_MOST, Message, NOTICE_LIMIT, Notice, Payload, Purpose, Request,
};

/// The oldest version that this crate speaks.
pub const VERSION_MIN: u16 = 1;
/// The newest version that this crate speaks.
pub const VERSION_MAX: u16 = 1;

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;
