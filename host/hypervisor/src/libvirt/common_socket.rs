//! The socket over which QEMUs that wait for a migrating domain get their channel.
//!
//! A domain that keeps its channel across migrations names this socket, the same file on each host, in its XML. libvirt starts
//! the QEMU at the destination with it, and QEMU connects at once. vnumad cannot know in advance which domains arrive. So it gives
//! each QEMU that connects memory and interrupts of its own: what the guest has published to it comes with the migration,
//! and when the guest runs vnumad has the device plugged anew ([`gets_channel_anew`](crate::VmConnection::gets_channel_anew)).
//!
//! - A guest that arrives does not run yet. Should vnumad be stopped here, the migration waits, and the guest runs on where it is.
//! - A guest that runs is attached over this socket as well. Then a child accepts, not this thread ([`handshake`](super::handshake)), until
//!   it has served that guest's QEMU: it has an end of a pipe open for so long.
//! - Any user of the host may connect, as it is not known which one QEMU will run as. A client gets empty memory only.
//!   The connections of a user, and of all users, are limited. Others are refused by a message, as a QEMU whose connection is closed
//!   without one reads without end.

use super::sockets::{
    Batch, Turn, bind_to, credentials_of, has_read_all, make_directory, messages, refuse, send_all,
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::EventFd,
        socket::{Backlog, SockFlag, accept4, listen},
    },
    unistd::pipe2,
};
use std::{
    fmt, fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use vnuma_channel::Plug;
use vnuma_process::{Heartbeat, Worker, Workers};

/// Its name in the directory of sockets.
pub(super) const NAME: &str = "channel.sock";

/// Connections of one user, and of all, whose messages are not read yet. QEMU reads them when it makes the device.
const PER_USER: usize = 32;
const OF_ALL: usize = 256;

/// How long an attach waits for another one, whose QEMU has not connected yet.
const TURN_LIMIT: Duration = Duration::from_secs(5);

/// Between two that are accepted, so that a client that connects without end does not delay an attach.
const BREATH: Duration = Duration::from_millis(1);

/// How long a client may take to read.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// After this time it is checked again whether clients have read, and whether files can be opened again.
const LOOK: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_secs(1);

/// Makes a channel whose host's end is not in use.
pub type MakeSpare = Box<dyn Fn() -> io::Result<Plug> + Send + Sync>;

/// The socket of all domains that take their channels along.
pub(super) struct CommonSocket {
    directory: PathBuf,
    path: PathBuf,
    listener: OwnedFd,
    make: MakeSpare,
    /// Held by the thread that accepts or starts a child that does. The end of a pipe that such a child has open as long as it accepts.
    turn: Mutex<Option<OwnedFd>>,
    /// Last: the socket has to be removed before another process may have it.
    _lock: Turn,
}

/// Serves it until this is dropped.
#[derive(Debug)]
pub(super) struct Served {
    socket: Arc<CommonSocket>,
    _worker: Worker<()>,
}

/// A client that has not read everything.
struct Reader {
    stream: OwnedFd,
    user: libc::uid_t,
    until: Instant,
}

impl fmt::Debug for CommonSocket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CommonSocket").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Served {
    /// By one of these workers.
    pub(super) fn start(workers: &Workers, directory: &Path, make: MakeSpare) -> io::Result<Self> {
        make_directory(directory)?;
        let lock = Turn::take(directory.join("channel.lock"), "serves it")?;
        let path = directory.join(NAME);
        let listener = bind_to(&path, 0o666)?;
        listen(&listener, Backlog::new(64)?)?;
        let (directory, turn) = (directory.to_owned(), Mutex::default());
        let socket = Arc::new(CommonSocket { directory, path, listener, make, turn, _lock: lock });
        let served = Arc::clone(&socket);
        let worker =
            workers.start_polling("channels", move |jobs, stop| served.serve(jobs.heartbeat(), &stop))?;
        Ok(Self { socket, _worker: worker.detached() })
    }

    pub(super) fn socket(&self) -> &CommonSocket {
        &self.socket
    }
}

impl Drop for CommonSocket {
    fn drop(&mut self) {
        // One that stays is replaced by the next vnumad.
        let _ = fs::remove_file(&self.path);
    }
}

impl CommonSocket {
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Messages for a client that is not expected.
    pub(super) fn spare(&self) -> io::Result<OwnedFd> {
        let Plug::Ivshmem(server) = (self.make)()?;
        Ok(server)
    }

    /// No other process accepts as long as this is held. `None`: a child does.
    fn turn(&self) -> Option<MutexGuard<'_, Option<OwnedFd>>> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Its other end is closed.
        let is_over = |pipe: &OwnedFd| wait_for([pipe.as_fd()], Some(Duration::ZERO))[0];
        turn.as_ref().is_none_or(is_over).then_some(turn)
    }

    /// Has a child accept, which `start` starts with the listener and an end of a pipe.
    pub(super) fn leave_to<T>(
        &self,
        start: impl FnOnce(&OwnedFd, &OwnedFd) -> io::Result<T>,
    ) -> io::Result<T> {
        let until = Instant::now() + TURN_LIMIT;
        let mut turn = loop {
            match self.turn() {
                Some(turn) => break turn,
                None if Instant::now() < until => thread::sleep(BREATH),
                None => {
                    let reason = "another domain is being attached, and its QEMU has not connected yet";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                }
            }
        };
        let (over, accepts) = pipe2(OFlag::O_CLOEXEC)?;
        let started = start(&self.listener, &accepts)?;
        *turn = Some(over);
        Ok(started)
    }

    fn serve(&self, heartbeat: &Heartbeat, stop: &EventFd) {
        let mut readers: Vec<Reader> = Vec::new();
        loop {
            let wait = if readers.is_empty() { None } else { Some(LOOK) };
            let [comes, ends] = heartbeat.rest(|| wait_for([self.listener.as_fd(), stop.as_fd()], wait));
            if ends {
                return;
            }
            let now = Instant::now();
            readers.retain(|reader| now < reader.until && !has_read_all(reader.stream.as_raw_fd()));
            if !comes {
                continue;
            }
            let child_accepts = self.turn().is_none();
            thread::sleep(if child_accepts { LOOK } else { BREATH });
            if !child_accepts && let Err(error) = self.accept(&mut readers) {
                tracing::warn!(path = %self.path.display(), %error, "a QEMU that was started to take in a domain waits for its channel");
                if wait_for([stop.as_fd()], Some(PAUSE))[0] {
                    return;
                }
            }
        }
    }

    /// Sends one that waits its messages. They are made before, as an accepted client waits for them.
    fn accept(&self, readers: &mut Vec<Reader>) -> io::Result<()> {
        let messages = messages(&self.spare()?)?;
        let mut batch = Batch::new(&messages);
        let Some(_turn) = self.turn() else { return Ok(()) };
        let stream = match accept4(self.listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            // SAFETY: the kernel has just made it for this process.
            Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
            // A child has accepted it, or it has gone.
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        // SAFETY: a plain system call on a descriptor of this function.
        let user = unsafe { credentials_of(stream.as_raw_fd()) }.uid;
        let own = readers.iter().filter(|reader| reader.user == user).count();
        let sent = if own < PER_USER && readers.len() < OF_ALL {
            // SAFETY: the headers of a batch point to memory of its own, which lives until then.
            unsafe { send_all(stream.as_raw_fd(), &mut batch.headers) }
        } else {
            tracing::warn!(user, own, all = readers.len(), path = %self.path.display(), "too many wait for a channel: one is refused");
            // SAFETY: a plain system call on a descriptor of this function.
            unsafe { refuse(stream.as_raw_fd()) }
        };
        // One more is kept open until it has read that it is refused.
        if sent && readers.len() < 2 * OF_ALL {
            readers.push(Reader { stream, user, until: Instant::now() + READ_LIMIT });
        }
        Ok(())
    }
}

/// Which of these can be read. None: the time is over.
fn wait_for<const N: usize>(descriptors: [BorrowedFd<'_>; N], limit: Option<Duration>) -> [bool; N] {
    let mut waits = descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN));
    let limit =
        limit.map_or(PollTimeout::NONE, |limit| PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
    // Interrupted or not, what can be read is looked at.
    let _ = poll(&mut waits, limit);
    waits.map(|wait| wait.any().unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::{
        super::handshake::{
            Handshake, Place,
            tests::{own, receive, receive_from, server},
        },
        *,
    };
    use std::{
        io::Read,
        os::unix::{fs::PermissionsExt, net::UnixStream},
        process::{Command, Stdio},
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
    };
    use vnuma_process::Change;

    fn serve(directory: &Path) -> Served {
        Served::start(&Workers::default(), directory, Box::new(|| Ok(Plug::Ivshmem(server(5))))).unwrap()
    }

    #[test]
    fn each_who_connects_gets_messages_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(5);
        // Each one more than the one before.
        let make = move || Ok(Plug::Ivshmem(server(made.fetch_add(1, Ordering::AcqRel) as i64)));
        let served = Served::start(&Workers::default(), &dir.path().join("sub"), Box::new(make)).unwrap();
        let path = dir.path().join("sub/channel.sock");
        assert_eq!(served.socket().path(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let streams: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let mut counts: Vec<usize> = Vec::new();
        for stream in &streams {
            let (values, descriptors) = receive_from(stream);
            assert_eq!(descriptors, values.len() - 2, "and the end, when all is read");
            counts.push(values.len());
        }
        counts.sort_unstable();
        counts.dedup();
        assert_eq!(counts.len(), 3, "two have got the same: {counts:?}");
        drop(served);
        let until = Instant::now() + READ_LIMIT;
        while fs::read_dir(dir.path().join("sub")).unwrap().count() > 0 {
            assert!(Instant::now() < until, "it leaves files behind");
            std::thread::sleep(LOOK);
        }
    }

    /// QEMU gives up a connection that it finds closed, though there is something to read.
    #[test]
    fn it_stays_open_for_one_who_reads_later() {
        let dir = tempfile::tempdir().unwrap();
        let _served = serve(dir.path());
        let stream = UnixStream::connect(dir.path().join(NAME)).unwrap();
        let mut wait = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        assert_eq!(poll(&mut wait, PollTimeout::from(300_u16)), Ok(0), "nothing was read");
        assert_eq!(receive_from(&stream).0.len(), 5);
    }

    #[test]
    fn one_user_does_not_have_them_all() {
        let dir = tempfile::tempdir().unwrap();
        let _served = serve(dir.path());
        let connect = || UnixStream::connect(dir.path().join(NAME)).unwrap();
        let mut idle: Vec<_> = (0..PER_USER).map(|_| connect()).collect();
        let refused = connect();
        refused.set_read_timeout(Some(READ_LIMIT)).unwrap();
        assert_eq!(receive_from(&refused), (vec![-1], 0), "one more than it may have");
        assert_eq!(receive_from(&idle.pop().unwrap()).0.len(), 5);
        // It is seen a moment later that it was read.
        let until = Instant::now() + READ_LIMIT;
        while receive(&dir.path().join(NAME)).0 == [-1] {
            assert!(Instant::now() < until, "there is room again");
        }
    }

    #[test]
    fn one_vnumad_serves_it() {
        let dir = tempfile::tempdir().unwrap();
        let served = serve(dir.path());
        let error = Served::start(&Workers::default(), dir.path(), Box::new(|| Ok(Plug::Ivshmem(server(3)))))
            .unwrap_err();
        assert_eq!(error.to_string(), format!("process {} serves it as well", own()));
        assert_eq!(receive(served.socket().path()).0.len(), 5);
    }

    #[test]
    fn a_panic_and_a_silence_of_its_thread_are_seen() {
        let (dir, workers) = (tempfile::tempdir().unwrap(), Workers::default());
        let ((begin, begun), (release, held)) = (mpsc::channel(), mpsc::channel::<()>());
        let held = Mutex::new(held);
        let make = move || {
            begin.send(()).unwrap();
            let released = held.lock().unwrap().recv();
            panic!("{released:?}");
        };
        let served = Served::start(&workers, dir.path(), Box::new(make)).unwrap();
        let look = || workers.look(Instant::now() + 2 * READ_LIMIT, READ_LIMIT).pop();
        let until = Instant::now() + READ_LIMIT;
        let _client = UnixStream::connect(served.socket().path()).unwrap();
        begun.recv_timeout(READ_LIMIT).unwrap();
        assert!(matches!(look(), Some(Change::Silent(name, _)) if name == "channels"));
        release.send(()).unwrap();
        while look() != Some(Change::Panicked("channels".to_owned(), "Ok(())".to_owned())) {
            assert!(Instant::now() < until, "its panic is not seen");
        }
    }

    /// The process may have no descriptors left for a while.
    #[test]
    fn whoever_waits_is_served_when_that_can_be_done() {
        let dir = tempfile::tempdir().unwrap();
        let attempts = AtomicUsize::new(0);
        let make = move || match attempts.fetch_add(1, Ordering::AcqRel) {
            0 => Err(io::Error::from(Errno::EMFILE)),
            _ => Ok(Plug::Ivshmem(server(5))),
        };
        let served = Served::start(&Workers::default(), dir.path(), Box::new(make)).unwrap();
        assert_eq!(receive(served.socket().path()).0.len(), 5);
    }

    /// What is meant for one process goes to it alone, and one that arrives meanwhile is not kept waiting.
    #[test]
    fn a_process_that_is_attached_gets_what_is_meant_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let served = serve(dir.path());
        let socket = served.socket();
        let mut sleeper =
            Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = sleeper.id().cast_signed();
        let others = Handshake::start(&Workers::default(), Place::Common(socket), pid, &server(35)).unwrap();
        assert_eq!(others.path(), socket.path());
        let mut arrives = UnixStream::connect(socket.path()).unwrap();
        arrives.set_read_timeout(Some(READ_LIMIT)).unwrap();
        arrives.read_exact(&mut [0; 5 * 8]).unwrap();
        arrives.set_nonblocking(true).unwrap();
        let more = arrives.read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(more, Err(io::ErrorKind::WouldBlock)), "nothing else, and it stays open: {more:?}");
        let mut more: Vec<_> = (0..4).map(|_| UnixStream::connect(socket.path()).unwrap()).collect();
        for (number, stream) in more.iter_mut().enumerate() {
            stream.set_read_timeout(Some(READ_LIMIT)).unwrap();
            let mut first = [0; 8];
            stream.read_exact(&mut first).unwrap();
            let refused = i64::from_le_bytes(first) == -1;
            assert_eq!(refused, number == 3, "{number}: one for which there are no messages is told so");
        }
        // Some have not read all that they were sent. The child ends all the same.
        assert!(!others.end(), "the process that is meant has not come");
        let own = Handshake::start(&Workers::default(), Place::Common(socket), own(), &server(35)).unwrap();
        assert_eq!(receive(socket.path()).0.len(), 35);
        assert!(own.end());
        assert_eq!(receive(socket.path()).0.len(), 5, "it is served as before");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
