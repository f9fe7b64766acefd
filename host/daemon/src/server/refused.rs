//! Clients that are told why they get no connection.

use crate::fair::{Permit, Permits, Room};
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};
use vnuma_api::{ApiError, ErrorKind};
use vnuma_model::Party;

/// Refusals answered at a time. Further connections are closed without an answer.
const REFUSALS: Room = Room { of_one: 4, of_all: 64 };

/// Time for a client to send its request and read the refusal.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);

/// At most this much of a refused request is read.
const REQUEST_LIMIT: usize = 8192;

/// Refuses connections.
#[derive(Debug)]
pub(super) struct Refused(Permits);

impl Default for Refused {
    fn default() -> Self {
        Self(Permits::new(REFUSALS))
    }
}

impl Refused {
    /// Tells a client why it gets no connection, unless others of its party are being told.
    pub(super) fn tell<S>(&self, stream: S, party: Party, why: impl FnOnce() -> String)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        if let Ok(permit) = self.0.take(party) {
            tokio::spawn(timeout(REFUSAL_LIMIT, reject_503(stream, why(), permit)));
        }
    }
}

/// Answers any request with a refusal. The request is read first: to the client a connection that is closed with unread
/// data looks broken.
async fn reject_503(mut stream: impl AsyncRead + AsyncWrite + Unpin, message: String, _permit: Permit) {
    let mut request = Vec::new();
    let ended = |request: &[u8]| request.windows(4).any(|end| end == b"\r\n\r\n");
    while !ended(&request) && request.len() < REQUEST_LIMIT {
        if !matches!(stream.read_buf(&mut request).await, Ok(length) if length > 0) {
            return;
        }
    }
    let error = ApiError { error: ErrorKind::Busy, message };
    let body = serde_json::to_string(&error).unwrap_or_default();
    let head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close";
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // A client that has gone needs no answer.
    let _ = stream.write_all(answer.as_bytes()).await;
}
