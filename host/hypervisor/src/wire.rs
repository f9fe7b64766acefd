//! Lines over a Unix socket, each with a time limit and a length limit.
//!
//! The peer is not trusted to answer, to stop, or to read what it is sent: a limit counts for
//! a whole line and not for each of its bytes, and a line has an end.

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, sendmsg, socket,
    },
};
use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

/// Longest line. The longest honest one lists 4096 vCPUs, about 900 KiB.
pub(crate) const LINE_LIMIT: usize = 4 << 20;

const CHUNK: usize = 64 * 1024;

/// Why there is no line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("timed out")]
    Timeout,
    #[error("closed by the other end")]
    Closed,
    #[error("a line of more than {LINE_LIMIT} bytes")]
    TooLong,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for WireError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::EPIPE | Errno::ECONNRESET => Self::Closed,
            other => Self::Io(other.into()),
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: OwnedFd,
    /// Received and not yet taken.
    buffer: Vec<u8>,
    /// How much of it has been searched for the end of a line.
    searched: usize,
}

impl Wire {
    /// Connects without ever waiting: the queue of a listener that does not accept is soon full.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match connect(socket.as_raw_fd(), &UnixAddr::new(path)?) {
            Ok(()) => Ok(Self { socket, buffer: Vec::new(), searched: 0 }),
            Err(Errno::EAGAIN) => {
                let reason = "others wait for this monitor already, and nobody serves them";
                Err(io::Error::new(io::ErrorKind::WouldBlock, reason))
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends a line, and a descriptor with its first byte.
    pub(crate) fn send(
        &self,
        line: &[u8],
        fd: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<(), WireError> {
        let mut rest = line;
        let raw = fd.map(|fd| [fd.as_raw_fd()]);
        let rights = raw.as_ref().map(|fds| ControlMessage::ScmRights(fds));
        while !rest.is_empty() {
            let control = if rest.len() == line.len() { rights.as_slice() } else { &[] };
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(rest)], control, flags, None) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.wait(PollFlags::POLLOUT, until)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// The next line, without its end. What has arrived is returned even after the time limit.
    pub(crate) fn line(&mut self, until: Instant) -> Result<Vec<u8>, WireError> {
        let mut received = false;
        loop {
            if let Some(length) = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + length + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.buffer.len();
            if self.searched > LINE_LIMIT {
                return Err(WireError::TooLong);
            }
            // A peer that never pauses, so that there is nothing to wait for, gains no time by it.
            if received && Instant::now() >= until {
                return Err(WireError::Timeout);
            }
            self.receive(until)?;
            received = true;
        }
    }

    fn receive(&mut self, until: Instant) -> Result<(), WireError> {
        let mut chunk = [0; CHUNK];
        // Descriptors that the peer may send are closed by the kernel: there is no room for them.
        match recv(self.socket.as_raw_fd(), &mut chunk, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(WireError::Closed),
            Ok(length) => {
                self.buffer.extend_from_slice(&chunk[..length]);
                Ok(())
            }
            Err(Errno::EINTR) => Ok(()),
            Err(Errno::EAGAIN) => self.wait(PollFlags::POLLIN, until),
            Err(errno) => Err(errno.into()),
        }
    }

    fn wait(&self, flags: PollFlags, until: Instant) -> Result<(), WireError> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(WireError::Timeout);
        }
        // Rounded up: a limit below a millisecond would not wait at all.
        let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.as_fd(), flags)], left) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
