//! The process that forks the children of handshakes.
//!
//! A fork copies what a process has of mappings and page tables, and its page faults wait meanwhile. A vnumad with a thousand domains has
//! thousands of threads, whose stacks are mappings: a fork, and the end of the child, took tens of milliseconds. So a process that
//! is forked once, while vnumad is small, does nothing but fork:
//!
//! ```text
//!  vnumad ──order, descriptors──▶ fork server ──clone(CLONE_PARENT)──▶ child, whose parent is vnumad
//!     ▲        ◀──its number──────────┘                                  │
//!     └────────────────────────────── exit code ────────────────────────┘
//! ```
//!
//! It ends when vnumad has. If it is killed, the next order forks another one, from a vnumad that is large by then. As it may be forked in a
//! process with several threads, it makes system calls only, on memory that was prepared, and nothing in it panics.

use super::{
    child::{Ends, close_others, serve_messages},
    sockets::{Batch, MAX_MESSAGES, MESSAGE, Message},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, socketpair},
        wait::waitpid,
    },
    unistd::Pid,
};
use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How long it may take to fork a child, which takes less than a millisecond.
const LIMIT: Duration = Duration::from_secs(10);

/// Most descriptors that the kernel sends with a message (`SCM_MAX_FD` of include/net/scm.h).
const MOST_DESCRIPTORS: usize = 253;

/// Bytes before the messages of an order: whose QEMU is meant, how long it is waited for, and how many messages there are.
const HEAD: usize = 12;
/// Those of a message: its own, and whether a descriptor goes with it.
const EACH: usize = MESSAGE + 1;
const LONGEST: usize = HEAD + MAX_MESSAGES * EACH;

/// What a child is to do. Descriptors of an order come in this order, and then those of its messages.
pub(super) struct Order<'a> {
    pub(super) cancel: BorrowedFd<'a>,
    pub(super) listener: BorrowedFd<'a>,
    /// What it has of the socket that all have: what it has open as long as it accepts, and where clients go that are not meant.
    pub(super) left: Option<[BorrowedFd<'a>; 2]>,
    pub(super) pid: i32,
    pub(super) limit_ms: i32,
    pub(super) messages: &'a [Message],
}

impl Order<'_> {
    fn bytes(&self) -> Vec<u8> {
        let count = self.messages.len() as i32;
        let mut bytes: Vec<u8> =
            [self.pid, self.limit_ms, count].iter().flat_map(|number| number.to_ne_bytes()).collect();
        for (message, descriptor) in self.messages {
            bytes.extend(message);
            bytes.push(u8::from(descriptor.is_some()));
        }
        bytes
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let ends = [self.cancel, self.listener].into_iter().chain(self.left.into_iter().flatten());
        let of_messages = self.messages.iter().filter_map(|(_, descriptor)| descriptor.as_ref());
        ends.map(|end| end.as_raw_fd()).chain(of_messages.map(AsRawFd::as_raw_fd)).collect()
    }
}

/// The server of this process.
static SERVER: Mutex<Option<ForkServer>> = Mutex::new(None);

/// Forks it, unless that is done: before this process has many threads. Where it fails, the first order tries again.
pub(super) fn start() {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if server.is_none() {
        *server = ForkServer::start().ok();
    }
}

/// Starts a child of this process.
pub(super) fn fork(order: &Order<'_>) -> io::Result<Pid> {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    // One that was ended by somebody is noticed by the first order only.
    for _ in 0..2 {
        let forks = match server.take() {
            Some(forks) => forks,
            None => ForkServer::start()?,
        };
        match forks.fork(order) {
            // It has ended, and has not got the order.
            Err(Failed::Sent(errno)) if ENDED.contains(&errno) => {}
            // It may have carried it out. A second child would take the QEMU of the first.
            Err(Failed::Answer) => {
                return Err(io::Error::other("the process that forks children does not answer"));
            }
            Err(Failed::Sent(errno) | Failed::Fork(errno)) => {
                *server = Some(forks);
                return Err(errno.into());
            }
            Ok(child) => {
                *server = Some(forks);
                return Ok(child);
            }
        }
    }
    Err(io::Error::other("the process that forks children ends again and again"))
}

/// Errors of an order that is sent to a server that has ended.
const ENDED: [Errno; 4] = [Errno::EPIPE, Errno::ECONNREFUSED, Errno::ENOTCONN, Errno::ECONNRESET];

/// Why there is no child.
enum Failed {
    /// The order could not be sent.
    Sent(Errno),
    /// There was no answer.
    Answer,
    /// The server could not fork.
    Fork(Errno),
}

/// A server that runs until this is dropped.
struct ForkServer {
    socket: OwnedFd,
    process: Pid,
}

impl ForkServer {
    fn start() -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let mut room = Room::new();
        // SAFETY: the child makes system calls only, on memory that was prepared, and never returns.
        let process = match unsafe { libc::fork() } {
            0 => serve(theirs.as_raw_fd(), &mut room),
            process => Errno::result(process)?,
        };
        Ok(Self { socket, process: Pid::from_raw(process) })
    }

    fn fork(&self, order: &Order<'_>) -> Result<Pid, Failed> {
        let (bytes, descriptors) = (order.bytes(), order.descriptors());
        if order.messages.len() > MAX_MESSAGES || descriptors.len() > MOST_DESCRIPTORS {
            return Err(Failed::Sent(Errno::E2BIG));
        }
        let (rights, flags) = ([ControlMessage::ScmRights(&descriptors)], MsgFlags::MSG_NOSIGNAL);
        sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, flags, None)
            .map_err(Failed::Sent)?;
        let limit = PollTimeout::try_from(LIMIT).unwrap_or(PollTimeout::MAX);
        loop {
            match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], limit) {
                Err(Errno::EINTR) => {}
                Ok(0) | Err(_) => return Err(Failed::Answer),
                Ok(_) => break,
            }
        }
        let mut answer = [0; 4];
        match recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
            Ok(4) => {}
            _ => return Err(Failed::Answer),
        }
        match i32::from_ne_bytes(answer) {
            child @ 1.. => Ok(Pid::from_raw(child)),
            errno => Err(Failed::Fork(Errno::from_raw(-errno))),
        }
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // It may have been stopped. Children are processes of their own.
        let _ = kill(self.process, Signal::SIGKILL);
        while waitpid(self.process, None) == Err(Errno::EINTR) {}
    }
}

/// Memory for an order.
struct Room {
    bytes: [u8; LONGEST],
    /// Aligned as the kernel wants a control message, with room for its head.
    control: [usize; 4 + MOST_DESCRIPTORS / 2],
    descriptors: [RawFd; MOST_DESCRIPTORS],
    /// All of these in rising order.
    sorted: [RawFd; MOST_DESCRIPTORS],
    batch: Batch,
}

impl Room {
    fn new() -> Box<Self> {
        Box::new(Self {
            bytes: [0; LONGEST],
            control: [0; 4 + MOST_DESCRIPTORS / 2],
            descriptors: [-1; MOST_DESCRIPTORS],
            sorted: [-1; MOST_DESCRIPTORS],
            batch: Batch::with_room(MAX_MESSAGES),
        })
    }

    /// Waits for an order. How many descriptors have come with it, or none if some are missing: this process can have no more of them.
    /// `None`: there are no more orders.
    ///
    /// # Safety
    /// The descriptor is a socket.
    unsafe fn receive(&mut self, socket: RawFd) -> Option<usize> {
        let mut vector = libc::iovec { iov_base: self.bytes.as_mut_ptr().cast(), iov_len: self.bytes.len() };
        // SAFETY: all zero is a valid value of this plain structure. The header points to buffers that outlive the call, with their
        // sizes; the kernel has filled the control buffer up to the length that is in the header then.
        unsafe {
            let mut header: libc::msghdr = std::mem::zeroed();
            (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
            (header.msg_control, header.msg_controllen) =
                (self.control.as_mut_ptr().cast(), size_of_val(&self.control));
            let length = loop {
                let length = libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC);
                if length >= 0 || Errno::last() != Errno::EINTR {
                    break length;
                }
            };
            if length < HEAD as isize {
                return None;
            }
            let part = libc::CMSG_FIRSTHDR(&raw const header);
            if part.is_null() {
                return None;
            }
            let sent = (*part).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
            let count = sent.min(MOST_DESCRIPTORS);
            ptr::copy_nonoverlapping(
                libc::CMSG_DATA(part),
                self.descriptors.as_mut_ptr().cast(),
                count * size_of::<RawFd>(),
            );
            if header.msg_flags & (libc::MSG_CTRUNC | libc::MSG_TRUNC) != 0 {
                self.descriptors[..count].iter().for_each(|&descriptor| _ = libc::close(descriptor));
                return Some(0);
            }
            Some(count)
        }
    }

    fn number(&self, at: usize) -> i32 {
        let mut number = [0; 4];
        number.copy_from_slice(&self.bytes[4 * at..4 * at + 4]);
        i32::from_ne_bytes(number)
    }
}

/// Forks a child for each order, until there are no more.
fn serve(socket: RawFd, room: &mut Room) -> ! {
    // SAFETY: plain system calls, on numbers and on memory of this process that outlives them.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"vnuma-forks".as_ptr());
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut());
        // Its children are not to have it ignored either: what they would wait for is taken away by the kernel then.
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        close_others(&[socket]);
        while let Some(count) = room.receive(socket) {
            let flags = libc::CLONE_PARENT | libc::SIGCHLD;
            let child = if count == 0 { -1 } else { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
            if child == 0 {
                carry_out(room, count);
            }
            let errno = if count == 0 { libc::EMFILE } else { Errno::last_raw() };
            let answer = i32::try_from(child).ok().filter(|child| *child > 0).unwrap_or(-errno).to_ne_bytes();
            // Before the answer, so that no client can connect to a listener without a child.
            room.descriptors[..count].iter().for_each(|&descriptor| _ = libc::close(descriptor));
            libc::send(socket, answer.as_ptr().cast(), answer.len(), libc::MSG_NOSIGNAL);
        }
        libc::_exit(0)
    }
}

/// The child of an order with so many descriptors.
fn carry_out(room: &mut Room, count: usize) -> ! {
    let (pid, limit_ms, messages) = (room.number(0), room.number(1), room.number(2) as usize);
    let Room { bytes, descriptors, sorted, batch, .. } = room;
    let each = bytes[HEAD..].chunks_exact(EACH).take(messages);
    let with = each.clone().filter(|message| message[MESSAGE] != 0).count();
    let ends = count.saturating_sub(with);
    let mut rest = descriptors[ends..count].iter().copied();
    batch.set(each.map(|message| {
        let mut own = [0; MESSAGE];
        own.copy_from_slice(&message[..MESSAGE]);
        (own, if message[MESSAGE] == 0 { None } else { rest.next() })
    }));
    let end = |at: usize| if at < ends { descriptors[at] } else { -1 };
    let ends = Ends { cancel: end(0), listener: end(1), accepts: end(2), passes: end(3) };
    sorted[..count].copy_from_slice(&descriptors[..count]);
    sorted[..count].sort_unstable();
    serve_messages(&ends, pid, &sorted[..count], batch, limit_ms)
}

#[cfg(test)]
mod tests {
    use super::{
        super::handshake::{
            Handshake, Place,
            tests::{own, receive, server},
        },
        *,
    };
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    use std::time::Instant;
    use vnuma_process::{Workers, procfs};

    fn server_process() -> Option<Pid> {
        SERVER.lock().unwrap().as_ref().map(|server| server.process)
    }

    #[test]
    fn a_server_that_was_ended_is_followed_by_another_one() {
        start();
        let first = server_process().unwrap();
        let _ = kill(first, Signal::SIGKILL);
        // An order that it still gets is lost. Another test may have waited for its end.
        let _ = waitid(Id::Pid(first), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        let dir = tempfile::tempdir().unwrap();
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(5)).unwrap();
        assert_eq!(receive(handshake.path()).0.len(), 5);
        assert!(handshake.end());
        assert_ne!(server_process(), Some(first));
    }

    /// As the process that it is forked by may.
    #[test]
    fn it_does_not_ignore_ends_of_children() {
        let mut server = [0; 4];
        let (reads, writes) = nix::unistd::pipe().unwrap();
        // SAFETY: the child makes system calls and allocates, which the C library allows after a fork, and ends without cleaning up.
        let parent = unsafe {
            let parent = libc::fork();
            if parent == 0 {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                let started = ForkServer::start().map_or(-1, |server| {
                    let process = server.process.as_raw();
                    std::mem::forget(server);
                    process
                });
                let _ = nix::unistd::write(&writes, &started.to_ne_bytes());
                loop {
                    libc::pause();
                }
            }
            parent
        };
        assert_eq!(nix::unistd::read(&reads, &mut server), Ok(4));
        let server = i32::from_ne_bytes(server);
        let ignored = || {
            let status = procfs::read_process(server, "status", procfs::STATUS_LIMIT).ok()?;
            let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?.trim().to_owned();
            Some(u64::from_str_radix(&mask, 16).ok()? & 1 << (libc::SIGCHLD - 1) != 0)
        };
        let until = Instant::now() + LIMIT;
        while ignored() != Some(false) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ignored = ignored();
        let _ = kill(Pid::from_raw(parent), Signal::SIGKILL);
        assert!(waitpid(Pid::from_raw(parent), None).is_ok());
        assert_eq!(ignored, Some(false));
    }

    #[test]
    fn it_is_a_child_of_this_process_with_nothing_open_that_was_not_sent() {
        start();
        let until = Instant::now() + LIMIT;
        loop {
            let process = server_process().unwrap();
            let open = std::fs::read_dir(format!("/proc/{process}/fd")).map(|files| files.count());
            // Another test may have ended it.
            if open.as_ref().map_or(true, |count| *count <= 1) {
                break;
            }
            assert!(Instant::now() < until, "{open:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
