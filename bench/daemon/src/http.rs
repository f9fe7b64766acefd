//! The plainest HTTP client that can be: one request after the other over one connection.

use anyhow::{Context, ensure};
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

/// Only ends a hang.
const HANG: Duration = Duration::from_secs(60);

/// A connection to vnumad.
pub struct Client(BufReader<UnixStream>);

impl Client {
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(HANG))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request and returns the body of the answer.
    pub fn ask(&mut self, method: &str, path: &str) -> anyhow::Result<Vec<u8>> {
        let (status, length) = self.begin(method, path)?;
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        ensure!(status == 200, "{method} {path}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }

    /// Asks for events, which are read until the connection ends.
    pub fn watch(mut self) -> anyhow::Result<BufReader<UnixStream>> {
        let (status, _) = self.begin("GET", "/v1/watch")?;
        ensure!(status == 200, "the watch: {status}");
        self.0.get_ref().set_read_timeout(None)?;
        Ok(self.0)
    }

    /// Status and length of the answer.
    fn begin(&mut self, method: &str, path: &str) -> anyhow::Result<(u16, usize)> {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes())?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            ensure!(self.0.read_line(&mut head)? > 0, "{method} {path}: the connection ended");
        }
        parse_head(&head).with_context(|| format!("{method} {path}: {head}"))
    }

    /// Ends whatever waits for the other side.
    pub fn stream(&self) -> std::io::Result<UnixStream> {
        self.0.get_ref().try_clone()
    }
}

/// Status, and length if it is given.
fn parse_head(head: &str) -> Option<(u16, usize)> {
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    Some((status, length.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads() {
        assert_eq!(parse_head("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n"), Some((200, 12)));
        assert_eq!(parse_head("HTTP/1.1 404 Not Found\r\ncontent-length:7\r\n\r\n"), Some((404, 7)));
        assert_eq!(parse_head("HTTP/1.1 200 OK\r\n\r\n"), Some((200, 0)));
        assert_eq!(parse_head("nonsense"), None);
    }
}
