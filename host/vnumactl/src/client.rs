//! Talks to vnumad.

use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::{
    io,
    path::{Path, PathBuf},
};
use tokio::net::UnixStream;
use vnuma_api::ApiError;

/// A longer answer is not vnumad's: 64 VMs of 4096 vCPUs take less.
const ANSWER_LIMIT: usize = 256 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "cannot reach vnumad at {}: {source}\nIs it running? Start it with `vnumad` (as root), or name its socket with --socket.",
        socket.display()
    )]
    Unreachable { socket: PathBuf, source: io::Error },
    #[error("not permitted to connect to {}: ask for membership in its group, or use root", socket.display())]
    NotPermitted { socket: PathBuf },
    #[error("{}", .0.message)]
    Refused(ApiError),
    #[error("{path}: the connection to vnumad broke: {source}")]
    Broken { path: String, source: hyper::Error },
    #[error("{path}: vnumad answered {status} with something unexpected: {reason}")]
    Unexpected { path: String, status: u16, reason: String },
    #[error("vnumad has ended, or dropped this watcher because it read too slowly")]
    WatchEnded,
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Replay { path: PathBuf, source: crate::replay::ReplayError },
    #[error("{0}")]
    Calibrate(crate::calibrate::CalibrateError),
    #[error("setup --apply needs root")]
    SetupRights,
    #[error("{0} of what was to be done failed")]
    SetupFailed(usize),
    #[error("{vm}: guest node {guest_node} did not get its home on node {node}")]
    Rehome { vm: String, guest_node: u32, node: u32 },
    #[error("{vm}: guest node {guest_node} did not get the size that was wanted")]
    Resize { vm: String, guest_node: u32 },
    #[error("{vm}: it did not migrate to {destination}")]
    Migration { vm: String, destination: String },
    #[error("writing the output: {0}")]
    Output(io::Error),
}

/// vnumad behind a socket; each request has a connection of its own.
pub struct Client {
    socket: PathBuf,
}

impl Client {
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::GET, path, String::new()).await
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: String) -> Result<T, ClientError> {
        self.ask(Method::POST, path, body).await
    }

    /// Starts a request and returns its answer with the body still to come.
    pub async fn open(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Response<Incoming>, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| {
            let socket = self.socket.clone();
            match source.kind() {
                io::ErrorKind::PermissionDenied => ClientError::NotPermitted { socket },
                _ => ClientError::Unreachable { socket, source },
            }
        })?;
        let broken = |source| ClientError::Broken { path: path.to_owned(), source };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // What goes wrong with the connection comes out of the request.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "vnumad")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)));
        let request = request.map_err(|error| ClientError::Unexpected {
            path: path.to_owned(),
            status: 0,
            reason: error.to_string(),
        })?;
        let response = sender.send_request(request).await.map_err(broken)?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(path, response).await) }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<T, ClientError> {
        let response = self.open(method, path, body).await?;
        let status = response.status().as_u16();
        let bytes = collect(path, response).await?;
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Unexpected {
            path: path.to_owned(),
            status,
            reason: error.to_string(),
        })
    }
}

async fn refusal(path: &str, response: Response<Incoming>) -> ClientError {
    let status = response.status().as_u16();
    match collect(path, response).await.map(|bytes| serde_json::from_slice(&bytes)) {
        Ok(Ok(refusal)) => ClientError::Refused(refusal),
        Ok(Err(error)) => {
            ClientError::Unexpected { path: path.to_owned(), status, reason: error.to_string() }
        }
        Err(error) => error,
    }
}

async fn collect(path: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
    let status = response.status().as_u16();
    let limited = http_body_util::Limited::new(response.into_body(), ANSWER_LIMIT);
    let collected = limited.collect().await.map_err(|error| ClientError::Unexpected {
        path: path.to_owned(),
        status,
        reason: error.to_string(),
    })?;
    Ok(collected.to_bytes())
}
