//! What the protocol does beyond the baseline.

/// Switches of the protocol. All nodes of a DSM must have the same [`Self::switches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// The owner answers the requester itself, not through the manager: 3 messages instead of 4.
    pub direct_reply: bool,
    /// A request goes to the node that was the owner as far as the requester knows: 2 messages if that is so.
    /// Otherwise that node forwards the request to the owner that it knows.
    pub owner_hints: bool,
    /// A requester whose copy is the current content gets no data.
    pub upgrade_without_data: bool,
    /// A page that nodes read and then write, one after the other, is handed over with the right to write
    /// at the read. Only with owner hints.
    pub migratory: bool,
    /// An owner that gives a page away tells the two nodes that had it before: their next request finds the new owner, though they
    /// are not on the way of the page. Only with owner hints.
    pub tell_owners: bool,
    /// The owner sends the difference to the copy that the requester had before, if it has kept that content.
    pub deltas: bool,
    /// Most pages that are requested ahead of a sequential reader; 0 is never. GiantVM has no prefetch.
    pub prefetch_pages: u32,
    /// A prefetch stays within a block of so many pages, the first of which begins at page 0; 0 is the whole region.
    /// Where the pages are divided among state machines, a block is of one of them.
    pub prefetch_within: u64,
    /// A page that a thread waited for is kept for so long, in nanoseconds, or until [`crate::Event::Progress`].
    /// 0 is not at all, which permits the livelock of GiantVM's section 5.1 ("slower is faster").
    pub hold_ns: u64,
    /// Invalidations and their acknowledgements wait for [`crate::Event::Flush`] and share a message.
    pub batch_invalidations: bool,
    /// Copies that a write drops are acknowledged to the node that writes. The owner hands the page over without waiting for them.
    pub direct_acks: bool,
}

impl Options {
    /// One bit for each switch that nodes must have in common. How far a node fetches ahead, and how long it keeps a page, is its own
    /// affair.
    pub fn switches(&self) -> u16 {
        let each = [
            self.direct_reply,
            self.owner_hints,
            self.upgrade_without_data,
            self.migratory,
            self.tell_owners,
            self.deltas,
            self.batch_invalidations,
            self.direct_acks,
        ];
        each.into_iter().rev().fold(0, |bits, on| bits << 1 | u16::from(on))
    }

    /// GiantVM's protocol (section 3.3.1), message for message.
    pub fn ivy() -> Self {
        Self {
            direct_reply: false,
            owner_hints: false,
            upgrade_without_data: false,
            migratory: false,
            tell_owners: false,
            deltas: false,
            prefetch_pages: 0,
            prefetch_within: 0,
            hold_ns: 0,
            batch_invalidations: false,
            direct_acks: false,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            direct_reply: true,
            owner_hints: true,
            upgrade_without_data: true,
            migratory: true,
            tell_owners: true,
            deltas: true,
            prefetch_pages: 16,
            prefetch_within: 0,
            hold_ns: 20_000,
            batch_invalidations: true,
            direct_acks: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_switch_has_a_bit() {
        let default = Options::default();
        assert_eq!((Options::ivy().switches(), default.switches()), (0, 0xff));
        let others = [
            Options { direct_reply: false, ..default },
            Options { owner_hints: false, ..default },
            Options { upgrade_without_data: false, ..default },
            Options { migratory: false, ..default },
            Options { tell_owners: false, ..default },
            Options { deltas: false, ..default },
            Options { batch_invalidations: false, ..default },
            Options { direct_acks: false, ..default },
        ];
        let bits: Vec<_> = others.iter().map(|other| other.switches() ^ 0xff).collect();
        assert_eq!(bits, (0..8).map(|bit| 1 << bit).collect::<Vec<_>>());
        assert_eq!(Options { hold_ns: 0, prefetch_pages: 0, ..default }.switches(), 0xff);
    }
}
