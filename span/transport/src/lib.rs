//! Connections between the hosts of a distributed shared memory.
//!
//! Two nodes have several connections, the lanes. A page belongs to one lane, and frames of a lane arrive in order. A lane is
//! meant to be owned by one thread, the one that serves the faults of its pages; nothing here waits but [`wait`] and what
//! makes connections.
//!
//! A [`Pipe`] moves bytes: [`TcpPipe`], [`TlsPipe`], [`RdsPipe`], [`ShmPipe`]. A [`Lane`] makes frames of them, and ends the connection
//! when the peer breaks a rule: garbage, lengths beyond limits, frames out of order, frames that are never finished, nothing
//! taken, nothing said. The error names the peer and the field. Other lanes go on.

mod callers;
mod connect;
mod error;
mod lane;
mod listener;
mod pipe;
mod rds;
mod reserve;
mod shm;
mod tls;
mod wait;

pub use connect::{Lanes, accept, dial, mesh};
pub use error::{Fault, Peer, TransportError};
pub use lane::{Lane, Limits};
pub use listener::{Listener, Place};
pub use pipe::{Pipe, TcpPipe};
pub use rds::{RdsListener, RdsPipe};
pub use reserve::Reserved;
pub use shm::{RING, ShmPipe};
pub use tls::{Identity, TlsPipe, node_name};
pub use wait::{Ready, Waiter, wait};
