//! Messages by which the nodes agree on who is a member, and rebuild who owns what.
//!
//! | message | bytes of the body |
//! |---|---|
//! | suspect | 7, node u8 |
//! | accept | 8, epoch u64, members u64, round u8 |
//! | conflict | 9, epoch u64, members u64 |
//! | holdings | 10, epoch u64, last u8, count u16, then for each: page u64, owner u8 |
//! | directory | 11, epoch u64, last u8, count u16, then for each: page u64, copyset u64 |
//! | fenced | 12, epoch u64, members u64 |
//!
//! A set of nodes has one bit for each.

use crate::{
    error::WireError,
    hello::node,
    reader::{Reader, at_most, flag},
};

/// Most pages in [`Membership::Holdings`] and [`Membership::Directory`].
pub const PAGES_LIMIT: usize = 512;

/// The highest number of a membership: each has a number that is a little higher than the last.
pub const EPOCH_MOST: u64 = 1 << 56;

/// Who is a member from an epoch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Its number, at most [`EPOCH_MOST`], as everywhere in these messages.
    pub epoch: u64,
    /// One bit for each node.
    pub members: u64,
}

/// A page that a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holding {
    /// The page.
    pub page: u64,
    /// As the owner.
    pub owner: bool,
}

/// A page that the receiver owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The page.
    pub page: u64,
    /// Who has a copy besides: one bit for each node.
    pub copyset: u64,
}

/// What nodes say about the membership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Membership {
    /// The sender suspects a node.
    Suspect {
        /// The node, below 64.
        node: u8,
    },
    /// The sender has accepted a view.
    Accept {
        /// The view.
        view: View,
        /// 1 or 2.
        round: u8,
    },
    /// The sender has accepted another view.
    Conflict {
        /// What it has accepted.
        view: View,
    },
    /// Pages that the sender has; at most [`PAGES_LIMIT`].
    Holdings {
        /// The view.
        epoch: u64,
        /// There are no more.
        last: bool,
        /// Some of them.
        pages: Vec<Holding>,
    },
    /// Pages that the receiver owns; at most [`PAGES_LIMIT`].
    Directory {
        /// The view.
        epoch: u64,
        /// There are no more.
        last: bool,
        /// Some of them.
        pages: Vec<Entry>,
    },
    /// The receiver is no member any more.
    Fenced {
        /// The view.
        view: View,
    },
}

/// The first of the numbers.
pub(crate) const FIRST: u8 = 7;
/// The last of the numbers.
pub(crate) const LAST: u8 = 12;

fn encode_view(number: u8, view: View, out: &mut Vec<u8>) {
    out.push(number);
    out.extend(view.epoch.to_le_bytes());
    out.extend(view.members.to_le_bytes());
}

fn encode_list(number: u8, epoch: u64, last: bool, count: usize, out: &mut Vec<u8>) {
    assert!(count <= PAGES_LIMIT, "{count} pages");
    out.push(number);
    out.extend(epoch.to_le_bytes());
    out.push(u8::from(last));
    out.extend((count as u16).to_le_bytes());
}

fn decode_view(
    epoch: &'static str,
    members: &'static str,
    reader: &mut Reader<'_>,
) -> Result<View, WireError> {
    Ok(View { epoch: decode_epoch(epoch, reader)?, members: reader.u64(members)? })
}

fn decode_epoch(field: &'static str, reader: &mut Reader<'_>) -> Result<u64, WireError> {
    at_most(field, reader.u64(field)?, EPOCH_MOST, "at most 2^56")
}

fn decode_count(field: &'static str, reader: &mut Reader<'_>) -> Result<usize, WireError> {
    let count = usize::from(reader.u16(field)?);
    if count > PAGES_LIMIT {
        return Err(WireError::Limit { field, value: count, limit: PAGES_LIMIT });
    }
    Ok(count)
}

impl Membership {
    /// Appends the message.
    ///
    /// # Panics
    /// When there are too many pages: the peer would refuse it.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Suspect { node } => out.extend([FIRST, *node]),
            Self::Accept { view, round } => {
                encode_view(8, *view, out);
                out.push(*round);
            }
            Self::Conflict { view } => encode_view(9, *view, out),
            Self::Holdings { epoch, last, pages } => {
                encode_list(10, *epoch, *last, pages.len(), out);
                for Holding { page, owner } in pages {
                    out.extend(page.to_le_bytes());
                    out.push(u8::from(*owner));
                }
            }
            Self::Directory { epoch, last, pages } => {
                encode_list(11, *epoch, *last, pages.len(), out);
                for Entry { page, copyset } in pages {
                    out.extend(page.to_le_bytes());
                    out.extend(copyset.to_le_bytes());
                }
            }
            Self::Fenced { view } => encode_view(LAST, *view, out),
        }
    }

    /// Reads what follows the number, which is one of [`FIRST`] to [`LAST`].
    pub(crate) fn decode(number: u8, reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match number {
            FIRST => Self::Suspect { node: node("suspect.node", reader)? },
            8 => {
                let view = decode_view("accept.epoch", "accept.members", reader)?;
                let round = reader.u8("accept.round")?;
                if !(1..=2).contains(&round) {
                    let value = round.into();
                    return Err(WireError::Value { field: "accept.round", value, expected: "1 or 2" });
                }
                Self::Accept { view, round }
            }
            9 => Self::Conflict { view: decode_view("conflict.epoch", "conflict.members", reader)? },
            10 => {
                let epoch = decode_epoch("holdings.epoch", reader)?;
                let last = flag("holdings.last", reader.u8("holdings.last")?)?;
                let count = decode_count("holdings.count", reader)?;
                let mut page = || {
                    let page = reader.u64("holding.page")?;
                    Ok(Holding { page, owner: flag("holding.owner", reader.u8("holding.owner")?)? })
                };
                Self::Holdings { epoch, last, pages: (0..count).map(|_| page()).collect::<Result<_, _>>()? }
            }
            11 => {
                let epoch = decode_epoch("directory.epoch", reader)?;
                let last = flag("directory.last", reader.u8("directory.last")?)?;
                let count = decode_count("directory.count", reader)?;
                let mut page = || {
                    let page = reader.u64("entry.page")?;
                    Ok(Entry { page, copyset: reader.u64("entry.copyset")? })
                };
                Self::Directory { epoch, last, pages: (0..count).map(|_| page()).collect::<Result<_, _>>()? }
            }
            _ => Self::Fenced { view: decode_view("fenced.epoch", "fenced.members", reader)? },
        })
    }
}
