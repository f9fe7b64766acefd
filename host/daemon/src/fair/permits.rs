//! How many of something a party has at a time.

use super::{ROOT, Room};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};
use vnuma_model::Party;

/// What is counted for each party.
#[derive(Clone, Debug)]
pub(crate) struct Permits {
    room: Room,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    by: BTreeMap<Party, usize>,
    /// Of all but root.
    all: usize,
}

/// One of what a party may have; it is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    party: Party,
    taken: Arc<Mutex<Taken>>,
}

impl Permits {
    pub(crate) fn new(room: Room) -> Self {
        Self { room, taken: Arc::default() }
    }

    /// The most that one may have.
    pub(crate) fn most(&self) -> usize {
        self.room.of_one
    }

    /// One more for this party. `Err`: it has so many, and gets no more now.
    pub(crate) fn take(&self, party: Party) -> Result<Permit, usize> {
        // The count is consistent whenever the lock is free, even after a panic.
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.by.get(&party).copied().unwrap_or_default();
        if !self.room.has_one_more(party, own, taken.all) {
            return Err(own);
        }
        taken.by.insert(party, own + 1);
        taken.all += usize::from(party != ROOT);
        Ok(Permit { party, taken: Arc::clone(&self.taken) })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= usize::from(self.party != ROOT);
        if let Some(own) = taken.by.get_mut(&self.party) {
            *own -= 1;
            if *own == 0 {
                taken.by.remove(&self.party);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parties_do_not_take_from_each_other_and_give_back() {
        let (permits, seven) = (Permits::new(Room::for_parties_of(2)), Party::User(7));
        let mut held =
            vec![permits.take(seven).expect("the first"), permits.take(seven).expect("the second")];
        assert_eq!(permits.take(seven).err(), Some(2));
        assert!(permits.take(Party::User(0)).is_ok());
        held.pop();
        held.push(permits.take(seven).expect("one was given back"));
        assert!(permits.take(seven).is_err());
        drop(held);
        let taken = permits.taken.lock().expect("free");
        assert!(taken.by.is_empty() && taken.all == 0, "a party stays behind");
    }
}
