//! VMs behind one trait: which there are, what they consist of, and their topology channel.

mod error;
mod qmp;

pub use error::VmError;
pub use qmp::QmpBackend;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};
use vnuma_topology::VmDescription;

/// A source of VMs: a directory of QMP sockets today, libvirt another day.
pub trait VmBackend: Send {
    /// VMs that are there now. Cheap (names only), for a call after every change of
    /// [`watch_dirs`](Self::watch_dirs). What cannot be read is skipped with a log line.
    fn scan(&mut self) -> Vec<VmCandidate>;
    /// Connects to a VM. Its process is pinned down by a pidfd before anything is asked.
    fn connect(&self, candidate: &VmCandidate) -> Result<Box<dyn VmConnection>, VmError>;
    /// Directories whose changes (inotify) call for another [`scan`](Self::scan).
    fn watch_dirs(&self) -> Vec<PathBuf>;
}

/// A VM that can be connected to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmCandidate {
    /// Name of the socket's file, without its extension. The VM's own name, if it has
    /// one, is in its description.
    pub name: String,
    /// The QMP socket.
    pub socket: PathBuf,
}

/// Something that happened to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The VM shuts down; its process ends soon.
    Shutdown,
    /// vCPUs stand still (paused, or the end of a migration).
    Stopped,
    /// vCPUs run again.
    Resumed,
    /// vCPUs were plugged or unplugged: describe the VM again.
    VcpusChanged,
    /// The guest has let go of the topology channel's device.
    ChannelDetached,
    /// The other end closed the connection. Nothing follows.
    Disconnected,
}

/// A connection to a VM. Calls block, each for about a second at most.
pub trait VmConnection: Send {
    /// Asks for everything that is in a [`VmDescription`]. Thread ids are checked to belong
    /// to the VM's own process.
    fn describe(&mut self) -> Result<VmDescription, VmError>;
    /// Plugs the topology channel's device into a free PCIe root port. `server` is the VM's
    /// end of the ivshmem server's socket; the server's messages are expected to be in it
    /// already. On failure everything done so far is undone.
    fn attach_channel(&mut self, server: OwnedFd) -> Result<(), VmError>;
    /// Is the device plugged?
    fn channel_attached(&mut self) -> Result<bool, VmError>;
    /// Unplugs the device. The guest takes part in that: [`VmError::DetachPending`] says
    /// that it has not let go in time; [`VmEvent::ChannelDetached`] follows when it does.
    fn detach_channel(&mut self) -> Result<(), VmError>;
    /// Waits for the next event. `None` after `timeout`.
    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError>;
    /// The VM's process.
    fn pid(&self) -> i32;
    /// The VM's process, immune to the reuse of its number.
    fn pidfd(&self) -> BorrowedFd<'_>;
    /// The connection's socket: readable when [`poll_event`](Self::poll_event) may have something.
    fn event_fd(&self) -> BorrowedFd<'_>;
}
