//! TLS 1.3 with a certificate on both sides.
//!
//! A node's certificate is issued for the name [`node_name`]. Its holder may speak for that node, and for no other: the
//! dialling side asks for the name, the listening side compares it with the node that the hello names.

use crate::pipe::Pipe;
use nix::poll::PollFlags;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    client::verify_server_name,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName},
    server::{ParsedCertificate, WebPkiClientVerifier},
    version::TLS13,
};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

/// The most that a peer may send without any content, bytes: more than the longest handshake and the longest record have.
const MOST_WITHOUT_CONTENT: usize = 48 << 10;

/// The name that the certificate of a node is issued for.
pub fn node_name(node: u8) -> String {
    format!("node-{node}.dsm.vnuma")
}

/// Who this node is, and whom it believes.
#[derive(Clone, Debug)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Identity {
    /// From the authorities that issue the nodes' certificates, and this node's own with its key.
    pub fn new(
        authorities: &[CertificateDer<'static>],
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> io::Result<Self> {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority.clone()).map_err(io::Error::other)?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(io::Error::other)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(io::Error::other)?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(io::Error::other)?;
        // Sessions are not resumed: a connection lasts as long as the membership.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// TLS on TCP.
#[derive(Debug)]
pub struct TlsPipe {
    stream: TcpStream,
    connection: Connection,
    ended: bool,
    /// Bytes from the peer since its last content.
    without_content: usize,
}

impl TlsPipe {
    /// The side that dialled, to a node.
    pub fn dialled(stream: TcpStream, identity: &Identity, node: u8) -> io::Result<Self> {
        let name = ServerName::try_from(node_name(node)).map_err(io::Error::other)?;
        let client = ClientConnection::new(Arc::clone(&identity.client), name).map_err(io::Error::other)?;
        Self::new(stream, client.into())
    }

    /// The side that listens.
    pub fn accepted(stream: TcpStream, identity: &Identity) -> io::Result<Self> {
        let server = ServerConnection::new(Arc::clone(&identity.server)).map_err(io::Error::other)?;
        Self::new(stream, server.into())
    }

    fn new(stream: TcpStream, mut connection: Connection) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        connection.set_buffer_limit(Some(256 << 10));
        Ok(Self { stream, connection, ended: false, without_content: 0 })
    }
}

impl Pipe for TlsPipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => {
                    self.without_content = 0;
                    return outcome;
                }
            }
            if self.ended {
                return Ok(0);
            }
            // A member that sends records without content, and never stops, would keep this loop to itself.
            if self.without_content > MOST_WITHOUT_CONTENT {
                let told =
                    format!("the peer has sent {} bytes of TLS without any content", self.without_content);
                return Err(io::Error::new(io::ErrorKind::InvalidData, told));
            }
            let bytes = self.connection.read_tls(&mut self.stream)?;
            self.ended = bytes == 0;
            self.without_content += bytes;
            let outcome = self.connection.process_new_packets();
            // Answers of the handshake, or the alert that says what was wrong.
            let flushed = self.flush();
            outcome.map_err(io::Error::other)?;
            flushed?;
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let taken = self.connection.writer().write(bytes)?;
            let flushed = self.flush()?;
            if taken > 0 || bytes.is_empty() {
                return Ok(taken);
            }
            // There was no room, and there is now unless the socket takes nothing. To say so in any other case would have
            // the caller wait for a socket that is ready already.
            if !flushed {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
    }

    fn flush(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // Bytes that were taken before the handshake is done are not ready to go.
        Ok(!self.connection.is_handshaking())
    }

    fn events(&self, _writing: bool) -> PollFlags {
        if self.connection.wants_write() { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn authenticate(&self, node: u8) -> Result<(), String> {
        let certificate = self.connection.peer_certificates().and_then(|chain| chain.first());
        let certificate = certificate.ok_or_else(|| "the peer has shown no certificate".to_owned())?;
        let parsed = ParsedCertificate::try_from(certificate).map_err(|error| error.to_string())?;
        let name = ServerName::try_from(node_name(node)).map_err(|error| error.to_string())?;
        verify_server_name(&parsed, &name).map_err(|_| {
            format!("the peer says it is node {node}, and its certificate is not for {}", node_name(node))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
    use rustls::server::ServerSessionMemoryCache;
    use std::{
        net::{Ipv4Addr, TcpListener},
        thread,
        time::{Duration, Instant},
    };

    fn identity(issuer: &CertifiedIssuer<'_, KeyPair>, node: u8) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let parameters = CertificateParams::new([node_name(node)]).expect("a name");
        let certificate = parameters.signed_by(&key, issuer).expect("a certificate");
        let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a private key");
        Identity::new(&[issuer.der().clone()], vec![certificate.der().clone()], key).expect("an identity")
    }

    /// Tickets of sessions are records without content: some are no harm, and a peer that sends them without end is an error.
    #[test]
    fn a_peer_that_sends_nothing_but_empty_records_is_an_error() {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(parameters, KeyPair::generate().expect("a key"));
        let issuer = issuer.expect("an authority");
        for (tickets, harm) in [(50, false), (750, true)] {
            let mut sender = identity(&issuer, 0);
            let server = Arc::make_mut(&mut sender.server);
            server.send_tls13_tickets = tickets;
            server.session_storage = ServerSessionMemoryCache::new(tickets);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let address = listener.local_addr().expect("an address");
            let thread = thread::spawn(move || {
                let (stream, _) = listener.accept().expect("a connection");
                let mut pipe = TlsPipe::accepted(stream, &sender).expect("TLS");
                // The other end may have gone.
                while pipe.read(&mut [0; 16]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                    _ = pipe.write(b"content");
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let stream = TcpStream::connect(address).expect("a connection");
            let mut pipe = TlsPipe::dialled(stream, &identity(&issuer, 1), 0).expect("TLS");
            let (begin, mut buffer) = (Instant::now(), [0; 16]);
            let outcome = loop {
                _ = pipe.flush();
                match pipe.read(&mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        thread::sleep(Duration::from_millis(1));
                    }
                    outcome => break outcome,
                }
                assert!(begin.elapsed() < Duration::from_secs(60), "neither content nor an error");
            };
            drop(pipe);
            thread.join().expect("no panic");
            match outcome {
                Err(error) => {
                    let told = error.to_string();
                    assert!(
                        harm && told.ends_with("bytes of TLS without any content"),
                        "{tickets} tickets: {told}"
                    );
                }
                Ok(bytes) => assert!(!harm && bytes > 0, "{tickets} tickets were taken, {bytes} bytes"),
            }
        }
    }
}
