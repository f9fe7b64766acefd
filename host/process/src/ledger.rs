//! Budgets that several threads spend from.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use vnuma_model::{Budgets, Party, Work};

/// What is done for each party, of each kind of work.
#[derive(Clone, Debug)]
pub struct Ledger {
    began: Instant,
    budgets: Arc<Mutex<Budgets<(Work, Party)>>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { began: Instant::now(), budgets: Arc::default() }
    }
}

impl Ledger {
    /// Pays for work from the budget of a party, all of it or nothing. `Err`: it can be paid for after so long.
    pub fn spend(&self, work: Work, party: Party, amount: u32) -> Result<(), Duration> {
        let now_ns = self.now_ns();
        let spent = self.act(|budgets| budgets.spend((work, party), work.rate(), amount, now_ns));
        spent.map_err(Duration::from_nanos)
    }

    /// Who had to wait, for what, how often, and how long ago the last time.
    pub fn limited(&self) -> Vec<((Work, Party), u64, Duration)> {
        let now_ns = self.now_ns();
        let ago = |last_ns| Duration::from_nanos(now_ns.saturating_sub(last_ns));
        self.act(|budgets| budgets.limited().map(|(of, times, last_ns)| (*of, times, ago(last_ns))).collect())
    }

    /// Forgets parties that are gone.
    pub fn retain(&self, stays: impl Fn(Party) -> bool) {
        self.act(|budgets| budgets.retain(|(_, party)| stays(*party)));
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn act<T>(&self, act: impl FnOnce(&mut Budgets<(Work, Party)>) -> T) -> T {
        // Nothing that is done under the lock panics half-way.
        act(&mut self.budgets.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_party_pays_for_its_own() {
        let (ledger, [busy, other]) = (Ledger::default(), [Party::Vm(1), Party::User(1)]);
        let all = Work::Descriptions.rate().at_once;
        assert_eq!(ledger.spend(Work::Descriptions, busy, all), Ok(()));
        let wait = ledger.clone().spend(Work::Descriptions, busy, all).expect_err("all is spent");
        assert!(wait > Duration::ZERO && ledger.spend(Work::LogLines, busy, 1).is_ok());
        assert_eq!(ledger.spend(Work::Descriptions, other, all), Ok(()));
        let limited: Vec<_> = ledger.limited().into_iter().map(|(of, times, _)| (of, times)).collect();
        assert_eq!(limited, [((Work::Descriptions, busy), 1)]);
        ledger.retain(|party| party != busy);
        assert_eq!(ledger.limited(), []);
    }
}
