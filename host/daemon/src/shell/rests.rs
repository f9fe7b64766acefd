//! When the core's thread looks for what the kernel and guests have to say.
//!
//! An event that comes alone is taken at once. Then there is a pause, and all events that come in the pause are taken together.
//! In a busy time both are looked for at the same moments: what guests answer to a publication is taken with the next events of the
//! kernel. So a thousand moves a second cause a wake-up in [`REST`], and not one for each move and one for each answer.

use std::time::{Duration, Instant};
use vnuma_observe::location::REST;

/// Until when nothing is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rests {
    kernel: Instant,
    doorbells: Instant,
}

impl Rests {
    /// Without a pause.
    pub(super) fn new(now: Instant) -> Self {
        Self { kernel: now, doorbells: now }
    }

    /// Until then events of the kernel are not looked for.
    pub(super) fn kernel(&self) -> Instant {
        self.kernel
    }

    /// Until then doorbells are not looked for.
    pub(super) fn doorbells(&self) -> Instant {
        self.doorbells
    }

    /// Events of the kernel were taken, after which that source wants to rest so long; zero, if there were none.
    pub(super) fn took_events(&mut self, now: Instant, rest: Duration) {
        if rest.is_zero() {
            return;
        }
        self.kernel = now + rest;
        // What guests answer from now on can wait for the next events. What may be taken already is not put off, or it would be
        // put off again and again.
        if self.doorbells > now {
            self.doorbells = self.doorbells.max(self.kernel);
        }
    }

    /// Doorbells were taken. The pause, as long as that of the kernel's events, delays acknowledgements, and no publication.
    pub(super) fn took_doorbells(&mut self, now: Instant) {
        self.doorbells = self.doorbells.max(now + REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// From a publication until the guest rings.
    const ANSWER: Duration = Duration::from_micros(300);

    /// What a thread does that sleeps until one of both may be looked for and has something.
    #[derive(Default)]
    struct Seen {
        wakeups: usize,
        /// The longest that an event, or a ring, waited.
        longest: [Duration; 2],
    }

    /// For a second, with a move in each `interval`.
    fn run(interval: Duration) -> Seen {
        let begin = Instant::now();
        let (mut rests, mut seen) = (Rests::new(begin), Seen::default());
        let mut moves: Vec<Instant> =
            (1..).map(|number| begin + interval * number).take_while(|at| *at < begin + SECOND).collect();
        let mut rings: Vec<Instant> = Vec::new();
        moves.reverse();
        loop {
            let event = moves.last().map(|at| rests.kernel().max(*at));
            let ring = rings.iter().min().map(|at| rests.doorbells().max(*at));
            let Some(now) = event.into_iter().chain(ring).min() else { return seen };
            seen.wakeups += 1;
            if rests.kernel() <= now {
                let mut taken = 0;
                while let Some(at) = moves.pop_if(|at| *at <= now) {
                    seen.longest[0] = seen.longest[0].max(now - at);
                    rings.push(now + ANSWER);
                    taken += 1;
                }
                let rest = if taken > 0 { REST } else { Duration::ZERO };
                rests.took_events(now, rest);
            }
            if rests.doorbells() <= now && rings.iter().any(|at| *at <= now) {
                let waited = rings.iter().filter(|at| **at <= now).map(|at| now - *at).max();
                seen.longest[1] = seen.longest[1].max(waited.unwrap_or_default());
                rings.retain(|at| *at > now);
                rests.took_doorbells(now);
            }
        }
    }

    #[test]
    fn a_move_now_and_then_and_its_answer_are_taken_at_once() {
        let seen = run(Duration::from_millis(20));
        assert_eq!(seen.longest, [Duration::ZERO; 2]);
        assert_eq!(seen.wakeups, 2 * 49);
    }

    #[test]
    fn a_thousand_moves_a_second_and_their_answers_wake_up_once_in_a_rest() {
        let seen = run(Duration::from_millis(1));
        assert!((240..=260).contains(&seen.wakeups), "{}", seen.wakeups);
        assert!(seen.longest[0] <= REST && seen.longest[1] <= 2 * REST, "{:?}", seen.longest);
    }

    #[test]
    fn a_look_that_finds_nothing_changes_nothing() {
        let now = Instant::now();
        let mut rests = Rests::new(now);
        rests.took_doorbells(now);
        rests.took_events(now, Duration::ZERO);
        assert_eq!((rests.kernel(), rests.doorbells()), (now, now + REST));
    }

    /// Events are looked for by themselves, too, before a request is answered.
    #[test]
    fn doorbells_that_may_be_taken_are_never_put_off() {
        let begin = Instant::now();
        let mut rests = Rests::new(begin);
        rests.took_doorbells(begin);
        for turn in 1..10 {
            rests.took_events(begin + REST * turn, REST);
        }
        assert_eq!(rests.doorbells(), begin + REST);
    }
}
