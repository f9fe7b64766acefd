//! ivshmem as the transport of a channel: the ivshmem server's side of an attached device, and eventfds in both directions.
//!
//! QEMU's ivshmem-doorbell (hw/misc/ivshmem.c, `ivshmem_recv_setup`; alike in 7.2 and 10.0)
//! reads messages of 8 little-endian bytes, each with at most one descriptor:
//!
//! | value            | descriptor | meaning                                     |
//! |------------------|------------|---------------------------------------------|
//! | 0                | none       | version of the protocol, first              |
//! | own peer number  | none       | second; 0, or QEMU refuses `master=on`      |
//! | -1               | memory     | the shared memory; ends the synchronous part |
//! | peer number      | eventfd    | next vector of that peer                    |
//!
//! QEMU waits in `device_add` for the first three with its big lock held. They lie in the socket
//! before QEMU gets its end, so it never waits.

use crate::{
    Channel, ChannelError, Identity, Plug, Transport,
    doorbell::Doorbells,
    error::failed,
    layout::{Generations, Region},
    takeover::{Files, Parts},
    wakeups::Wakeups,
};
use nix::sys::{
    eventfd::{EfdFlags, EventFd},
    socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair},
};
use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};
use vnuma_abi_topology_channel::ivshmem::{
    ACKNOWLEDGE_VECTOR, GUEST_PEER, HOST_PEER, PUBLISH_VECTOR, VECTORS,
};

const PROTOCOL_VERSION: i64 = 0;
const SHARED_MEMORY: i64 = -1;

/// The eventfds of a device.
#[derive(Debug)]
pub(crate) struct Ivshmem {
    doorbells: &'static Doorbells,
    guest_vectors: Vec<EventFd>,
    host_vectors: Vec<EventFd>,
    /// Of the vector by which the guest acknowledges.
    wakeups: Wakeups,
    /// Kept open: QEMU would see the server going away. It has where a channel was taken over, and does not mind.
    _server: Option<OwnedFd>,
}

impl Ivshmem {
    /// A transport for this region, and the socket that is to be handed to QEMU.
    pub(crate) fn serve(region: &Region) -> Result<(Self, OwnedFd), ChannelError> {
        let (guest_vectors, host_vectors) = (vectors()?, vectors()?);
        let host = host_vectors.iter().map(AsFd::as_fd);
        let guest = guest_vectors.iter().map(AsFd::as_fd);
        let (server, client) =
            serve(region.memory(), host, guest).map_err(failed("ivshmem server's messages"))?;
        Ok((Self::new(guest_vectors, host_vectors, Some(server))?, client))
    }

    fn new(
        guest_vectors: Vec<EventFd>,
        host_vectors: Vec<EventFd>,
        server: Option<OwnedFd>,
    ) -> Result<Self, ChannelError> {
        let wakeups = Wakeups::new(&host_vectors[ACKNOWLEDGE_VECTOR]);
        Ok(Self {
            doorbells: Doorbells::shared().map_err(failed("asynchronous reads"))?,
            wakeups: wakeups.map_err(failed("watching for acknowledgements"))?,
            guest_vectors,
            host_vectors,
            _server: server,
        })
    }

    /// Takes over the parts of a channel, as [`Channel::take_over`]. With its region comes the generation that this says is published,
    /// which is good for a hint only, as the guest could have written it.
    pub(crate) fn take_over(
        files: &Files,
        pidfd: BorrowedFd<'_>,
        process: &Path,
    ) -> Result<(Self, Region, u64), ChannelError> {
        let parts = files.take(pidfd, process).map_err(failed("taking it over from the hypervisor"))?;
        let Parts { memory, guest_vectors, host_vectors } = parts;
        let (region, published) = Region::take_over(memory).map_err(failed("shared memory"))?;
        Ok((Self::new(guest_vectors, host_vectors, None)?, region, published))
    }
}

impl Transport for Ivshmem {
    fn raise(&self) -> io::Result<()> {
        self.doorbells.signal(self.guest_vectors[PUBLISH_VECTOR].as_fd())
    }

    fn signalled(&self) -> BorrowedFd<'_> {
        self.wakeups.fd()
    }

    fn expect_signals(&mut self) -> io::Result<()> {
        self.wakeups.refill(&self.host_vectors[ACKNOWLEDGE_VECTOR])
    }

    fn take_signals(&mut self) -> io::Result<()> {
        self.wakeups.take(&self.host_vectors[ACKNOWLEDGE_VECTOR])
    }

    fn identity(&self, region: &Region) -> io::Result<Identity> {
        Files::of(region.memory(), &self.guest_vectors, &self.host_vectors).map(Identity)
    }
}

impl Channel {
    /// A new channel, and what is to be handed to the hypervisor. `epoch` is in the upper half of every generation: one that no other
    /// channel of the VM had.
    pub fn create(epoch: u32) -> Result<(Self, Plug), ChannelError> {
        let region = Region::new()?;
        let (transport, socket) = Ivshmem::serve(&region)?;
        Ok((Self::new(region, transport, Generations::new(epoch)), Plug::Ivshmem(socket)))
    }

    /// Takes over a channel whose host's end has died from its hypervisor: the process of `pidfd`, whose directory in
    /// `/proc` is `process`. What is published there stays readable until [`Channel::publish`] is called, and
    /// during it. Two host's ends at a time would mix their publications.
    pub fn take_over(
        identity: &Identity,
        pidfd: BorrowedFd<'_>,
        process: &Path,
        epoch: u32,
    ) -> Result<Self, ChannelError> {
        let (transport, region, published) = Ivshmem::take_over(&identity.0, pidfd, process)?;
        Ok(Self::new(region, transport, Generations::after(epoch, published)))
    }
}

fn vectors() -> Result<Vec<EventFd>, ChannelError> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    (0..VECTORS).map(|_| EventFd::from_value_and_flags(0, flags).map_err(failed("eventfd"))).collect()
}

/// A pair of sockets: the server's end, and the client's end with all messages waiting in it.
fn serve<'a>(
    memory: BorrowedFd<'a>,
    host_vectors: impl Iterator<Item = BorrowedFd<'a>>,
    guest_vectors: impl Iterator<Item = BorrowedFd<'a>>,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (server, client) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
    let setup = [(PROTOCOL_VERSION, None), (GUEST_PEER.into(), None), (SHARED_MEMORY, Some(memory))];
    let host = host_vectors.map(|vector| (HOST_PEER.into(), Some(vector)));
    let guest = guest_vectors.map(|vector| (GUEST_PEER.into(), Some(vector)));
    for (value, descriptor) in setup.into_iter().chain(host).chain(guest) {
        send(&server, value, descriptor)?;
    }
    Ok((server, client))
}

fn send(socket: &OwnedFd, value: i64, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = value.to_le_bytes();
    let raw = descriptor.map(|descriptor| [descriptor.as_raw_fd()]);
    let rights = raw.as_ref().map(|raw| ControlMessage::ScmRights(raw));
    let rights = rights.as_slice();
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], rights, flags, None)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
