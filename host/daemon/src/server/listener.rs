//! Connections of the API: credentials of the peer, and the limit for each user.

use super::{
    limits::{PerUser, Permit},
    rights::{Peer, Rights},
};
use axum::serve::Listener;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{UnixListener, UnixStream, unix::SocketAddr},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tracing::{debug, error};
use vnuma_api::{ApiError, ErrorKind};

/// Refusals answered at a time. Further connections are closed without an answer.
const REFUSALS: usize = 16;

/// Time for a client to send its request and read the refusal.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);

/// At most this much of a refused request is read.
const REQUEST_LIMIT: usize = 8192;

/// Pause after an error that is not of one connection, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Accepts connections.
pub(crate) struct ApiListener {
    listener: UnixListener,
    rights: Rights,
    connections: PerUser,
    refusals: Arc<Semaphore>,
}

impl ApiListener {
    pub(crate) fn new(listener: UnixListener, rights: Rights, connections_per_user: usize) -> Self {
        let connections = PerUser::new(connections_per_user);
        Self { listener, rights, connections, refusals: Arc::new(Semaphore::new(REFUSALS)) }
    }

    fn refuse(&self, stream: UnixStream, peer: Peer) {
        let most = self.connections.most();
        debug!(uid = peer.uid, most, "a connection is refused");
        if let Ok(permit) = Arc::clone(&self.refusals).try_acquire_owned() {
            tokio::spawn(timeout(REFUSAL_LIMIT, reject_503(stream, peer.uid, most, permit)));
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
            match self.connections.take(peer.uid) {
                Some(permit) => return (Connection { stream, peer, _permit: permit }, address),
                None => self.refuse(stream, peer),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

fn is_of_the_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// Answers any request with a refusal. The request is read first: to the client a connection that is closed with unread
/// data looks broken.
async fn reject_503(mut stream: UnixStream, uid: u32, most: usize, _permit: OwnedSemaphorePermit) {
    let mut request = Vec::new();
    let ended = |request: &[u8]| request.windows(4).any(|end| end == b"\r\n\r\n");
    while !ended(&request) && request.len() < REQUEST_LIMIT {
        if !matches!(stream.read_buf(&mut request).await, Ok(length) if length > 0) {
            return;
        }
    }
    let message = format!(
        "user {uid} has {most} connections to vnumad, the most that one may have (api.connections_per_user)"
    );
    let error = ApiError { error: ErrorKind::Busy, message };
    let body = serde_json::to_string(&error).unwrap_or_default();
    let head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close";
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // A client that has gone needs no answer.
    let _ = stream.write_all(answer.as_bytes()).await;
}

/// A connection, counted for its user until it is dropped.
pub(crate) struct Connection {
    stream: UnixStream,
    pub(crate) peer: Peer,
    _permit: Permit,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
