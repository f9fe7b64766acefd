//! Tell: the host's end of a VM's topology channel.
//!
//! - [`Content`] is what can be told, checked against the limits of the layout.
//! - [`publication`](publish::publication) turns it into the list of stores, in the order that `topology_channel.h`
//!   demands. Being a list, it can be stopped after each store by a test.
//! - [`Region`] is the shared memory. The guest can write it, so nothing that is read back is believed.
//! - [`Channel`] adds the ivshmem server's side: the messages for QEMU, written in advance, so that QEMU
//!   never waits for this process, the guest's interrupt and its acknowledgements.
//! - [`Identity`] finds the parts of a channel again in the hypervisor when the host's end has died.
//! - [`reader`] is the reader of the header as a model, and [`guest`] the other end of a channel, for tests.

mod channel;
mod content;
mod doorbell;
pub mod guest;
mod ivshmem;
pub mod publish;
pub mod reader;
mod region;
mod takeover;

pub use channel::{Acknowledgement, Channel, ChannelError};
pub use content::{Content, ContentError};
pub use publish::{Generations, Step};
pub use region::Region;
pub use takeover::{Identity, parse_eventfd_id};
