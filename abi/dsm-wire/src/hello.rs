//! The first frame of each direction.

use crate::{PAGE_SIZE, VERSION_MAX, VERSION_MIN, error::WireError, reader::Reader};

/// First bytes of a [`Hello`].
pub const MAGIC: [u8; 8] = *b"VNUMADSM";
/// Bytes of a [`Hello`].
pub const HELLO: usize = 60;

/// Who speaks, and of what. The layout is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest version that the sender speaks.
    pub version_min: u16,
    /// Newest version that the sender speaks, not below `version_min`.
    pub version_max: u16,
    /// The sender, below [`NODE_LIMIT`](crate::NODE_LIMIT).
    pub node: u8,
    /// Whom it wants to speak to, below [`NODE_LIMIT`](crate::NODE_LIMIT).
    pub peer: u8,
    /// Number of this connection among those of the two nodes, below `lanes`.
    pub lane: u16,
    /// Connections between two nodes.
    pub lanes: u16,
    /// The protocol's switches, one bit for each: the same on all nodes.
    pub switches: u16,
    /// Which DSM: the same on all its nodes, and chosen anew for each.
    pub cluster: u128,
    /// Tells a node from the one that had its number before.
    pub incarnation: u64,
    /// Length of the region.
    pub pages: u64,
    /// Bytes of a page.
    pub page_size: u32,
    /// Pages in a row that belong to one lane.
    pub stripe_pages: u32,
}

impl Hello {
    /// With the versions and the page size of this crate; the rest is to be filled in.
    pub fn new(node: u8, peer: u8) -> Self {
        Self {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            node,
            peer,
            lane: 0,
            lanes: 1,
            switches: 0,
            cluster: 0,
            incarnation: 0,
            pages: 0,
            page_size: PAGE_SIZE as u32,
            stripe_pages: 1,
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend(self.version_min.to_le_bytes());
        out.extend(self.version_max.to_le_bytes());
        out.extend([self.node, self.peer]);
        out.extend(self.lane.to_le_bytes());
        out.extend(self.lanes.to_le_bytes());
        out.extend(self.switches.to_le_bytes());
        out.extend(self.cluster.to_le_bytes());
        out.extend(self.incarnation.to_le_bytes());
        out.extend(self.pages.to_le_bytes());
        out.extend(self.page_size.to_le_bytes());
        out.extend(self.stripe_pages.to_le_bytes());
    }

    pub(crate) fn decode(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let magic: [u8; 8] = reader.array("hello.magic")?;
        if magic != MAGIC {
            let value = u64::from_be_bytes(magic);
            return Err(WireError::Value { field: "hello.magic", value, expected: "VNUMADSM" });
        }
        let (version_min, version_max) = (reader.u16("hello.version_min")?, reader.u16("hello.version_max")?);
        if version_min > version_max {
            let value = version_min.into();
            let expected = "at most hello.version_max";
            return Err(WireError::Value { field: "hello.version_min", value, expected });
        }
        let (node, peer) = (reader.node("hello.node")?.0, reader.node("hello.peer")?.0);
        let (lane, lanes) = (reader.u16("hello.lane")?, reader.u16("hello.lanes")?);
        if lane >= lanes {
            let expected = "below hello.lanes";
            return Err(WireError::Value { field: "hello.lane", value: lane.into(), expected });
        }
        let hello = Self {
            version_min,
            version_max,
            node,
            peer,
            lane,
            lanes,
            switches: reader.u16("hello.switches")?,
            cluster: u128::from_le_bytes(reader.array("hello.cluster")?),
            incarnation: reader.u64("hello.incarnation")?,
            pages: reader.u64("hello.pages")?,
            page_size: reader.u32("hello.page_size")?,
            stripe_pages: reader.u32("hello.stripe_pages")?,
        };
        reader.end("hello")?;
        Ok(hello)
    }

    /// The version that both sides speak, if `self`, who speaks here, and the peer belong together.
    ///
    /// Whether the peer is the node that it says it is, is the transport's business.
    pub fn agree(&self, theirs: &Self) -> Result<u16, (Refusal, WireError)> {
        let same = |refusal, field, ours: u64, theirs: u64| {
            let mismatch = WireError::Mismatch { field, theirs, ours };
            if ours == theirs { Ok(()) } else { Err((refusal, mismatch)) }
        };
        let version = self.version_max.min(theirs.version_max);
        if version < self.version_min || version < theirs.version_min {
            let (field, ours) = ("hello.version_max", self.version_max.into());
            let mismatch = WireError::Mismatch { field, theirs: theirs.version_max.into(), ours };
            return Err((Refusal::Version, mismatch));
        }
        same(Refusal::Peer, "hello.peer", self.node.into(), theirs.peer.into())?;
        same(Refusal::Peer, "hello.node", self.peer.into(), theirs.node.into())?;
        let (high, low) = ((self.cluster >> 64) as u64, self.cluster as u64);
        same(Refusal::Cluster, "hello.cluster", high, (theirs.cluster >> 64) as u64)?;
        same(Refusal::Cluster, "hello.cluster", low, theirs.cluster as u64)?;
        same(Refusal::Lane, "hello.lanes", self.lanes.into(), theirs.lanes.into())?;
        same(Refusal::Lane, "hello.lane", self.lane.into(), theirs.lane.into())?;
        same(Refusal::Region, "hello.page_size", self.page_size.into(), theirs.page_size.into())?;
        same(Refusal::Region, "hello.pages", self.pages, theirs.pages)?;
        same(Refusal::Region, "hello.stripe_pages", self.stripe_pages.into(), theirs.stripe_pages.into())?;
        same(Refusal::Switches, "hello.switches", self.switches.into(), theirs.switches.into())?;
        Ok(version)
    }
}

/// Why a connection ends before it has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// No version that both speak.
    Version = 1,
    /// Another DSM.
    Cluster = 2,
    /// Another node was expected, or is here.
    Peer = 3,
    /// Another number of connections, or this one is there already.
    Lane = 4,
    /// Another region.
    Region = 5,
    /// Other switches of the protocol.
    Switches = 6,
}

impl Refusal {
    pub(crate) fn decode(value: u8) -> Result<Self, WireError> {
        [Self::Version, Self::Cluster, Self::Peer, Self::Lane, Self::Region, Self::Switches]
            .into_iter()
            .find(|refusal| *refusal as u8 == value)
            .ok_or(WireError::Value { field: "refusal", value: value.into(), expected: "a reason (1 to 6)" })
    }
}
