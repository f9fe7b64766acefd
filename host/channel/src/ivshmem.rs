//! The ivshmem server's side of an attached device.
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

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};
use vnuma_abi_topology_channel::ivshmem::{GUEST_PEER, HOST_PEER};

const PROTOCOL_VERSION: i64 = 0;
const SHARED_MEMORY: i64 = -1;

/// A pair of sockets: the server's end, and the client's end with all messages waiting in it.
pub(crate) fn serve<'a>(
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
