//! Two rings in memory that two processes of a host share.
//!
//! ```text
//! file: ring to the listener, ring to the dialler; each:
//!   0     head      bytes ever written, by the writer
//!   64    tail      bytes ever read, by the reader
//!   128   sleeping  1 while the reader waits on the socket
//!   192   starved   1 while the writer waits on the socket for room
//!   4096  bytes     RING of them
//! ```
//!
//! A reader that polls costs the writer no system call. One that sleeps is woken by a byte on a socket, which also shows
//! when the other process has ended. The file goes over that socket when the connection is made.
//!
//! # What is untrusted
//!
//! The other process can write to all of it at any time. Positions are kept here, and those of the other side are checked
//! against them. Bytes are copied before anybody looks at them. The file cannot shrink. The socket is used with
//! `MSG_DONTWAIT`, so that flags which the other side may change do not matter.

use crate::pipe::Pipe;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    poll::PollFlags,
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::{MapFlags, ProtFlags, mmap, munmap},
        socket::{ControlMessage, MsgFlags, recv, send, sendmsg},
        stat::fstat,
    },
};
use std::{
    io::{self, IoSlice},
    num::NonZeroUsize,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};
use vnuma_abi_dsm_wire::WireError;

/// Bytes of a ring: two of the largest frames. A power of two.
pub const RING: usize = 2 << 20;
const DATA: usize = 4096;
const HEAD: usize = 0;
const TAIL: usize = 64;
const SLEEPING: usize = 128;
const STARVED: usize = 192;
/// Bytes of the file.
const FILE: usize = 2 * (DATA + RING);

/// What the other process did to the memory. It is a [`Fault::Ring`](crate::Fault::Ring) in the end.
fn wrong(field: &'static str, value: u64, expected: &'static str) -> io::Error {
    io::Error::other(WireError::Value { field, value, expected })
}

/// The file, mapped.
#[derive(Debug)]
struct Memory {
    address: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value and stays at its address; positions are atomic, bytes are copied through raw
// pointers.
unsafe impl Send for Memory {}

impl Memory {
    fn map(file: impl AsFd) -> io::Result<Self> {
        let size = NonZeroUsize::new(FILE).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0)? };
        Ok(Self { address: address.cast() })
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < FILE, "offset {offset}");
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.address.add(offset) }
    }

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping and aligned: all offsets are multiples of 64. Others access it at the same time,
        // hence the atomic.
        unsafe { self.at(offset).cast().as_ref() }
    }

    fn flag(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `position`.
        unsafe { self.at(offset).cast().as_ref() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this size, and nothing refers to it any more. It cannot fail for
        // such a mapping.
        let _ = unsafe { munmap(self.address.cast(), FILE) };
    }
}

/// A connection within a host.
#[derive(Debug)]
pub struct ShmPipe {
    memory: Memory,
    socket: UnixStream,
    /// Where the ring begins that this side writes, and how much it has written.
    out: (usize, u64),
    /// Where the ring begins that this side reads, and how much it has read.
    inward: (usize, u64),
    /// The last read found nothing.
    idle: bool,
    ended: bool,
}

impl ShmPipe {
    /// The side that dialled makes the memory.
    pub fn dialled(socket: UnixStream) -> io::Result<Self> {
        let file = memfd_create(c"vnuma-dsm-ring", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&file, FILE as i64)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let (number, byte) = ([file.as_raw_fd()], [IoSlice::new(&[1])]);
        let rights = [ControlMessage::ScmRights(&number)];
        sendmsg::<()>(socket.as_raw_fd(), &byte, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
        let memory = Memory::map(&file)?;
        Ok(Self { memory, socket, out: (0, 0), inward: (DATA + RING, 0), idle: false, ended: false })
    }

    /// The side that listens gets it. `WouldBlock` while it has not come: only where the socket does not block.
    pub fn accepted(socket: UnixStream) -> io::Result<Self> {
        let file = receive_file(&socket)?;
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        let size = fstat(&file)?.st_size;
        if !seals.contains(SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK) || size != FILE as i64 {
            let value = u64::try_from(size).unwrap_or(0);
            let expected = "the size of two rings, sealed";
            return Err(wrong("file", value, expected));
        }
        let memory = Memory::map(&file)?;
        Ok(Self { memory, socket, out: (DATA + RING, 0), inward: (0, 0), idle: false, ended: false })
    }

    /// Copies between a buffer and the ring's bytes from a position on, in one or two pieces.
    fn pieces(ring: usize, position: u64, len: usize) -> [(usize, usize); 2] {
        let start = (position % RING as u64) as usize;
        let first = len.min(RING - start);
        [(ring + DATA + start, first), (ring + DATA, len - first)]
    }

    /// Bytes that have come and were not read.
    fn available(&self) -> io::Result<usize> {
        let (ring, tail) = self.inward;
        let head = self.memory.position(ring + HEAD).load(Ordering::Acquire);
        match head.checked_sub(tail).filter(|len| *len <= RING as u64) {
            Some(len) => Ok(len as usize),
            None => {
                let expected = "at most a ring ahead of what was read";
                Err(wrong("head", head, expected))
            }
        }
    }

    /// Bytes that can be written.
    fn room(&self) -> io::Result<usize> {
        let (ring, head) = self.out;
        let tail = self.memory.position(ring + TAIL).load(Ordering::Acquire);
        match head.checked_sub(tail).filter(|len| *len <= RING as u64) {
            Some(used) => Ok(RING - used as usize),
            None => {
                let expected = "at most what was written, and a ring behind it at most";
                Err(wrong("tail", tail, expected))
            }
        }
    }

    /// Wakes the other side if it has said that it waits.
    fn ring_if(&self, flag: usize) {
        // Between the position, which was just stored, and the flag: the other side does it the other way round.
        fence(Ordering::SeqCst);
        if self.memory.flag(flag).load(Ordering::Relaxed) != 0
            && self.memory.flag(flag).swap(0, Ordering::Relaxed) != 0
        {
            // A full socket wakes it as well, and one without a reader shows when reading.
            let _ = send(self.socket.as_raw_fd(), &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        }
    }

    /// Takes the bytes that woke this side.
    fn drain(&mut self) {
        let mut bytes = [0; 64];
        loop {
            match recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(64) | Err(Errno::EINTR) => {}
                Ok(1..) | Err(Errno::EAGAIN) => return,
                Ok(_) | Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }
}

/// The file that comes with the first byte. All that came with it are closed if there are others: whoever dials sends as many as
/// the kernel lets it, and `nix` gives none of them where there was no room for all.
fn receive_file(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0_u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    // 16 bytes of a header, and four descriptors of which one is expected.
    let mut space = [0_u64; 4];
    // SAFETY: a `msghdr` of zeroes is one without any part.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space) as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: the message has one part and room for what comes with it; both live through the call.
    let bytes = Errno::result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut files = Vec::new();
    // SAFETY: the kernel has filled the space that the message names, and says how much of it.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: it is null, or inside that space.
    while let Some(head) = unsafe { header.as_ref() } {
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: it only computes the length of a header.
            let before = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = head.cmsg_len.saturating_sub(before) / size_of::<RawFd>();
            // SAFETY: behind the header, inside that space.
            let numbers = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for at in 0..count {
                // SAFETY: the kernel has put so many numbers there, of descriptors that it has just opened for this process, and
                // nothing else knows them.
                files.push(unsafe { OwnedFd::from_raw_fd(numbers.add(at).read_unaligned()) });
            }
        }
        // SAFETY: as for the first.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    match (bytes, files.len()) {
        // There was no number left for it, or for another one.
        (_, 0 | 1) if message.msg_flags & libc::MSG_CTRUNC != 0 => Err(Errno::EMFILE.into()),
        (1, 1) => files.pop().ok_or_else(|| io::ErrorKind::InvalidData.into()),
        (_, count) => Err(wrong("files", count as u64, "one, with the first byte")),
    }
}

impl Pipe for ShmPipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (ring, tail) = self.inward;
        let mut len = self.available()?.min(buffer.len());
        // Nothing for the second time, so it is the socket that keeps this side from sleeping. A side that polls before it sleeps would find
        // it ready again and again, and not hear that the other process has ended.
        if len == 0 && std::mem::replace(&mut self.idle, true) {
            self.drain();
            len = self.available()?.min(buffer.len());
        }
        if len == 0 {
            return if self.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        self.idle = false;
        let mut done = 0;
        for (offset, len) in Self::pieces(ring, tail, len) {
            let part = &mut buffer[done..done + len];
            if len > 0 {
                // SAFETY: both are `len` bytes long: the piece is inside the ring, the buffer is this side's own. The
                // other process may change the bytes meanwhile, and whatever is copied is checked later.
                unsafe { self.memory.at(offset).as_ptr().copy_to_nonoverlapping(part.as_mut_ptr(), len) };
            }
            done += len;
        }
        self.inward.1 = tail + len as u64;
        self.memory.position(ring + TAIL).store(self.inward.1, Ordering::Release);
        self.ring_if(ring + STARVED);
        Ok(len)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (ring, head) = self.out;
        let len = self.room()?.min(bytes.len());
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut done = 0;
        for (offset, len) in Self::pieces(ring, head, len) {
            if len > 0 {
                let part = &bytes[done..done + len];
                // SAFETY: as in `read`, in the other direction.
                unsafe { self.memory.at(offset).as_ptr().copy_from_nonoverlapping(part.as_ptr(), len) };
            }
            done += len;
        }
        self.out.1 = head + len as u64;
        self.memory.position(ring + HEAD).store(self.out.1, Ordering::Release);
        self.ring_if(ring + SLEEPING);
        Ok(len)
    }

    fn events(&self, _writing: bool) -> PollFlags {
        PollFlags::POLLIN
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn arm(&mut self, writing: bool) -> bool {
        self.drain();
        self.memory.flag(self.inward.0 + SLEEPING).store(1, Ordering::Relaxed);
        if writing {
            self.memory.flag(self.out.0 + STARVED).store(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let nothing_to_read = self.available().is_ok_and(|len| len == 0);
        let nothing_to_write = !writing || self.room().is_ok_and(|room| room == 0);
        !self.ended && nothing_to_read && nothing_to_write
    }

    fn pending(&self) -> bool {
        self.available().map_or(true, |len| len > 0)
    }
}
