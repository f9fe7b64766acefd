//! What the tests of the transports share.
#![allow(dead_code)]

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, Hello};
use vnuma_dsm_transport::{
    Identity, Lane, Limits, Listener, Place, TransportError, accept, dial, node_name, wait,
};

/// Nothing here takes longer unless it hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// An authority that issues certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("a certificate") }
    }

    /// A node that believes this authority, with a certificate of this authority.
    pub fn identity(&self, node: u8) -> Identity {
        self.identity_believing(node, self)
    }

    /// A node with a certificate of this authority, that believes another.
    pub fn identity_believing(&self, node: u8, other: &Self) -> Identity {
        let params = CertificateParams::new(vec![node_name(node)]).expect("a name");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        Identity::new(&[other.issuer.der().clone()], vec![certificate.der().clone()], key)
            .expect("an identity")
    }
}

pub fn hello(node: u8, peer: u8) -> Hello {
    Hello { cluster: 77, pages: 1024, stripe_pages: 512, ..Hello::new(node, peer) }
}

pub fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// A listener of node 0, and where node 1 finds it.
pub struct Meeting {
    pub listener: Listener,
    pub place: Place,
    _directory: tempfile::TempDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Tls,
    Shm,
    Rdma,
}

/// An address of this machine that an RDMA device has; without it RDMA is left out.
const RDMA: &str = "VNUMA_RDMA_ADDRESS";

fn rdma() -> Option<SocketAddr> {
    let address = std::env::var(RDMA).ok()?;
    Some((address.parse::<Ipv4Addr>().expect(RDMA), 0).into())
}

/// All that this machine has.
pub fn all() -> Vec<Transport> {
    let mut all = vec![Transport::Tcp, Transport::Tls, Transport::Shm];
    all.extend(rdma().map(|_| Transport::Rdma));
    all
}

impl Meeting {
    pub fn new(transport: Transport) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let authority = Authority::new();
        let path = directory.path().join("socket");
        let place = match transport {
            Transport::Tcp => Place::Tcp(anywhere()),
            Transport::Tls => Place::Tls(anywhere(), authority.identity(0)),
            Transport::Shm => Place::Shm(path.clone()),
            Transport::Rdma => Place::Rdma(rdma().expect(RDMA)),
        };
        let listener = Listener::bind(&place).expect("a listener");
        let place = match transport {
            Transport::Tcp => Place::Tcp(listener.address().expect("an address")),
            Transport::Tls => Place::Tls(listener.address().expect("an address"), authority.identity(1)),
            Transport::Shm => Place::Shm(path),
            Transport::Rdma => Place::Rdma(listener.address().expect("an address")),
        };
        Self { listener, place, _directory: directory }
    }

    pub fn address(&self) -> SocketAddr {
        self.listener.address().expect("TCP")
    }
}

/// Node 0 and node 1, connected.
pub fn pair(transport: Transport, limits: Limits) -> (Lane, Lane) {
    let meeting = Meeting::new(transport);
    let (zero, one) = meet(&meeting, hello(0, 0), hello(1, 0), limits);
    (zero.expect("accepted"), one.expect("connected"))
}

/// What comes of a dial.
pub fn meet(
    meeting: &Meeting,
    ours: Hello,
    theirs: Hello,
    limits: Limits,
) -> (Result<Lane, TransportError>, Result<Lane, TransportError>) {
    thread::scope(|scope| {
        let dialled = scope.spawn(|| dial(&meeting.place, &theirs, limits));
        (accept(&meeting.listener, &ours, limits), dialled.join().expect("no panic"))
    })
}

/// Runs both lanes in this thread until `done`, giving what comes to `take` with the place of the lane.
pub fn run(
    lanes: &mut [&mut Lane],
    mut take: impl FnMut(usize, Body<'_>),
    mut done: impl FnMut(&mut [&mut Lane]) -> bool,
) -> Result<(), TransportError> {
    let start = Instant::now();
    loop {
        for (place, lane) in lanes.iter_mut().enumerate() {
            lane.flush()?;
            lane.receive(|_, body| take(place, body))?;
            lane.tick(Instant::now(), 0)?;
        }
        if done(lanes) {
            return Ok(());
        }
        assert!(start.elapsed() < HANG, "it hangs");
        wait(lanes, &[], Duration::from_millis(5), Duration::ZERO).expect("poll");
    }
}

/// The error that ends a lane, whatever else comes before.
pub fn ending(lane: &mut Lane) -> TransportError {
    run(&mut [lane], |_, _| {}, |_| false).expect_err("runs until it ends")
}
