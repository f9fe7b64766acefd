//! The client for programs that are not asynchronous: each call waits for its answer, in the thread that calls.

use crate::{Answer, Bytes, Error, Method};
use std::{io, path::PathBuf, sync::Arc, time::Duration};
use tokio::runtime::{Builder, Runtime};
use vnuma_api::{EventKind, operation::Operation};

/// vnumad behind a socket; see [`crate::Client`].
#[derive(Clone, Debug)]
pub struct Client {
    client: crate::Client,
    runtime: Arc<Runtime>,
}

/// A connection for one request after the other; see [`crate::Connection`].
#[derive(Debug)]
pub struct Connection {
    connection: crate::Connection,
    runtime: Arc<Runtime>,
}

/// Lines without end; see [`crate::Lines`].
#[derive(Debug)]
pub struct Lines {
    lines: crate::Lines,
    runtime: Arc<Runtime>,
}

impl Client {
    /// vnumad that listens at this socket, whose answers, and lines, have to come within this time.
    ///
    /// # Errors
    ///
    /// The system has no more file descriptors.
    pub fn new(socket: impl Into<PathBuf>, limit: Duration) -> io::Result<Self> {
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build()?);
        Ok(Self { client: crate::Client::new(socket).within(limit), runtime })
    }

    /// A connection that stays.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn connect(&self) -> Result<Connection, Error> {
        let connection = self.runtime.block_on(self.client.connect())?;
        Ok(Connection { connection, runtime: Arc::clone(&self.runtime) })
    }

    /// Asks for an operation.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn ask<O: Operation>(&self, subject: O::Subject<'_>, input: &O::Input) -> Result<O::Output, Error> {
        self.runtime.block_on(self.client.ask::<O>(subject, input))
    }

    /// Sends any request and returns its answer, whatever its status is.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Result<Answer, Error> {
        self.runtime.block_on(self.client.send(method, path, body))
    }

    /// Events of these kinds from now on.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn watch(&self, kinds: &[EventKind]) -> Result<Lines, Error> {
        let lines = self.runtime.block_on(self.client.watch(kinds))?;
        Ok(Lines { lines, runtime: Arc::clone(&self.runtime) })
    }
}

impl Connection {
    /// Asks for an operation.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn ask<O: Operation>(
        &mut self,
        subject: O::Subject<'_>,
        input: &O::Input,
    ) -> Result<O::Output, Error> {
        self.runtime.block_on(self.connection.ask::<O>(subject, input))
    }

    /// Sends any request and returns its answer, whatever its status is.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn send(&mut self, method: Method, path: &str, body: impl Into<Bytes>) -> Result<Answer, Error> {
        self.runtime.block_on(self.connection.send(method, path, body))
    }
}

impl Lines {
    /// Changes how long the next line may take.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { lines: self.lines.within(limit), ..self }
    }

    /// The next line, with its end.
    ///
    /// # Errors
    ///
    /// See [`crate::Lines::line`].
    pub fn line(&mut self) -> Result<Vec<u8>, Error> {
        self.runtime.block_on(self.lines.line())
    }
}
