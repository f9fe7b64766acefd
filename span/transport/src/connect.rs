//! Making connections.
//!
//! Of two nodes, the one with the higher number dials. The listener serves each caller in a thread of its own until the
//! handshake is done, so that one that says nothing, or garbage, does not delay others.

use crate::{
    error::{Fault, Peer, TransportError},
    lane::{Lane, Limits},
    pipe::{Pipe, TcpPipe},
    rds::{RdsListener, RdsPipe},
    shm::ShmPipe,
    tls::{Identity, TlsPipe},
    wait::receive_one,
};
use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, Hello, Refusal};

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

/// A caller that has not said who it is.
enum Caller {
    Tcp(TcpStream, Option<Identity>),
    Rdma(RdsPipe),
    Shm(UnixStream),
}

fn unknown(address: impl std::fmt::Display) -> Peer {
    Peer { node: None, lane: 0, address: address.to_string() }
}

/// The system does not report addresses of sockets of the file system.
fn local(path: &Path) -> String {
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

    fn next(&self) -> io::Result<(Caller, String)> {
        match self {
            Self::Tcp(socket, identity) => {
                let (stream, address) = socket.accept()?;
                let kind = if identity.is_some() { "tls" } else { "tcp" };
                Ok((Caller::Tcp(stream, identity.clone()), format!("{kind} {address}")))
            }
            Self::Rdma(listener) => {
                let (pipe, address) = listener.next()?;
                Ok((Caller::Rdma(pipe), format!("rdma {address}")))
            }
            Self::Shm(socket, path) => Ok((Caller::Shm(socket.accept()?.0), local(path))),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Shm(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Caller {
    fn pipe(self, deadline: Instant) -> io::Result<Box<dyn Pipe>> {
        Ok(match self {
            Self::Tcp(stream, None) => Box::new(TcpPipe::new(stream)?),
            Self::Tcp(stream, Some(identity)) => Box::new(TlsPipe::accepted(stream, &identity)?),
            Self::Rdma(pipe) => Box::new(pipe),
            Self::Shm(socket) => loop {
                match ShmPipe::accepted(socket.try_clone()?) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                        thread::sleep(Duration::from_millis(1));
                    }
                    outcome => break Box::new(outcome?),
                }
            },
        })
    }
}

/// Dials the node `hello.peer`, says who this is, and hears whether the peer agrees.
pub fn dial(place: &Place, hello: &Hello, limits: Limits) -> Result<Lane, TransportError> {
    let deadline = Instant::now() + limits.connect;
    let (pipe, address): (io::Result<Box<dyn Pipe>>, String) = match place {
        Place::Tcp(address) => {
            let pipe = TcpStream::connect_timeout(address, limits.connect).and_then(TcpPipe::new);
            (pipe.map(|pipe| Box::new(pipe) as _), format!("tcp {address}"))
        }
        Place::Tls(address, identity) => {
            let stream = TcpStream::connect_timeout(address, limits.connect);
            let pipe = stream.and_then(|stream| TlsPipe::dialled(stream, identity, hello.peer));
            (pipe.map(|pipe| Box::new(pipe) as _), format!("tls {address}"))
        }
        Place::Rdma(address) => {
            let pipe = RdsPipe::dialled(*address, hello.lane, deadline);
            (pipe.map(|pipe| Box::new(pipe) as _), format!("rdma {address}"))
        }
        Place::Shm(path) => {
            let pipe = UnixStream::connect(path).and_then(ShmPipe::dialled);
            (pipe.map(|pipe| Box::new(pipe) as _), local(path))
        }
    };
    let pipe = pipe.map_err(|error| Fault::io("connect")(error).of(&unknown(&address)))?;
    let mut lane = Lane::new(pipe, address, limits);
    lane.send(&Body::Hello(*hello), 0)?;
    let theirs = receive_hello(&mut lane, deadline)?;
    if let Err((_, error)) = hello.agree(&theirs) {
        return Err(lane.end(Fault::Wire(error)));
    }
    lane.establish(&theirs)?;
    Ok(lane)
}

fn receive_hello(lane: &mut Lane, deadline: Instant) -> Result<Hello, TransportError> {
    let mut theirs = None;
    receive_one(lane, deadline, |_, body| {
        if let Body::Hello(hello) = body {
            theirs = Some(hello);
        }
    })?;
    theirs.ok_or_else(|| lane.end(Fault::Ended))
}

/// Answers a caller: it must be a node above this one, and this DSM's. The number of the lane is the caller's.
fn answer(caller: Caller, address: String, template: &Hello, limits: Limits) -> Result<Lane, TransportError> {
    let deadline = Instant::now() + limits.connect;
    let pipe = caller.pipe(deadline).map_err(|error| Fault::io("accept")(error).of(&unknown(&address)))?;
    let mut lane = Lane::new(pipe, address, limits);
    let theirs = receive_hello(&mut lane, deadline)?;
    let ours = Hello { peer: theirs.node, lane: theirs.lane, ..*template };
    let refused = match ours.agree(&theirs) {
        Err((refusal, error)) => Some((refusal, Fault::Wire(error))),
        Ok(_) if theirs.node <= ours.node => {
            let expected = "above the node that listens";
            let value = theirs.node.into();
            let error = vnuma_abi_dsm_wire::WireError::Value { field: "hello.node", value, expected };
            Some((Refusal::Peer, Fault::Wire(error)))
        }
        Ok(_) => None,
    };
    if let Some((refusal, fault)) = refused {
        let _ = lane.send(&Body::Refusal(refusal), 0);
        return Err(lane.end(fault));
    }
    lane.establish(&theirs)?;
    lane.send(&Body::Hello(ours), 0)?;
    Ok(lane)
}

/// All lanes of a node: by lane, then by peer.
pub type Lanes = Vec<BTreeMap<u8, Lane>>;

/// Most callers that may be in the middle of a handshake.
const CALLERS: usize = 256;

/// Connects this node to all others: `hello.lanes` connections to each of `peers`.
///
/// `hello` says who this is; its `peer` and `lane` are not used. Callers that do not belong here are given to `complain` and
/// disturb nothing else. It fails when not all connections are there after `limits.connect`.
pub fn mesh(
    listener: &Listener,
    peers: &BTreeMap<u8, Place>,
    hello: &Hello,
    limits: Limits,
    mut complain: impl FnMut(TransportError),
) -> Result<Lanes, TransportError> {
    let deadline = Instant::now() + limits.connect;
    let (sender, receiver) = mpsc::channel();
    // Not those that this node dials.
    let mut callers = 0_usize;
    for (&node, place) in peers.iter().filter(|(node, _)| **node < hello.node) {
        for lane in 0..hello.lanes {
            let (sender, place) = (sender.clone(), place.clone());
            let hello = Hello { peer: node, lane, ..*hello };
            thread::spawn(move || drop(sender.send((false, dial_until(&place, &hello, limits, deadline)))));
        }
    }
    let mut lanes: Lanes = (0..hello.lanes).map(|_| BTreeMap::new()).collect();
    let wanted = peers.len() * usize::from(hello.lanes);
    let mut have = 0;
    while have < wanted {
        if Instant::now() >= deadline {
            let missing = peers.keys().find(|node| lanes.iter().any(|lane| !lane.contains_key(node)));
            let peer = Peer { node: missing.copied(), lane: 0, address: "not connected".to_owned() };
            return Err(Fault::Deadline { limit: limits.connect }.of(&peer));
        }
        // More callers than that wait until others were served: one that is turned away may be a node.
        let next = if callers < CALLERS { listener.next() } else { Err(io::ErrorKind::WouldBlock.into()) };
        match next {
            Ok((caller, address)) => {
                let (sender, hello) = (sender.clone(), *hello);
                callers += 1;
                thread::spawn(move || drop(sender.send((true, answer(caller, address, &hello, limits)))));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => complain(Fault::io("accept")(error).of(&unknown("listener"))),
        }
        let Ok((called, outcome)) = receiver.recv_timeout(Duration::from_millis(1)) else { continue };
        callers -= usize::from(called);
        match outcome.and_then(|lane| keep(lane, peers, &mut lanes)) {
            Ok(()) => have += 1,
            Err(error) => complain(error),
        }
    }
    Ok(lanes)
}

fn keep(mut lane: Lane, peers: &BTreeMap<u8, Place>, lanes: &mut Lanes) -> Result<(), TransportError> {
    let Peer { node, lane: number, .. } = *lane.peer();
    let expected = "a node of this DSM that is not connected yet";
    let wrong = |value: u64| {
        Fault::Wire(vnuma_abi_dsm_wire::WireError::Value { field: "hello.node", value, expected })
    };
    let place = lanes.get_mut(usize::from(number));
    match (node, place) {
        (Some(node), Some(place)) if peers.contains_key(&node) && !place.contains_key(&node) => {
            place.insert(node, lane);
            Ok(())
        }
        _ => Err(lane.end(wrong(node.map_or(u64::MAX, u64::from)))),
    }
}

/// How often a peer that closes the connection before it says who it is is dialled again, and the time between.
const CLOSED: (u32, Duration) = (10, Duration::from_millis(50));

/// Dials until the peer is there: nodes start in any order. One that begins to listen anew closes connections that nobody has taken
/// by then. One that refuses this node does so as well in some cases, so that it is asked a few times only.
fn dial_until(
    place: &Place,
    hello: &Hello,
    limits: Limits,
    deadline: Instant,
) -> Result<Lane, TransportError> {
    let mut closed = 0;
    loop {
        let outcome = dial(place, hello, limits);
        let pause = match outcome.as_ref().map_err(|error| &error.fault) {
            Err(Fault::Io { act: "connect", .. }) => Duration::from_millis(10),
            Err(Fault::Closed { .. } | Fault::Io { act: "write", .. }) if closed < CLOSED.0 => {
                closed += 1;
                CLOSED.1
            }
            _ => return outcome,
        };
        if Instant::now() >= deadline {
            return outcome;
        }
        thread::sleep(pause);
    }
}

/// Takes one caller, for tests and measurements of two nodes.
pub fn accept(listener: &Listener, template: &Hello, limits: Limits) -> Result<Lane, TransportError> {
    let deadline = Instant::now() + limits.connect;
    loop {
        match listener.next() {
            Ok((caller, address)) => return answer(caller, address, template, limits),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Fault::Deadline { limit: limits.connect }.of(&unknown("listener")));
            }
            Err(error) => return Err(Fault::io("accept")(error).of(&unknown("listener"))),
        }
    }
}
