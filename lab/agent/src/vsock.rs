//! AF_VSOCK between the server and its guests.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, accept4, bind, connect, listen, socket,
};

/// Connects to a port of the guest with the given context id.
pub fn connect_to(cid: u32, port: u32) -> io::Result<File> {
    let socket = stream_socket()?;
    connect(socket.as_raw_fd(), &VsockAddr::new(cid, port))?;
    Ok(File::from(socket))
}

/// Listens at a port.
pub fn listen_at(port: u32) -> io::Result<OwnedFd> {
    let socket = stream_socket()?;
    bind(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port))?;
    listen(&socket, Backlog::new(64)?)?;
    Ok(socket)
}

/// Waits for the next connection.
pub fn accept_at(listener: &OwnedFd) -> io::Result<File> {
    let descriptor = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: accept4() gave a new descriptor that nothing else owns.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}

fn stream_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}
