//! What travels between a client and the agent of a machine.
//!
//! ```text
//! frame   = kind: u8, length: u32 little-endian, payload: length bytes
//!
//! agent                       client
//!   Hello(version)     ──▶
//!                      ◀──    Request(JSON)
//!                      ◀──    Stdin(bytes)*, StdinEnd, Resize(rows, columns)*
//!   Stdout(bytes)*, Stderr(bytes)*, Credit(bytes of stdin taken)*
//!   Exit(status) or Error(text)  ──▶
//!                      ◀──    Close
//! ```
//! and again from `Request`, or the connection ends. A client has at most [`STDIN_WINDOW`] bytes of stdin
//! without credit under way, so the agent never has to stop reading and sees the end of a connection at
//! once. `Put` takes the file's content from stdin, `Get` gives it on stdout.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Version of the protocol, sent in `Hello`.
pub const VERSION: u32 = 1;
/// Longest payload of stdin, stdout and stderr frames.
pub const MAX_DATA: usize = 64 << 10;
/// Longest payload of any frame.
pub const MAX_FRAME: usize = 1 << 20;
/// Bytes of stdin that may be under way without credit.
pub const STDIN_WINDOW: usize = 256 << 10;

/// Status of a command that was not found, as shells have it.
pub const STATUS_NOT_FOUND: i32 = 127;
/// Status of a command that could not be started, as shells have it.
pub const STATUS_CANNOT_START: i32 = 126;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Request {
    /// Run a program.
    Exec(Exec),
    /// Write stdin to a file, made anew with the given mode; parent directories are made too.
    Put {
        /// Absolute path of the file.
        path: String,
        /// Its permission bits.
        mode: u32,
    },
    /// Send a file as stdout.
    Get {
        /// Absolute path of the file.
        path: String,
    },
}

/// A program to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// The program and its arguments; not a shell line.
    pub argv: Vec<String>,
    /// Environment variables besides those of the agent.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Rows and columns of a terminal to run it on; else it gets three pipes.
    #[serde(default)]
    pub terminal: Option<(u16, u16)>,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Agent: greets with its version of the protocol.
    Hello(u32),
    /// Client: what it wants.
    Request(Request),
    /// Client: input for the program.
    Stdin(Vec<u8>),
    /// Client: there is no more input.
    StdinEnd,
    /// Client: the terminal has this many rows and columns now.
    Resize(u16, u16),
    /// Agent: output.
    Stdout(Vec<u8>),
    /// Agent: error output.
    Stderr(Vec<u8>),
    /// Agent: so many more bytes of input were taken.
    Credit(u32),
    /// Agent: the request is done; the status is 128 + signal for a program ended by one.
    Exit(i32),
    /// Agent: the request failed.
    Error(String),
    /// Client: it has seen the end of the request and sends no more frames for it.
    Close,
}

/// What is wrong with a stream of frames.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The stream ended in a frame, or failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The kind is none.
    #[error("frame kind {0} is unknown")]
    Kind(u8),
    /// The payload is longer than its kind may be.
    #[error("frame kind {kind} has {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// Kind of the frame.
        kind: u8,
        /// Its length.
        length: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The payload does not fit its kind.
    #[error("frame kind {kind} has a bad payload: {reason}")]
    Payload {
        /// Kind of the frame.
        kind: u8,
        /// What is wrong.
        reason: String,
    },
}

const HELLO: u8 = 1;
const REQUEST: u8 = 2;
const STDIN: u8 = 3;
const STDIN_END: u8 = 4;
const RESIZE: u8 = 5;
const STDOUT: u8 = 6;
const STDERR: u8 = 7;
const CREDIT: u8 = 8;
const EXIT: u8 = 9;
const ERROR: u8 = 10;
const CLOSE: u8 = 11;

/// The longest payload of a kind.
fn limit(kind: u8) -> Option<usize> {
    match kind {
        HELLO | RESIZE | CREDIT | EXIT => Some(4),
        STDIN | STDOUT | STDERR => Some(MAX_DATA),
        REQUEST | ERROR => Some(MAX_FRAME),
        STDIN_END | CLOSE => Some(0),
        _ => None,
    }
}

impl Frame {
    /// Writes the frame and flushes.
    pub fn write(&self, writer: &mut impl Write) -> Result<(), ProtocolError> {
        let (kind, payload) = self.encode()?;
        let limit = limit(kind).unwrap_or(0);
        if payload.len() > limit {
            return Err(ProtocolError::TooLong { kind, length: payload.len(), limit });
        }
        // One write per frame: on a virtio port each costs an exit of the VM.
        let mut bytes = Vec::with_capacity(5 + payload.len());
        bytes.push(kind);
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&payload);
        writer.write_all(&bytes)?;
        writer.flush()?;
        Ok(())
    }

    /// Reads the next frame; `None` at the end of the stream.
    pub fn read(reader: &mut impl Read) -> Result<Option<Self>, ProtocolError> {
        let mut header = [0; 5];
        loop {
            match reader.read(&mut header[..1]) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        reader.read_exact(&mut header[1..])?;
        let [kind, length @ ..] = header;
        let length = u32::from_le_bytes(length) as usize;
        let limit = limit(kind).ok_or(ProtocolError::Kind(kind))?;
        if length > limit {
            return Err(ProtocolError::TooLong { kind, length, limit });
        }
        let mut payload = vec![0; length];
        reader.read_exact(&mut payload)?;
        Self::decode(kind, payload).map(Some)
    }

    fn encode(&self) -> Result<(u8, Vec<u8>), ProtocolError> {
        Ok(match self {
            Self::Hello(version) => (HELLO, version.to_le_bytes().into()),
            Self::Request(request) => {
                let error =
                    |e: serde_json::Error| ProtocolError::Payload { kind: REQUEST, reason: e.to_string() };
                (REQUEST, serde_json::to_vec(request).map_err(error)?)
            }
            Self::Stdin(bytes) => (STDIN, bytes.clone()),
            Self::StdinEnd => (STDIN_END, Vec::new()),
            Self::Resize(rows, columns) => (RESIZE, [rows.to_le_bytes(), columns.to_le_bytes()].concat()),
            Self::Stdout(bytes) => (STDOUT, bytes.clone()),
            Self::Stderr(bytes) => (STDERR, bytes.clone()),
            Self::Credit(bytes) => (CREDIT, bytes.to_le_bytes().into()),
            Self::Exit(status) => (EXIT, status.to_le_bytes().into()),
            Self::Error(text) => (ERROR, text.clone().into_bytes()),
            Self::Close => (CLOSE, Vec::new()),
        })
    }

    fn decode(kind: u8, payload: Vec<u8>) -> Result<Self, ProtocolError> {
        let error = |reason: String| ProtocolError::Payload { kind, reason };
        let four = || -> Result<[u8; 4], ProtocolError> {
            payload[..].try_into().map_err(|_| error(format!("{} bytes, expected 4", payload.len())))
        };
        Ok(match kind {
            HELLO => Self::Hello(u32::from_le_bytes(four()?)),
            REQUEST => Self::Request(serde_json::from_slice(&payload).map_err(|e| error(e.to_string()))?),
            STDIN => Self::Stdin(payload),
            STDIN_END => Self::StdinEnd,
            RESIZE => {
                let [r0, r1, c0, c1] = four()?;
                Self::Resize(u16::from_le_bytes([r0, r1]), u16::from_le_bytes([c0, c1]))
            }
            STDOUT => Self::Stdout(payload),
            STDERR => Self::Stderr(payload),
            CREDIT => Self::Credit(u32::from_le_bytes(four()?)),
            EXIT => Self::Exit(i32::from_le_bytes(four()?)),
            ERROR => Self::Error(String::from_utf8_lossy(&payload).into_owned()),
            CLOSE => Self::Close,
            _ => return Err(ProtocolError::Kind(kind)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let data = || proptest::collection::vec(any::<u8>(), 0..200);
        let exec = (
            proptest::collection::vec(".{0,20}", 0..4),
            proptest::collection::vec(("[A-Z]{1,5}", ".{0,9}"), 0..3),
            any::<Option<(u16, u16)>>(),
        );
        prop_oneof![
            any::<u32>().prop_map(Frame::Hello),
            exec.prop_map(|(argv, env, terminal)| Frame::Request(Request::Exec(Exec {
                argv,
                env,
                terminal
            }))),
            (".{0,20}", any::<u32>()).prop_map(|(path, mode)| Frame::Request(Request::Put { path, mode })),
            ".{0,20}".prop_map(|path| Frame::Request(Request::Get { path })),
            data().prop_map(Frame::Stdin),
            Just(Frame::StdinEnd),
            any::<(u16, u16)>().prop_map(|(rows, columns)| Frame::Resize(rows, columns)),
            data().prop_map(Frame::Stdout),
            data().prop_map(Frame::Stderr),
            any::<u32>().prop_map(Frame::Credit),
            any::<i32>().prop_map(Frame::Exit),
            ".{0,50}".prop_map(Frame::Error),
            Just(Frame::Close),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire(sent in proptest::collection::vec(frames(), 0..20)) {
            let mut wire = Vec::new();
            for frame in &sent {
                frame.write(&mut wire).unwrap();
            }
            let mut reader = &wire[..];
            let mut received = Vec::new();
            while let Some(frame) = Frame::read(&mut reader).unwrap() {
                received.push(frame);
            }
            prop_assert_eq!(sent, received);
        }

        #[test]
        fn no_bytes_make_it_panic_or_run_on(wire in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = &wire[..];
            while let Ok(Some(_)) = Frame::read(&mut reader) {}
        }

        #[test]
        fn a_cut_frame_is_an_error(frame in frames(), cut in 1_usize..1000) {
            let mut wire = Vec::new();
            frame.write(&mut wire).unwrap();
            let cut = 1 + cut % (wire.len() - 1);
            prop_assert!(matches!(Frame::read(&mut &wire[..cut]), Err(ProtocolError::Io(_))));
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_it_is_allocated() {
        let wire = [STDOUT, 0xff, 0xff, 0xff, 0xff];
        let error = Frame::read(&mut &wire[..]).unwrap_err();
        assert_eq!(error.to_string(), "frame kind 6 has 4294967295 bytes, at most 65536 are allowed");
        let error = Frame::Stdin(vec![0; MAX_DATA + 1]).write(&mut Vec::new()).unwrap_err();
        assert!(matches!(error, ProtocolError::TooLong { kind: STDIN, .. }));
    }

    #[test]
    fn unknown_kinds_and_fields_are_refused() {
        assert!(matches!(Frame::read(&mut &[99, 0, 0, 0, 0][..]), Err(ProtocolError::Kind(99))));
        let json = br#"{"get":{"path":"/x","more":1}}"#;
        let mut wire = vec![REQUEST, json.len() as u8, 0, 0, 0];
        wire.extend_from_slice(json);
        let error = Frame::read(&mut &wire[..]).unwrap_err().to_string();
        assert!(error.contains("unknown field `more`"), "{error}");
    }
}
