//! libvirt's wire, as far as a daemon for one client needs it: frames, and values in XDR (RFC 4506).
//!
//! ```text
//!  length │ program │ version │ procedure │ type │ serial │ status │ values ...
//! ```
//!
//! All are numbers of four bytes, the highest first, and the length counts itself.

use anyhow::{Context, ensure};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

/// The program of domains and connections.
pub const REMOTE: u32 = 0x2000_8086;
/// The one by which each side sees that the other one lives.
pub const KEEPALIVE: u32 = 0x6b65_6570;
/// Types of frames.
pub const REPLY: u32 = 1;
pub const MESSAGE: u32 = 2;
/// Status of a reply.
const OK: u32 = 0;
const ERROR: u32 = 1;
/// `VIR_ERR_OPERATION_FAILED`, `VIR_FROM_RPC`, `VIR_ERR_ERROR`.
const FAILED: [i32; 3] = [9, 7, 2];
/// More than any that vnumad sends.
const MAX_FRAME: usize = 1 << 20;
/// The length and the six numbers after it.
const HEAD: usize = 28;

/// What came.
#[derive(Debug)]
pub struct Call {
    pub program: u32,
    pub procedure: u32,
    serial: u32,
    values: Vec<u8>,
    at: usize,
}

impl Call {
    /// The next one. `None`: the client has gone.
    pub fn read(stream: &mut UnixStream) -> anyhow::Result<Option<Self>> {
        let mut head = [0; HEAD];
        if stream.read(&mut head[..1])? == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut head[1..])?;
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let length = word(0) as usize;
        ensure!((HEAD..=MAX_FRAME).contains(&length), "a frame of {length} bytes");
        let mut values = vec![0; length - HEAD];
        stream.read_exact(&mut values)?;
        Ok(Some(Self { program: word(4), procedure: word(12), serial: word(20), values, at: 0 }))
    }

    fn bytes(&mut self, count: usize) -> anyhow::Result<&[u8]> {
        let taken = self.values.get(self.at..self.at + count).context("the call ends too early")?;
        self.at += count.next_multiple_of(4);
        Ok(taken)
    }

    pub fn number(&mut self) -> anyhow::Result<u32> {
        let bytes = self.bytes(4)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    pub fn text(&mut self) -> anyhow::Result<String> {
        let length = self.number()? as usize;
        Ok(String::from_utf8_lossy(self.bytes(length)?).into_owned())
    }

    pub fn uuid(&mut self) -> anyhow::Result<[u8; 16]> {
        Ok(self.bytes(16)?.try_into()?)
    }

    /// Answers it.
    pub fn reply(&self, stream: &mut UnixStream, answer: anyhow::Result<Values>) -> anyhow::Result<()> {
        let (status, values) = match answer {
            Ok(values) => (OK, values),
            Err(error) => (ERROR, error_values(&format!("{error:#}"))),
        };
        send(stream, [self.program, self.procedure, REPLY, self.serial, status], &values)
    }
}

fn error_values(message: &str) -> Values {
    let [code, domain, level] = FAILED;
    let mut values = Values::default();
    values.number(code as u32).number(domain as u32).number(1).text(message).number(level as u32);
    // No domain, three texts and a network that are not there, and two numbers.
    values.0.resize(values.0.len() + 7 * 4, 0);
    values
}

/// Sends a message that answers nothing.
pub fn notify(stream: &mut UnixStream, program: u32, procedure: u32, values: &Values) -> anyhow::Result<()> {
    send(stream, [program, procedure, MESSAGE, 0, OK], values)
}

fn send(stream: &mut UnixStream, head: [u32; 5], values: &Values) -> anyhow::Result<()> {
    let [program, procedure, kind, serial, status] = head;
    let mut frame = Values::default();
    frame.number((HEAD + values.0.len()) as u32).number(program).number(1).number(procedure);
    frame.number(kind).number(serial).number(status);
    frame.0.extend_from_slice(&values.0);
    Ok(stream.write_all(&frame.0)?)
}

/// Values that are sent.
#[derive(Debug, Default)]
pub struct Values(Vec<u8>);

impl Values {
    pub fn number(&mut self, number: u32) -> &mut Self {
        self.0.extend_from_slice(&number.to_be_bytes());
        self
    }

    pub fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len() as u32).0.extend_from_slice(text.as_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn uuid(&mut self, uuid: [u8; 16]) -> &mut Self {
        self.0.extend_from_slice(&uuid);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_what_is_read() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let mut values = Values::default();
        values.text("vm0001").uuid([7; 16]).number(42);
        send(&mut one, [REMOTE, 212, 0, 5, OK], &values).unwrap();
        let mut call = Call::read(&mut other).unwrap().expect("a call");
        assert_eq!((call.program, call.procedure), (REMOTE, 212));
        assert_eq!((call.text().unwrap(), call.uuid().unwrap()), ("vm0001".to_owned(), [7; 16]));
        assert_eq!(call.number().unwrap(), 42);
        assert!(call.number().is_err(), "there is nothing more");
        call.reply(&mut other, Err(anyhow::anyhow!("no"))).unwrap();
        let reply = Call::read(&mut one).unwrap().expect("a reply");
        assert_eq!(reply.serial, 5);
        drop(other);
        assert!(Call::read(&mut one).unwrap().is_none());
    }
}
