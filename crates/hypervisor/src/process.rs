//! The process at the other end of a socket.

use crate::VmError;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
};

/// `SO_PEERPIDFD` of include/uapi/asm-generic/socket.h, since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process that stays the same one: its number may be used again, its pidfd not.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    pidfd: OwnedFd,
    /// The kernel gave the pidfd for the socket, so that there is no doubt about the number.
    certain: bool,
}

impl Process {
    /// The process that called `listen` at the other end of `socket`; it need not have accepted
    /// the connection. For a socket that QEMU was handed ready to use it is whoever made it;
    /// QEMU's threads are then refused as foreign, and nothing is said of that process's own.
    ///
    /// Before Linux 6.5 the process is looked up by its number. It is the right one if it
    /// answers afterwards: QEMU greets after this.
    pub(crate) fn behind(socket: BorrowedFd<'_>, path: &Path) -> Result<Self, VmError> {
        let failed = |pid| move |source| VmError::Process { socket: path.display().to_string(), pid, source };
        let credentials = getsockopt(&socket, PeerCredentials).map_err(|errno| failed(0)(errno.into()))?;
        let pid = credentials.pid();
        if pid <= 0 {
            // So it is for a process outside of our PID namespace.
            let reason = io::Error::new(io::ErrorKind::NotFound, "not visible from here");
            return Err(failed(pid)(reason));
        }
        let (pidfd, certain) = match peer_pidfd(socket) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => (pidfd_open(pid), false),
            other => (other, true),
        };
        Ok(Self { pid, pidfd: pidfd.map_err(failed(pid))?, certain })
    }

    /// Is it beyond doubt the process behind the socket, even if that never answers?
    pub(crate) fn is_certain(&self) -> bool {
        self.certain
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Is this thread one of the process's own, and the process still there?
    pub(crate) fn has_thread(&self, tid: i32) -> bool {
        // Looked up first: if the process is alive after that, its number was its own all the time.
        vnuma_process::thread_exists(self.pid, tid) && self.alive()
    }

    pub(crate) fn alive(&self) -> bool {
        // A pidfd becomes readable when its process ends.
        let mut poll = libc::pollfd { fd: self.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 0 }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut length = libc::socklen_t::try_from(size_of::<RawFd>()).unwrap_or_default();
    // SAFETY: `fd` has room for the `length` bytes that the kernel may write.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if result < 0 || fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers and returns a new descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
