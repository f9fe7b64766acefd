//! What a transport has to offer: bytes in order, in both directions, without waiting.

use nix::poll::PollFlags;
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
};

/// One connection to another node. Framing, limits and the treatment of hostile peers are those of
/// [`Lane`](crate::Lane), the same for all of them.
pub trait Pipe: Send {
    /// Takes bytes that have come. 0 is the end; `WouldBlock` that there are none now.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// When [`Self::read`] did not fill the buffer: was there nothing more? What comes later makes [`Self::fd`] ready then, so
    /// that it need not be called again only to hear `WouldBlock`.
    fn short_is_all(&self) -> bool {
        false
    }

    /// Gives bytes on. `WouldBlock` when none can be taken now.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Gives on what [`Self::write`] took and kept; true when nothing is kept.
    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// What to wait for in order to read, or to write too.
    fn events(&self, writing: bool) -> PollFlags {
        if writing { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    /// Becomes ready for [`Self::events`].
    fn fd(&self) -> BorrowedFd<'_>;

    /// Says that the caller is about to wait. False when there is something to read or to write already.
    fn arm(&mut self, writing: bool) -> bool {
        let _ = writing;
        true
    }

    /// Is there something to read, without a system call? Pipes that cannot tell say no.
    fn pending(&self) -> bool {
        false
    }

    /// Has the other end shown that it is this node? A pipe that knows nothing of its peer says yes.
    fn authenticate(&self, node: u8) -> Result<(), String> {
        let _ = node;
        Ok(())
    }
}

/// TCP as it is: neither secret nor authenticated. For networks without other users.
#[derive(Debug)]
pub struct TcpPipe {
    stream: TcpStream,
}

impl TcpPipe {
    /// Takes a connection over.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        // A message is smaller than a segment, and the receiver waits for it.
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }
}

impl Pipe for TcpPipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }

    fn short_is_all(&self) -> bool {
        true
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
