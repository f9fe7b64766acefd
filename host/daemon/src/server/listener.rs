//! Connections of the API: credentials of the peer, and the limit for each user.

use super::{
    context::Client,
    guarded::Guarded,
    refused::Refused,
    rights::{Peer, Rights},
};
use crate::fair::{Permits, Room, Tolls};
use axum::serve::Listener;
use std::{io, sync::Arc, time::Duration};
use tokio::{
    net::{UnixListener, UnixStream, unix::SocketAddr},
    time::sleep,
};
use tracing::{debug, error};
use vnuma_model::{Party, Work};

/// Pause after an error that is not of one connection, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Accepts connections.
pub(crate) struct ApiListener {
    listener: UnixListener,
    rights: Rights,
    connections: Permits,
    refused: Refused,
    tolls: Tolls,
}

impl ApiListener {
    pub(crate) fn new(listener: UnixListener, rights: Rights, per_user: usize, tolls: Tolls) -> Self {
        let connections = Permits::new(Room::for_parties_of(per_user));
        Self { listener, rights, connections, refused: Refused::default(), tolls }
    }

    fn refuse(&self, stream: UnixStream, Peer { uid, .. }: Peer, has: usize) {
        let most = self.connections.most();
        debug!(uid, has, "a connection is refused");
        self.refused.tell(stream, Party::User(uid), || match has < most {
            true => format!(
                "user {uid} has {has} connections to vnumad, and gets no more while other users have so many"
            ),
            false => format!(
                "user {uid} has {most} connections to vnumad, the most that one may have (api.connections_per_user)"
            ),
        });
    }

    /// What is waited for before a connection is read. Those who could stop vnumad need not pay.
    fn toll(&self, peer: Peer) -> impl Future<Output = ()> + Send + 'static {
        let toll = self.tolls.clone().pay(Work::Connections, Party::User(peer.uid), 1);
        async move {
            if !peer.is_trusted() {
                toll.await;
            }
        }
    }
}

impl Listener for ApiListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_the_client(&error) => continue,
                Err(error) => {
                    error!(%error, "no connection can be accepted");
                    sleep(ERROR_PAUSE).await;
                    continue;
                }
            };
            let peer = self.rights.of(&stream);
            match self.connections.take(Party::User(peer.uid)) {
                Ok(held) => {
                    let client = Client { peer, held: Arc::new(held) };
                    return (Guarded::new(stream, client, self.toll(peer)), address);
                }
                Err(has) => self.refuse(stream, peer, has),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Did the client go before it was accepted?
pub(super) fn is_of_the_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// A connection, counted for its user until it is dropped and all that its requests have begun is over.
pub(crate) type Connection = Guarded<UnixStream, Client>;
