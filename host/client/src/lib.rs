//! A client of vnumad's interface ([`vnuma_api`]), over its Unix socket.
//!
//! [`Client::ask`] asks for an [`Operation`] and returns its answer; [`Client::watch`] and [`Client::record`] read lines
//! without end. [`blocking`] has the same for programs that are not asynchronous.

#![forbid(unsafe_code)]

pub mod blocking;
mod lines;

pub use hyper::{Method, body::Bytes};
pub use lines::Lines;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::http1::{self, SendRequest, handshake},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use std::{
    future::poll_fn,
    io,
    path::{Path, PathBuf},
    pin::{Pin, pin},
    time::Duration,
};
use tokio::{net::UnixStream, time::sleep};
use vnuma_api::{
    ApiError, EventKind, OBSERVATIONS, WATCH,
    operation::{Operation, Right, Subject},
};

/// A longer answer is not vnumad's: 64 VMs of 4096 vCPUs take less.
const ANSWER_LIMIT: usize = 256 << 20;

/// How often a client tries to connect again, and the pause between two tries.
const CONNECTS: u32 = 500;
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No process listens at the socket.
    #[error("cannot reach vnumad at {}: {source}", socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket is not for this user.
    #[error("not permitted to connect to {}: ask for membership in its group, or use root", socket.display())]
    NotPermitted {
        /// The socket.
        socket: PathBuf,
    },
    /// vnumad refuses: a kind for programs, and a message.
    #[error("{}", .0.message)]
    Refused(ApiError),
    /// The connection has ended before the answer.
    #[error("{path}: the connection to vnumad broke: {source}")]
    Broken {
        /// What was asked for.
        path: String,
        /// Why.
        source: hyper::Error,
    },
    /// There is no answer within the limit of the client.
    #[error("{path}: vnumad did not answer within {limit:?}")]
    TimedOut {
        /// What was asked for.
        path: String,
        /// The limit.
        limit: Duration,
    },
    /// The answer is not one of vnumad's.
    #[error("{path}: vnumad answered {status} with something unexpected: {reason}")]
    Unexpected {
        /// What was asked for.
        path: String,
        /// Status of HTTP; 0 if nothing was asked.
        status: u16,
        /// What is wrong with it.
        reason: String,
    },
    /// Lines without end have ended.
    #[error("vnumad has ended, or dropped this watcher because it read too slowly")]
    WatchEnded,
}

/// vnumad behind a socket. Each request has a connection of its own.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Option<Duration>,
}

/// A connection for one request after the other.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    driver: Driver,
    limit: Option<Duration>,
}

/// Moves bytes while an answer is waited for. The connection ends when it is dropped.
#[derive(Debug)]
struct Driver(Option<http1::Connection<TokioIo<UnixStream>, Full<Bytes>>>);

impl Driver {
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            // What goes wrong with the connection comes out of the work.
            if self.0.as_mut().is_some_and(|connection| Pin::new(connection).poll(context).is_ready()) {
                self.0 = None;
            }
            work.as_mut().poll(context)
        })
        .await
    }
}

/// An answer as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status of HTTP.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

impl Client {
    /// vnumad that listens at this socket. It may take any time to answer.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), limit: None }
    }

    /// The same, where each answer, and each line, has to come within this time.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Connects. While the socket's backlog is full the kernel answers EAGAIN to every client, root included.
    async fn stream(&self) -> io::Result<UnixStream> {
        for _ in 0..CONNECTS {
            match UnixStream::connect(&self.socket).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(CONNECT_PAUSE).await,
                connected => return connected,
            }
        }
        UnixStream::connect(&self.socket).await
    }

    /// A connection that stays.
    ///
    /// # Errors
    ///
    /// No process listens, or this user may not connect.
    pub async fn connect(&self) -> Result<Connection, Error> {
        let stream = self.stream().await.map_err(|source| {
            let socket = self.socket.clone();
            match source.kind() {
                io::ErrorKind::PermissionDenied => Error::NotPermitted { socket },
                _ => Error::Unreachable { socket, source },
            }
        })?;
        let path = self.socket.display().to_string();
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|source| Error::Broken { path, source })?;
        Ok(Connection { sender, driver: Driver(Some(connection)), limit: self.limit })
    }

    /// Asks for an operation.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn ask<O: Operation>(
        &self,
        subject: O::Subject<'_>,
        input: &O::Input,
    ) -> Result<O::Output, Error> {
        self.connect().await?.ask::<O>(subject, input).await
    }

    /// Sends any request and returns its answer, whatever its status is.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Result<Answer, Error> {
        self.connect().await?.send(method, path, body).await
    }

    /// Events of these kinds from now on, all if none is named: lines with a [`vnuma_api::Event`] each.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn watch(&self, kinds: &[EventKind]) -> Result<Lines, Error> {
        let names: Vec<&str> = kinds.iter().map(Into::into).collect();
        let query = if names.is_empty() { String::new() } else { format!("?events={}", names.join(",")) };
        self.lines(format!("{WATCH}{query}"), lines::EVENT_LIMIT).await
    }

    /// What the policies are given from now on: lines with a [`vnuma_api::Observation`] each.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn record(&self) -> Result<Lines, Error> {
        self.lines(OBSERVATIONS.to_owned(), lines::OBSERVATION_LIMIT).await
    }

    async fn lines(&self, path: String, longest: usize) -> Result<Lines, Error> {
        let Connection { mut sender, mut driver, limit } = self.connect().await?;
        let opened = driver.during(async {
            let response = open(&mut sender, Method::GET, &path, Bytes::new()).await?;
            match response.status().as_u16() {
                200 => Ok(response.into_body()),
                status => Err(Answer { status, body: collect(&path, response).await? }.refusal(&path)),
            }
        });
        let body = within(limit, &path, opened).await?;
        Ok(Lines::new(body, driver, path, longest, limit))
    }
}

impl Connection {
    /// Asks for an operation.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn ask<O: Operation>(
        &mut self,
        subject: O::Subject<'_>,
        input: &O::Input,
    ) -> Result<O::Output, Error> {
        let path = subject.path(O::PATH);
        let method = if O::RIGHT == Right::Read { Method::GET } else { Method::POST };
        let unexpected = |status, error: serde_json::Error| Error::Unexpected {
            path: path.clone(),
            status,
            reason: error.to_string(),
        };
        let mut body = serde_json::to_vec(input).map_err(|error| unexpected(0, error))?;
        if body == b"null" {
            body.clear();
        }
        let answer = self.send(method, &path, body).await?;
        if answer.status != 200 {
            return Err(answer.refusal(&path));
        }
        serde_json::from_slice(&answer.body).map_err(|error| unexpected(answer.status, error))
    }

    /// Sends any request and returns its answer, whatever its status is.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Result<Answer, Error> {
        let body = body.into();
        let answered = self.driver.during(async {
            let response = open(&mut self.sender, method, path, body).await?;
            Ok(Answer { status: response.status().as_u16(), body: collect(path, response).await? })
        });
        within(self.limit, path, answered).await
    }
}

/// Sends a request; its answer, with the body still to come.
async fn open(
    sender: &mut SendRequest<Full<Bytes>>,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<Response<Incoming>, Error> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "vnumad")
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(body));
    let request = request.map_err(|error| Error::Unexpected {
        path: path.to_owned(),
        status: 0,
        reason: error.to_string(),
    })?;
    let broken = |source| Error::Broken { path: path.to_owned(), source };
    // The answer before on this connection may have ended just now.
    sender.ready().await.map_err(broken)?;
    sender.send_request(request).await.map_err(broken)
}

impl Answer {
    /// The error that it is, if its status is one of failure.
    fn refusal(&self, path: &str) -> Error {
        match serde_json::from_slice(&self.body) {
            Ok(refusal) => Error::Refused(refusal),
            Err(error) => {
                let (path, reason) = (path.to_owned(), error.to_string());
                Error::Unexpected { path, status: self.status, reason }
            }
        }
    }
}

async fn collect(path: &str, response: Response<Incoming>) -> Result<Bytes, Error> {
    let status = response.status().as_u16();
    let collected = Limited::new(response.into_body(), ANSWER_LIMIT)
        .collect()
        .await
        .map_err(|error| Error::Unexpected { path: path.to_owned(), status, reason: error.to_string() })?;
    Ok(collected.to_bytes())
}

/// Ends what waits for vnumad after the limit.
async fn within<T>(
    limit: Option<Duration>,
    path: &str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(limit) = limit else { return work.await };
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(Error::TimedOut { path: path.to_owned(), limit }),
    }
}
