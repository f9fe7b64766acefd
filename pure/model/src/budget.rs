//! Work that one party can cause, and how much of it is done for each.
//!
//! A guest, its QEMU, a user, or a peer on the network causes work by what it does: events, requests, lines of the log. What is done
//! for one is paid from a budget of its own. One that is spent makes that party wait, and no other.

use crate::VmId;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::IpAddr};
use strum::IntoStaticStr;

/// Work that others cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Work {
    /// Events of the kernel about threads of a VM are taken.
    ThreadEvents,
    /// A VM is described by its hypervisor, which may walk all of its page tables: milliseconds of a CPU.
    Descriptions,
    /// What a VM's hypervisor says unasked is taken.
    HypervisorEvents,
    /// A line is logged about what a party did.
    LogLines,
    /// The core's thread is asked for something: once for a request of the API, and once more for each VM of a list.
    Requests,
    /// Files of the host are read for a request of the API.
    HostReadings,
    /// A client connects.
    Connections,
}

impl Work {
    /// How much of it is done for one party.
    pub const fn rate(self) -> Rate {
        match self {
            Self::ThreadEvents => Rate::new(2000, 8000),
            Self::Descriptions => Rate::new(20, 400),
            Self::HypervisorEvents => Rate::new(100, 1000),
            // A line is ten of these.
            Self::LogLines => Rate::new(1, 200),
            Self::Requests => Rate::new(2000, 10_000),
            Self::HostReadings => Rate::new(20, 200),
            Self::Connections => Rate::new(200, 1000),
        }
    }

    /// Its name in the API and in metrics.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Whose work it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Party {
    /// A VM: its guest, and its hypervisor's process.
    Vm(VmId),
    /// A user of the host.
    User(u32),
    /// A host on the network.
    Address(IpAddr),
}

/// How much may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// In the long run, a second.
    pub per_s: u32,
    /// At once, after a rest.
    pub at_once: u32,
}

impl Rate {
    /// So much in the long run, and so much at once.
    pub const fn new(per_s: u32, at_once: u32) -> Self {
        Self { per_s, at_once }
    }

    /// What `amount` takes to be earned.
    const fn earned_in_ns(self, amount: u32) -> u64 {
        amount as u64 * 1_000_000_000 / if self.per_s == 0 { 1 } else { self.per_s as u64 }
    }
}

/// The budget of one party for one kind of work. A new one is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// When it is full again, if nothing else is spent.
    full_ns: u64,
}

impl Budget {
    /// Spends so much, or nothing. `Err`: so many nanoseconds must pass before it can be spent. More than [`Rate::at_once`] is paid
    /// for like that, by a full budget.
    pub fn spend(&mut self, rate: Rate, amount: u32, now_ns: u64) -> Result<(), u64> {
        let full_ns = self.full_ns.max(now_ns) + rate.earned_in_ns(amount.min(rate.at_once));
        let wait_ns = full_ns.saturating_sub(now_ns.saturating_add(rate.earned_in_ns(rate.at_once)));
        if wait_ns > 0 {
            return Err(wait_ns);
        }
        self.full_ns = full_ns;
        Ok(())
    }

    /// Takes so much of it, whether or not it has that: what something costs may be known only when it is done. Nothing can be spent
    /// until what is lacking is earned.
    pub fn charge(&mut self, rate: Rate, amount: u32, now_ns: u64) {
        self.full_ns = self.full_ns.max(now_ns).saturating_add(rate.earned_in_ns(amount));
    }

    /// Is nothing of it spent?
    pub const fn is_full(&self, now_ns: u64) -> bool {
        self.full_ns <= now_ns
    }
}

/// A party that had to wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Limited {
    /// What it wanted done.
    pub work: String,
    /// Who: `vm web`, `user 1000`, `192.0.2.1`.
    pub party: String,
    /// How often it had to wait, or was refused.
    pub times: u64,
    /// When it had to the last time: `CLOCK_MONOTONIC` of the host, nanoseconds.
    pub last_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    budget: Budget,
    times: u64,
    last_ns: u64,
}

/// Budgets by kind of work and party. At most [`Self::MOST`] are kept. Of more, the one that has gone longest without a wait is
/// forgotten, full ones first.
#[derive(Clone, Debug)]
pub struct Budgets<K> {
    accounts: BTreeMap<K, Account>,
}

impl<K> Default for Budgets<K> {
    fn default() -> Self {
        Self { accounts: BTreeMap::new() }
    }
}

impl<K: Ord + Clone> Budgets<K> {
    /// Budgets that are kept.
    pub const MOST: usize = 4096;

    /// Spends so much of this budget, or nothing, as [`Budget::spend`] does.
    pub fn spend(&mut self, of: K, rate: Rate, amount: u32, now_ns: u64) -> Result<(), u64> {
        let account = self.account(of, now_ns);
        let spent = account.budget.spend(rate, amount, now_ns);
        if spent.is_err() {
            (account.times, account.last_ns) = (account.times.saturating_add(1), now_ns);
        }
        spent
    }

    /// Takes so much of this budget, whether or not it has that, as [`Budget::charge`] does.
    pub fn charge(&mut self, of: K, rate: Rate, amount: u32, now_ns: u64) {
        self.account(of, now_ns).budget.charge(rate, amount, now_ns);
    }

    /// Those that had to wait: whose budget, how often, and when the last time.
    pub fn limited(&self) -> impl Iterator<Item = (&K, u64, u64)> {
        let limited = self.accounts.iter().filter(|(_, account)| account.times > 0);
        limited.map(|(of, account)| (of, account.times, account.last_ns))
    }

    /// Forgets budgets of those that are gone.
    pub fn retain(&mut self, mut stays: impl FnMut(&K) -> bool) {
        self.accounts.retain(|of, _| stays(of));
    }

    fn account(&mut self, of: K, now_ns: u64) -> &mut Account {
        if self.accounts.len() >= Self::MOST && !self.accounts.contains_key(&of) {
            self.make_room(now_ns);
        }
        self.accounts.entry(of).or_default()
    }

    fn make_room(&mut self, now_ns: u64) {
        let forgotten = |account: &Account| (!account.budget.is_full(now_ns), account.last_ns);
        let first = self.accounts.iter().min_by_key(|(_, account)| forgotten(account));
        if let Some(of) = first.map(|(of, _)| of.clone()) {
            self.accounts.remove(&of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn a_budget_that_is_spent_is_earned_again() {
        let (rate, mut budget) = (Rate::new(10, 3), Budget::default());
        let spent: Vec<_> = (0..4).map(|_| budget.spend(rate, 1, SECOND_NS)).collect();
        assert_eq!(spent, [Ok(()), Ok(()), Ok(()), Err(SECOND_NS / 10)]);
        assert_eq!(budget.spend(rate, 2, SECOND_NS), Err(SECOND_NS / 5), "all of it or nothing");
        assert_eq!(budget.spend(rate, 1, SECOND_NS + SECOND_NS / 10), Ok(()));
        assert!(!budget.is_full(SECOND_NS + SECOND_NS / 5) && budget.is_full(2 * SECOND_NS));
        assert_eq!(budget.spend(rate, 100, 2 * SECOND_NS), Ok(()), "what is more than all is paid by all");
    }

    #[test]
    fn what_was_taken_beyond_a_budget_is_earned_before_anything_is_spent() {
        let (rate, mut budgets) = (Rate::new(10, 3), Budgets::default());
        budgets.charge("a", rate, 13, SECOND_NS);
        assert_eq!(budgets.spend("a", rate, 1, SECOND_NS), Err(SECOND_NS + SECOND_NS / 10));
        assert_eq!(budgets.spend("a", rate, 1, 2 * SECOND_NS + SECOND_NS / 10), Ok(()));
        assert_eq!(budgets.limited().collect::<Vec<_>>(), [(&"a", 1, SECOND_NS)]);
    }

    #[test]
    fn one_that_spends_all_does_not_keep_others_waiting() {
        let (rate, mut budgets) = (Rate::new(1, 1), Budgets::default());
        assert_eq!(budgets.spend("a", rate, 1, 5), Ok(()));
        assert!(budgets.spend("a", rate, 1, 6).is_err() && budgets.spend("a", rate, 1, 7).is_err());
        assert_eq!(budgets.spend("b", rate, 1, 7), Ok(()));
        assert_eq!(budgets.limited().collect::<Vec<_>>(), [(&"a", 2, 7)]);
        budgets.retain(|of| *of != "a");
        assert_eq!((budgets.limited().count(), budgets.spend("a", rate, 1, 8)), (0, Ok(())));
    }

    #[test]
    fn parties_without_end_take_no_memory_without_end() {
        let (rate, mut budgets) = (Rate::new(1, 1), Budgets::default());
        let _ = (budgets.spend(0, rate, 1, 0), budgets.spend(0, rate, 1, 1));
        for party in 1..2 * Budgets::<u32>::MOST as u32 {
            assert_eq!(budgets.spend(party, rate, 1, 2 * SECOND_NS * u64::from(party)), Ok(()));
        }
        assert_eq!(budgets.accounts.len(), Budgets::<u32>::MOST);
        assert_eq!(budgets.limited().map(|(of, ..)| *of).collect::<Vec<_>>(), [0], "who was limited stays");
    }

    proptest! {
        #[test]
        fn no_more_is_spent_than_the_rate_and_what_was_saved(
            (per_s, at_once) in (1_u32..1000, 1_u32..100),
            asked in proptest::collection::vec((0_u64..SECOND_NS, 1_u32..20), 0..200),
        ) {
            let (rate, mut budget, mut now_ns, mut spent) = (Rate::new(per_s, at_once), Budget::default(), 0, 0_u64);
            for (pause_ns, amount) in asked {
                now_ns += pause_ns;
                let before = budget;
                match budget.spend(rate, amount, now_ns) {
                    Ok(()) => spent += u64::from(amount.min(at_once)),
                    Err(wait_ns) => {
                        prop_assert_eq!(budget, before);
                        prop_assert!(budget.clone().spend(rate, amount, now_ns + wait_ns).is_ok(), "a wait is long enough");
                    }
                }
                // Each spending may be rounded by a nanosecond.
                let earned = now_ns as u128 * u128::from(per_s) / u128::from(SECOND_NS);
                prop_assert!(u128::from(spent) <= earned + u128::from(at_once) + 1);
            }
        }
    }
}
