//! Names of things, and sets of nodes.

/// Most nodes of one DSM: a [`NodeSet`] is one word.
pub const NODE_LIMIT: u8 = 64;

/// A node of the DSM: 0 to 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

impl NodeId {
    /// [`NODE_LIMIT`].
    pub const LIMIT: usize = NODE_LIMIT as usize;
}

/// A host page, by its number in the shared region.
///
/// State belongs to the host page (GiantVM, section 4.2.1): a page that is mapped at several guest addresses has one id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

/// Counts the contents of one page: 1 is the content before the first write, which is equal on all nodes (zeros).
/// It rises whenever a node becomes able to write. 0 means no content.
pub type Version = u64;

/// No content has a higher one: a page that is written a billion times a second gets there in 146 years. A peer that names a higher
/// one is refused.
pub const VERSION_MOST: Version = 1 << 62;

/// Numbers the memberships. A frame of an older epoch is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl Epoch {
    /// A membership that is further ahead of the last one is refused: a peer cannot use the numbers up.
    pub const AHEAD: u64 = 1 << 22;

    /// True if a membership may have this number after `last`.
    pub fn may_follow(self, last: Self) -> bool {
        self.0 <= last.0.saturating_add(Self::AHEAD) && self.0 <= u64::MAX - Self::AHEAD
    }
}

/// A set of nodes, such as a copyset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeSet(u64);

impl NodeSet {
    /// No node.
    pub const EMPTY: Self = Self(0);

    /// The nodes 0 to `count - 1`; `count` is at most 64.
    pub fn first(count: usize) -> Self {
        Self(if count >= NodeId::LIMIT { u64::MAX } else { (1 << count) - 1 })
    }

    /// From one bit per node.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// One bit per node.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Adds a node.
    pub fn insert(&mut self, node: NodeId) {
        self.0 |= 1 << node.0;
    }

    /// Removes a node. True if it was in the set.
    pub fn remove(&mut self, node: NodeId) -> bool {
        let had = self.contains(node);
        self.0 &= !(1 << node.0);
        had
    }

    /// The set without a node.
    pub fn without(mut self, node: NodeId) -> Self {
        self.remove(node);
        self
    }

    /// The set with a node.
    pub fn with(mut self, node: NodeId) -> Self {
        self.insert(node);
        self
    }

    /// The nodes that are in both.
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The nodes that are in this one only.
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True if the node is in the set.
    pub fn contains(self, node: NodeId) -> bool {
        usize::from(node.0) < NodeId::LIMIT && self.0 & (1 << node.0) != 0
    }

    /// True if every node of this set is in the other.
    pub fn is_subset(self, of: Self) -> bool {
        self.0 & !of.0 == 0
    }

    /// True if there is no node in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of nodes.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The nodes in rising order.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        let mut bits = self.0;
        std::iter::from_fn(move || {
            if bits == 0 {
                return None;
            }
            let node = bits.trailing_zeros();
            bits &= bits - 1;
            Some(NodeId(node as u8))
        })
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().fold(Self::EMPTY, Self::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_all_64_nodes() {
        let all = NodeSet::first(64);
        assert_eq!((all.len(), all.iter().last()), (64, Some(NodeId(63))));
        let some: NodeSet = [NodeId(0), NodeId(63), NodeId(7)].into_iter().collect();
        assert_eq!(some.iter().collect::<Vec<_>>(), [NodeId(0), NodeId(7), NodeId(63)]);
        assert!(some.is_subset(all) && !all.is_subset(some) && !some.contains(NodeId(200)));
        assert_eq!(some.without(NodeId(63)).with(NodeId(1)).bits(), 0b1000_0011);
        assert_eq!(NodeSet::first(3).bits(), 7);
    }
}
