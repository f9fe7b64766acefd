//! How long a look may take, and who of those that are looked at takes how much of it.
//!
//! A program decides how many threads, mappings and open files there are to read, and a user how many processes. So a process has a
//! slice, a user a budget, and a look a limit. Whoever is not looked at is taken to be as at the last look that it had, and those that
//! were looked at longest ago come first at the next.

use crate::core::Process;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};
use vnuma_model::{Budgets, Rate};
use vnuma_process::procfs::CpuTimes;

/// The time of one look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time {
    /// For all processes.
    pub(super) look: Duration,
    /// For one of them.
    pub(super) process: Duration,
}

impl Default for Time {
    /// A signal to end waits for the look, and a second is not noticed.
    fn default() -> Self {
        Self { look: Duration::from_millis(400), process: Duration::from_millis(200) }
    }
}

/// For all processes of a user that is not root, microseconds.
const USER: Rate = Rate::new(50_000, 250_000);

/// The time that a process has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    begin: Instant,
    end: Instant,
}

impl Turn {
    /// At a look that ends then.
    pub(super) fn new(end: Instant, time: Time) -> Self {
        let begin = Instant::now();
        Self { begin, end: end.min(begin + time.process) }
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    /// Half of what is left of it.
    pub(super) fn half(self) -> Self {
        let now = Instant::now();
        Self { end: now + self.end.saturating_duration_since(now) / 2, ..self }
    }
}

/// What is known of a process since it was looked at last.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The look.
    pub(super) look: u64,
    /// When that was.
    pub(super) at: Duration,
    /// Times of its threads then.
    pub(super) threads: BTreeMap<i32, CpuTimes>,
    /// If it is of interest.
    pub(super) process: Option<Process>,
}

impl Known {
    /// There was no time for all of it at this look. What was read counts, and what was not is as before.
    pub(super) fn take_part(
        &mut self,
        look: u64,
        at: Duration,
        threads: BTreeMap<i32, CpuTimes>,
        read: Option<Process>,
    ) {
        self.look = look;
        if let (Some(process), Some(read)) = (&mut self.process, read)
            && !threads.is_empty()
        {
            process.allowed = read.allowed;
            (process.ran_permille, process.waited_permille) = (read.ran_permille, read.waited_permille);
            process.memory_kib = read.memory_kib.or(process.memory_kib.take());
            process.evidence.extend(read.evidence);
            (self.at, self.threads) = (at, threads);
        }
    }
}

/// Users, and the time that they have.
#[derive(Debug, Default)]
pub(super) struct Users {
    budgets: Budgets<u32>,
    /// Who has had all of it at this look.
    spent: BTreeSet<u32>,
}

impl Users {
    /// A look begins.
    pub(super) fn begin(&mut self) {
        self.spent.clear();
    }

    /// May another process of this user be looked at?
    pub(super) fn may(&self, user: u32) -> bool {
        !self.spent.contains(&user)
    }

    /// A process of this user was looked at.
    pub(super) fn took(&mut self, user: u32, turn: Turn, now: Duration) {
        self.spend(user, turn.begin.elapsed(), now);
    }

    fn spend(&mut self, user: u32, time: Duration, now: Duration) {
        let amount = u32::try_from(time.as_micros()).unwrap_or(u32::MAX).max(1);
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        if user != 0 && self.budgets.spend(user, USER, amount, now_ns).is_err() {
            self.spent.insert(user);
        }
    }

    /// Users whose processes were not all looked at, for the time that they take.
    pub(super) fn spent(&self) -> &BTreeSet<u32> {
        &self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_many_processes_has_a_twentieth_of_a_cpu_and_others_have_theirs() {
        let (mut users, slow) = (Users::default(), Duration::from_millis(10));
        let mut taken = 0;
        for look in 0..20 {
            users.begin();
            while users.may(1000) {
                users.spend(1000, slow, Duration::from_secs(5 * look));
                taken += 1;
            }
            assert_eq!((users.may(1001), users.may(0)), (true, true));
            assert_eq!(users.spent(), &BTreeSet::from([1000]));
        }
        assert!((20 * 25..=20 * 26).contains(&taken), "{taken}");
        users.begin();
        for _ in 0..1000 {
            users.spend(0, slow, Duration::from_secs(100));
        }
        assert!(users.may(0), "root has all the time of a look");
    }
}
