//! Shares of what clients cause: each party has a part of its own, and none takes that of another one.

mod lanes;
mod permits;
mod queue;
mod tolls;

pub(crate) use lanes::{Lane, Lanes};
pub(crate) use permits::{Permit, Permits};
pub(crate) use queue::FairQueue;
pub(crate) use tolls::Tolls;

use vnuma_model::Party;

/// Root, who has a share that no other user can take.
pub(crate) const ROOT: Party = Party::User(0);

/// How many of something there may be at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// That one party may have; root may have as many in any case.
    pub(crate) of_one: usize,
    /// That all parties but root may have.
    pub(crate) of_all: usize,
}

impl Room {
    /// Room for a few parties that use all of their part, and for many that use little.
    pub(crate) const fn for_parties_of(of_one: usize) -> Self {
        Self { of_one, of_all: 1024 + 4 * of_one }
    }

    /// Is there one more for a party that has `own`, while all but root have `all`? None gets more than a quarter of what is
    /// left, so that others find some when many use all that they can get.
    pub(crate) fn has_one_more(self, party: Party, own: usize, all: usize) -> bool {
        let left = if party == ROOT { usize::MAX } else { self.of_all.saturating_sub(all) };
        own < self.of_one.min(left.div_ceil(4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// One party after the other takes all that it gets.
    fn greedy(room: Room, parties: u32) -> BTreeMap<Party, usize> {
        let (mut taken, mut all) = (BTreeMap::new(), 0);
        for party in (1..=parties).map(Party::User) {
            let own = taken.entry(party).or_insert(0);
            while room.has_one_more(party, *own, all) {
                (*own, all) = (*own + 1, all + 1);
            }
        }
        taken
    }

    #[test]
    fn whoever_comes_finds_room_whatever_others_take() {
        let room = Room { of_one: 64, of_all: 600 };
        let taken = greedy(room, 100);
        assert_eq!(taken.values().take(3).copied().collect::<Vec<_>>(), [64; 3]);
        assert!(taken.values().take(20).all(|own| *own > 0), "{taken:?}");
        assert!(room.has_one_more(ROOT, 63, 600) && !room.has_one_more(ROOT, 64, 0));
    }
}
