//! What a channel needs of a transport, and which transports there are. Who makes, plugs or records a channel need not know which.

use crate::{layout::Region, takeover::Files};
use serde::{Deserialize, Serialize};
use std::{
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
};

/// Signals between the host's end of a channel and its guest. How the guest gets the region is the transport's affair, too.
/// No call blocks, whatever the guest does.
pub trait Transport: Send + fmt::Debug {
    /// Raises the guest's interrupt.
    fn raise(&self) -> io::Result<()>;
    /// Readable when the guest has signalled, for as many signals as a guest may send.
    fn signalled(&self) -> BorrowedFd<'_>;
    /// A publication follows, for which the guest may signal again.
    fn expect_signals(&mut self) -> io::Result<()>;
    /// Takes the signals that made [`Self::signalled`] readable. What the guest changed before a signal that this did not take makes
    /// it readable again: look at it afterwards.
    fn take_signals(&mut self) -> io::Result<()>;
    /// What finds it again, with its region.
    fn identity(&self, region: &Region) -> io::Result<Identity>;
}

/// What a hypervisor is handed to plug a channel's device.
#[derive(Debug)]
pub enum Plug {
    /// The socket of an ivshmem server, with all of its messages.
    Ivshmem(OwnedFd),
}

/// What finds the parts of a channel again in its hypervisor when the host's end has died: files, by the one transport so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Identity(pub Files);
