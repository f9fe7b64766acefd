//! What the threads of a node share: who is suspected, and whether it goes on.

use crate::{NodeError, happening::Happening};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    fmt,
    mem::discriminant,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use vnuma_coherence::NodeSet;

type Tell = Box<dyn Fn(&Happening) + Send + Sync>;

pub(crate) struct Shared {
    /// One bit for each node.
    suspects: AtomicU64,
    /// Accesses fail from now on.
    halted: AtomicBool,
    /// The threads end.
    leaving: AtomicBool,
    /// What was done before is not counted.
    forgotten: AtomicBool,
    /// Wakes each thread.
    wakes: Vec<EventFd>,
    /// Messages and bytes of all shards.
    sent: [AtomicU64; 2],
    /// The membership in force in each shard, and the one that was reported last.
    views: Mutex<(Vec<NodeSet>, NodeSet)>,
    told: Mutex<Vec<Happening>>,
    tell: Tell,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("suspects", &self.suspects).field("halted", &self.halted).finish()
    }
}

/// What is reported, and remembered, of each kind: a peer can cause any number of lost pages, and must not hide by them that this node
/// has stopped.
const TOLD: usize = 1024;

impl Shared {
    pub fn new(shards: usize, members: NodeSet, tell: Tell) -> Result<Self, NodeError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = || EventFd::from_value_and_flags(0, flags).map_err(NodeError::system("eventfd"));
        Ok(Self {
            suspects: AtomicU64::new(0),
            halted: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            forgotten: AtomicBool::new(false),
            wakes: (0..shards).map(|_| wake()).collect::<Result<_, _>>()?,
            sent: Default::default(),
            views: Mutex::new((vec![members; shards], members)),
            told: Mutex::default(),
            tell,
        })
    }

    pub fn wake_of(&self, shard: usize) -> &EventFd {
        &self.wakes[shard]
    }

    /// Wakes all threads.
    pub fn wake(&self) {
        for wake in &self.wakes {
            // Full means that it wakes already.
            let _ = wake.write(1);
        }
    }

    /// All shards suspect what one does.
    pub fn suspect(&self, node: u8) {
        let bit = 1_u64.checked_shl(node.into()).unwrap_or(0);
        if self.suspects.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.wake();
        }
    }

    pub fn suspects(&self) -> u64 {
        self.suspects.load(Ordering::Relaxed)
    }

    /// A membership is in force in a shard. It is reported once it is in force in all of them: the receiver may end this node, and
    /// the other members would take that for a second loss while one of their shards still agrees on the first.
    pub fn agreed(&self, shard: usize, members: NodeSet) {
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        let (views, told) = &mut *views;
        views[shard] = members;
        if views.iter().any(|view| *view != members) || *told == members {
            return;
        }
        let list = |nodes: NodeSet| nodes.iter().map(|node| node.0).collect();
        let lost = told.minus(members);
        *told = members;
        self.tell(Happening::Members { members: list(members), lost: list(lost) });
    }

    pub fn count(&self, bytes: usize) {
        self.sent[0].fetch_add(1, Ordering::Relaxed);
        self.sent[1].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn sent(&self) -> [u64; 2] {
        [0, 1].map(|which: usize| self.sent[which].load(Ordering::Relaxed))
    }

    pub fn halt(&self) {
        if !self.halted.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    pub fn is_halted(&self) -> bool {
        self.halted.load(Ordering::Relaxed)
    }

    /// The threads forget what they have done, before they do anything else.
    pub fn forget(&self) {
        self.forgotten.store(true, Ordering::Relaxed);
    }

    pub fn is_forgotten(&self) -> bool {
        self.forgotten.load(Ordering::Relaxed)
    }

    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        self.wake();
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Reports what no other shard has reported.
    pub fn tell(&self, happening: Happening) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |other: &&Happening| discriminant(*other) == discriminant(&happening);
        if told.iter().filter(same).count() < TOLD && !told.iter().any(|other| happening.repeats(other)) {
            (self.tell)(&happening);
            told.push(happening);
        }
    }

    pub fn told(&self) -> Vec<Happening> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vnuma_coherence::StopReason;

    /// A program that does not learn that its node has stopped goes on.
    #[test]
    fn what_ends_a_node_is_told_after_any_number_of_lost_pages() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&heard);
        let tell = move |happening: &Happening| hears.lock().expect("no panic").push(happening.clone());
        let shared = Shared::new(1, NodeSet::first(3), Box::new(tell)).expect("shared");
        (0..2000).for_each(|page| shared.tell(Happening::PageLost { page }));
        let lost = TOLD;
        assert_eq!(heard.lock().expect("no panic").len(), lost);
        shared.agreed(0, NodeSet::first(2));
        let stopped = Happening::Stopped { reason: StopReason::Minority };
        shared.tell(stopped.clone());
        shared.tell(stopped.clone());
        let members = Happening::Members { members: vec![0, 1], lost: vec![2] };
        assert_eq!(heard.lock().expect("no panic")[lost..], [members, stopped]);
        assert_eq!(shared.told(), *heard.lock().expect("no panic"));
    }
}
