//! The host's end of a VM's topology channel.
//!
//! - [`Content`] is what can be published, checked against the limits of the layout.
//! - [`publication`](layout::publication) turns it into the list of stores, in the order that `topology_channel.h`
//!   demands. Being a list, it can be stopped after each store by a test.
//! - [`Region`] is the shared memory, which the guest can write.
//! - [`Channel`] has the host's end of a region, and a [`Transport`]: the guest's interrupt and its signals.
//! - ivshmem is the one transport so far: its server's messages for QEMU, written in advance, so that QEMU
//!   never waits for this process, and eventfds.
//! - [`GuestStatus`] is what the guest says in its area of the memory, by single loads. It decides nothing.
//! - [`Plug`] is what a hypervisor is handed to plug the channel's device, by whatever transport.
//! - [`Identity`] finds the parts of a channel again in the hypervisor when the host's end has died.

mod channel;
mod content;
mod doorbell;
mod error;
mod ivshmem;
pub mod layout;
mod status;
mod takeover;
mod transport;
mod wakeups;

pub use channel::{Channel, MAX_OUTSTANDING};
pub use content::{Content, ContentError};
pub use error::ChannelError;
pub use layout::{Generations, Region, Step};
pub use status::GuestStatus;
pub use takeover::{Files, parse_eventfd_id};
pub use transport::{Identity, Plug, Transport};
pub use wakeups::{PAUSE, WAKEUPS_PER_PUBLICATION};
