//! From every state all threads can finish.
//!
//! A state in which nothing can happen is found by stateright. A request that goes round in a circle, or a page that is taken away
//! again and again, is none: something always happens. So the whole graph is kept here, and searched backwards from its ends.

use crate::system::{Action, System, World};
use std::collections::{HashMap, VecDeque, hash_map::DefaultHasher};
use std::hash::{Hash, Hasher};

/// So often more than [`System::losses`] a thread may lose its page on the way to the end.
const MORE_LOSSES: u8 = 3;

/// What was found.
#[derive(Debug)]
pub struct Ends {
    pub states: usize,
    /// States within the bound of losses.
    pub inside: usize,
    pub ends: usize,
    /// States behind the bound of losses, which were not looked at.
    pub cut_off: usize,
    /// What leads to a state from which there is no way to an end.
    pub lost: Option<Vec<Action>>,
}

struct Search<'a> {
    system: &'a System,
    seen: HashMap<u64, u32>,
    /// Where each state came from first, and the ends among them.
    from: Vec<Option<(u32, Action)>>,
    /// Whether the bound of losses holds there: from such a state there must be a way.
    inside: Vec<bool>,
    ends: Vec<u32>,
    /// What a state was reached from, by what happens by itself: nobody may count on a node that fails.
    before: Vec<Vec<u32>>,
    queue: VecDeque<(u32, World)>,
    cut_off: usize,
}

impl Search<'_> {
    fn reach(&mut self, world: World, from: Option<(u32, Action)>) {
        let most = world.threads.iter().map(|thread| thread.losses).max().unwrap_or(0);
        if most > self.system.losses + MORE_LOSSES {
            self.cut_off += 1;
            return;
        }
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        let next = self.from.len() as u32;
        let state = *self.seen.entry(hasher.finish()).or_insert(next);
        if let Some((before, action)) = from
            && !self.system.is_failure(&world, action)
        {
            if state == next {
                self.before.push(Vec::new());
            }
            self.before[state as usize].push(before);
        } else if state == next {
            self.before.push(Vec::new());
        }
        if state == next {
            self.from.push(from);
            self.inside.push(most <= self.system.losses);
            if System::done(&world) {
                self.ends.push(state);
            }
            self.queue.push_back((state, world));
        }
    }

    /// States from which an end can be reached.
    fn backwards(&self) -> Vec<bool> {
        let mut good = vec![false; self.from.len()];
        let mut left = self.ends.clone();
        while let Some(state) = left.pop() {
            if !std::mem::replace(&mut good[state as usize], true) {
                left.extend(&self.before[state as usize]);
            }
        }
        good
    }

    fn way_to(&self, state: usize) -> Vec<Action> {
        let mut way: Vec<_> =
            std::iter::successors(self.from[state], |(before, _)| self.from[*before as usize])
                .map(|(_, action)| action)
                .collect();
        way.reverse();
        way
    }
}

/// Looks at all states.
pub fn ends(system: &System) -> Ends {
    let mut search = Search {
        system,
        seen: HashMap::new(),
        from: Vec::new(),
        inside: Vec::new(),
        ends: Vec::new(),
        before: Vec::new(),
        queue: VecDeque::new(),
        cut_off: 0,
    };
    search.reach(system.start(), None);
    let mut actions = Vec::new();
    while let Some((state, world)) = search.queue.pop_front() {
        system.steps(&world, &mut actions);
        for action in actions.drain(..) {
            let mut next = world.clone();
            system.apply(&mut next, action);
            search.reach(next, Some((state, action)));
        }
    }
    let good = search.backwards();
    let lost = (0..good.len()).find(|state| search.inside[*state] && !good[*state]);
    Ends {
        states: search.from.len(),
        inside: search.inside.iter().filter(|inside| **inside).count(),
        ends: search.ends.len(),
        cut_off: search.cut_off,
        lost: lost.map(|state| search.way_to(state)),
    }
}
