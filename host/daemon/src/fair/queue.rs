//! A queue in which parties take turns.

use super::{ROOT, Room};
use std::collections::{BTreeMap, VecDeque};
use vnuma_model::Party;

/// What waits, by party. Each party has one turn after the other parties that wait had one, however much it has put in.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    room: Room,
    waiting: BTreeMap<Party, VecDeque<T>>,
    /// Those with something that waits, in the order of their turns.
    turns: VecDeque<Party>,
    length: usize,
}

impl<T> FairQueue<T> {
    pub(crate) const fn new(room: Room) -> Self {
        Self { room, waiting: BTreeMap::new(), turns: VecDeque::new(), length: 0 }
    }

    /// Adds one behind the others of its party. `Err`: that party has so many, and there is no room for another one of it.
    pub(crate) fn push(&mut self, of: Party, item: T) -> Result<(), usize> {
        let own = self.waiting.get(&of).map_or(0, VecDeque::len);
        let of_root = self.waiting.get(&ROOT).map_or(0, VecDeque::len);
        if !self.room.has_one_more(of, own, self.length - of_root) {
            return Err(own);
        }
        if own == 0 {
            self.turns.push_back(of);
        }
        self.waiting.entry(of).or_default().push_back(item);
        self.length += 1;
        Ok(())
    }

    /// The first of the party whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let of = self.turns.pop_front()?;
        let queue = self.waiting.get_mut(&of)?;
        let item = queue.pop_front()?;
        self.length -= 1;
        if queue.is_empty() {
            self.waiting.remove(&of);
        } else {
            self.turns.push_back(of);
        }
        Some(item)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.room);
    }

    /// All that waits.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOM: Room = Room { of_one: 20, of_all: 200 };

    #[test]
    fn one_that_has_put_in_much_waits_for_all_others() {
        let mut queue = FairQueue::new(ROOM);
        let all = [(1, "a"), (1, "b"), (1, "c"), (0, "root"), (2, "x"), (2, "y")];
        all.iter().for_each(|(user, item)| assert_eq!(queue.push(Party::User(*user), *item), Ok(())));
        let taken: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(taken, ["a", "root", "x", "b", "y", "c"]);
        assert!(queue.is_empty() && queue.waiting.is_empty(), "parties stay behind");
    }

    #[test]
    fn root_has_room_when_others_have_none_left() {
        let mut queue = FairQueue::new(ROOM);
        for party in (1..100).map(Party::User) {
            while queue.push(party, party).is_ok() {}
        }
        let of_root = (0..).take_while(|_| queue.push(ROOT, ROOT).is_ok()).count();
        assert_eq!(of_root, ROOM.of_one);
        assert_eq!(queue.push(Party::User(1), Party::User(1)), Err(ROOM.of_one));
    }

    proptest! {
        /// Each item is a party and a number; `None` takes one.
        #[test]
        fn none_has_two_turns_while_another_one_waits(
            acts in proptest::collection::vec(proptest::option::weighted(0.6, 0_u32..5), 0..300),
        ) {
            let (mut queue, mut number) = (FairQueue::new(ROOM), 0_u64);
            let mut model = BTreeMap::<u32, VecDeque<u64>>::new();
            // Of each that waits: who had a turn since it waits.
            let mut passed = BTreeMap::<u32, Vec<u32>>::new();
            for act in acts {
                match act {
                    Some(user) => {
                        number += 1;
                        let own = model.entry(user).or_default();
                        match queue.push(Party::User(user), (user, number)) {
                            Ok(()) => own.push_back(number),
                            Err(has) => {
                                prop_assert_eq!(has, own.len());
                                prop_assert!(has > 0, "one that has nothing is refused while there is room");
                            }
                        }
                        passed.entry(user).or_default();
                    }
                    None => {
                        let waiting: Vec<u32> =
                            model.iter().filter(|(_, own)| !own.is_empty()).map(|(user, _)| *user).collect();
                        let Some((user, taken)) = queue.pop() else {
                            prop_assert!(waiting.is_empty());
                            continue;
                        };
                        prop_assert_eq!(model.get_mut(&user).and_then(VecDeque::pop_front), Some(taken), "in order");
                        passed.insert(user, Vec::new());
                        for other in waiting.into_iter().filter(|other| *other != user) {
                            let passed = passed.entry(other).or_default();
                            prop_assert!(!passed.contains(&user), "{} had two turns while {} waited", user, other);
                            passed.push(user);
                        }
                        if model[&user].is_empty() {
                            passed.remove(&user);
                        }
                    }
                }
            }
        }
    }
}
