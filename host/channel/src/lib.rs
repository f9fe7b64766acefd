//! The host's end of a VM's topology channel.
//!
//! - [`Content`] is what can be published, checked against the limits of the layout.
//! - [`publication`](publish::publication) turns it into the list of stores, in the order that `topology_channel.h`
//!   demands. Being a list, it can be stopped after each store by a test.
//! - [`Region`] is the shared memory, which the guest can write.
//! - [`Channel`] adds the ivshmem server's side: the messages for QEMU, written in advance, so that QEMU
//!   never waits for this process, the guest's interrupt and its acknowledgements.
//! - [`GuestStatus`] is what the guest says in its area of the memory, by single loads. It decides nothing.
//! - [`Identity`] finds the parts of a channel again in the hypervisor when the host's end has died.

mod channel;
mod content;
mod doorbell;
mod ivshmem;
pub mod publish;
mod region;
mod status;
mod takeover;
mod wakeups;

pub use channel::{Channel, ChannelError, MAX_OUTSTANDING};
pub use content::{Content, ContentError};
pub use publish::{Generations, Step};
pub use region::Region;
pub use status::{DriverMode, DriverVersion, GuestStatus};
pub use takeover::{Identity, parse_eventfd_id};
pub use wakeups::{PAUSE, WAKEUPS_PER_PUBLICATION};
