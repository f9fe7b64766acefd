//! Pauses between attempts.

use std::time::Duration;

/// Pauses that double, from the first to the longest. Their unit is the caller's; [`Self::duration`] is for nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    next: u64,
    longest: u64,
}

impl Backoff {
    /// Nothing has failed yet.
    pub const fn new(first: u64, longest: u64) -> Self {
        Self { next: first, longest }
    }

    /// Pauses between these times, in nanoseconds.
    pub const fn of(first: Duration, longest: Duration) -> Self {
        // A u64 holds five centuries of them.
        Self::new(first.as_nanos() as u64, longest.as_nanos() as u64)
    }

    /// An attempt has failed: the pause before the next one.
    pub fn pause(&mut self) -> u64 {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }

    /// The pause after so many failures, at least 1.
    pub fn pause_after(self, failures: u32) -> u64 {
        self.next.saturating_mul(1 << failures.saturating_sub(1).min(63)).min(self.longest)
    }

    /// The same as [`Self::pause`], of pauses in nanoseconds.
    pub fn duration(&mut self) -> Duration {
        Duration::from_nanos(self.pause())
    }

    /// Sets another longest pause. The next pause stays as it is.
    pub const fn up_to(self, longest: u64) -> Self {
        Self { longest, ..self }
    }
}

/// A rest after a failure, and a longer one after the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    backoff: Backoff,
    for_ns: u64,
    until_ns: u64,
}

impl Rest {
    /// Before the first failure.
    pub const fn new(first_ns: u64, longest_ns: u64) -> Self {
        Self { backoff: Backoff::new(first_ns, longest_ns), for_ns: 0, until_ns: 0 }
    }

    /// Begins the rest after a failure.
    pub fn begin(&mut self, now_ns: u64) {
        self.for_ns = self.backoff.pause();
        self.until_ns = now_ns.saturating_add(self.for_ns);
    }

    /// When the last rest ends.
    pub const fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// How much of the rest is left. `None`: it is over.
    pub fn left_ns(&self, now_ns: u64) -> Option<u64> {
        self.until_ns.checked_sub(now_ns).filter(|left_ns| *left_ns > 0)
    }

    /// True during the rest, and afterwards for as long as it took.
    pub const fn is_recent(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns.saturating_add(self.for_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(1, 10);
        let pauses: Vec<u64> = (0..6).map(|_| backoff.pause()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
        assert_eq!([1, 2, 3, 4, 5, 6].map(|failures| Backoff::new(1, 10).pause_after(failures)), *pauses);
        assert_eq!(Backoff::new(3, u64::MAX).pause_after(u32::MAX), u64::MAX);
        let mut known = backoff.up_to(3);
        assert_eq!([known.pause(), known.pause()], [10, 3], "the next one was promised");
        let mut never = Backoff::new(u64::MAX - 1, u64::MAX);
        assert_eq!([never.pause(), never.pause(), never.pause()], [u64::MAX - 1, u64::MAX, u64::MAX]);
    }

    #[test]
    fn a_rest_is_twice_as_long_after_the_next_failure() {
        let mut rest = Rest::new(10, 20);
        rest.begin(100);
        assert_eq!((rest.until_ns(), rest.left_ns(109), rest.left_ns(110)), (110, Some(1), None));
        assert_eq!([109, 119, 120].map(|now_ns| rest.is_recent(now_ns)), [true, true, false]);
        rest.begin(200);
        assert_eq!([rest.left_ns(200), rest.left_ns(220)], [Some(20), None]);
        rest.begin(300);
        assert_eq!(rest.until_ns(), 320, "the longest");
    }

    #[test]
    fn times_are_nanoseconds() {
        let mut backoff = Backoff::of(Duration::from_millis(2), Duration::from_millis(3));
        assert_eq!([backoff.duration(), backoff.duration()], [2, 3].map(Duration::from_millis));
    }
}
