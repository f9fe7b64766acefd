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
    ids::{NODE_LIMIT, NodeId, NodeSet, PageId, Version},
    membership::{self, Membership},
    reader::{Reader, below},
};

/// Most notices in a message.
pub const NOTICE_LIMIT: usize = 1024;

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

/// Asks for a page: Message-1 and Message-1-non-owner (GiantVM, section 3.3.1), forwarded unchanged until it finds the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The page.
    pub page: PageId,
    /// Who asked first.
    pub requester: NodeId,
    /// What for.
    pub purpose: Purpose,
    /// The content that the requester's memory has, also if it is not mapped. 0 if none.
    pub have: Version,
}

/// Answers a request: Message-2-read and Message-2-write (GiantVM, section 3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The page.
    pub page: PageId,
    /// Who asked.
    pub to: NodeId,
    /// The owner that sent it.
    pub from: NodeId,
    /// What the requester may do.
    pub access: Access,
    /// The requester is the owner from now on. Always with [`Access::Write`].
    pub owner: bool,
    /// How sure the owners are that the page is migratory: 0 to [`MIGRATORY_MOST`].
    pub migratory: u8,
    /// For a new owner: the owner before the one that sent it, unless the page goes back and forth between two nodes.
    pub before: Option<NodeId>,
    /// The content.
    pub version: Version,
    /// What travels beside the message.
    pub payload: Payload,
    /// For a new owner: who still has a copy. They were told to drop it, and say to the new owner that they have. It writes then.
    pub copies: NodeSet,
}

/// One invalidation or its acknowledgement, in [`Message::Notices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// Drop the copy of the page; `owner` is about to write it. With direct acknowledgements `owner` is told when that is done, else
    /// the sender.
    Invalidate {
        /// The page.
        page: PageId,
        /// The next owner.
        owner: NodeId,
    },
    /// The copy was dropped.
    Invalidated {
        /// The page.
        page: PageId,
    },
}

/// What a node tells another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a page.
    Request(Request),
    /// Answers a request.
    Grant(Grant),
    /// A request for prefetch is not answered with the page.
    Refuse {
        /// The page.
        page: PageId,
    },
    /// Invalidations and acknowledgements: 1 to [`NOTICE_LIMIT`].
    Notices(Vec<Notice>),
    /// A page has a new owner. Of a migratory page that was handed over at a read, the new owner tells the manager. The old
    /// owner tells those before it.
    OwnerIs {
        /// The page.
        page: PageId,
        /// The owner.
        owner: NodeId,
        /// The content that the owner got.
        version: Version,
    },
    /// The only copy of the page was on a node that was lost.
    Lost {
        /// The page.
        page: PageId,
    },
    /// About the membership; valid in any epoch.
    Membership(Membership),
    /// About a cut.
    Cut(Cut),
}

/// About a cut: second copies as of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// A page for its keeper. The whole content travels beside it.
    Page {
        /// The cut.
        number: u64,
        /// The page.
        page: PageId,
        /// The content.
        version: Version,
    },
    /// The sender has sent all its pages of the cut.
    End {
        /// The cut.
        number: u64,
    },
    /// The sender has all pages of the cut that it is to keep.
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
    /// The pages that it names, each with its field. Lists of pages are checked where they are used.
    pub fn pages(&self) -> impl Iterator<Item = (&'static str, PageId)> {
        let of_notice = |notice: &Notice| match *notice {
            Notice::Invalidate { page, .. } | Notice::Invalidated { page } => ("notice.page", page),
        };
        let (one, notices): (_, &[Notice]) = match self {
            Self::Request(Request { page, .. }) => (Some(("request.page", *page)), &[]),
            Self::Grant(Grant { page, .. }) => (Some(("grant.page", *page)), &[]),
            Self::Refuse { page } => (Some(("refuse.page", *page)), &[]),
            Self::Notices(notices) => (None, notices),
            Self::OwnerIs { page, .. } => (Some(("owner-is.page", *page)), &[]),
            Self::Lost { page } => (Some(("lost.page", *page)), &[]),
            Self::Cut(Cut::Page { page, .. }) => (Some(("cut.page", *page)), &[]),
            Self::Membership(_) | Self::Cut(Cut::End { .. } | Cut::Kept { .. }) => (None, &[]),
        };
        one.into_iter().chain(notices.iter().map(of_notice))
    }

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
                numbered(REQUEST, page.0, out);
                out.extend([requester.0, *purpose as u8]);
                out.extend(have.to_le_bytes());
            }
            Self::Grant(grant) => encode_grant(grant, out),
            Self::Refuse { page } => numbered(REFUSE, page.0, out),
            Self::Notices(notices) => encode_notices(notices, out),
            Self::OwnerIs { page, owner, version } => {
                numbered(OWNER_IS, page.0, out);
                out.push(owner.0);
                out.extend(version.to_le_bytes());
            }
            Self::Lost { page } => numbered(LOST, page.0, out),
            Self::Membership(message) => message.encode(out),
            Self::Cut(Cut::Page { number, page, version }) => {
                numbered(CUT_PAGE, *number, out);
                out.extend(page.0.to_le_bytes());
                out.extend(version.to_le_bytes());
            }
            Self::Cut(Cut::End { number }) => numbered(CUT_END, *number, out),
            Self::Cut(Cut::Kept { number }) => numbered(CUT_KEPT, *number, out),
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
                page: reader.page("request.page")?,
                requester: reader.node("request.requester")?,
                purpose: match below("request.purpose", reader.u8("request.purpose")?, 3, "0 to 2")? {
                    0 => Purpose::Read,
                    1 => Purpose::Write,
                    _ => Purpose::Prefetch,
                },
                have: reader.version("request.have")?,
            }),
            GRANT => return decode_grant(reader),
            CUT_PAGE => return decode_cut_page(reader),
            CUT_END => Self::Cut(Cut::End { number: reader.u64("cut.number")? }),
            CUT_KEPT => Self::Cut(Cut::Kept { number: reader.u64("cut.number")? }),
            REFUSE => Self::Refuse { page: reader.page("refuse.page")? },
            NOTICES => Self::Notices(decode_notices(&mut reader)?),
            OWNER_IS => Self::OwnerIs {
                page: reader.page("owner-is.page")?,
                owner: reader.node("owner-is.owner")?,
                version: reader.version("owner-is.version")?,
            },
            LOST => Self::Lost { page: reader.page("lost.page")? },
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

fn numbered(kind: u8, number: u64, out: &mut Vec<u8>) {
    out.push(kind);
    out.extend(number.to_le_bytes());
}

fn encode_grant(grant: &Grant, out: &mut Vec<u8>) {
    let (payload, base) = match grant.payload {
        Payload::None => (0, 0),
        Payload::Page => (1, 0),
        Payload::Delta { base } => (2, base),
    };
    numbered(GRANT, grant.page.0, out);
    let owner = if grant.owner { OWNER } else { 0 } | if grant.copies.is_empty() { 0 } else { COPIES };
    let before = grant.before.map_or(NO_NODE, |node| node.0);
    out.extend([grant.to.0, grant.from.0, grant.access as u8, owner, grant.migratory, before]);
    out.extend(grant.version.to_le_bytes());
    out.push(payload);
    out.extend(base.to_le_bytes());
    if !grant.copies.is_empty() {
        out.extend(grant.copies.bits().to_le_bytes());
    }
}

fn decode_grant(mut reader: Reader<'_>) -> Result<(Message, Contents<'_>), WireError> {
    let page = reader.page("grant.page")?;
    let to = reader.node("grant.to")?;
    let from = reader.node("grant.from")?;
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
        value => Some(NodeId(below("grant.before", value, NODE_LIMIT, "below 64, or 255")?)),
    };
    let version = reader.version("grant.version")?;
    let kind = below("grant.payload", reader.u8("grant.payload")?, 3, "0 to 2")?;
    let base = reader.version("grant.base")?;
    if kind != 2 && base != 0 {
        return Err(WireError::Value { field: "grant.base", value: base, expected: "0 without a delta" });
    }
    let copies = if owner & COPIES == 0 { NodeSet::EMPTY } else { reader.nodes("grant.copies")? };
    if owner & COPIES != 0 && copies.is_empty() {
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
    let (page, version) = (reader.page("cut.page")?, reader.version("cut.version")?);
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
                numbered(1, page.0, out);
                out.push(owner.0);
            }
            Notice::Invalidated { page } => numbered(2, page.0, out),
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
                let page = reader.page("notice.page")?;
                Ok(Notice::Invalidate { page, owner: reader.node("notice.owner")? })
            }
            2 => Ok(Notice::Invalidated { page: reader.page("notice.page")? }),
            value => {
                Err(WireError::Value { field: "notice", value: value.into(), expected: "a notice (1 or 2)" })
            }
        })
        .collect()
}
