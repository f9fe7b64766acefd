//! Which sources are given up because they can be opened and count nothing. Pure.
//!
//! ```text
//!              PATIENCE periods in a row in which threads ran and nothing was counted
//!   in use ─────────────────────────────────────────────────────────────────────────▶ given up
//!     ▲  ▲                                                                              │  ▲
//!     │  └───────────── something was counted ────────── tried again ◀── a while later ─┘  │
//!     │                                                       └────── PATIENCE periods ────┘ and twice as long a while
//!   the next best one is in use meanwhile
//! ```
//!
//! Others can hold all counters for good, a group can be larger than what is left of a PMU beside the kernel's own watchdog, and the
//! PMU of a VM can be one that counts nothing.

use crate::events::Source;
use vnuma_model::{Backoff, PassedOver};

/// Periods in a row after which a source is given up.
pub const PATIENCE: u32 = 5;
/// Periods until one that was given up is tried again: at first, and at most.
const WAITS: Backoff = Backoff::new(60, 960);
/// Threads that miss the last-level cache so often in a period access memory.
const MANY_MISSES: u64 = 10_000;

fn first_wait() -> (u64, Backoff) {
    let mut waits = WAITS;
    (waits.pause(), waits)
}

/// What a period showed of all threads that have counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Some thread ran.
    pub ran: bool,
    /// Instructions of all.
    pub instructions: u64,
    /// Their misses of the last-level cache.
    pub llc_misses: u64,
    /// Their accesses to memory. `None`: the source does not count these.
    pub accesses: Option<u64>,
}

impl Heard {
    /// Something was counted. A source of accesses that counts none of many is none.
    fn is_something(&self) -> bool {
        self.instructions > 0 && !(self.llc_misses >= MANY_MISSES && self.accesses == Some(0))
    }
}

/// What follows from a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// This source is given up: the next best one is to be found.
    GivenUp(Source),
    /// This source is to be tried again.
    TriedAgain(Source),
    /// This source was tried again, and counts.
    Counts(Source),
}

/// Watches whether the source in use counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Periods in a row in which nothing was counted.
    periods: u32,
    /// Best first.
    given_up: Vec<Source>,
    /// Of these, the one that is tried again.
    trial: Option<Source>,
    /// Periods until the next trial.
    wait: u64,
    waits: Backoff,
    /// Trials that have begun.
    trials: usize,
}

impl Default for Silence {
    fn default() -> Self {
        let (wait, waits) = first_wait();
        Self { periods: 0, given_up: Vec::new(), trial: None, wait, waits, trials: 0 }
    }
}

impl Silence {
    /// Sources that are not to be used now, with the reason.
    pub fn given_up(&self) -> Vec<PassedOver> {
        let not_tried = self.given_up.iter().filter(|&&source| self.trial != Some(source));
        let why = || format!("it counted nothing in {PATIENCE} periods; it is tried again from time to time");
        not_tried.map(|source| PassedOver::new(source.name(), why())).collect()
    }

    /// A period has ended, with this source in use.
    pub fn period(&mut self, in_use: Source, heard: &Heard) -> Option<Change> {
        if self.trial.is_some_and(|trial| trial != in_use) {
            // It cannot be opened any more.
            self.end_trial();
        }
        match (in_use, heard.ran, heard.is_something()) {
            (Source::None, _, _) | (_, false, _) => {}
            (_, true, true) => {
                self.periods = 0;
                // What is worse than one that counts is not needed.
                self.given_up.retain(|&source| source < in_use);
                if self.trial.take().is_some() {
                    (self.wait, self.waits) = first_wait();
                    return Some(Change::Counts(in_use));
                }
            }
            (_, true, false) => {
                self.periods += 1;
                if self.periods >= PATIENCE {
                    self.give_up(in_use);
                    return Some(Change::GivenUp(in_use));
                }
            }
        }
        self.begin_trial().map(Change::TriedAgain)
    }

    fn give_up(&mut self, source: Source) {
        self.periods = 0;
        if self.trial.is_some() {
            self.end_trial();
        } else {
            (self.wait, self.waits) = first_wait();
        }
        if let Err(at) = self.given_up.binary_search(&source) {
            self.given_up.insert(at, source);
        }
    }

    fn end_trial(&mut self) {
        self.trial = None;
        (self.wait, self.periods) = (self.waits.pause(), 0);
    }

    /// One after the other has its turn, the best first.
    fn begin_trial(&mut self) -> Option<Source> {
        if self.given_up.is_empty() || self.trial.is_some() {
            return None;
        }
        self.wait = self.wait.saturating_sub(1);
        if self.wait > 0 {
            return None;
        }
        self.trial = Some(self.given_up[self.trials % self.given_up.len()]);
        self.trials += 1;
        self.periods = 0;
        self.trial
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Source::{Generic, LocalRemote, None as Nothing, PageLocation, PerNode};
    use proptest::prelude::*;

    const IDLE: Heard = Heard { ran: false, instructions: 0, llc_misses: 0, accesses: None };
    const SILENT: Heard = Heard { ran: true, ..IDLE };
    const COUNTED: Heard = Heard { ran: true, instructions: 1, llc_misses: 0, accesses: None };

    /// Periods until something changes, and that.
    fn until_change(silence: &mut Silence, in_use: Source, heard: &Heard) -> (u32, Change) {
        for periods in 1..=2 * 960 {
            if let Some(change) = silence.period(in_use, heard) {
                return (periods, change);
            }
        }
        panic!("nothing changes: {silence:?}");
    }

    fn given_up(silence: &Silence) -> Vec<Source> {
        let all = [PerNode, LocalRemote, Generic, PageLocation, Nothing];
        let source = |passed: &PassedOver| all.into_iter().find(|source| source.name() == passed.way);
        silence.given_up().iter().filter_map(source).collect()
    }

    #[test]
    fn a_source_that_counts_nothing_is_given_up_after_some_periods() {
        let mut silence = Silence::default();
        assert_eq!(until_change(&mut silence, PerNode, &SILENT), (PATIENCE, Change::GivenUp(PerNode)));
        assert_eq!(given_up(&silence), [PerNode]);
        assert!(silence.given_up()[0].why.contains("counted nothing in 5 periods"));
        assert_eq!(until_change(&mut silence, Generic, &SILENT), (PATIENCE, Change::GivenUp(Generic)));
        assert_eq!(given_up(&silence), [PerNode, Generic], "the best first");
    }

    #[test]
    fn periods_without_a_thread_that_runs_say_nothing() {
        let mut silence = Silence::default();
        for _ in 0..3 * PATIENCE {
            assert_eq!(silence.period(PerNode, &IDLE), None);
        }
        for _ in 1..PATIENCE {
            assert_eq!(silence.period(PerNode, &SILENT), None);
            assert_eq!(silence.period(PerNode, &IDLE), None);
        }
        assert_eq!(silence.period(PerNode, &SILENT), Some(Change::GivenUp(PerNode)));
    }

    #[test]
    fn one_period_that_counts_is_enough_to_stay() {
        let mut silence = Silence::default();
        for _ in 0..20 {
            for _ in 1..PATIENCE {
                assert_eq!(silence.period(Generic, &SILENT), None);
            }
            assert_eq!(silence.period(Generic, &COUNTED), None);
        }
    }

    #[test]
    fn a_source_of_accesses_has_to_count_some_of_many() {
        let heard = |llc_misses, accesses| Heard { instructions: 1, llc_misses, accesses, ..SILENT };
        assert!(!heard(MANY_MISSES, Some(0)).is_something());
        assert!(heard(MANY_MISSES, Some(1)).is_something());
        assert!(heard(MANY_MISSES, None).is_something(), "it does not count them");
        assert!(heard(MANY_MISSES - 1, Some(0)).is_something(), "there may have been none");
        assert!(!Heard { llc_misses: 1, ..SILENT }.is_something(), "a thread that runs has instructions");
    }

    #[test]
    fn what_was_given_up_is_tried_again_less_and_less_often() {
        let mut silence = Silence::default();
        until_change(&mut silence, PerNode, &SILENT);
        for wait in [60, 120, 240, 480, 960, 960] {
            let tried = until_change(&mut silence, Generic, &COUNTED);
            assert_eq!(tried, (wait, Change::TriedAgain(PerNode)));
            assert_eq!(given_up(&silence), [], "while it is tried it may be used");
            let failed = until_change(&mut silence, PerNode, &SILENT);
            assert_eq!(failed, (PATIENCE, Change::GivenUp(PerNode)));
            assert_eq!(given_up(&silence), [PerNode]);
        }
    }

    #[test]
    fn what_counts_again_is_in_use_again_and_all_that_is_worse_is_forgotten() {
        let mut silence = Silence::default();
        for source in [PerNode, LocalRemote, Generic, PageLocation] {
            until_change(&mut silence, source, &SILENT);
        }
        // Each has its turn, although none can be tried in the meantime.
        assert_eq!(until_change(&mut silence, Nothing, &IDLE), (60, Change::TriedAgain(PerNode)));
        until_change(&mut silence, PerNode, &SILENT);
        assert_eq!(until_change(&mut silence, Nothing, &IDLE), (120, Change::TriedAgain(LocalRemote)));
        assert_eq!(silence.period(LocalRemote, &IDLE), None, "it is not known yet");
        assert_eq!(silence.period(LocalRemote, &COUNTED), Some(Change::Counts(LocalRemote)));
        assert_eq!(given_up(&silence), [PerNode]);
        assert_eq!(until_change(&mut silence, LocalRemote, &COUNTED).0, 60, "patience begins anew");
    }

    #[test]
    fn one_that_cannot_be_opened_when_it_is_tried_stays_given_up() {
        let mut silence = Silence::default();
        until_change(&mut silence, PerNode, &SILENT);
        until_change(&mut silence, Generic, &COUNTED);
        // The next best one is in use still.
        assert_eq!(silence.period(Generic, &COUNTED), None);
        assert_eq!(given_up(&silence), [PerNode]);
        assert_eq!(until_change(&mut silence, Generic, &COUNTED), (119, Change::TriedAgain(PerNode)));
    }

    proptest! {
        /// Whatever counts: a source that counts is never given up, one that does not is in use for a small part of the time, and
        /// one that begins to count is found.
        #[test]
        fn the_best_source_that_counts_is_in_use_in_the_end(
            counts in proptest::collection::vec(any::<bool>(), 4),
            openable in proptest::collection::vec(any::<bool>(), 4),
            later in proptest::collection::vec(any::<bool>(), 4),
        ) {
            let all = [PerNode, LocalRemote, Generic, PageLocation];
            let mut silence = Silence::default();
            let detect = |silence: &Silence| {
                let not = given_up(silence);
                let found = all.iter().zip(&openable).find(|(source, open)| **open && !not.contains(source));
                found.map_or(Nothing, |(source, _)| *source)
            };
            let mut in_use = detect(&silence);
            for counts in [&counts, &later] {
                let does = |source: Source| all.iter().position(|&one| one == source).is_some_and(|at| counts[at]);
                let mut bad = 0;
                for _ in 0..20_000 {
                    let heard = if does(in_use) { COUNTED } else { SILENT };
                    bad += u32::from(in_use != Nothing && !does(in_use));
                    match silence.period(in_use, &heard) {
                        Some(Change::GivenUp(source)) => {
                            prop_assert!(source == in_use && !does(source));
                            in_use = detect(&silence);
                        }
                        Some(Change::TriedAgain(_)) => in_use = detect(&silence),
                        Some(Change::Counts(source)) => prop_assert_eq!(source, in_use),
                        None => {}
                    }
                }
                prop_assert!(bad < 20_000 / 60, "{} periods without counts", bad);
                let best = all.into_iter().zip(&openable).find(|(source, open)| **open && does(*source));
                let best = best.map_or(Nothing, |(source, _)| source);
                prop_assert!(in_use == best || silence.trial.is_some() && in_use < best, "{:?}: {:?}", in_use, best);
            }
        }
    }
}
