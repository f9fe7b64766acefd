//! Models of the other end of a topology channel, for tests that hold a host to its promises.
//!
//! - [`read`] is the reader of `topology_channel.h` over anything that loads words. The shipped reader is
//!   `guest/driver/channel.c`.
//! - [`GuestEnd`] is what QEMU and the guest's driver have of a channel.

mod guest;
mod reader;

pub use guest::GuestEnd;
pub use reader::{Other, ReadError, SUPPORTED, Topology, read, read_as};

/// Bytes of a load.
pub const WORD: usize = 8;
