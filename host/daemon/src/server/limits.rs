//! Limits for each user. Users do not share a limit, so a user who may read cannot lock root out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// A limit for each user.
#[derive(Clone, Debug)]
pub(crate) struct PerUser {
    most: usize,
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One of what a user may have; it is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    uid: u32,
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

impl PerUser {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// One more for this user. `None` if it has all that it may have.
    pub(crate) fn take(&self, uid: u32) -> Option<Permit> {
        // The count is consistent whenever the lock is free, even after a panic.
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(uid).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Permit { uid, taken: Arc::clone(&self.taken) })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_do_not_take_from_each_other_and_give_back() {
        let limit = PerUser::new(2);
        let mut held = vec![limit.take(7).expect("the first"), limit.take(7).expect("the second")];
        assert!(limit.take(7).is_none());
        assert!(limit.take(0).is_some());
        held.pop();
        held.push(limit.take(7).expect("one was given back"));
        assert!(limit.take(7).is_none());
        drop(held);
        assert!(limit.taken.lock().expect("free").is_empty(), "a user stays behind");
    }
}
