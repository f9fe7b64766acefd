//! Which node manages which page.

use vnuma_abi_dsm_wire::{NodeId, NodeSet, PageId};

/// Managers by ranges of pages, so that they can follow the guest's NUMA nodes.
///
/// The manager of a page tracks its owner (GiantVM, section 3.3.1). While nobody has touched the page, the manager owns it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Managers {
    /// First page of each range and its manager; sorted, the first is page 0.
    starts: Vec<(u64, NodeId)>,
    pages: u64,
}

/// Why ranges cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManagersError {
    /// There is no range.
    #[error("managers: no range of pages")]
    Empty,
    /// This range has no page.
    #[error("managers: range {0}: no pages")]
    EmptyRange(usize),
    /// This range is managed by a node above 63.
    #[error("managers: range {0}: node above 63")]
    NoSuchNode(usize),
}

impl Managers {
    /// Ranges in the order of their pages: a number of pages (at least 1) and the manager of these pages.
    ///
    /// # Errors
    /// See [`ManagersError`].
    pub fn new(ranges: &[(u64, NodeId)]) -> Result<Self, ManagersError> {
        if ranges.is_empty() {
            return Err(ManagersError::Empty);
        }
        let mut pages = 0;
        let mut starts = Vec::with_capacity(ranges.len());
        for (index, &(count, node)) in ranges.iter().enumerate() {
            if count == 0 {
                return Err(ManagersError::EmptyRange(index));
            }
            if usize::from(node.0) >= NodeId::LIMIT {
                return Err(ManagersError::NoSuchNode(index));
            }
            starts.push((pages, node));
            pages += count;
        }
        Ok(Self { starts, pages })
    }

    /// Number of pages in all ranges.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The manager of a page when all nodes are members. A page beyond the last range belongs to the last one.
    pub fn home(&self, page: PageId) -> NodeId {
        let after = self.starts.partition_point(|&(start, _)| start <= page.0);
        self.starts[after.max(1) - 1].1
    }

    /// The manager of a page among these members: its home or, if that was lost, the next member in the order of numbers.
    /// `members` is not empty.
    pub fn manager(&self, page: PageId, members: NodeSet) -> NodeId {
        let home = self.home(page);
        if members.contains(home) {
            return home;
        }
        members.iter().find(|node| *node > home).or_else(|| members.iter().next()).unwrap_or(home)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_one_another() {
        let managers = Managers::new(&[(10, NodeId(2)), (5, NodeId(0)), (1, NodeId(1))]).unwrap();
        assert_eq!(managers.pages(), 16);
        let homes: Vec<_> = [0, 9, 10, 14, 15].iter().map(|page| managers.home(PageId(*page)).0).collect();
        assert_eq!(homes, [2, 2, 0, 0, 1]);
    }

    #[test]
    fn the_next_member_takes_over() {
        let managers = Managers::new(&[(1, NodeId(1)), (1, NodeId(2))]).unwrap();
        let members = NodeSet::first(3).without(NodeId(1));
        assert_eq!(managers.manager(PageId(0), members), NodeId(2));
        assert_eq!(managers.manager(PageId(1), NodeSet::first(2)), NodeId(0));
    }

    #[test]
    fn bad_ranges_are_refused_with_their_number() {
        assert_eq!(Managers::new(&[]), Err(ManagersError::Empty));
        let refused = Managers::new(&[(1, NodeId(0)), (0, NodeId(1))]).unwrap_err();
        assert_eq!(refused.to_string(), "managers: range 1: no pages");
        assert_eq!(Managers::new(&[(1, NodeId(64))]), Err(ManagersError::NoSuchNode(0)));
    }
}
