//! Sockets over which QEMUs are sent the messages of a channel: who may have one, and who has read everything.

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket},
};
use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    ptr,
};

/// No version of the protocol: QEMU says so, and ends.
pub(super) const REFUSAL: [u8; MESSAGE] = (-1_i64).to_le_bytes();

/// Most messages: three, and one for each interrupt of both sides.
pub(super) const MAX_MESSAGES: usize = 256;

/// Bytes of a message.
pub(super) const MESSAGE: usize = 8;

/// A message, and the descriptor that goes with it.
pub(super) type Message = ([u8; MESSAGE], Option<OwnedFd>);

/// Makes a directory that everybody can pass through, and only its owner can list. One of another user is left alone: that user could
/// put another socket in the place of vnumad's.
pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o711).create(directory)?;
    let handle = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(directory)?;
    let owner = handle.metadata()?.uid();
    if owner != 0 && owner != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{}: owner = {owner}: must be root or the user of vnumad", directory.display()),
        ));
    }
    // The umask of this process may have taken rights away.
    handle.set_permissions(Permissions::from_mode(0o711))
}

/// The lock of a file, by which one vnumad at a time does something. It ends with its vnumad, and the file with it, or with the next one.
#[derive(Debug)]
pub(super) struct Turn {
    path: PathBuf,
    lock: Flock<File>,
}

/// Follows the number of the process in a file whose QEMU has not read what it was sent.
const UNREAD: &str = "unread";

impl Turn {
    /// `does`: what another process that has it does.
    pub(super) fn take(path: PathBuf, does: &str) -> io::Result<Self> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let file = options.mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path)?;
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((file, Errno::EWOULDBLOCK)) => return Err(others(file, does)),
                Err((_, errno)) => return Err(errno.into()),
            };
            // Its former holder may have removed the file.
            let (own, there) = (lock.metadata()?, fs::metadata(&path));
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())) {
                lock.set_len(0)?;
                writeln!(lock, "{}", std::process::id())?;
                return Ok(Self { path, lock });
            }
        }
    }

    /// Tells those who want it as well that a QEMU has not read what it was sent.
    pub(super) fn awaits_reader(&mut self) {
        // Only for the message.
        let _ = self.lock.rewind().and_then(|()| writeln!(self.lock, "{} {UNREAD}", std::process::id()));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Before the lock is given back. A file that stays is locked by the next one.
        let _ = fs::remove_file(&self.path);
    }
}

/// Somebody else has the lock of this file.
fn others(file: File, does: &str) -> io::Error {
    let mut text = String::new();
    // It may not have written it yet.
    let _ = file.take(32).read_to_string(&mut text);
    let mut words = text.split_whitespace();
    let pid = words.next().and_then(|pid| pid.parse::<u32>().ok());
    let who = pid.map_or("another vnumad".to_owned(), |pid| format!("process {pid}"));
    let says = match words.next() {
        Some(UNREAD) => format!("its QEMU has not read what {who} has sent it before"),
        _ => format!("{who} {does} as well"),
    };
    io::Error::new(io::ErrorKind::ResourceBusy, says)
}

/// What came with one `recvmsg`. Empty: the other end is closed.
struct Received {
    bytes: usize,
    descriptors: Vec<OwnedFd>,
    /// There was no room for some descriptors: too many came, or this process can have no more of them.
    cut_off: bool,
}

/// Receives a message without waiting. All descriptors that came with it are closed with the result, of one that was cut off as well.
/// `flags`: with `MSG_PEEK` the message stays, and these are copies of its descriptors.
fn receive(from: BorrowedFd<'_>, bytes: &mut [u8], flags: libc::c_int) -> nix::Result<Received> {
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // Aligned as the kernel wants a control message.
    let mut control = [0_usize; 4];
    // SAFETY: all zero is a valid value of this plain structure.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header points to buffers that outlive the call, with their sizes.
    let count = Errno::result(unsafe { libc::recvmsg(from.as_raw_fd(), &raw mut header, flags) })?;
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has filled the buffer up to the length that is in the header now, also if there was more: each control message
    // that these macros find has the length that it says, and the descriptors were just made for this process.
    unsafe {
        let mut part = libc::CMSG_FIRSTHDR(&raw const header);
        while !part.is_null() {
            if ((*part).cmsg_level, (*part).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let length = (*part).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let numbers = libc::CMSG_DATA(part).cast::<RawFd>();
                let number = |at| OwnedFd::from_raw_fd(numbers.add(at).read_unaligned());
                descriptors.extend((0..length / size_of::<RawFd>()).map(number));
            }
            part = libc::CMSG_NXTHDR(&raw const header, part);
        }
    }
    let cut_off = header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Received { bytes: count as usize, descriptors, cut_off })
}

/// What waits in a socket, message by message.
pub(super) fn messages(server: &OwnedFd) -> io::Result<Vec<Message>> {
    let mut messages = Vec::new();
    loop {
        let mut bytes = [0; MESSAGE];
        let mut received = match receive(server.as_fd(), &mut bytes, 0) {
            Err(Errno::EAGAIN) => return Ok(messages),
            other => other?,
        };
        // Its other end is closed, as the channel is not served.
        if received.bytes == 0 {
            return Ok(messages);
        }
        let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()));
        if received.cut_off {
            return wrong(
                "descriptors of the channel are cut off: this process may have too many open files",
            );
        }
        if received.bytes != MESSAGE || received.descriptors.len() > 1 || messages.len() == MAX_MESSAGES {
            return wrong("the channel's messages are not as expected");
        }
        messages.push((bytes, received.descriptors.pop()));
    }
}

/// What a child has of the socket that all have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left<'a> {
    /// Open as long as it accepts.
    pub(super) accepts: BorrowedFd<'a>,
    /// Clients that are not meant go to vnumad by this.
    pub(super) passes: BorrowedFd<'a>,
}

/// How often a message is looked at whose descriptor is cut off though this process can have more: another thread may have had the last
/// one meanwhile.
const LOOKS: usize = 3;

/// A client that another process has accepted and passed on. `None`: there is none now. While this process can have no more files, it
/// waits where it is: one that is closed without a message would read without end.
///
/// A message that cannot be received for another reason is dropped, and `dropped` is called with its user: those behind it would wait for
/// good. A security module may refuse a descriptor, for example.
pub(super) fn take_client(
    from: BorrowedFd<'_>,
    dropped: impl FnOnce(libc::uid_t, &'static str),
) -> io::Result<Option<OwnedFd>> {
    let mut user = libc::uid_t::MAX.to_ne_bytes();
    let mut why = "its descriptor is cut off";
    for _ in 0..LOOKS {
        match receive(from, &mut user, libc::MSG_PEEK) {
            // This fails while there is no room for a descriptor.
            Ok(received) if received.cut_off => drop(from.try_clone_to_owned()?),
            Ok(mut received) => {
                // Its own descriptor is closed with it, and the copy stays.
                receive(from, &mut user, 0)?;
                return Ok(received.descriptors.pop());
            }
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(errno) => {
                why = errno.desc();
                break;
            }
        }
    }
    // What cannot be taken away either is tried again after a pause.
    receive(from, &mut user, 0)?;
    dropped(libc::uid_t::from_ne_bytes(user), why);
    Ok(None)
}

/// Passes a client of this user on. False if that could not be done at once.
///
/// # Safety
/// None beyond that of a system call. It makes no other, and allocates nothing.
pub(super) unsafe fn pass_client(to: RawFd, client: RawFd, user: libc::uid_t) -> bool {
    let (mut bytes, mut control) = (user.to_ne_bytes(), [0_usize; 4]);
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zero is a valid value of this plain structure. The control buffer has room for one header and one descriptor, as `Batch`
    // checks of one of its size, and all buffers outlive the call.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(4) as usize;
        put_descriptor(&header, client);
        libc::sendmsg(to, &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) == bytes.len() as isize
    }
}

/// Puts a descriptor into the control buffer of a message.
///
/// # Safety
/// The buffer has room for it.
unsafe fn put_descriptor(header: &libc::msghdr, descriptor: RawFd) {
    // SAFETY: as the caller says.
    unsafe {
        let control = libc::CMSG_FIRSTHDR(header);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(control).cast::<RawFd>().write_unaligned(descriptor);
    }
}

/// A socket with this path, which no other process has then. What is there and is no socket stays.
pub(super) fn bind_to(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            let what = format!("{}: exists and is not a socket; it is left alone", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Ok(_) => fs::remove_file(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(listener)
}

/// Messages as `sendmmsg` takes them. The parts point into each other, so it is made before the fork and not moved after.
pub(super) struct Batch {
    pub(super) headers: Vec<libc::mmsghdr>,
    parts: Vec<Part>,
}

/// A message: its bytes, and room for one descriptor.
struct Part {
    bytes: [u8; MESSAGE],
    vector: libc::iovec,
    // Aligned as the kernel wants a control message.
    control: [usize; 4],
}

impl Batch {
    pub(super) fn new(messages: &[Message]) -> Self {
        let mut batch = Self::with_room(messages.len());
        batch.set(
            messages.iter().map(|(bytes, descriptor)| (*bytes, descriptor.as_ref().map(AsRawFd::as_raw_fd))),
        );
        batch
    }

    /// None yet, and room for so many.
    pub(super) fn with_room(most: usize) -> Self {
        Self { headers: Vec::with_capacity(most), parts: Vec::with_capacity(most) }
    }

    /// Has these messages instead of those before, as far as there is room: nothing is allocated.
    pub(super) fn set(&mut self, messages: impl Iterator<Item = ([u8; MESSAGE], Option<RawFd>)>) {
        // SAFETY: the macro computes a size.
        let space = unsafe { libc::CMSG_SPACE(4) as usize };
        assert!(space <= size_of::<[usize; 4]>(), "room for one descriptor");
        let Self { headers, parts } = self;
        headers.clear();
        parts.clear();
        for (bytes, descriptor) in messages.take(headers.capacity().min(parts.capacity())) {
            let vector = libc::iovec { iov_base: ptr::null_mut(), iov_len: MESSAGE };
            // Not moved after this, as the parts point into themselves.
            parts.push(Part { bytes, vector, control: [0; 4] });
            let Some(part) = parts.last_mut() else { return };
            part.vector.iov_base = part.bytes.as_mut_ptr().cast();
            // SAFETY: all zero is a valid value of this plain structure.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = &raw mut part.vector;
            header.msg_hdr.msg_iovlen = 1;
            if let Some(descriptor) = descriptor {
                header.msg_hdr.msg_control = part.control.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = space;
                // SAFETY: the control buffer has room for one header and one descriptor, which was checked above.
                unsafe { put_descriptor(&header.msg_hdr, descriptor) };
            }
            headers.push(header);
        }
    }
}

/// Tells a QEMU that it gets no channel. False if the message could not be sent.
///
/// # Safety
/// None beyond that of a system call.
pub(super) unsafe fn refuse(peer: RawFd) -> bool {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message has that length.
    unsafe { libc::send(peer, REFUSAL.as_ptr().cast(), MESSAGE, flags) == MESSAGE as isize }
}

/// Sends all messages. False: not all.
///
/// # Safety
/// The headers point to memory that is valid.
pub(super) unsafe fn send_all(peer: RawFd, headers: &mut [libc::mmsghdr]) -> bool {
    let mut sent = 0;
    while sent < headers.len() {
        let rest = &mut headers[sent..];
        // SAFETY: the headers and what they point to are the caller's, and are valid.
        let count = unsafe { libc::sendmmsg(peer, rest.as_mut_ptr(), rest.len() as u32, libc::MSG_NOSIGNAL) };
        match usize::try_from(count) {
            Ok(count @ 1..) => sent += count,
            _ => return false,
        }
    }
    true
}

/// Has the other end read everything?
pub(super) fn has_read_all(peer: RawFd) -> bool {
    let mut unread: libc::c_int = 0;
    // SAFETY: the kernel writes a number to `unread`.
    let known = unsafe { libc::ioctl(peer, libc::TIOCOUTQ, &raw mut unread) } == 0;
    !known || unread == 0
}

/// The process at the other end of a socket, and its user.
///
/// # Safety
/// None beyond that of a system call.
pub(super) unsafe fn credentials_of(peer: RawFd) -> libc::ucred {
    let mut credentials = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the structure has room for the `length` bytes that the kernel may write.
    unsafe {
        libc::getsockopt(
            peer,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    credentials
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{ControlMessage, MsgFlags, sendmsg, socketpair},
    };
    use std::{io::IoSlice, os::unix::fs::chown};

    const MEMORY: &str = "sockets-test-leak";

    /// Descriptors of this process that are the file of these tests.
    fn open() -> usize {
        let names =
            fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        names.filter(|name| name.to_string_lossy().contains(MEMORY)).count()
    }

    #[test]
    fn descriptors_that_are_too_many_do_not_stay_open() {
        for count in [2, 3, 20] {
            let flags = SockFlag::SOCK_CLOEXEC;
            let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
            let memory = memfd_create(MEMORY, MFdFlags::MFD_CLOEXEC).unwrap();
            let raw = vec![memory.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&raw)];
            let message = [IoSlice::new(&[0; MESSAGE])];
            sendmsg::<()>(ours.as_raw_fd(), &message, &rights, MsgFlags::empty(), None).unwrap();
            messages(&theirs).expect_err("more than one descriptor");
            drop((ours, theirs, memory));
            assert_eq!(open(), 0, "{count} came with one message");
        }
    }

    /// What this is in a process that can have no more files.
    fn without_files(act: impl FnOnce() -> bool) -> bool {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the child makes system calls and allocates, which the C library allows after a fork, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let limited = libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) == 0;
                libc::_exit(i32::from(!(limited && act())));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status == 0
        }
    }

    #[test]
    fn a_client_is_passed_on_and_a_reader_that_has_gone_is_noticed() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = || socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
        let ((reads, writes), (client, other)) = (pair(), pair());
        let take = || take_client(reads.as_fd(), |user, why| panic!("that of {user} is dropped: {why}"));
        assert!(take().unwrap().is_none());
        // SAFETY: plain system calls.
        let pass = || unsafe { pass_client(writes.as_raw_fd(), client.as_raw_fd(), 7) };
        assert!(pass());
        assert!(without_files(|| take().is_err()), "it is not lost");
        let passed = take().unwrap().expect("a client");
        // SAFETY: as above.
        assert!(unsafe { refuse(passed.as_raw_fd()) });
        let mut bytes = [0; MESSAGE];
        assert_eq!((receive(other.as_fd(), &mut bytes, 0).unwrap().bytes, bytes), (MESSAGE, REFUSAL));
        let passes = (0..100_000).take_while(|_| pass()).count();
        assert!((1..100_000).contains(&passes), "nobody reads, and it does not wait: {passes}");
        drop(reads);
        assert!(!pass());
    }

    #[test]
    fn a_message_that_cannot_be_received_keeps_no_client_behind_it_waiting() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = || socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
        let ((reads, writes), (client, _other)) = (pair(), pair());
        let memory = memfd_create(MEMORY, MFdFlags::MFD_CLOEXEC).unwrap();
        // There is no room for so many, as if a security module refused one.
        let raw = [memory.as_raw_fd(); 20];
        let (user, rights) = (7_u32.to_ne_bytes(), [ControlMessage::ScmRights(&raw)]);
        sendmsg::<()>(writes.as_raw_fd(), &[IoSlice::new(&user)], &rights, MsgFlags::empty(), None).unwrap();
        // SAFETY: a plain system call.
        assert!(unsafe { pass_client(writes.as_raw_fd(), client.as_raw_fd(), 8) });
        let mut dropped = None;
        let first = take_client(reads.as_fd(), |user, why| dropped = Some((user, why)));
        assert!(matches!(first, Ok(None)), "{first:?}");
        assert_eq!(dropped, Some((7, "its descriptor is cut off")));
        let second = take_client(reads.as_fd(), |user, why| panic!("that of {user} is dropped: {why}"));
        assert!(matches!(second, Ok(Some(_))), "{second:?}");
        drop(memory);
        assert_eq!(open(), 0, "its descriptors are closed");
    }

    #[test]
    fn what_is_of_others_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        fs::write(&path, "text").unwrap();
        let error = bind_to(&path, 0o600).unwrap_err().to_string();
        assert!(error.contains("precious: exists and is not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root can give a directory to another user");
            return;
        }
        let theirs = dir.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        chown(&theirs, Some(65_534), None).unwrap();
        let error = make_directory(&theirs).unwrap_err().to_string();
        assert!(error.contains("theirs: owner = 65534: must be root or the user of vnumad"), "{error}");
    }
}
