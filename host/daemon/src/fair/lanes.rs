//! So many at a time for each party; others of that party wait.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vnuma_model::Party;

/// A number of lanes for each party. Further ones of that party wait, in the order in which they came.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    most: usize,
    of: Arc<Mutex<BTreeMap<Party, Weak<Semaphore>>>>,
}

/// A lane, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lane {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Lanes {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, of: Arc::default() }
    }

    /// Waits for a lane.
    pub(crate) async fn enter(&self, party: Party) -> Lane {
        // It fails only if the semaphore is closed, which never happens.
        Lane { _permit: self.of(party).acquire_owned().await.ok() }
    }

    fn of(&self, party: Party) -> Arc<Semaphore> {
        let mut lanes = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lanes.get(&party).and_then(Weak::upgrade) {
            return known;
        }
        lanes.retain(|_, lanes| lanes.strong_count() > 0);
        let new = Arc::new(Semaphore::new(self.most));
        lanes.insert(party, Arc::downgrade(&new));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    #[test]
    fn a_party_waits_for_its_own_only() {
        let lanes = Lanes::new(1);
        let mut context = Context::from_waker(Waker::noop());
        let mut enter = |party| pin!(lanes.enter(party)).poll(&mut context);
        let Poll::Ready(held) = enter(Party::User(1)) else { panic!("it is free") };
        assert!(enter(Party::User(1)).is_pending());
        assert!(enter(Party::User(2)).is_ready());
        drop(held);
        assert!(enter(Party::User(1)).is_ready());
        assert!(enter(Party::User(3)).is_ready());
        assert_eq!(lanes.of.lock().expect("free").len(), 1, "parties that are gone stay behind");
    }
}
