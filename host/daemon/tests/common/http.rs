//! The plainest HTTP client that can be.

// Each test binary uses a part of it.
#![allow(dead_code)]

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

/// Sends a request and returns the status and the JSON of the answer.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).expect("connected");
    stream.set_read_timeout(Some(super::HANG_LIMIT)).expect("a limit");
    send(&mut stream, method, path, body);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

/// Asks for a path over a connection that stays, and returns the status and the body.
pub fn ask_again(connection: &mut BufReader<UnixStream>, path: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    connection.get_mut().write_all(request.as_bytes()).expect("sent");
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let begin = head.len();
        assert!(connection.read_line(&mut head).expect("a head") > 0, "the connection ended: {head}");
        if let Some(text) = head[begin..].to_lowercase().strip_prefix("content-length:") {
            length = text.trim().parse().expect("a length");
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).expect("a body");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, String::from_utf8(body).expect("UTF-8"))
}

pub fn send(stream: &mut UnixStream, method: &str, path: &str, body: &str) {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).expect("sent");
    // The answer to a body that is too long may come before its end.
    let _ = stream.write_all(body.as_bytes());
}

/// Events as they come.
pub struct Watch(BufReader<UnixStream>);

impl Watch {
    pub fn start(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("connected");
        stream.set_read_timeout(Some(super::HANG_LIMIT)).expect("a limit");
        send(&mut stream, "GET", "/v1/watch", "");
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            reader.read_line(&mut line).expect("a head");
        }
        Self(reader)
    }

    /// The next event of this kind.
    pub fn next(&mut self, kind: &str) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).expect("an event") > 0, "no {kind}: the stream ended");
            // Between the lines there are the lengths of HTTP's chunks.
            match serde_json::from_str::<Value>(&line) {
                Ok(event) if event["event"] == kind => return event,
                _ => {}
            }
        }
    }

    /// Reads to the end of the stream.
    pub fn ends(mut self) -> bool {
        self.0.read_to_end(&mut Vec::new()).is_ok()
    }
}
