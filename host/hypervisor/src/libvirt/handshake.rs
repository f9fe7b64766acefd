//! The handshake of the channel's device, by a process of its own.
//!
//! A domain's QEMU connects to a socket in the file system, as libvirt hands over no open one, and reads the messages of the server
//! with its big lock held: the guest stands still until it has them. The process that serves that socket must not stop between
//! QEMU's `connect` and the last message. vnumad may be stopped or killed at any time, and so does not serve it:
//!
//! ```text
//!  vnumad                            child (forked, a few system calls)        QEMU
//!  messages read from the channel
//!  socket bound, for this QEMU only
//!  fork, by the fork server ───────▶ waits for a connection
//!  libvirt: attach ──────────────────────────────────────────────────────────▶ connect
//!                                    accept: is it that QEMU?
//!                                    all messages in one `sendmmsg` ──────────▶ reads them
//!                                    waits until all are read, or QEMU has closed
//!  reaps the child ◀──────────────── exits
//! ```
//!
//! - QEMU connects when libvirt makes the character device, and reads when it plugs the device. If it sees in between that the other
//!   end is closed, it drops the messages, and reads without end. So the child keeps its end open until there is nothing to read.
//! - The child has a session of its own, blocks all signals that can be blocked, and ends by itself if nobody connects within
//!   [`LIMIT`].
//! - It is forked by a small process that does nothing else ([`fork_server`]). It has no other descriptors of vnumad, so that it keeps none of
//!   them open when vnumad ends.
//! - All messages are made before. `sendmmsg` is not interrupted between two of them by a signal, not even by one that kills.
//! - Two vnumads that attach one QEMU in one directory would take each other's socket away, and its QEMU would get the memory of the
//!   other one. So one of them waits for its turn: it has the lock of a file beside the socket.
//! - If QEMU connects to a socket whose child has ended, it gets an error at once, and libvirt reports that the device was not
//!   plugged.
//! - A domain that takes its channel along to other hosts is attached over the socket that all such domains have
//!   ([`CommonSocket`]). QEMUs that arrive connect to it as well, at any moment. The child passes these on to vnumad, whose limits
//!   count for them. If vnumad has ended, it refuses them by a message: a QEMU whose connection is closed without one reads without end.
//! - A QEMU that is not reading what it was sent keeps its child, and the lock that it is attached by: until it has read, or has
//!   closed the connection, it is sent nothing else.
//!
//! Who stops this child, by its own number, between `accept` and `sendmmsg`, or kills it before QEMU has read everything, does stop
//! the guest.

use super::{
    child::{CANCELLED, FAILED, TIMED_OUT},
    common_socket::CommonSocket,
    fork_server::{self, Order},
    sockets::{Left, Message, Turn, bind_to, make_directory, messages},
};
use nix::{
    errno::Errno,
    sys::{
        eventfd::{EfdFlags, EventFd},
        socket::{Backlog, listen},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Gid, Pid, Uid, chown},
};
use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use vnuma_process::{
    Heartbeat, Workers,
    procfs::{self, STATUS_LIMIT},
};

/// How long a child waits for QEMU. Longer than an attach may take.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// How long a child may take to end after the order. It ends at once if QEMU has read everything or nothing.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Where QEMU connects.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'a> {
    /// To a socket in this directory that is made for it.
    Own(&'a Path),
    /// To the socket that all have.
    Common(&'a CommonSocket),
}

/// A socket that is served.
#[derive(Debug)]
pub(super) struct Handshake {
    path: PathBuf,
    child: Option<Pid>,
    cancel: EventFd,
    /// The path is that of the socket that all have, which stays.
    common: bool,
    workers: Workers,
    /// Dropped last: until the socket's file is removed no other attach may use the socket. As long as a child serves, a worker holds it.
    turn: Option<Turn>,
}

impl Handshake {
    /// Serves the messages that wait in `server` to the process `pid`, once. A child that takes its time is waited for by one of
    /// these workers.
    pub(super) fn start(workers: &Workers, place: Place<'_>, pid: i32, server: &OwnedFd) -> io::Result<Self> {
        let directory = match place {
            Place::Own(directory) => directory,
            Place::Common(socket) => socket.directory(),
        };
        make_directory(directory)?;
        let turn = Turn::take(directory.join(format!("{pid}.lock")), "attaches this QEMU")?;
        let messages = self::messages(server)?;
        let cancel = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)?;
        let (path, common) = match place {
            Place::Own(directory) => (directory.join(format!("{pid}.sock")), None),
            Place::Common(socket) => (socket.path().to_owned(), Some(socket)),
        };
        // Removes its own socket wherever this ends: the process may be gone, so that it cannot be found out who it is.
        let mut started = Self {
            path,
            child: None,
            cancel,
            common: common.is_some(),
            workers: workers.clone(),
            turn: Some(turn),
        };
        let cancel = started.cancel.as_fd();
        started.child = Some(match common {
            None => fork_child(&listen_for(&started.path, pid)?, cancel, None, pid, &messages)?,
            Some(socket) => {
                socket.leave_to(|listener, left| fork_child(listener, cancel, Some(left), pid, &messages))?
            }
        });
        Ok(started)
    }

    /// Where QEMU is to connect.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Ends it. False if no messages were sent.
    pub(super) fn end(mut self) -> bool {
        !matches!(self.finish(), Some(CANCELLED | TIMED_OUT | FAILED))
    }

    /// The exit code of the child, which gets the order to end if it still waits.
    fn finish(&mut self) -> Option<i32> {
        if !self.common {
            // A file that is gone is no error, and one that stays is replaced by the next attach.
            let _ = fs::remove_file(&self.path);
        }
        // A counter that is full is as readable as any other. There may be a child of which nothing is known.
        let _ = self.cancel.write(1);
        let child = self.child.take()?;
        let until = Instant::now() + END_LIMIT;
        loop {
            match waitpid(child, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(_, code)) => return Some(code),
                Ok(WaitStatus::StillAlive) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1))
                }
                // QEMU has not read everything, or somebody has stopped the child: it ends by itself later. Until then there is
                // no other one for this QEMU.
                _ => {
                    let mut turn = self.turn.take();
                    turn.iter_mut().for_each(Turn::awaits_reader);
                    let waits = move |heartbeat: &Heartbeat| {
                        heartbeat.rest(|| while waitpid(child, None) == Err(Errno::EINTR) {});
                        drop(turn);
                    };
                    let _ = self.workers.start_alone("handshake", waits);
                    return None;
                }
            }
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Starts the child, which sends these messages to `pid`. `left`: what it has of the socket that all have.
fn fork_child(
    listener: &OwnedFd,
    cancel: BorrowedFd<'_>,
    left: Option<&Left<'_>>,
    pid: i32,
    messages: &[Message],
) -> io::Result<Pid> {
    let (listener, left) = (listener.as_fd(), left.map(|left| [left.accepts, left.passes]));
    let limit_ms = i32::try_from(LIMIT.as_millis()).unwrap_or(i32::MAX);
    fork_server::fork(&Order { cancel, listener, left, pid, limit_ms, messages })
}

/// A socket that listens, and that only root and the user of this process can connect to.
fn listen_for(path: &Path, pid: i32) -> io::Result<OwnedFd> {
    let listener = bind_to(path, 0o600)?;
    let user = user_of(pid)?;
    if user != nix::unistd::geteuid() {
        chown(path, Some(user), None::<Gid>)?;
    }
    listen(&listener, Backlog::new(8)?)?;
    Ok(listener)
}

/// The user by whose rights a process opens files.
fn user_of(pid: i32) -> io::Result<Uid> {
    let status = procfs::read_process(pid, "status", STATUS_LIMIT).map_err(io::Error::other)?;
    let unknown = || io::Error::other(format!("/proc/{pid}/status: Uid is missing"));
    procfs::users(&status).map(|[.., user]| Uid::from_raw(user)).ok_or_else(unknown)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::libvirt::sockets::{MESSAGE, REFUSAL};
    use nix::sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
        socket::{
            AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
            sendmsg, socketpair,
        },
    };
    use std::{
        io::{IoSlice, IoSliceMut},
        os::{
            fd::{AsRawFd, FromRawFd, RawFd},
            unix::{
                fs::PermissionsExt,
                net::{UnixListener, UnixStream},
            },
        },
        process::{Command, Stdio},
    };

    const HANG: Duration = Duration::from_secs(60);

    /// A socket in which `count` messages wait, all but the first two with a descriptor.
    pub(in super::super) fn server(count: i64) -> OwnedFd {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
        for value in 0..count {
            let memory = memfd_create("handshake-test", MFdFlags::MFD_CLOEXEC).unwrap();
            let raw = [memory.as_raw_fd()];
            let rights = (value >= 2).then_some(ControlMessage::ScmRights(&raw));
            let bytes = value.to_le_bytes();
            let buffers = [IoSlice::new(&bytes)];
            sendmsg::<()>(ours.as_raw_fd(), &buffers, rights.as_slice(), MsgFlags::empty(), None).unwrap();
        }
        // The other end has closed only after it has sent everything: what waits is read all the same.
        std::mem::forget(ours);
        theirs
    }

    pub(in super::super) fn own() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn a_process_that_has_ended_leaves_no_socket() {
        let directory = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        let pid = ended.id().cast_signed();
        ended.wait().unwrap();
        let error =
            Handshake::start(&Workers::default(), Place::Own(directory.path()), pid, &server(3)).unwrap_err();
        assert!(error.to_string().contains("no such process"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn one_at_a_time_serves_a_process() {
        let dir = tempfile::tempdir().unwrap();
        let first =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(35)).unwrap();
        let error = Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(3))
            .unwrap_err()
            .to_string();
        assert_eq!(error, format!("process {} attaches this QEMU as well", own()));
        // Whose output would be waited for if this fails.
        let mut sleeper =
            Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let other = Handshake::start(
            &Workers::default(),
            Place::Own(dir.path()),
            sleeper.id().cast_signed(),
            &server(3),
        );
        assert!(other.is_ok(), "another process is another matter: {other:?}");
        assert_eq!(receive(first.path()).0.len(), 35, "the second one has not taken its socket away");
        assert!(first.end(), "it was served");
        let next = Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(3)).unwrap();
        assert_eq!(receive(next.path()).0.len(), 3);
        drop((next, other));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    /// The file is removed and made anew all the time.
    #[test]
    fn no_two_have_the_lock_of_a_file() {
        use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let (inside, taken) = (AtomicBool::new(false), AtomicUsize::new(0));
        let until = Instant::now() + HANG;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while taken.load(Ordering::Acquire) < 20_000 {
                        assert!(Instant::now() < until);
                        let Ok(turn) = Turn::take(dir.path().join("1.lock"), "has it") else { continue };
                        assert!(!inside.swap(true, Ordering::AcqRel), "two have it");
                        taken.fetch_add(1, Ordering::AcqRel);
                        inside.store(false, Ordering::Release);
                        drop(turn);
                    }
                });
            }
        });
    }

    /// What a client gets, with the number of descriptors.
    pub(in super::super) fn receive(path: &Path) -> (Vec<i64>, usize) {
        receive_from(&UnixStream::connect(path).unwrap())
    }

    pub(in super::super) fn receive_from(stream: &UnixStream) -> (Vec<i64>, usize) {
        stream.set_read_timeout(Some(HANG)).unwrap();
        let (mut values, mut descriptors) = (Vec::new(), 0);
        loop {
            let mut bytes = [0; 8];
            let mut space = nix::cmsg_space!([RawFd; 1]);
            let mut buffers = [IoSliceMut::new(&mut bytes)];
            let received =
                recvmsg::<()>(stream.as_raw_fd(), &mut buffers, Some(&mut space), MsgFlags::empty()).unwrap();
            if received.bytes == 0 {
                return (values, descriptors);
            }
            for control in received.cmsgs().unwrap() {
                let ControlMessageOwned::ScmRights(raw) = control else { continue };
                descriptors += raw.len();
                // SAFETY: the kernel has just made them for this process.
                raw.into_iter().for_each(|raw| drop(unsafe { OwnedFd::from_raw_fd(raw) }));
            }
            values.push(i64::from_le_bytes(bytes));
        }
    }

    #[test]
    fn a_client_gets_all_messages_and_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("sub");
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(&directory), own(), &server(35)).unwrap();
        let path = handshake.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (values, descriptors) = receive(&path);
        assert_eq!((values, descriptors), ((0..35).collect(), 33));
        assert!(handshake.end(), "it was served");
        assert!(!path.exists());
    }

    /// QEMU gives up a connection that it finds closed, though there is something to read.
    #[test]
    fn the_connection_stays_open_until_everything_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(35)).unwrap();
        let path = handshake.path().to_owned();
        let stream = UnixStream::connect(&path).unwrap();
        let closed = |limit_ms| {
            let mut wait = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
            // SAFETY: `wait` is one valid pollfd.
            unsafe { libc::poll(&raw mut wait, 1, limit_ms) == 1 }
        };
        assert!(!closed(300), "nothing was read");
        assert!(handshake.end(), "it was served");
        assert!(!closed(300), "it does not end because it is told to");
        assert_eq!(receive_from(&stream).0.len(), 35);
        assert!(closed(60_000));
    }

    /// Each attempt to attach it would leave a child and a thread.
    #[test]
    fn a_client_that_reads_nothing_has_one_child_at_most() {
        let (dir, workers) = (tempfile::tempdir().unwrap(), Workers::default());
        let start = || Handshake::start(&workers, Place::Own(dir.path()), own(), &server(35));
        let first = start().unwrap();
        let stream = UnixStream::connect(first.path()).unwrap();
        let child = first.child.unwrap();
        assert!(first.end(), "it was sent everything");
        for _ in 0..3 {
            let error = start().map(|other| other.child).unwrap_err().to_string();
            assert_eq!(error, format!("its QEMU has not read what process {} has sent it before", own()));
        }
        assert_eq!(kill(child, None), Ok(()), "QEMU may read yet");
        assert_eq!(receive_from(&stream).0.len(), 35);
        let until = Instant::now() + HANG;
        let next = loop {
            match start() {
                Ok(next) => break next,
                Err(_) => assert!(Instant::now() < until, "it has read everything"),
            }
        };
        assert_eq!(kill(child, None), Err(Errno::ESRCH), "it has ended with what it was for");
        assert!(!next.end());
    }

    /// Its child stays, as QEMU may read later, and is not to use a CPU for that.
    #[test]
    fn a_client_that_writes_and_reads_nothing_costs_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(3)).unwrap();
        let mut stream = UnixStream::connect(handshake.path()).unwrap();
        io::Write::write_all(&mut stream, b"x").unwrap();
        let child = handshake.child.unwrap();
        thread::sleep(Duration::from_secs(2));
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
        // Fields 14 and 15: hundredths of a second.
        let fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2);
        let used: u64 = fields.map(|field| field.parse::<u64>().unwrap()).sum();
        assert!(used < 20, "{used} hundredths of a second in 2 s");
        drop(stream);
        assert!(handshake.end(), "it was sent everything");
    }

    /// Whether nobody holds this listening socket. Children that other tests fork at this moment have it too, and close it or end.
    fn is_refused(socket: &Path) -> bool {
        let until = Instant::now() + HANG;
        while Instant::now() < until {
            match UnixStream::connect(socket) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return true,
                _ => thread::sleep(Duration::from_millis(5)),
            }
        }
        false
    }

    #[test]
    fn one_that_is_ended_before_a_client_comes_refuses_it() {
        let dir = tempfile::tempdir().unwrap();
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(3)).unwrap();
        let path = handshake.path().to_owned();
        let link = dir.path().join("still-there");
        fs::hard_link(&path, &link).unwrap();
        assert!(!handshake.end(), "nothing was sent");
        assert!(is_refused(&link), "a process of ours holds the socket");
    }

    #[test]
    fn another_process_is_refused_with_a_message() {
        let dir = tempfile::tempdir().unwrap();
        let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        let handshake = Handshake::start(
            &Workers::default(),
            Place::Own(dir.path()),
            sleeper.id().cast_signed(),
            &server(3),
        )
        .unwrap();
        let mut stream = UnixStream::connect(handshake.path()).unwrap();
        let mut message = [0; MESSAGE];
        io::Read::read_exact(&mut stream, &mut message).expect("a message, and no end without one");
        assert_eq!(message, REFUSAL, "this is not the process that is meant");
        assert!(!handshake.end());
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    /// What a killed vnumad leaves must not keep its files open: a lock, say, or the socket of its API.
    #[test]
    fn the_child_has_no_other_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api")).unwrap();
        let handshake =
            Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &server(3)).unwrap();
        drop(listener);
        let child = handshake.child.unwrap();
        let until = Instant::now() + HANG;
        loop {
            let names = fs::read_dir(format!("/proc/{child}/fd")).unwrap();
            // The listener, the cancelling eventfd and one descriptor to send.
            if names.count() == 3 {
                break;
            }
            assert!(Instant::now() < until, "others stay open");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(is_refused(&dir.path().join("api")));
    }

    /// A child is no part of its parent: stopping the parent does not stop it.
    #[test]
    fn a_parent_that_is_stopped_or_killed_does_not_keep_a_client_waiting() {
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            let dir = tempfile::tempdir().unwrap();
            let server = server(35);
            // SAFETY: the child calls what is tested, and ends by a signal or without cleaning up.
            let parent = match unsafe { libc::fork() } {
                0 => {
                    let started = Handshake::start(
                        &Workers::default(),
                        Place::Own(dir.path()),
                        nix::unistd::getppid().as_raw(),
                        &server,
                    );
                    let ready = dir.path().join(if started.is_ok() { "ready" } else { "failed" });
                    let _ = fs::write(ready, "");
                    loop {
                        thread::sleep(HANG);
                    }
                }
                parent => Pid::from_raw(Errno::result(parent).unwrap()),
            };
            let until = Instant::now() + HANG;
            while !dir.path().join("ready").exists() {
                assert!(Instant::now() < until && !dir.path().join("failed").exists());
                thread::sleep(Duration::from_millis(5));
            }
            kill(parent, signal).unwrap();
            waitpid(parent, Some(WaitPidFlag::WUNTRACED)).unwrap();
            let next =
                || Handshake::start(&Workers::default(), Place::Own(dir.path()), own(), &self::server(3));
            if signal == Signal::SIGKILL {
                // A lock ends with its holder, and with a child that has not closed what it does not need.
                while let Err(error) = next() {
                    assert!(Instant::now() < until, "{error}");
                }
                continue;
            }
            assert!(next().is_err(), "it has not ended");
            let began = Instant::now();
            let (values, descriptors) = receive(&dir.path().join(format!("{}.sock", own())));
            assert_eq!((values.len(), descriptors), (35, 33), "{signal}");
            assert!(began.elapsed() < HANG);
            let _ = kill(parent, Signal::SIGKILL);
            if signal == Signal::SIGSTOP {
                waitpid(parent, None).unwrap();
            }
        }
    }
}
