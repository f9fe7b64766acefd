//! Ports that no other process gets before a node listens on them.
//!
//! A port that was free a moment ago can be taken meanwhile: any program's next connection has a port of the system's choice, and nodes
//! that wait for each other connect again and again. A socket that is bound to the port keeps the system from choosing it, and lets a
//! listener be bound to it as well as long as it does not listen itself (`SO_REUSEADDR`, socket(7)).

use socket2::{Domain, Socket, Type};
use std::{
    io,
    net::{IpAddr, SocketAddr},
};

/// Ports of TCP that are kept until this is dropped. A [`Listener`](crate::Listener) can be bound to them, in any process.
#[derive(Debug)]
pub struct Reserved {
    _sockets: Vec<Socket>,
    addresses: Vec<SocketAddr>,
}

impl Reserved {
    /// So many different ports of an address of this host.
    pub fn new(address: IpAddr, count: usize) -> io::Result<Self> {
        let sockets = (0..count).map(|_| reserve(address)).collect::<io::Result<Vec<_>>>()?;
        let addresses = sockets.iter().map(address_of).collect::<io::Result<_>>()?;
        Ok(Self { _sockets: sockets, addresses })
    }

    /// The address, with each port.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

fn reserve(address: IpAddr) -> io::Result<Socket> {
    let any = SocketAddr::new(address, 0);
    let socket = Socket::new(Domain::for_address(any), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&any.into())?;
    Ok(socket)
}

fn address_of(socket: &Socket) -> io::Result<SocketAddr> {
    let other = || io::Error::other("a socket has an address of another family");
    socket.local_addr()?.as_socket().ok_or_else(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Listener, Place};
    use std::{
        collections::BTreeSet,
        net::{Ipv4Addr, Ipv6Addr, TcpStream},
    };

    #[test]
    fn only_a_listener_gets_a_reserved_port() {
        for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let reserved = Reserved::new(address, 3).expect("ports");
            let ports: BTreeSet<_> = reserved.addresses().iter().map(SocketAddr::port).collect();
            assert_eq!((ports.len(), ports.contains(&0)), (3, false));
            for &place in reserved.addresses() {
                TcpStream::connect(place).expect_err("nobody listens yet");
                let listener = Listener::bind(&Place::Tcp(place)).expect("a listener");
                TcpStream::connect(place).expect("somebody listens");
                Listener::bind(&Place::Tcp(place)).map(drop).expect_err("there is one");
                drop(listener);
                // As the system does for a connection: without SO_REUSEADDR.
                let other = Socket::new(Domain::for_address(place), Type::STREAM, None).expect("a socket");
                let taken = other.bind(&place.into()).expect_err("it is reserved");
                assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
            }
        }
    }
}
