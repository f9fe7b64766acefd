//! Requests to vnumad whose answers are looked at as they came.

use crate::HANG_LIMIT;
use serde_json::Value;
use std::path::Path;
use vnuma_client::{
    Error, Method,
    blocking::{Client, Connection, Lines},
};

/// vnumad at this socket.
pub fn client(socket: &Path) -> Client {
    Client::new(socket, HANG_LIMIT).expect("a client")
}

/// Sends a request and returns the status and the JSON of the answer.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let answer = client(socket).send(method, path, body.to_owned()).expect("an answer");
    let text = String::from_utf8_lossy(&answer.body);
    (answer.status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// Asks for a path over a connection that stays, and returns the status and the body.
pub fn ask_again(connection: &mut Connection, path: &str) -> (u16, String) {
    let answer = connection.send(Method::GET, path, "").expect("an answer");
    (answer.status, String::from_utf8(answer.body.into()).expect("UTF-8"))
}

/// Events as they come.
pub struct Watch(Lines);

impl Watch {
    /// Watches from now on.
    pub fn start(socket: &Path) -> Self {
        Self(client(socket).watch(&[]).expect("it can be watched"))
    }

    /// The next event of this kind.
    pub fn next(&mut self, kind: &str) -> Value {
        loop {
            let line = self.0.line().unwrap_or_else(|error| panic!("no {kind}: {error}"));
            let event: Value = serde_json::from_slice(&line).expect("JSON");
            if event["event"] == kind {
                return event;
            }
        }
    }

    /// Reads to the end of the stream.
    pub fn ends(mut self) -> bool {
        loop {
            match self.0.line() {
                Ok(_) => {}
                Err(error) => return matches!(error, Error::WatchEnded),
            }
        }
    }
}
