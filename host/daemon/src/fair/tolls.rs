//! What is paid for work before it is done.

use super::Lanes;
use tokio::time::sleep;
use vnuma_model::{Party, Work};
use vnuma_process::Ledger;

/// Work is paid from the budget of its party, which waits until it can.
#[derive(Clone, Debug)]
pub(crate) struct Tolls {
    ledger: Ledger,
    lines: Lanes,
}

impl Tolls {
    pub(crate) fn new(ledger: Ledger) -> Self {
        Self { ledger, lines: Lanes::new(1) }
    }

    /// Waits until it is paid.
    pub(crate) async fn pay(self, work: Work, party: Party, amount: u32) {
        if self.ledger.spend(work, party, amount).is_ok() {
            return;
        }
        // One after the other, as they were waited for together all would take the same that is earned.
        let _first = self.lines.enter(party).await;
        while let Err(wait) = self.ledger.spend(work, party, amount) {
            sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    #[tokio::test]
    async fn a_party_that_has_spent_all_waits_until_it_has_earned_more() {
        let tolls = Tolls::new(Ledger::default());
        let (busy, other) = (Party::User(1), Party::User(2));
        let all = Work::Requests.rate().at_once;
        tolls.clone().pay(Work::Requests, busy, all).await;
        let mut waits = pin!(tolls.clone().pay(Work::Requests, busy, all));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut context).is_pending());
        assert_eq!(pin!(tolls.clone().pay(Work::Requests, other, all)).poll(&mut context), Poll::Ready(()));
        tolls.pay(Work::Connections, busy, 1).await;
    }
}
