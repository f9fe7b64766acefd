//! The socket over which QEMUs that wait for a migrating domain get their channel.
//!
//! A domain that keeps its channel across migrations names this socket, the same file on each host, in its XML. libvirt starts
//! the QEMU at the destination with it, and QEMU connects at once. vnumad cannot know in advance which domains arrive. So it gives
//! each QEMU that connects memory and interrupts of its own: what the guest has published to it comes with the migration,
//! and when the guest runs vnumad has the device plugged anew ([`gets_channel_anew`](crate::VmConnection::gets_channel_anew)).
//!
//! - A guest that arrives does not run yet. Should vnumad be stopped here, the migration waits, and the guest runs on where it is.
//! - A guest that runs is attached over this socket as well. Then a child accepts, not this thread ([`handshake`](super::handshake)), until
//!   it has served that guest's QEMU: it has an end of a pipe open for so long. It passes other clients on to this thread.
//! - Any user of the host may connect, as it is not known which one QEMU will run as. A client gets empty memory only.
//!   The connections of a user, and of all users, are limited. Others are refused by a message, as a QEMU whose connection is closed
//!   without one reads without end.

use super::sockets::{
    Batch, Left, Message, Turn, bind_to, credentials_of, has_read_all, make_directory, messages, refuse,
    send_all, take_client,
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::EventFd,
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, accept4, listen, setsockopt, socketpair, sockopt,
        },
    },
    unistd::pipe2,
};
use std::{
    collections::VecDeque,
    fmt, fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use vnuma_channel::Plug;
use vnuma_model::{Party, Work};
use vnuma_process::{Heartbeat, Jobs, Ledger, Worker, Workers};

/// Its name in the directory of sockets.
pub(super) const NAME: &str = "channel.sock";

/// Connections of one user, and of all, whose messages are not read yet. QEMU reads them when it makes the device.
const PER_USER: usize = 32;
const OF_ALL: usize = 256;

/// Users from this number on can be those of one user of the host (`/etc/subuid`). All of them have no more than half.
const OWN_NUMBERS: libc::uid_t = 65_536;

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
    /// Clients that a child has accepted and passes on: where they come, and where it sends them.
    passed: (OwnedFd, OwnedFd),
    /// Last: the socket has to be removed before another process may have it.
    _lock: Turn,
}

/// Serves it until this is dropped.
#[derive(Debug)]
pub(super) struct Served {
    socket: Arc<CommonSocket>,
    ledger: Ledger,
    _worker: Worker<()>,
}

/// A client that has not read everything.
struct Reader {
    stream: OwnedFd,
    user: libc::uid_t,
    until: Instant,
}

/// Clients, and what the next one is sent.
struct Arrivals {
    /// They were sent the messages of a channel.
    readers: Vec<Reader>,
    /// They were sent that they get none. The first has waited longest.
    refused: VecDeque<Reader>,
    spare: Option<Vec<Message>>,
    tidy_from: Instant,
    /// For channels that a user has made, and lines of the log.
    ledger: Ledger,
}

impl Reader {
    /// Is there something that it has not read?
    fn reads_on(&self) -> bool {
        !has_read_all(self.stream.as_raw_fd())
    }
}

impl Arrivals {
    fn new(ledger: Ledger) -> Self {
        let (readers, refused, tidy_from) = (Vec::new(), VecDeque::new(), Instant::now());
        Self { readers, refused, spare: None, tidy_from, ledger }
    }

    fn is_empty(&self) -> bool {
        self.readers.is_empty() && self.refused.is_empty()
    }

    /// Forgets those that have read everything, or had the time to, from time to time: each is looked at.
    fn tidy(&mut self, now: Instant) {
        if now < self.tidy_from {
            return;
        }
        self.tidy_from = now + LOOK;
        self.readers.retain(|reader| now < reader.until && reader.reads_on());
        self.refused.retain(|reader| now < reader.until && reader.reads_on());
    }

    fn has(&self, user: libc::uid_t) -> usize {
        self.readers.iter().filter(|reader| reader.user == user).count()
    }

    /// May this user have one more? What one user has keeps no other user from it, if that user is one of the host's own.
    fn admits(&mut self, user: libc::uid_t) -> bool {
        self.readers.retain(|reader| reader.user != user || reader.reads_on());
        let of_others = self.readers.iter().filter(|reader| reader.user >= OWN_NUMBERS).count();
        let room = user < OWN_NUMBERS || of_others < OF_ALL / 2;
        let room = room && self.has(user) < PER_USER && self.readers.len() < OF_ALL;
        room && self.ledger.spend(Work::Connections, Party::User(user), 1).is_ok()
    }

    /// Keeps one that was refused open, so that it reads that. As many of a user as it could have, and as many of all.
    fn keep_refused(&mut self, reader: Reader) {
        let of_user = |other: &Reader| other.user == reader.user;
        let first = self.refused.iter().position(of_user);
        let first = first.filter(|_| self.refused.iter().filter(|other| of_user(other)).count() >= PER_USER);
        if let Some(first) = first.or((self.refused.len() >= OF_ALL).then_some(0)) {
            self.refused.remove(first);
        }
        self.refused.push_back(reader);
    }
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
        let passed = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
        // A child does not wait for this thread: what is passed on has to find room. Without the right to that there is less.
        let _ = setsockopt(&passed.1, sockopt::SndBufForce, &(4 << 20));
        let (directory, turn) = (directory.to_owned(), Mutex::default());
        let socket = Arc::new(CommonSocket { directory, path, listener, make, turn, passed, _lock: lock });
        let (served, ledger) = (Arc::clone(&socket), Ledger::default());
        let arrivals = Arrivals::new(ledger.clone());
        let serve = move |jobs: Jobs<()>, stop: Arc<EventFd>| served.serve(arrivals, jobs.heartbeat(), &stop);
        let worker = workers.start_polling("channels", serve)?;
        Ok(Self { socket, ledger, _worker: worker.detached() })
    }

    /// Budgets of users that connect.
    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
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

    /// Has a child accept, which `start` starts with the listener.
    pub(super) fn leave_to<T>(
        &self,
        start: impl FnOnce(&OwnedFd, &Left<'_>) -> io::Result<T>,
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
        let left = Left { accepts: accepts.as_fd(), passes: self.passed.1.as_fd() };
        let started = start(&self.listener, &left)?;
        *turn = Some(over);
        Ok(started)
    }

    fn serve(&self, mut arrivals: Arrivals, heartbeat: &Heartbeat, stop: &EventFd) {
        loop {
            let wait = if arrivals.is_empty() { None } else { Some(LOOK) };
            let sources = [self.passed.0.as_fd(), self.listener.as_fd(), stop.as_fd()];
            let [passed, comes, ends] = heartbeat.rest(|| wait_for(sources, wait));
            if ends {
                return;
            }
            arrivals.tidy(Instant::now());
            let mut outcome = Ok(());
            if passed {
                let ledger = arrivals.ledger.clone();
                let next = || take_client(self.passed.0.as_fd(), |user, why| self.tell(&ledger, user, why));
                outcome = self.answer(&mut arrivals, next);
            }
            if comes && outcome.is_ok() {
                let child_accepts = self.turn().is_none();
                if !passed {
                    thread::sleep(if child_accepts { LOOK } else { BREATH });
                }
                if !child_accepts {
                    outcome = self.answer(&mut arrivals, || self.accept());
                }
            }
            if let Err(error) = outcome {
                tracing::warn!(path = %self.path.display(), %error, "a QEMU that was started to take in a domain waits for its channel");
                if wait_for([stop.as_fd()], Some(PAUSE))[0] {
                    return;
                }
            }
        }
    }

    /// Logs that a client of this user could not be taken over from a child.
    fn tell(&self, ledger: &Ledger, user: libc::uid_t, why: &str) {
        if let Some(more) = ledger.line(Party::User(user)) {
            tracing::warn!(user, why, path = %self.path.display(), "a client that wants a channel cannot be received, and is closed{more}");
        }
    }

    /// A client that waits, unless a child has it.
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let Some(_turn) = self.turn() else { return Ok(None) };
        match accept4(self.listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            // SAFETY: the kernel has just made it for this process.
            Ok(raw) => Ok(Some(unsafe { OwnedFd::from_raw_fd(raw) })),
            // A child has accepted it, or it has gone.
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends the next client its messages. They are made before, so that it waits in its queue if that fails.
    fn answer(
        &self,
        arrivals: &mut Arrivals,
        next: impl FnOnce() -> io::Result<Option<OwnedFd>>,
    ) -> io::Result<()> {
        let messages = match arrivals.spare.take() {
            Some(spare) => spare,
            None => messages(&self.spare()?)?,
        };
        let next = next();
        let Ok(Some(stream)) = next else {
            arrivals.spare = Some(messages);
            return next.map(drop);
        };
        // SAFETY: a plain system call on a descriptor of this function.
        let user = unsafe { credentials_of(stream.as_raw_fd()) }.uid;
        let until = Instant::now() + READ_LIMIT;
        if arrivals.admits(user) {
            let mut batch = Batch::new(&messages);
            // SAFETY: the headers of a batch point to memory of its own, which lives until then.
            if unsafe { send_all(stream.as_raw_fd(), &mut batch.headers) } {
                arrivals.readers.push(Reader { stream, user, until });
            }
            return Ok(());
        }
        if let Some(more) = arrivals.ledger.line(Party::User(user)) {
            let (own, all) = (arrivals.has(user), arrivals.readers.len());
            tracing::warn!(user, own, all, path = %self.path.display(), "too many want a channel: one is refused{more}");
        }
        arrivals.spare = Some(messages);
        // SAFETY: a plain system call on a descriptor of this function.
        if unsafe { refuse(stream.as_raw_fd()) } {
            arrivals.keep_refused(Reader { stream, user, until });
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
        super::{
            handshake::{
                Handshake, Place,
                tests::{own, receive, receive_from, server},
            },
            sockets::pass_client,
        },
        *,
    };
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use std::{
        io::{IoSlice, Read},
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
        wait_for_room(&dir.path().join(NAME));
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
        // As many as if there were no child.
        let connect = || UnixStream::connect(socket.path()).unwrap();
        let more: Vec<_> = (0..PER_USER).map(|_| connect()).collect();
        more.iter().enumerate().for_each(|(number, stream)| assert_eq!(first_of(stream), 0, "{number}"));
        let refused = connect();
        assert_eq!(first_of(&refused), -1, "one more than a user may have is told so");
        // Most have not read all that they were sent. The child ends all the same.
        assert!(!others.end(), "the process that is meant has not come");
        drop((arrives, more, refused));
        let own = Handshake::start(&Workers::default(), Place::Common(socket), own(), &server(35)).unwrap();
        assert_eq!(receive(socket.path()).0.len(), 35);
        assert!(own.end());
        wait_for_room(socket.path());
        assert_eq!(receive(socket.path()).0.len(), 5, "it is served as before");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    /// It comes from a child over another socket.
    #[test]
    fn a_client_that_cannot_be_received_keeps_no_other_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let served = serve(dir.path());
        let passes = served.socket().passed.1.as_raw_fd();
        let (theirs, other) = UnixStream::pair().unwrap();
        // There is no room for so many.
        let (many, user) = ([theirs.as_raw_fd(); 20], NOBODY.to_ne_bytes());
        let rights = [ControlMessage::ScmRights(&many)];
        sendmsg::<()>(passes, &[IoSlice::new(&user)], &rights, MsgFlags::empty(), None).unwrap();
        assert_eq!(receive(served.socket().path()).0.len(), 5, "one that connects");
        // SAFETY: a plain system call.
        assert!(unsafe { pass_client(passes, theirs.as_raw_fd(), NOBODY) });
        assert_eq!(first_of(&other), 0, "one that a child passes on");
    }

    /// The first value that a client is sent.
    fn first_of(mut stream: &UnixStream) -> i64 {
        stream.set_read_timeout(Some(READ_LIMIT)).unwrap();
        let mut first = [0; 8];
        stream.read_exact(&mut first).expect("a message, and no end without one");
        i64::from_le_bytes(first)
    }

    /// It is seen a moment later that clients have read or gone.
    fn wait_for_room(path: &Path) {
        let until = Instant::now() + READ_LIMIT;
        while receive(path).0 == [-1] {
            assert!(Instant::now() < until, "there is room again");
        }
    }

    /// Connections of another user of the host. `None`: only root can make them.
    fn connections_of(user: libc::uid_t, count: usize, path: &Path) -> Option<Vec<UnixStream>> {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root can connect as another user");
            return None;
        }
        let path = path.to_owned();
        let connect = move || {
            // SAFETY: the system call, and not the function of the C library, changes the user of this thread only.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) };
            assert_eq!(changed, 0);
            (0..count).map(|_| UnixStream::connect(&path).unwrap()).collect()
        };
        Some(thread::spawn(connect).join().unwrap())
    }

    /// In a directory that all users can pass through.
    fn serve_all() -> (tempfile::TempDir, Served) {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let served = serve(dir.path());
        (dir, served)
    }

    const NOBODY: libc::uid_t = 65_534;

    #[test]
    fn what_one_user_connects_refuses_no_other_while_a_domain_is_attached() {
        let (_dir, served) = serve_all();
        let path = served.socket().path();
        let mut sleeper =
            Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let (workers, pid) = (Workers::default(), sleeper.id().cast_signed());
        let attaches = Handshake::start(&workers, Place::Common(served.socket()), pid, &server(35)).unwrap();
        let theirs = connections_of(NOBODY, 25, path);
        let arrives = UnixStream::connect(path).unwrap();
        assert_eq!(first_of(&arrives), 0, "it arrives");
        let more = connections_of(NOBODY, 2 * PER_USER, path);
        let all = theirs.iter().chain(&more).flatten();
        let refused = all.filter(|stream| first_of(stream) == -1).count();
        assert_eq!(refused, if more.is_some() { 25 + PER_USER } else { 0 }, "they are told so");
        assert_eq!(first_of(&UnixStream::connect(path).unwrap()), 0);
        assert!(!attaches.end());
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    #[test]
    fn who_has_many_numbers_leaves_room_for_users_of_the_host() {
        let (_dir, served) = serve_all();
        let path = served.socket().path();
        let mut theirs = Vec::new();
        for user in OWN_NUMBERS..OWN_NUMBERS + 6 {
            let Some(more) = connections_of(user, PER_USER, path) else { return };
            theirs.extend(more);
        }
        let refused = theirs.iter().filter(|stream| first_of(stream) == -1).count();
        assert_eq!(refused, 6 * PER_USER - OF_ALL / 2);
        assert_eq!(first_of(&UnixStream::connect(path).unwrap()), 0);
    }

    /// Each is a channel that is made.
    #[test]
    fn who_connects_again_and_again_has_some_of_it_only() {
        let (_dir, served) = serve_all();
        let path = served.socket().path();
        let most = Work::Connections.rate().at_once as usize;
        let until = Instant::now() + READ_LIMIT;
        let refused = |_| first_of(&UnixStream::connect(path).unwrap()) == -1;
        while !(0..2 * most).any(refused) {
            assert!(Instant::now() < until, "it is never refused");
        }
        let Some(other) = connections_of(NOBODY, 1, path) else { return };
        assert_eq!(first_of(&other[0]), 0, "another user has its own");
    }

    /// A QEMU that is closed before it has read reads without end.
    #[test]
    fn who_is_refused_stays_open_whatever_other_users_do() {
        let (_dir, served) = serve_all();
        let path = served.socket().path();
        let idle: Vec<_> = (0..PER_USER).map(|_| UnixStream::connect(path).unwrap()).collect();
        let refused = UnixStream::connect(path).unwrap();
        let closed = |stream: &UnixStream| {
            let mut wait = [PollFd::new(stream.as_fd(), PollFlags::empty())];
            poll(&mut wait, PollTimeout::ZERO).unwrap() == 1
        };
        let Some(theirs) = connections_of(NOBODY, 5 * PER_USER, path) else { return };
        // All were answered when the last one was.
        let last = UnixStream::connect(path).unwrap();
        assert_eq!(first_of(&last), -1);
        assert!(!closed(&refused) && !idle.iter().any(closed));
        // Those that are too many are closed after the last one was answered, if that came between two of them.
        let until = Instant::now() + READ_LIMIT;
        let open = || theirs.iter().filter(|stream| !closed(stream)).count();
        while open() > 2 * PER_USER {
            assert!(Instant::now() < until, "one user keeps {} open", open());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
