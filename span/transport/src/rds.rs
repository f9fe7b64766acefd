//! RDMA, by the kernel's reliable datagram sockets (RDS) on an RDMA device.
//!
//! The kernel carries the datagrams between two hosts over reliable connections of the device (queue pairs), in order and each
//! once. A stock kernel has it (`rds_rdma`), for InfiniBand and RoCE. Only that: RDS over TCP, which exists too, is refused.
//!
//! Each lane has two sockets of its own, one at each end. Its number is the type of service of both, for which RDS makes a queue
//! pair of its own: lanes do not wait for each other in one, as the connections of *GiantVM* did.
//!
//! ```text
//! dialler                                       listener
//!   new socket A ── CALL, lane ──▶ its address
//!                ◀── ANSWER ────── new socket B    A and B take datagrams of each other only
//!                ◀──▶ DATA, bytes
//!                ◀──▶ END
//! ```
//!
//! A call to a host on which no process listens yet is lost, so it is repeated. A process that ends without END, or a host that
//! does, is found by its silence. Nothing is secret or authenticated: for networks without other users.

use crate::pipe::Pipe;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{Domain, MaybeUninitSlice, Socket, Type};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    mem::MaybeUninit,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Of `linux/rds.h`.
const SOL_RDS: libc::c_int = 276;
const RDS_CONG_MONITOR: libc::c_int = 6;
const SO_RDS_TRANSPORT: libc::c_int = 8;
const RDS_TRANS_IB: libc::c_int = 0;
/// `SIOCPROTOPRIVATE`.
const SIOCRDSSETTOS: libc::Ioctl = 0x89e0;

/// Bytes of a datagram without its tag.
const CHUNK: usize = 32 << 10;
/// What may wait in the kernel, of each direction.
const QUEUE: libc::c_int = 1 << 20;
/// Between two calls.
const AGAIN: Duration = Duration::from_millis(100);
/// Callers that are remembered, whose repeated calls need no second socket.
const CALLERS: usize = 1024;
/// Datagrams of strangers that are dropped before others are looked at.
const STRANGERS: usize = 64;

/// First byte of a datagram.
const DATA: u8 = 0;
const END: u8 = 1;
const ANSWER: u8 = 2;
/// The others of a call are [`NAME`] and the number of the lane.
const CALL: u8 = 3;
const NAME: &[u8; 8] = b"vnumadsm";

/// A connection between two sockets.
#[derive(Debug)]
pub struct RdsPipe {
    socket: Socket,
    peer: SocketAddrV4,
    /// A datagram for which there was not enough room.
    rest: Vec<u8>,
    used: usize,
    /// The peer's queue is full. The kernel makes the socket readable when it is not any more.
    congested: bool,
    ended: bool,
}

/// Takes calls.
#[derive(Debug)]
pub struct RdsListener {
    socket: Socket,
    address: SocketAddrV4,
    callers: Mutex<VecDeque<SocketAddrV4>>,
}

fn ipv4(address: SocketAddr) -> io::Result<SocketAddrV4> {
    match address {
        SocketAddr::V4(address) => Ok(address),
        SocketAddr::V6(address) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("{address}: RDS needs an IPv4 address here"),
        )),
    }
}

fn set(socket: &Socket, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads one `c_int`, which lives through the call.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size) };
    Ok(Errno::result(result).map(drop)?)
}

/// A socket at this address, port 0 for one of the system's choice, for a lane or for the listener.
fn open(address: SocketAddrV4, lane: u8) -> io::Result<Socket> {
    let told =
        |what: &'static str| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    let new = Socket::new(Domain::from(libc::AF_RDS), Type::from(libc::SOCK_SEQPACKET), None)
        .map_err(told("socket(AF_RDS), which needs the kernel module rds_rdma"))?;
    new.set_nonblocking(true)?;
    set(&new, SOL_RDS, SO_RDS_TRANSPORT, RDS_TRANS_IB)
        .map_err(told("SO_RDS_TRANSPORT, which needs the kernel module rds_rdma"))?;
    set(&new, SOL_RDS, RDS_CONG_MONITOR, 1).map_err(told("RDS_CONG_MONITOR"))?;
    for name in [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE] {
        // Who may not exceed the system's limit gets that much.
        if set(&new, libc::SOL_SOCKET, name, QUEUE).is_err() {
            let plain = if name == libc::SO_SNDBUFFORCE { libc::SO_SNDBUF } else { libc::SO_RCVBUF };
            set(&new, libc::SOL_SOCKET, plain, QUEUE).map_err(told("SO_SNDBUF, SO_RCVBUF"))?;
        }
    }
    new.bind(&address.into()).map_err(|error| {
        io::Error::new(error.kind(), format!("bind {address}, which an RDMA device must have: {error}"))
    })?;
    // SAFETY: the kernel reads one byte, which lives through the call.
    let result = unsafe { libc::ioctl(new.as_raw_fd(), SIOCRDSSETTOS, &raw const lane) };
    Errno::result(result).map_err(io::Error::from).map_err(told("SIOCRDSSETTOS"))?;
    Ok(new)
}

/// No address, for datagrams of the kernel's own.
const NOWHERE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);

/// Where a socket is bound.
fn bound(socket: &Socket) -> io::Result<SocketAddrV4> {
    Ok(socket.local_addr()?.as_socket_ipv4().unwrap_or(NOWHERE))
}

fn send(socket: &Socket, to: SocketAddrV4, tag: u8, bytes: &[u8]) -> io::Result<()> {
    socket.send_to_vectored(&[IoSlice::new(&[tag]), IoSlice::new(bytes)], &to.into()).map(drop)
}

/// A datagram: its sender, its tag, and how many bytes are in `buffer`.
fn receive(socket: &Socket, buffer: &mut [u8]) -> io::Result<(SocketAddrV4, u8, usize)> {
    fn part(bytes: &mut [u8]) -> MaybeUninitSlice<'_> {
        // SAFETY: the same bytes, and the kernel writes to them nothing but bytes.
        MaybeUninitSlice::new(unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }
    let mut tag = [u8::MAX];
    let (count, flags, from) = socket.recv_from_vectored(&mut [part(&mut tag), part(buffer)])?;
    if flags.is_truncated() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a datagram that is too long"));
    }
    Ok((from.as_socket_ipv4().unwrap_or(NOWHERE), tag[0], count.saturating_sub(1)))
}

/// It may be sent later.
fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

impl RdsPipe {
    fn new(socket: Socket, peer: SocketAddrV4) -> Self {
        Self { socket, peer, rest: Vec::new(), used: 0, congested: false, ended: false }
    }

    /// Calls a listener until it answers.
    pub fn dialled(listener: SocketAddr, lane: u16, deadline: Instant) -> io::Result<Self> {
        let listener = ipv4(listener)?;
        // The address from which the peer is reached.
        let route = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        route.connect(listener)?;
        let own = ipv4(route.local_addr()?)?;
        let lane = lane as u8;
        let socket = open(SocketAddrV4::new(*own.ip(), 0), lane)?;
        let mut call = NAME.to_vec();
        call.push(lane);
        loop {
            match send(&socket, listener, CALL, &call) {
                Err(error) if !is_full(&error) => return Err(error),
                _ => {}
            }
            poll(
                &mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)],
                PollTimeout::try_from(AGAIN).unwrap_or(PollTimeout::ZERO),
            )?;
            match receive(&socket, &mut []) {
                Ok((peer, ANSWER, 0)) if peer.ip() == listener.ip() => return Ok(Self::new(socket, peer)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// The next datagram of the peer, into `buffer` if there is room for the largest, else to [`Self::rest`]. 0: the peer has ended.
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        for _ in 0..STRANGERS {
            let (from, tag, count) = receive(&self.socket, buffer)?;
            match tag {
                _ if from != self.peer => {}
                DATA if count > 0 => return Ok(count),
                END => {
                    self.ended = true;
                    return Ok(0);
                }
                // A second answer to a call that was repeated.
                ANSWER => {}
                tag => {
                    let text = format!("a datagram of {count} bytes with the tag {tag:#x}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }
}

impl Pipe for RdsPipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        if self.used == self.rest.len() {
            if buffer.len() >= CHUNK {
                return self.next(buffer);
            }
            let mut rest = std::mem::take(&mut self.rest);
            rest.resize(CHUNK, 0);
            let outcome = self.next(&mut rest);
            rest.truncate(*outcome.as_ref().unwrap_or(&0));
            (self.rest, self.used) = (rest, 0);
            outcome?;
        }
        let rest = &self.rest[self.used..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.used += count;
        Ok(count)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(CHUNK);
        let outcome = send(&self.socket, self.peer, DATA, &bytes[..count]);
        self.congested = matches!(&outcome, Err(error) if error.raw_os_error() == Some(libc::ENOBUFS));
        if self.congested {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        outcome.map(|()| count)
    }

    fn events(&self, writing: bool) -> PollFlags {
        // There is room in the socket all the time.
        if writing && !self.congested { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn arm(&mut self, _writing: bool) -> bool {
        !self.pending()
    }

    fn pending(&self) -> bool {
        self.used < self.rest.len()
    }
}

impl Drop for RdsPipe {
    fn drop(&mut self) {
        if !self.ended {
            // A peer that does not get it finds out by silence.
            let _ = send(&self.socket, self.peer, END, &[]);
        }
    }
}

impl RdsListener {
    /// At this address, which an RDMA device must have. Port 0 is one of the system's choice.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = open(ipv4(address)?, 0)?;
        let address = bound(&socket)?;
        Ok(Self { socket, address, callers: Mutex::default() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address.into()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Answers a call; `WouldBlock` if there is none.
    pub fn next(&self) -> io::Result<(RdsPipe, SocketAddr)> {
        let mut call = [0; NAME.len() + 2];
        let (caller, tag, count) = receive(&self.socket, &mut call)?;
        let lane = match call[..count].strip_prefix(NAME) {
            Some([lane]) if tag == CALL => *lane,
            _ => {
                let text = format!("{caller}: no call: {count} bytes with the tag {tag:#x}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        };
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        // It has called again before it got the answer.
        if callers.contains(&caller) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let socket = open(SocketAddrV4::new(*self.address.ip(), 0), lane)?;
        send(&socket, caller, ANSWER, &[])?;
        if callers.len() == CALLERS {
            callers.pop_front();
        }
        callers.push_back(caller);
        Ok((RdsPipe::new(socket, caller), caller.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing here takes longer unless it hangs.
    const HANG: Duration = Duration::from_secs(60);

    #[test]
    fn datagrams_have_a_sender_and_a_tag_and_are_whole() {
        let socket = || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
            socket.set_nonblocking(true).expect("a socket that does not wait");
            Socket::from(socket)
        };
        let (one, other) = (socket(), socket());
        let (from, to) = (bound(&one).expect("an address"), bound(&other).expect("an address"));
        let mut buffer = [0; 4];
        assert_eq!(receive(&other, &mut buffer).expect_err("nothing").kind(), io::ErrorKind::WouldBlock);
        send(&one, to, ANSWER, b"abc").expect("sent");
        assert_eq!(
            (until(|| receive(&other, &mut buffer)).expect("bytes"), &buffer),
            ((from, ANSWER, 3), b"abc\0")
        );
        send(&one, to, END, b"").expect("sent");
        assert_eq!(until(|| receive(&other, &mut [])).expect("no bytes"), (from, END, 0));
        send(&one, to, DATA, b"abcde").expect("sent");
        let error = until(|| receive(&other, &mut buffer)).expect_err("too long");
        assert_eq!(error.to_string(), "a datagram that is too long");
    }

    #[test]
    fn addresses_are_those_that_rds_has() {
        let error = ipv4("[::1]:8300".parse().expect("an address")).expect_err("IPv6");
        assert_eq!(error.to_string(), "[::1]:8300: RDS needs an IPv4 address here");
    }

    /// A listener where there is an RDMA device: its address is in the environment, as for the tests of all transports.
    fn listener() -> Option<RdsListener> {
        let address: Ipv4Addr = std::env::var("VNUMA_RDMA_ADDRESS").ok()?.parse().expect("an address");
        Some(RdsListener::bind((address, 0).into()).expect("a listener"))
    }

    fn until<T>(mut look: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let begin = Instant::now();
        loop {
            match look() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    assert!(begin.elapsed() < HANG, "it hangs");
                    std::thread::sleep(Duration::from_millis(1));
                }
                outcome => return outcome,
            }
        }
    }

    /// Both ends, and a socket of a third.
    fn connected(listener: &RdsListener) -> (RdsPipe, RdsPipe, Socket) {
        let address = listener.address();
        let dialled = std::thread::spawn(move || RdsPipe::dialled(address, 3, Instant::now() + HANG));
        let (theirs, _) = until(|| listener.next()).expect("a call");
        let ours = dialled.join().expect("no panic").expect("an answer");
        (theirs, ours, open(SocketAddrV4::new(*listener.address.ip(), 0), 0).expect("a socket"))
    }

    #[test]
    fn datagrams_of_strangers_are_dropped() {
        let Some(listener) = listener() else { return };
        let (mut theirs, mut ours, stranger) = connected(&listener);
        let to = bound(&theirs.socket).expect("an address");
        for tag in [DATA, END, 77] {
            until(|| send(&stranger, to, tag, b"no")).expect("sent");
        }
        until(|| ours.write(b"yes")).expect("sent");
        let mut buffer = [0; 2];
        // In parts, as there is not more room.
        assert_eq!((until(|| theirs.read(&mut buffer)).expect("bytes"), &buffer), (2, b"ye"));
        assert!(theirs.pending() && !theirs.arm(false));
        assert_eq!((until(|| theirs.read(&mut buffer)).expect("bytes"), buffer[0]), (1, b's'));
        drop(ours);
        assert_eq!(until(|| theirs.read(&mut buffer)).expect("the end"), 0);
    }

    #[test]
    fn a_peer_that_sends_what_is_no_data_is_refused() {
        let Some(listener) = listener() else { return };
        let cases: [(u8, &[u8], &str); 3] = [
            (77, b"abc", "a datagram of 3 bytes with the tag 0x4d"),
            (DATA, b"", "a datagram of 0 bytes with the tag 0x0"),
            (DATA, &[0; CHUNK + 1], "a datagram that is too long"),
        ];
        for (tag, bytes, text) in cases {
            let (mut theirs, ours, _) = connected(&listener);
            until(|| send(&ours.socket, ours.peer, tag, bytes)).expect("sent");
            let error = until(|| theirs.read(&mut [0; 8])).expect_err("refused");
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn a_caller_that_repeats_itself_has_one_connection_and_one_that_calls_wrongly_none() {
        let Some(listener) = listener() else { return };
        let (_theirs, ours, stranger) = connected(&listener);
        let call = [&NAME[..], &[3]].concat();
        until(|| send(&ours.socket, listener.address, CALL, &call)).expect("sent");
        until(|| send(&stranger, listener.address, CALL, b"hello")).expect("sent");
        let error = until(|| listener.next()).expect_err("no call");
        assert!(error.to_string().ends_with("no call: 5 bytes with the tag 0x3"), "{error}");
    }
}
