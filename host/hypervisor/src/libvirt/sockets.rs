//! Sockets over which QEMUs are sent the messages of a channel: who may have one, and who has read everything.

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::socket::{
        AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, bind, recvmsg, socket,
    },
};
use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, IoSliceMut, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    ptr,
};

/// No version of the protocol: QEMU says so, and ends.
pub(super) const REFUSAL: [u8; MESSAGE] = (-1_i64).to_le_bytes();

/// Most messages: three, and one for each interrupt of both sides.
const MAX_MESSAGES: usize = 256;

/// Bytes of a message.
pub(super) const MESSAGE: usize = 8;

/// A message, and the descriptor that goes with it.
pub(super) type Message = ([u8; MESSAGE], Option<OwnedFd>);

/// Makes a directory that everybody can pass through, and only its owner can list.
pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o711).create(directory)?;
    // The umask of this process may have taken rights away.
    fs::set_permissions(directory, Permissions::from_mode(0o711))
}

/// The lock of a file, by which one vnumad at a time does something. It ends with its vnumad, and the file with it, or with the next one.
#[derive(Debug)]
pub(super) struct Turn {
    path: PathBuf,
    _lock: Flock<File>,
}

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
                return Ok(Self { path, _lock: lock });
            }
        }
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
    let mut pid = String::new();
    // It may not have written it yet.
    let _ = file.take(16).read_to_string(&mut pid);
    let who = pid.trim().parse::<u32>().map_or("another vnumad".to_owned(), |pid| format!("process {pid}"));
    io::Error::new(io::ErrorKind::ResourceBusy, format!("{who} {does} as well"))
}

/// What waits in a socket, message by message.
pub(super) fn messages(server: &OwnedFd) -> io::Result<Vec<Message>> {
    let mut messages = Vec::new();
    loop {
        let mut bytes = [0; MESSAGE];
        let mut space = nix::cmsg_space!([RawFd; 1]);
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let received = match recvmsg::<()>(server.as_raw_fd(), &mut buffers, Some(&mut space), flags) {
            Err(Errno::EAGAIN) => return Ok(messages),
            other => other?,
        };
        // Its other end is closed, as the channel is not served.
        if received.bytes == 0 {
            return Ok(messages);
        }
        let mut descriptor = None;
        for control in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(descriptors) = control {
                // SAFETY: the kernel has just made them for this process.
                descriptor = descriptors.first().map(|&raw| unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
        if received.bytes != MESSAGE || messages.len() == MAX_MESSAGES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the channel's messages are not as expected",
            ));
        }
        messages.push((bytes, descriptor));
    }
}

/// A socket with this path, which no other process has then.
pub(super) fn bind_to(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
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
    _parts: Vec<Part>,
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
        // SAFETY: the macro computes a size.
        let (space, length) = unsafe { (libc::CMSG_SPACE(4) as usize, libc::CMSG_LEN(4) as usize) };
        assert!(space <= size_of::<[usize; 4]>(), "room for one descriptor");
        // Not moved after this, as the parts point into themselves.
        let part = |(bytes, _): &Message| Part {
            bytes: *bytes,
            vector: libc::iovec { iov_base: ptr::null_mut(), iov_len: MESSAGE },
            control: [0; 4],
        };
        let mut parts: Vec<Part> = messages.iter().map(part).collect();
        let mut headers = Vec::with_capacity(parts.len());
        for (part, (_, descriptor)) in parts.iter_mut().zip(messages) {
            part.vector.iov_base = part.bytes.as_mut_ptr().cast();
            // SAFETY: all zero is a valid value of this plain structure.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = &raw mut part.vector;
            header.msg_hdr.msg_iovlen = 1;
            if let Some(descriptor) = descriptor {
                header.msg_hdr.msg_control = part.control.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = space;
                // SAFETY: the control buffer has room for one header and one descriptor, which was checked above.
                unsafe {
                    let control = libc::CMSG_FIRSTHDR(&raw const header.msg_hdr);
                    (*control).cmsg_level = libc::SOL_SOCKET;
                    (*control).cmsg_type = libc::SCM_RIGHTS;
                    (*control).cmsg_len = length;
                    libc::CMSG_DATA(control).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
                }
            }
            headers.push(header);
        }
        Self { headers, _parts: parts }
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
