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
    ids::{Epoch, NodeId, NodeSet, PageId},
    reader::{Reader, at_most, flag},
};

/// Most pages in [`Membership::Holdings`] and [`Membership::Directory`].
pub const PAGES_LIMIT: usize = 512;

/// The highest number of a membership: each has a number that is a little higher than the last.
pub const EPOCH_MOST: u64 = 1 << 56;

/// A membership: proposed, accepted or in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Its number, at most [`EPOCH_MOST`], as everywhere in these messages.
    pub epoch: Epoch,
    /// Who is in it.
    pub members: NodeSet,
}

/// A page that a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holding {
    /// The page.
    pub page: PageId,
    /// As the owner.
    pub owner: bool,
}

/// A page whose owner is told who else has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The page.
    pub page: PageId,
    /// Who has a copy besides the owner.
    pub copyset: NodeSet,
}

/// How the members agree on the next membership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Membership {
    /// The sender suspects a node. Goes to the lowest node that it does not suspect.
    Suspect {
        /// The node.
        node: NodeId,
    },
    /// The sender has accepted the view. In round 1 it makes no new messages of its epoch from now on, in round 2 it has
    /// passed on what it relays.
    Accept {
        /// The view.
        view: View,
        /// 1 or 2.
        round: u8,
    },
    /// The sender has accepted another view, which this one contradicts.
    Conflict {
        /// What it has accepted.
        view: View,
    },
    /// Pages that the sender has, to their manager in the view: at most [`PAGES_LIMIT`].
    Holdings {
        /// The view.
        epoch: Epoch,
        /// Some of them.
        pages: Vec<Holding>,
        /// There are no more.
        last: bool,
    },
    /// Pages that the receiver owns in the view: at most [`PAGES_LIMIT`].
    Directory {
        /// The view.
        epoch: Epoch,
        /// Some of them.
        pages: Vec<Entry>,
        /// There are no more.
        last: bool,
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
    out.extend(view.epoch.0.to_le_bytes());
    out.extend(view.members.bits().to_le_bytes());
}

fn encode_list(number: u8, epoch: Epoch, last: bool, count: usize, out: &mut Vec<u8>) {
    assert!(count <= PAGES_LIMIT, "{count} pages");
    out.push(number);
    out.extend(epoch.0.to_le_bytes());
    out.push(u8::from(last));
    out.extend((count as u16).to_le_bytes());
}

fn decode_view(
    epoch: &'static str,
    members: &'static str,
    reader: &mut Reader<'_>,
) -> Result<View, WireError> {
    Ok(View { epoch: decode_epoch(epoch, reader)?, members: reader.nodes(members)? })
}

fn decode_epoch(field: &'static str, reader: &mut Reader<'_>) -> Result<Epoch, WireError> {
    at_most(field, reader.u64(field)?, EPOCH_MOST, "at most 2^56").map(Epoch)
}

/// A list: its epoch, whether it is the last, and its pages.
fn decode_list<T>(
    [epoch, last, count]: [&'static str; 3],
    reader: &mut Reader<'_>,
    mut page: impl FnMut(&mut Reader<'_>) -> Result<T, WireError>,
) -> Result<(Epoch, bool, Vec<T>), WireError> {
    let epoch = decode_epoch(epoch, reader)?;
    let last = flag(last, reader.u8(last)?)?;
    let value = usize::from(reader.u16(count)?);
    if value > PAGES_LIMIT {
        return Err(WireError::Limit { field: count, value, limit: PAGES_LIMIT });
    }
    Ok((epoch, last, (0..value).map(|_| page(reader)).collect::<Result<_, _>>()?))
}

impl Membership {
    /// Appends the message.
    ///
    /// # Panics
    /// When there are too many pages: the peer would refuse it.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Suspect { node } => out.extend([FIRST, node.0]),
            Self::Accept { view, round } => {
                encode_view(8, *view, out);
                out.push(*round);
            }
            Self::Conflict { view } => encode_view(9, *view, out),
            Self::Holdings { epoch, last, pages } => {
                encode_list(10, *epoch, *last, pages.len(), out);
                for Holding { page, owner } in pages {
                    out.extend(page.0.to_le_bytes());
                    out.push(u8::from(*owner));
                }
            }
            Self::Directory { epoch, last, pages } => {
                encode_list(11, *epoch, *last, pages.len(), out);
                for Entry { page, copyset } in pages {
                    out.extend(page.0.to_le_bytes());
                    out.extend(copyset.bits().to_le_bytes());
                }
            }
            Self::Fenced { view } => encode_view(LAST, *view, out),
        }
    }

    /// Reads what follows the number, which is one of [`FIRST`] to [`LAST`].
    pub(crate) fn decode(number: u8, reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match number {
            FIRST => Self::Suspect { node: reader.node("suspect.node")? },
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
                let fields = ["holdings.epoch", "holdings.last", "holdings.count"];
                let (epoch, last, pages) = decode_list(fields, reader, |reader| {
                    let page = reader.page("holding.page")?;
                    Ok(Holding { page, owner: flag("holding.owner", reader.u8("holding.owner")?)? })
                })?;
                Self::Holdings { epoch, last, pages }
            }
            11 => {
                let fields = ["directory.epoch", "directory.last", "directory.count"];
                let (epoch, last, pages) = decode_list(fields, reader, |reader| {
                    Ok(Entry { page: reader.page("entry.page")?, copyset: reader.nodes("entry.copyset")? })
                })?;
                Self::Directory { epoch, last, pages }
            }
            _ => Self::Fenced { view: decode_view("fenced.epoch", "fenced.members", reader)? },
        })
    }
}
