//! What the protocol does beyond the baseline.

/// Switches of the protocol. All nodes of a DSM must have the same.
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
