//! Threads that are to be looked at, a few at a time: a VM of thousands of vCPUs delays no other.

use std::collections::{HashSet, VecDeque};

/// Looked at in one go: three small files each, a millisecond or two altogether.
const AT_ONCE: usize = 64;

/// Threads in the order in which they were named, each once.
#[derive(Debug, Default)]
pub(super) struct Looks {
    waiting: VecDeque<i32>,
    known: HashSet<i32>,
}

impl Looks {
    /// One more thread, unless it waits already.
    pub(super) fn add(&mut self, tid: i32) {
        if self.known.insert(tid) {
            self.waiting.push_back(tid);
        }
    }

    /// The next ones.
    pub(super) fn take(&mut self) -> Vec<i32> {
        let next: Vec<i32> = self.waiting.drain(..AT_ONCE.min(self.waiting.len())).collect();
        self.known.retain(|tid| !next.contains(tid));
        next
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_turn_once() {
        let mut looks = Looks::default();
        let many = AT_ONCE as i32 + 2;
        (0..many).chain(0..many).for_each(|tid| looks.add(tid));
        let first = looks.take();
        assert_eq!(first, (0..AT_ONCE as i32).collect::<Vec<_>>());
        // One that comes again waits behind the others.
        looks.add(0);
        assert_eq!(looks.take(), [many - 2, many - 1, 0]);
        assert!(looks.is_empty() && looks.take().is_empty());
    }
}
