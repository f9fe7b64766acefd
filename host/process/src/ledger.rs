//! Budgets that several threads spend from.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use vnuma_model::{Budgets, Party, Work};

/// What a line of the log costs.
const LINE: u32 = 10;

/// What is done for each party, of each kind of work.
#[derive(Clone, Debug)]
pub struct Ledger {
    began: Instant,
    budgets: Arc<Mutex<Budgets<(Work, Party)>>>,
    /// Lines about a party that were not logged since the last one that was.
    withheld: Arc<Mutex<BTreeMap<Party, u64>>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { began: Instant::now(), budgets: Arc::default(), withheld: Arc::default() }
    }
}

/// How many lines about a party were not logged before this one, as the end of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld(u64);

impl fmt::Display for Withheld {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(formatter, " (and {} more lines before)", self.0) }
    }
}

impl Ledger {
    /// Pays for work from the budget of a party, all of it or nothing. `Err`: it can be paid for after so long.
    pub fn spend(&self, work: Work, party: Party, amount: u32) -> Result<(), Duration> {
        let now_ns = self.now_ns();
        let spent = self.act(|budgets| budgets.spend((work, party), work.rate(), amount, now_ns));
        spent.map_err(Duration::from_nanos)
    }

    /// Takes so much from the budget of a party, whether or not it has that: for work that has turned out to cost so much.
    pub fn charge(&self, work: Work, party: Party, amount: u32) {
        let now_ns = self.now_ns();
        self.act(|budgets| budgets.charge((work, party), work.rate(), amount, now_ns));
    }

    /// May a line about what this party did be logged? The line is to end with what is returned. `None`: it is counted instead, as the
    /// party has spent its budget for lines.
    pub fn line(&self, party: Party) -> Option<Withheld> {
        let spent = self.spend(Work::LogLines, party, LINE);
        let mut withheld = self.withheld.lock().unwrap_or_else(PoisonError::into_inner);
        if spent.is_ok() {
            return Some(Withheld(withheld.remove(&party).unwrap_or_default()));
        }
        if withheld.len() >= Budgets::<Party>::MOST && !withheld.contains_key(&party) {
            withheld.pop_first();
        }
        let count = withheld.entry(party).or_default();
        *count = count.saturating_add(1);
        None
    }

    /// Who had to wait, for what, how often, and how long ago the last time.
    pub fn limited(&self) -> Vec<((Work, Party), u64, Duration)> {
        let now_ns = self.now_ns();
        let ago = |last_ns| Duration::from_nanos(now_ns.saturating_sub(last_ns));
        self.act(|budgets| budgets.limited().map(|(of, times, last_ns)| (*of, times, ago(last_ns))).collect())
    }

    /// The same of all of these, together.
    pub fn limited_by(ledgers: &[Self]) -> BTreeMap<(Work, Party), (u64, Duration)> {
        let mut all = BTreeMap::new();
        for (of, times, ago) in ledgers.iter().flat_map(Self::limited) {
            let (sum, last) = all.entry(of).or_insert((0_u64, ago));
            (*sum, *last) = (sum.saturating_add(times), ago.min(*last));
        }
        all
    }

    /// Forgets parties that are gone.
    pub fn retain(&self, stays: impl Fn(Party) -> bool) {
        self.act(|budgets| budgets.retain(|(_, party)| stays(*party)));
        self.withheld.lock().unwrap_or_else(PoisonError::into_inner).retain(|party, _| stays(*party));
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

    #[test]
    fn a_party_that_several_limit_is_told_of_once() {
        let (ledgers, of) = ([Ledger::default(), Ledger::default()], (Work::Descriptions, Party::User(1)));
        for (ledger, times) in ledgers.iter().zip([1, 2]) {
            ledger.charge(of.0, of.1, 2 * of.0.rate().at_once);
            assert!((0..times).all(|_| ledger.spend(of.0, of.1, 1).is_err()), "it is in debt");
        }
        let limited: Vec<_> =
            Ledger::limited_by(&ledgers).into_iter().map(|(of, (times, _))| (of, times)).collect();
        assert_eq!(limited, [(of, 3)]);
    }

    #[test]
    fn lines_that_come_without_end_are_counted() {
        let (ledger, [busy, other]) = (Ledger::default(), [Party::Vm(1), Party::Vm(2)]);
        let logged = (0..10_000).filter_map(|_| ledger.line(busy)).count();
        assert!((20..=21).contains(&logged), "{logged}");
        assert_eq!(ledger.line(other), Some(Withheld(0)), "others are heard");
        // As if it had earned a line again.
        ledger.act(|budgets| budgets.retain(|_| false));
        let next = ledger.line(busy).expect("it has a budget");
        assert_eq!(
            (next.0, next.to_string()),
            (10_000 - logged as u64, format!(" (and {} more lines before)", next.0))
        );
        let next = ledger.line(busy).expect("one more");
        assert_eq!(next.to_string(), "", "they are told of once");
    }
}
