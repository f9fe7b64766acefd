//! The process of a VM: at the other end of a socket, or by its number.

use crate::VmError;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
};
use vnuma_process::procfs::{self, STATUS_LIMIT};

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
    /// the connection. For a socket that QEMU was handed ready to use it is the socket's maker;
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

    /// The process with this number. The caller sees afterwards that it is the one that is meant, as that may have ended.
    pub(crate) fn with_number(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, pidfd: pidfd_open(pid)?, certain: true })
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
        // Looked up first: if the process is alive after that, its number was not reused.
        vnuma_process::thread_exists(self.pid, tid) && self.alive()
    }

    /// What a process means by the numbers of its threads.
    pub(crate) fn thread_names(&self) -> ThreadNames {
        let numbers = |tid| {
            let status = procfs::read_thread(self.pid, tid, "status", STATUS_LIMIT).ok()?;
            let numbers = procfs::namespace_numbers(&status);
            Some((*numbers.last()?, numbers.len()))
        };
        // All threads of a process are in one namespace, and the first one has the number of the process.
        if numbers(self.pid).is_none_or(|(_, namespaces)| namespaces == 1) {
            return ThreadNames::Ours;
        }
        let threads = procfs::threads(self.pid).unwrap_or_default();
        ThreadNames::Inner(threads.into_iter().filter_map(|tid| Some((numbers(tid)?.0, tid))).collect())
    }

    pub(crate) fn alive(&self) -> bool {
        // A pidfd becomes readable when its process ends.
        let mut poll = libc::pollfd { fd: self.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 0 }
    }
}

/// How a process counts its threads. In a PID namespace of its own, as in a container, it knows them by other numbers
/// than this process does.
#[derive(Debug)]
pub(crate) enum ThreadNames {
    /// As this process does.
    Ours,
    /// By these numbers; what this process calls them. Threads of that process only.
    Inner(BTreeMap<i32, i32>),
}

impl ThreadNames {
    /// This process's number for the thread that the other one calls `named`. Whether it is one of its own is still to
    /// be seen.
    pub(crate) fn ours(&self, named: i64) -> Option<i32> {
        let named = i32::try_from(named).ok()?;
        match self {
            Self::Ours => Some(named),
            Self::Inner(threads) => threads.get(&named).copied(),
        }
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
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    vnuma_process::open_pidfd(pid)
}
