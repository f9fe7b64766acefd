//! The socket over which QEMUs get a channel that were started to take in a domain.
//!
//! A domain that takes its channel along to other hosts names this socket in its XML, which is the same file on each host. libvirt starts
//! the QEMU at the destination with it, and QEMU connects at once. vnumad cannot know before which domains arrive. So it gives each
//! QEMU that connects memory and interrupts of its own, which nobody else has: what the guest has published to it comes with the migration,
//! and when the guest runs vnumad has the device plugged anew ([`is_received`](crate::VmConnection::is_received)).
//!
//! - A guest that arrives does not run yet. Should vnumad be stopped here, the migration waits, and the guest runs on where it is.
//! - A guest that runs is attached over this socket as well. Then a child serves it ([`handshake`](super::handshake)), and this thread
//!   waits for its turn.
//! - Any user of the host may connect, as it is not known which one QEMU will run as. All that there is to get is memory that is empty.
//!   Each user has so many connections at a time.

use super::handshake::{
    Batch, SERVED, Turn, bind_to, credentials_of, has_read_all, make_directory, messages, send_all,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        socket::{Backlog, SockFlag, accept4, listen},
    },
};
use std::{
    fmt, fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vnuma_process::spawn_worker;

/// Its name in the directory of sockets.
pub(super) const NAME: &str = "channel.sock";

/// Connections of one user whose messages are not read yet. QEMU reads them when it makes the device.
const PER_USER: usize = 32;

/// How long somebody may take to read.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// How soon it is looked again whether somebody has read, and whether there are files again.
const LOOK: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_secs(1);

/// Makes an end of a socket in which the messages of a channel wait that nobody has.
pub type MakeSpare = Box<dyn Fn() -> io::Result<OwnedFd> + Send + Sync>;

/// The socket of all domains that take their channels along.
pub(super) struct CommonSocket {
    directory: PathBuf,
    path: PathBuf,
    listener: OwnedFd,
    make: MakeSpare,
    /// Of whoever accepts.
    turn: Mutex<()>,
    stop: EventFd,
    /// Last, as nobody else may have the socket before it is removed.
    _lock: Turn,
}

/// Serves it until this is dropped.
#[derive(Debug)]
pub(super) struct Served(Arc<CommonSocket>);

/// Nobody else accepts.
pub(super) struct Serving<'a> {
    socket: &'a CommonSocket,
    _turn: MutexGuard<'a, ()>,
}

/// Somebody who has not read everything.
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

impl fmt::Debug for Serving<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Serving").field(self.socket).finish()
    }
}

impl Served {
    pub(super) fn start(directory: &Path, make: MakeSpare) -> io::Result<Self> {
        make_directory(directory)?;
        let lock = Turn::take(directory.join("channel.lock"), "serves it")?;
        let path = directory.join(NAME);
        let listener = bind_to(&path, 0o666)?;
        listen(&listener, Backlog::new(64)?)?;
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)?;
        let (directory, turn) = (directory.to_owned(), Mutex::default());
        let socket = Arc::new(CommonSocket { directory, path, listener, make, turn, stop, _lock: lock });
        let served = Arc::clone(&socket);
        spawn_worker("channels", move || served.serve())?;
        Ok(Self(socket))
    }

    pub(super) fn socket(&self) -> &CommonSocket {
        &self.0
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A counter that is full is as readable as any other.
        let _ = self.0.stop.write(1);
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

    /// Nobody else accepts until this is dropped.
    pub(super) fn take_turn(&self) -> Serving<'_> {
        Serving { socket: self, _turn: self.turn.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    fn serve(&self) {
        let mut readers: Vec<Reader> = Vec::new();
        loop {
            let wait = if readers.is_empty() { None } else { Some(LOOK) };
            let [comes, ends] = wait_for([self.listener.as_fd(), self.stop.as_fd()], wait);
            if ends {
                return;
            }
            let now = Instant::now();
            readers.retain(|reader| now < reader.until && !has_read_all(reader.stream.as_raw_fd()));
            if comes && let Err(error) = self.accept(&mut readers) {
                tracing::warn!(path = %self.path.display(), %error, "a QEMU that was started to take in a domain waits for its channel");
                if wait_for([self.stop.as_fd()], Some(PAUSE))[0] {
                    return;
                }
            }
        }
    }

    /// Sends one that waits its messages. They are made before, as whoever is accepted waits for them.
    fn accept(&self, readers: &mut Vec<Reader>) -> io::Result<()> {
        let serving = self.take_turn();
        let messages = messages(&serving.spare()?)?;
        let mut batch = Batch::new(&messages);
        let stream = match accept4(self.listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            // SAFETY: the kernel has just made it for this process.
            Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
            // A child has accepted it, or it has gone.
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        // SAFETY: plain system calls on a descriptor of this function, and headers that point into `messages`.
        let user = unsafe { credentials_of(stream.as_raw_fd()) }.uid;
        if readers.iter().filter(|reader| reader.user == user).count() >= PER_USER {
            return Ok(());
        }
        // SAFETY: the headers of a batch point to memory of its own, which lives until then.
        if unsafe { send_all(stream.as_raw_fd(), &mut batch.headers) } == SERVED {
            readers.push(Reader { stream, user, until: Instant::now() + READ_LIMIT });
        }
        Ok(())
    }
}

impl Serving<'_> {
    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.socket.listener.as_fd()
    }

    /// Messages for somebody who is not expected.
    pub(super) fn spare(&self) -> io::Result<OwnedFd> {
        (self.socket.make)()
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
        sync::atomic::{AtomicUsize, Ordering},
    };

    fn serve(directory: &Path) -> Served {
        Served::start(directory, Box::new(|| Ok(server(5)))).unwrap()
    }

    #[test]
    fn each_who_connects_gets_messages_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let make = move || {
            count.fetch_add(1, Ordering::AcqRel);
            Ok(server(5))
        };
        let served = Served::start(&dir.path().join("sub"), Box::new(make)).unwrap();
        let path = dir.path().join("sub/channel.sock");
        assert_eq!(served.socket().path(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let streams: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for stream in &streams {
            assert_eq!(receive_from(stream), ((0..5).collect(), 3), "and the end, when all is read");
        }
        assert!(made.load(Ordering::Acquire) >= 3);
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
        assert!(receive(&dir.path().join(NAME)).0.is_empty(), "one more than it may have");
        assert_eq!(receive_from(&idle.pop().unwrap()).0.len(), 5);
        // It is seen a moment later that it was read.
        let until = Instant::now() + READ_LIMIT;
        while receive(&dir.path().join(NAME)).0.is_empty() {
            assert!(Instant::now() < until, "there is room again");
        }
    }

    #[test]
    fn one_vnumad_serves_it() {
        let dir = tempfile::tempdir().unwrap();
        let served = serve(dir.path());
        let error = Served::start(dir.path(), Box::new(|| Ok(server(3)))).unwrap_err();
        assert_eq!(error.to_string(), format!("process {} serves it as well", own()));
        assert_eq!(receive(served.socket().path()).0.len(), 5);
    }

    /// The process may have no descriptors left for a while.
    #[test]
    fn whoever_waits_is_served_when_that_can_be_done() {
        let dir = tempfile::tempdir().unwrap();
        let attempts = AtomicUsize::new(0);
        let make = move || match attempts.fetch_add(1, Ordering::AcqRel) {
            0 => Err(io::Error::from(Errno::EMFILE)),
            _ => Ok(server(5)),
        };
        let served = Served::start(dir.path(), Box::new(make)).unwrap();
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
        let others = Handshake::start(Place::Common(socket), pid, &server(35)).unwrap();
        assert_eq!(others.path(), socket.path());
        let mut arrives = UnixStream::connect(socket.path()).unwrap();
        arrives.set_read_timeout(Some(READ_LIMIT)).unwrap();
        arrives.read_exact(&mut [0; 5 * 8]).unwrap();
        arrives.set_nonblocking(true).unwrap();
        let more = arrives.read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(more, Err(io::ErrorKind::WouldBlock)), "nothing else, and it stays open: {more:?}");
        assert!(!others.end(), "the process that is meant has not come");
        let own = Handshake::start(Place::Common(socket), own(), &server(35)).unwrap();
        assert_eq!(receive(socket.path()).0.len(), 35);
        assert!(own.end());
        assert_eq!(receive(socket.path()).0.len(), 5, "it is served as before");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
