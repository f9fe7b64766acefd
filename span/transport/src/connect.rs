//! Making connections.
//!
//! Of two nodes, the one with the higher number dials, in a thread for each lane. [`Callers`] serves those that call.

use crate::{
    callers::Callers,
    error::{Fault, Peer, TransportError},
    lane::{Lane, Limits},
    listener::{Listener, Party, Place, local, unknown},
    pipe::{Pipe, TcpPipe},
    rds::RdsPipe,
    shm::ShmPipe,
    tls::TlsPipe,
    wait::receive_one,
};
use std::{
    collections::BTreeMap,
    io,
    net::TcpStream,
    os::unix::net::UnixStream,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, Hello};

/// Dials the node `hello.peer`, says who this is, and hears whether the peer agrees.
pub fn dial(place: &Place, hello: &Hello, limits: Limits) -> Result<Lane, TransportError> {
    dial_by(place, hello, limits, Instant::now() + limits.connect)
}

fn dial_by(place: &Place, hello: &Hello, limits: Limits, deadline: Instant) -> Result<Lane, TransportError> {
    // No time at all is an error of its own.
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let (pipe, address): (io::Result<Box<dyn Pipe>>, String) = match place {
        Place::Tcp(address) => {
            let pipe = TcpStream::connect_timeout(address, left).and_then(TcpPipe::new);
            (pipe.map(|pipe| Box::new(pipe) as _), format!("tcp {address}"))
        }
        Place::Tls(address, identity) => {
            let stream = TcpStream::connect_timeout(address, left);
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

/// All lanes of a node: by lane, then by peer.
pub type Lanes = Vec<BTreeMap<u8, Lane>>;

/// Connects this node to all others: `hello.lanes` connections to each of `peers`.
///
/// `hello` says who this is; its `peer` and `lane` are not used. Callers that do not belong here are given to `complain`, a
/// bounded number of those of each host, and disturb nothing else. It fails when not all connections are there after
/// `limits.connect`.
pub fn mesh(
    listener: &Listener,
    peers: &BTreeMap<u8, Place>,
    hello: &Hello,
    limits: Limits,
    mut complain: impl FnMut(TransportError),
) -> Result<Lanes, TransportError> {
    let deadline = Instant::now() + limits.connect;
    let dialled = dial_all(peers, hello, limits, deadline)?;
    let mut callers = Callers::new(peers.values(), hello.lanes, limits);
    let mut lanes: Lanes = (0..hello.lanes).map(|_| BTreeMap::new()).collect();
    let wanted = peers.len() * usize::from(hello.lanes);
    let mut have = 0;
    let mut late = false;
    while have < wanted && !late {
        late = Instant::now() >= deadline;
        let called = callers.serve(listener, hello);
        for (party, outcome) in
            called.into_iter().map(|(party, outcome)| (Some(party), outcome)).chain(dialled.try_iter())
        {
            match (outcome.and_then(|lane| keep(lane, peers, &mut lanes)), party) {
                (Ok(()), _) => have += 1,
                (Err(error), Some(party)) => callers.tell(party, error, &mut complain),
                (Err(error), None) => complain(error),
            }
        }
    }
    callers.tell_limited(&mut complain);
    if have == wanted {
        return Ok(lanes);
    }
    let missing = peers.keys().find(|node| lanes.iter().any(|lane| !lane.contains_key(node)));
    let peer = Peer { node: missing.copied(), lane: 0, address: "not connected".to_owned() };
    Err(Fault::Deadline { limit: limits.connect }.of(&peer))
}

/// What comes of a call, and whose it is if this node has not dialled itself.
type Connected = (Option<Party>, Result<Lane, TransportError>);

/// Dials all nodes below this one, in threads that end at the deadline, or when nobody waits for them any more.
fn dial_all(
    peers: &BTreeMap<u8, Place>,
    hello: &Hello,
    limits: Limits,
    deadline: Instant,
) -> Result<mpsc::Receiver<Connected>, TransportError> {
    let (sender, receiver) = mpsc::channel();
    for (&node, place) in peers.iter().filter(|(node, _)| **node < hello.node) {
        for lane in 0..hello.lanes {
            let (sender, place) = (sender.clone(), place.clone());
            let hello = Hello { peer: node, lane, ..*hello };
            let dial = move || drop(sender.send((None, dial_until(&place, &hello, limits, deadline))));
            let thread = thread::Builder::new().name(format!("dial {node}/{lane}")).spawn(dial);
            let peer = || Peer { node: Some(node), lane, address: "not dialled".to_owned() };
            thread.map_err(|error| Fault::io("thread")(error).of(&peer()))?;
        }
    }
    Ok(receiver)
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

/// How often a peer that closes the connection before it says who it is is dialled again, and the time between at first and at most.
const CLOSED: (u32, Duration, Duration) = (10, Duration::from_millis(50), Duration::from_secs(1));

/// Dials until the peer is there: nodes start in any order. One that begins to listen anew closes connections that nobody has taken
/// by then, and so does one that has no room. One that refuses this node does so as well in some cases, so that it is asked a few
/// times only.
fn dial_until(
    place: &Place,
    hello: &Hello,
    limits: Limits,
    deadline: Instant,
) -> Result<Lane, TransportError> {
    let mut closed = 0;
    loop {
        let outcome = dial_by(place, hello, limits, deadline);
        let pause = match outcome.as_ref().map_err(|error| &error.fault) {
            Err(Fault::Io { act: "connect", .. }) => Duration::from_millis(10),
            Err(Fault::Closed { .. } | Fault::Io { act: "write", .. }) if closed < CLOSED.0 => {
                closed += 1;
                CLOSED.2.min(CLOSED.1 * (1 << (closed - 1)))
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
    let mut callers = Callers::one(limits);
    loop {
        if let Some((_, outcome)) = callers.serve(listener, template).pop() {
            return outcome;
        }
        // One that has called is told about when its own time is over.
        if callers.is_empty() && Instant::now() >= deadline {
            return Err(Fault::Deadline { limit: limits.connect }.of(&unknown("listener")));
        }
    }
}
