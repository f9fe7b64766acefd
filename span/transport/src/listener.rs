//! Where a node listens, and who calls there.

use crate::{
    error::Peer,
    lane::{Lane, Limits},
    pipe::{Pipe, TcpPipe},
    rds::RdsListener,
    tls::{Identity, TlsPipe},
};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

/// Where a node listens.
#[derive(Clone, Debug)]
pub enum Place {
    /// TCP without TLS: only for networks without other users, and for measurements.
    Tcp(SocketAddr),
    /// TLS on TCP.
    Tls(SocketAddr, Identity),
    /// RDMA: an IPv4 address that an RDMA device has. Only for networks without other users.
    Rdma(SocketAddr),
    /// Shared memory within a host: the path of a socket. Its directory decides who may connect.
    Shm(PathBuf),
}

/// Where this node listens.
#[derive(Debug)]
pub enum Listener {
    /// TCP, with TLS or without.
    Tcp(TcpListener, Option<Identity>),
    /// RDMA.
    Rdma(RdsListener),
    /// Shared memory.
    Shm(UnixListener, PathBuf),
}

pub(crate) fn unknown(address: impl std::fmt::Display) -> Peer {
    Peer { node: None, lane: 0, address: address.to_string() }
}

/// The system does not report addresses of sockets of the file system.
pub(crate) fn local(path: &Path) -> String {
    format!("shm {}", path.display())
}

impl Listener {
    /// Listens. Port 0 is one of the system's choice.
    pub fn bind(place: &Place) -> io::Result<Self> {
        let listener = match place {
            Place::Tcp(address) => Self::Tcp(TcpListener::bind(address)?, None),
            Place::Tls(address, identity) => Self::Tcp(TcpListener::bind(address)?, Some(identity.clone())),
            Place::Rdma(address) => Self::Rdma(RdsListener::bind(*address)?),
            Place::Shm(path) => Self::Shm(UnixListener::bind(path)?, path.clone()),
        };
        match &listener {
            Self::Tcp(socket, _) => socket.set_nonblocking(true)?,
            // It never waits.
            Self::Rdma(_) => {}
            Self::Shm(socket, _) => socket.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// The address of TCP or RDMA, with the port that the system chose.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(socket, _) => socket.local_addr().ok(),
            Self::Rdma(listener) => Some(listener.address()),
            Self::Shm(..) => None,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket, _) => socket.as_fd(),
            Self::Rdma(listener) => listener.fd(),
            Self::Shm(socket, _) => socket.as_fd(),
        }
    }

    /// The next caller. `WouldBlock`: there is none.
    pub(crate) fn next(&self, limits: Limits) -> io::Result<Caller> {
        let (pipe, kind, address): (Box<dyn Pipe>, _, _) = match self {
            Self::Tcp(socket, identity) => {
                let (stream, address) = socket.accept()?;
                match identity {
                    None => (Box::new(TcpPipe::new(stream)?), "tcp", address),
                    Some(identity) => (Box::new(TlsPipe::accepted(stream, identity)?), "tls", address),
                }
            }
            Self::Rdma(listener) => {
                let (pipe, address) = listener.next()?;
                (Box::new(pipe), "rdma", address)
            }
            Self::Shm(socket, path) => {
                let socket = socket.accept()?.0;
                let party = Party::of_user(&socket);
                return Ok(Caller { party, address: local(path), stage: Stage::Socket(socket) });
            }
        };
        let text = format!("{kind} {address}");
        let lane = Lane::new(pipe, text.clone(), limits);
        Ok(Caller { party: Party::of(address.ip()), address: text, stage: Stage::Lane(Box::new(lane)) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Shm(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whose caller it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Party {
    /// A host. A host of IPv6 has all addresses of its network of 64 bits.
    Host(IpAddr),
    /// A user of this host.
    User(u32),
    /// This node itself.
    Own,
}

impl Party {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::Host(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }

    pub(crate) fn of_user(socket: &UnixStream) -> Self {
        getsockopt(socket, PeerCredentials).map_or(Self::User(u32::MAX), |peer| Self::User(peer.uid()))
    }

    /// Who calls from where this node is.
    pub(crate) fn at(place: &Place) -> Self {
        match place {
            Place::Tcp(address) | Place::Tls(address, _) | Place::Rdma(address) => Self::of(address.ip()),
            Place::Shm(_) => Self::User(nix::unistd::geteuid().as_raw()),
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(address) => write!(formatter, "{address}"),
            Self::User(user) => write!(formatter, "user {user}"),
            Self::Own => formatter.write_str("listener"),
        }
    }
}

/// One that has called.
pub(crate) struct Caller {
    pub party: Party,
    pub address: String,
    pub stage: Stage,
}

/// How far a caller is.
pub(crate) enum Stage {
    /// The file with the rings has not come.
    Socket(UnixStream),
    /// Its hello has not come.
    Lane(Box<Lane>),
}
