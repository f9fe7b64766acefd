//! Frames.

use crate::{
    PAGE_SIZE,
    delta::DELTA_LIMIT,
    error::WireError,
    hello::{HELLO, Hello, Refusal},
    message::{Contents, Message, NOTICE_LIMIT},
    reader::Reader,
};

/// Bytes of a frame's header.
pub const HEADER: usize = 24;
/// Most bytes of [`Body::Opaque`].
pub const OPAQUE_LIMIT: usize = 1 << 20;
/// Most bytes of any body.
pub const BODY_LIMIT: usize = OPAQUE_LIMIT;
/// Bytes of a grant without its contents.
const GRANT: usize = 31;
/// Most bytes of a protocol message.
const MESSAGE_LIMIT: usize = {
    let notices = 3 + 10 * NOTICE_LIMIT;
    let contents = GRANT + if DELTA_LIMIT > PAGE_SIZE { DELTA_LIMIT } else { PAGE_SIZE };
    if notices > contents { notices } else { contents }
};

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`Body::Hello`].
    Hello = 1,
    /// [`Body::Refusal`].
    Refusal = 2,
    /// [`Body::Ping`].
    Ping = 3,
    /// [`Body::Pong`].
    Pong = 4,
    /// [`Body::Bye`].
    Bye = 5,
    /// [`Body::Protocol`].
    Protocol = 6,
    /// [`Body::Opaque`].
    Opaque = 7,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Hello, Self::Refusal, Self::Ping, Self::Pong, Self::Bye, Self::Protocol, Self::Opaque];

    /// Most bytes of its body.
    pub fn limit(self) -> usize {
        match self {
            Self::Hello => HELLO,
            Self::Refusal => 1,
            Self::Ping | Self::Pong => 8,
            Self::Bye => 0,
            Self::Protocol => MESSAGE_LIMIT,
            Self::Opaque => OPAQUE_LIMIT,
        }
    }
}

/// What stands before a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the body, at most [`Kind::limit`].
    pub length: usize,
    /// What it is.
    pub kind: Kind,
    /// The sender's membership.
    pub epoch: u64,
    /// Counts the frames of a direction from 0.
    pub sequence: u64,
}

impl Header {
    /// Reads a header.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        let length = reader.u32("header.length")? as usize;
        let kind = reader.u8("header.kind")?;
        let [a, b, c] = reader.array("header.reserved")?;
        let (epoch, sequence) = (reader.u64("header.epoch")?, reader.u64("header.sequence")?);
        let known = Kind::ALL.into_iter().find(|known| *known as u8 == kind);
        let unknown =
            WireError::Value { field: "header.kind", value: kind.into(), expected: "a kind (1 to 7)" };
        let kind = known.ok_or(unknown)?;
        if [a, b, c] != [0; 3] {
            let value = u32::from_le_bytes([a, b, c, 0]).into();
            return Err(WireError::Value { field: "header.reserved", value, expected: "0" });
        }
        if length > kind.limit() {
            return Err(WireError::Limit { field: "header.length", value: length, limit: kind.limit() });
        }
        Ok(Self { length, kind, epoch, sequence })
    }
}

/// What a frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// Who speaks: the first frame.
    Hello(Hello),
    /// The connection ends before it has begun.
    Refusal(Refusal),
    /// Asks whether the peer is there.
    Ping(u64),
    /// The answer, with the number of the question.
    Pong(u64),
    /// The sender ends the connection, and means it.
    Bye,
    /// A message of the coherence protocol.
    Protocol(Message, Contents<'a>),
    /// Bytes of another protocol, for example that of the membership.
    Opaque(&'a [u8]),
}

impl<'a> Body<'a> {
    /// What it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Refusal(_) => Kind::Refusal,
            Self::Ping(_) => Kind::Ping,
            Self::Pong(_) => Kind::Pong,
            Self::Bye => Kind::Bye,
            Self::Protocol(..) => Kind::Protocol,
            Self::Opaque(_) => Kind::Opaque,
        }
    }

    /// Reads a body.
    pub fn decode(kind: Kind, bytes: &'a [u8]) -> Result<Self, WireError> {
        if bytes.len() > kind.limit() {
            return Err(WireError::Limit { field: "body", value: bytes.len(), limit: kind.limit() });
        }
        let mut reader = Reader::new(bytes);
        let body = match kind {
            Kind::Hello => return Hello::decode(reader).map(Self::Hello),
            Kind::Protocol => {
                return Message::decode(reader).map(|(message, contents)| Self::Protocol(message, contents));
            }
            Kind::Opaque => return Ok(Self::Opaque(bytes)),
            Kind::Refusal => Self::Refusal(Refusal::decode(reader.u8("refusal")?)?),
            Kind::Ping => Self::Ping(reader.u64("ping")?),
            Kind::Pong => Self::Pong(reader.u64("pong")?),
            Kind::Bye => Self::Bye,
        };
        reader.end("body")?;
        Ok(body)
    }
}

/// Appends a frame.
///
/// # Panics
/// When the body is one that a peer would refuse: too many notices, contents that the message does not announce, more opaque
/// bytes than [`OPAQUE_LIMIT`].
pub fn encode(body: &Body<'_>, epoch: u64, sequence: u64, out: &mut Vec<u8>) {
    let begin = out.len();
    let kind = body.kind();
    out.extend([0, 0, 0, 0, kind as u8, 0, 0, 0]);
    out.extend(epoch.to_le_bytes());
    out.extend(sequence.to_le_bytes());
    match body {
        Body::Hello(hello) => hello.encode(out),
        Body::Refusal(refusal) => out.push(*refusal as u8),
        Body::Ping(number) | Body::Pong(number) => out.extend(number.to_le_bytes()),
        Body::Bye => {}
        Body::Protocol(message, contents) => message.encode(*contents, out),
        Body::Opaque(bytes) => out.extend(*bytes),
    }
    let length = out.len() - begin - HEADER;
    assert!(length <= kind.limit(), "{length} bytes of {kind:?}");
    out[begin..begin + 4].copy_from_slice(&(length as u32).to_le_bytes());
}
