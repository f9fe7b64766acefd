//! The other end: a thread that answers.

use crate::place;
use anyhow::{Result, anyhow};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::OnceLock,
    thread,
    time::Duration,
};
use vnuma_abi_dsm_wire::{Body, Hello, PAGE_SIZE};
use vnuma_dsm_transport::{
    Fault, Identity, Lane, Limits, Listener, Place, TransportError, Waiter, accept, dial, node_name,
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    Tls,
    Shm,
    /// At the address of [`set_rdma_address`].
    Rdma,
}

/// What every machine has.
pub const ALL: [Kind; 3] = [Kind::Tcp, Kind::Tls, Kind::Shm];

/// An address of this machine that an RDMA device has.
static RDMA: OnceLock<Ipv4Addr> = OnceLock::new();

pub fn set_rdma_address(address: Ipv4Addr) {
    RDMA.get_or_init(|| address);
}

/// Where nodes of this machine listen.
pub fn local_address(kind: Kind) -> Ipv4Addr {
    let rdma = RDMA.get().copied().filter(|_| kind == Kind::Rdma);
    rdma.unwrap_or(Ipv4Addr::LOCALHOST)
}

impl Kind {
    pub fn named(name: &str) -> Result<Self> {
        let mut all = ALL.into_iter().chain([Self::Rdma]);
        all.find(|kind| kind.name() == name).ok_or_else(|| anyhow!("there is no transport {name:?}"))
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Tls => "tcp-tls",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
        }
    }
}

/// What the first byte of a request asks for.
#[derive(Clone, Copy)]
#[repr(u8)]
pub enum Ask {
    /// The same bytes.
    Echo = 0,
    /// A page.
    Page = 1,
    /// Nothing.
    Nothing = 2,
}

/// A lane to a thread that answers. It ends with the lane.
pub fn connect(kind: Kind, spin: Duration) -> Result<Lane> {
    let (theirs, ours) = pair(kind)?;
    thread::spawn(move || -> Result<()> {
        place::elsewhere()?;
        Ok(answer(theirs, spin)?)
    });
    Ok(ours)
}

/// Limits that a busy machine does not reach.
pub fn patient() -> Limits {
    let silence = Duration::from_secs(60);
    Limits { silence, stall: silence, ..Limits::default() }
}

/// Both ends of a lane.
pub fn pair(kind: Kind) -> Result<(Lane, Lane)> {
    let directory = tempfile::tempdir()?;
    let anywhere: SocketAddr = (local_address(kind), 0).into();
    let path = directory.path().join("socket");
    let [zero, one] = identities()?;
    let place = match kind {
        Kind::Tcp => Place::Tcp(anywhere),
        Kind::Tls => Place::Tls(anywhere, zero),
        Kind::Shm => Place::Shm(path.clone()),
        Kind::Rdma => Place::Rdma(anywhere),
    };
    let listener = Listener::bind(&place)?;
    let address = listener.address().unwrap_or(anywhere);
    let place = match kind {
        Kind::Tcp => Place::Tcp(address),
        Kind::Tls => Place::Tls(address, one),
        Kind::Shm => Place::Shm(path),
        Kind::Rdma => Place::Rdma(address),
    };
    let accepted = thread::spawn(move || accept(&listener, &Hello::new(0, 0), patient()));
    let ours = dial(&place, &Hello::new(1, 0), patient())?;
    let theirs = accepted.join().map_err(|_| anyhow!("the listener panicked"))??;
    Ok((theirs, ours))
}

fn answer(mut lane: Lane, spin: Duration) -> Result<(), TransportError> {
    let page = [0x5a; PAGE_SIZE];
    let mut answers: Vec<Vec<u8>> = Vec::new();
    let mut waiter = Waiter::new().expect("a waiter");
    loop {
        lane.flush()?;
        let outcome = lane.receive(|_, body| {
            if let Body::Opaque(bytes) = body {
                match bytes.first() {
                    Some(&ask) if ask == Ask::Echo as u8 => answers.push(bytes.to_vec()),
                    Some(&ask) if ask == Ask::Page as u8 => answers.push(page.to_vec()),
                    _ => {}
                }
            }
        });
        for bytes in answers.drain(..) {
            lane.send(&Body::Opaque(&bytes), 0)?;
        }
        match outcome {
            Ok(0) => drop(waiter.wait(&mut [&mut lane], &[], Duration::from_secs(1), spin)),
            Ok(_) => {}
            Err(TransportError { fault: Fault::Bye, .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Of nodes that believe each other.
pub fn identities<const N: usize>() -> Result<[Identity; N]> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let identity = |node| -> Result<Identity> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![node_name(node)])?.signed_by(&key, &issuer)?;
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        Ok(Identity::new(&[issuer.der().clone()], vec![certificate.der().clone()], key)?)
    };
    let all = (0..N).map(|node| identity(node as u8)).collect::<Result<Vec<_>>>()?;
    all.try_into().map_err(|_| anyhow!("{N} identities"))
}
