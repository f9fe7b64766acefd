//! Messages of the coherence protocol, and the contents of a page beside them.
//!
//! | message | bytes of the body |
//! |---|---|
//! | request | 1, page u64, requester u8, purpose u8, have u64 |
//! | grant | 2, page u64, to u8, from u8, access u8, owner u8, migratory u8, before u8, version u64, payload u8, base u64, copies, contents |
//! | refuse | 3, page u64 |
//! | notices | 4, count u16, then for each: 1, page u64, owner u8 (invalidate), or 2, page u64 (invalidated) |
//! | owner-is | 5, page u64, version u64 |
//! | lost | 6, page u64 |
//! | about the membership | 7 to 12: see `membership.rs` |
//! | cut-page | 13, number u64, page u64, version u64, the page |
//! | cut-end | 14, number u64 |
//! | cut-kept | 15, number u64 |
//!
//! Bit 0 of the owner in a grant says that the receiver owns the page from now on. With bit 1 the copies are a u64; else there are none.

use crate::{
    PAGE_SIZE,
    delta::Delta,
    error::WireError,
    hello::{NODE_LIMIT, node},
    membership::{self, Membership},
    reader::{Reader, at_most, below},
};

/// Most notices in a message.
pub const NOTICE_LIMIT: usize = 1024;

/// The highest version of a content: no program writes a page so often.
pub const VERSION_MOST: u64 = 1 << 62;
/// The highest value of [`Grant::migratory`].
pub const MIGRATORY_MOST: u8 = 3;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// A copy. The owner keeps its own.
    Read = 0,
    /// Ownership, and the only copy.
    Write = 1,
    /// A copy that no thread waits for. The owner may refuse.
    Prefetch = 2,
}

/// What local threads may do with a page without a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Access {
    /// Nothing: the page is not mapped.
    #[default]
    None = 0,
    /// Read: the page is write-protected.
    Read = 1,
    /// Read and write.
    Write = 2,
}

/// What stands behind a grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Nothing: the receiver has the content.
    #[default]
    None,
    /// The whole page.
    Page,
    /// A difference to the content with this version, which the receiver's memory has.
    Delta {
        /// The version that it starts from.
        base: u64,
    },
}

/// Asks for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The page.
    pub page: u64,
    /// Who asked first, below 64.
    pub requester: u8,
    /// What for.
    pub purpose: Purpose,
    /// The version that the requester's memory has, or 0; at most [`VERSION_MOST`], as all versions.
    pub have: u64,
}

/// Answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The page.
    pub page: u64,
    /// Who asked, below 64.
    pub to: u8,
    /// Who answers, below 64.
    pub from: u8,
    /// What the requester may do.
    pub access: Access,
    /// The requester owns the page from now on.
    pub owner: bool,
    /// How sure the owners are that the page migrates: 0 to [`MIGRATORY_MOST`].
    pub migratory: u8,
    /// The owner before the one that answers, below 64.
    pub before: Option<u8>,
    /// The version of the content.
    pub version: u64,
    /// What stands behind it.
    pub payload: Payload,
    /// Who still has a copy, one bit for each node: they tell the new owner when they have dropped it.
    pub copies: u64,
}

/// A part of [`Message::Notices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// Drop the copy.
    Invalidate {
        /// The page.
        page: u64,
        /// Who is about to write it, below 64.
        owner: u8,
    },
    /// The copy was dropped.
    Invalidated {
        /// The page.
        page: u64,
    },
}

/// What a node tells another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a page.
    Request(Request),
    /// Answers a request.
    Grant(Grant),
    /// A prefetch is not answered.
    Refuse {
        /// The page.
        page: u64,
    },
    /// Invalidations and acknowledgements: 1 to [`NOTICE_LIMIT`].
    Notices(Vec<Notice>),
    /// A node owns the page.
    OwnerIs {
        /// The page.
        page: u64,
        /// The node, below 64.
        owner: u8,
        /// The version that it got.
        version: u64,
    },
    /// The only copy of the page was on a node that was lost.
    Lost {
        /// The page.
        page: u64,
    },
    /// About the membership; valid in any epoch.
    Membership(Membership),
    /// About a cut.
    Cut(Cut),
}

/// A cut: second copies as of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// A page for its keeper; the content stands behind it.
    Page {
        /// The cut.
        number: u64,
        /// The page.
        page: u64,
        /// The version of the content.
        version: u64,
    },
    /// The sender has sent all its pages.
    End {
        /// The cut.
        number: u64,
    },
    /// The sender has all that it is to keep.
    Kept {
        /// The cut.
        number: u64,
    },
}

/// What of a page travels beside a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents<'a> {
    /// Nothing.
    None,
    /// All of it.
    Page(&'a [u8; PAGE_SIZE]),
    /// What changed.
    Delta(Delta<'a>),
}

const REQUEST: u8 = 1;
const GRANT: u8 = 2;
const REFUSE: u8 = 3;
const NOTICES: u8 = 4;
const OWNER_IS: u8 = 5;
const LOST: u8 = 6;
const CUT_PAGE: u8 = 13;
const CUT_END: u8 = 14;
const CUT_KEPT: u8 = 15;
/// In place of a node: there is none.
const NO_NODE: u8 = 0xff;
/// Bits of the byte `owner` of a grant.
const OWNER: u8 = 1 << 0;
const COPIES: u8 = 1 << 1;

impl Message {
    /// Appends the message and the contents.
    ///
    /// # Panics
    /// When the contents are not what the message says, or there are no notices or too many: the peer would refuse it.
    pub(crate) fn encode(&self, contents: Contents<'_>, out: &mut Vec<u8>) {
        let payload = match self {
            Self::Grant(grant) => grant.payload,
            Self::Cut(Cut::Page { .. }) => Payload::Page,
            _ => Payload::None,
        };
        let fits = match contents {
            Contents::None => payload == Payload::None,
            Contents::Page(_) => payload == Payload::Page,
            Contents::Delta(_) => matches!(payload, Payload::Delta { .. }),
        };
        assert!(fits, "contents beside {self:?}");
        match self {
            Self::Request(Request { page, requester, purpose, have }) => {
                out.push(REQUEST);
                out.extend(page.to_le_bytes());
                out.extend([*requester, *purpose as u8]);
                out.extend(have.to_le_bytes());
            }
            Self::Grant(grant) => encode_grant(grant, out),
            Self::Refuse { page } => page_only(REFUSE, *page, out),
            Self::Notices(notices) => encode_notices(notices, out),
            Self::OwnerIs { page, owner, version } => {
                page_only(OWNER_IS, *page, out);
                out.push(*owner);
                out.extend(version.to_le_bytes());
            }
            Self::Lost { page } => page_only(LOST, *page, out),
            Self::Membership(message) => message.encode(out),
            Self::Cut(Cut::Page { number, page, version }) => {
                page_only(CUT_PAGE, *number, out);
                out.extend(page.to_le_bytes());
                out.extend(version.to_le_bytes());
            }
            Self::Cut(Cut::End { number }) => page_only(CUT_END, *number, out),
            Self::Cut(Cut::Kept { number }) => page_only(CUT_KEPT, *number, out),
        }
        match contents {
            Contents::None => {}
            Contents::Page(page) => out.extend(page),
            Contents::Delta(delta) => out.extend(delta.bytes()),
        }
    }

    pub(crate) fn decode(mut reader: Reader<'_>) -> Result<(Self, Contents<'_>), WireError> {
        let message = match reader.u8("message")? {
            REQUEST => Self::Request(Request {
                page: reader.u64("request.page")?,
                requester: node("request.requester", &mut reader)?,
                purpose: match below("request.purpose", reader.u8("request.purpose")?, 3, "0 to 2")? {
                    0 => Purpose::Read,
                    1 => Purpose::Write,
                    _ => Purpose::Prefetch,
                },
                have: version("request.have", &mut reader)?,
            }),
            GRANT => return decode_grant(reader),
            CUT_PAGE => return decode_cut_page(reader),
            CUT_END => Self::Cut(Cut::End { number: reader.u64("cut.number")? }),
            CUT_KEPT => Self::Cut(Cut::Kept { number: reader.u64("cut.number")? }),
            REFUSE => Self::Refuse { page: reader.u64("refuse.page")? },
            NOTICES => Self::Notices(decode_notices(&mut reader)?),
            OWNER_IS => Self::OwnerIs {
                page: reader.u64("owner-is.page")?,
                owner: node("owner-is.owner", &mut reader)?,
                version: version("owner-is.version", &mut reader)?,
            },
            LOST => Self::Lost { page: reader.u64("lost.page")? },
            number @ membership::FIRST..=membership::LAST => {
                Self::Membership(Membership::decode(number, &mut reader)?)
            }
            value => {
                let value = value.into();
                return Err(WireError::Value { field: "message", value, expected: "a message (1 to 15)" });
            }
        };
        reader.end("message")?;
        Ok((message, Contents::None))
    }
}

fn page_only(kind: u8, page: u64, out: &mut Vec<u8>) {
    out.push(kind);
    out.extend(page.to_le_bytes());
}

fn version(field: &'static str, reader: &mut Reader<'_>) -> Result<u64, WireError> {
    at_most(field, reader.u64(field)?, VERSION_MOST, "at most 2^62")
}

fn encode_grant(grant: &Grant, out: &mut Vec<u8>) {
    let (payload, base) = match grant.payload {
        Payload::None => (0, 0),
        Payload::Page => (1, 0),
        Payload::Delta { base } => (2, base),
    };
    page_only(GRANT, grant.page, out);
    let owner = if grant.owner { OWNER } else { 0 } | if grant.copies != 0 { COPIES } else { 0 };
    out.extend([grant.to, grant.from, grant.access as u8, owner, grant.migratory]);
    out.push(grant.before.unwrap_or(NO_NODE));
    out.extend(grant.version.to_le_bytes());
    out.push(payload);
    out.extend(base.to_le_bytes());
    if grant.copies != 0 {
        out.extend(grant.copies.to_le_bytes());
    }
}

fn decode_grant(mut reader: Reader<'_>) -> Result<(Message, Contents<'_>), WireError> {
    let page = reader.u64("grant.page")?;
    let to = node("grant.to", &mut reader)?;
    let from = node("grant.from", &mut reader)?;
    let access = match below("grant.access", reader.u8("grant.access")?, 3, "0 to 2")? {
        0 => Access::None,
        1 => Access::Read,
        _ => Access::Write,
    };
    let owner = below("grant.owner", reader.u8("grant.owner")?, 4, "0 to 3")?;
    let migratory = reader.u8("grant.migratory")?;
    let migratory = below("grant.migratory", migratory, MIGRATORY_MOST + 1, "0 to 3")?;
    let before = match reader.u8("grant.before")? {
        NO_NODE => None,
        value => Some(below("grant.before", value, NODE_LIMIT, "below 64, or 255")?),
    };
    let version = version("grant.version", &mut reader)?;
    let kind = below("grant.payload", reader.u8("grant.payload")?, 3, "0 to 2")?;
    let base = at_most("grant.base", reader.u64("grant.base")?, VERSION_MOST, "at most 2^62")?;
    if kind != 2 && base != 0 {
        return Err(WireError::Value { field: "grant.base", value: base, expected: "0 without a delta" });
    }
    let copies = if owner & COPIES == 0 { 0 } else { reader.u64("grant.copies")? };
    if owner & COPIES != 0 && copies == 0 {
        return Err(WireError::Value { field: "grant.copies", value: 0, expected: "at least one node" });
    }
    let (payload, contents) = match kind {
        0 => (Payload::None, Contents::None),
        1 => (Payload::Page, Contents::Page(whole_page("grant.contents", &mut reader)?)),
        _ => (Payload::Delta { base }, Contents::Delta(Delta::decode(reader.rest())?)),
    };
    reader.end("grant")?;
    let owner = owner & OWNER != 0;
    let grant = Grant { page, to, from, access, owner, migratory, before, version, payload, copies };
    Ok((Message::Grant(grant), contents))
}

fn whole_page<'a>(field: &'static str, reader: &mut Reader<'a>) -> Result<&'a [u8; PAGE_SIZE], WireError> {
    let bytes = reader.take(field, PAGE_SIZE)?;
    let short = WireError::Short { field, need: PAGE_SIZE, have: bytes.len() };
    bytes.try_into().map_err(|_| short)
}

fn decode_cut_page(mut reader: Reader<'_>) -> Result<(Message, Contents<'_>), WireError> {
    let number = reader.u64("cut.number")?;
    let (page, version) = (reader.u64("cut.page")?, version("cut.version", &mut reader)?);
    let contents = Contents::Page(whole_page("cut.contents", &mut reader)?);
    reader.end("cut")?;
    Ok((Message::Cut(Cut::Page { number, page, version }), contents))
}

fn encode_notices(notices: &[Notice], out: &mut Vec<u8>) {
    assert!((1..=NOTICE_LIMIT).contains(&notices.len()), "{} notices", notices.len());
    out.push(NOTICES);
    out.extend((notices.len() as u16).to_le_bytes());
    for notice in notices {
        match *notice {
            Notice::Invalidate { page, owner } => {
                page_only(1, page, out);
                out.push(owner);
            }
            Notice::Invalidated { page } => page_only(2, page, out),
        }
    }
}

fn decode_notices(reader: &mut Reader<'_>) -> Result<Vec<Notice>, WireError> {
    let count = usize::from(reader.u16("notices.count")?);
    if count == 0 {
        return Err(WireError::Value { field: "notices.count", value: 0, expected: "at least 1" });
    }
    if count > NOTICE_LIMIT {
        return Err(WireError::Limit { field: "notices.count", value: count, limit: NOTICE_LIMIT });
    }
    (0..count)
        .map(|_| match reader.u8("notice")? {
            1 => {
                let page = reader.u64("notice.page")?;
                Ok(Notice::Invalidate { page, owner: node("notice.owner", reader)? })
            }
            2 => Ok(Notice::Invalidated { page: reader.u64("notice.page")? }),
            value => {
                Err(WireError::Value { field: "notice", value: value.into(), expected: "a notice (1 or 2)" })
            }
        })
        .collect()
}
