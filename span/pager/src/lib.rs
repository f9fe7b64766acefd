//! Page faults of a shared region, served in user space.
//!
//! One file in memory is mapped twice. The guest uses one mapping, which is registered with userfaultfd: what a page does not
//! allow becomes a [`Fault`]. The pager uses the other one, the alias, which never faults towards user space. A page
//! changes hands by [`Region::install`], [`Region::upgrade`], [`Region::downgrade`] and [`Region::invalidate`].
//!
//! The pages are divided among shards. Each has a descriptor of its own, so that faults of different shards share neither a
//! queue nor a thread.
//!
//! It ends there: who owns a page, and where its content comes from, is the protocol's business.

mod awaited;
mod error;
mod fault;
mod follow;
mod memory;
mod region;
mod state;
mod uffd;

pub use error::PagerError;
pub use fault::{Cause, Fault};
pub use follow::{Follower, Placement};
pub use region::{Features, Options, Page, Pin, Region};
pub use state::{Access, PageError, PageState};

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;
