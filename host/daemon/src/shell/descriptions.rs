//! When a VM is described again, and from whose budget that is paid.
//!
//! A description asks the hypervisor for much, and walks all page tables of its process, which takes a second of a CPU for a large VM.
//! Guests, hypervisors and users who may only look can each cause as many as they like. What one costs is known when it is made:
//! a little is paid before, and the rest is taken afterwards.

use super::observer::cpu_time_ns;
use std::time::{Duration, Instant};
use vnuma_model::{Party, Work};
use vnuma_process::Ledger;

/// Least time between two descriptions of a VM. Requests in between share the next.
const PAUSE: Duration = Duration::from_millis(200);

/// What is paid for each description, milliseconds of a CPU: what small VMs cost, with the part of their hypervisor.
pub(super) const LEAST: u32 = 20;

const MS_NS: u64 = 1_000_000;

/// Descriptions of one VM.
#[derive(Debug)]
pub(super) struct Descriptions {
    ledger: Ledger,
    vm: Party,
    wanted: Option<Wanted>,
    /// The next one is made then or later,
    from: Instant,
    /// and then or later if the VM pays for it.
    earned: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The VM has to pay for it.
    Unpaid,
    /// Who has paid for it. `None`: it is free.
    Paid(Option<Party>),
}

impl Descriptions {
    pub(super) fn new(ledger: Ledger, vm: Party) -> Self {
        let now = Instant::now();
        Self { ledger, vm, wanted: None, from: now, earned: now }
    }

    /// One is wanted, and this party pays. Others than the VM have paid [`LEAST`] already.
    pub(super) fn want(&mut self, payer: Option<Party>) {
        if payer != Some(self.vm) {
            self.wanted = Some(Wanted::Paid(payer));
        } else if self.wanted.is_none() {
            self.wanted = Some(Wanted::Unpaid);
        }
    }

    /// The VM causes it itself.
    pub(super) fn want_by_vm(&mut self) {
        self.want(Some(self.vm));
    }

    /// When to ask again whether one is due. `None`: none is wanted.
    pub(super) fn next(&self) -> Option<Instant> {
        self.wanted.map(|wanted| match wanted {
            Wanted::Unpaid => self.from.max(self.earned),
            Wanted::Paid(_) => self.from,
        })
    }

    /// Is one due that is paid for?
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        if self.next().is_none_or(|next| now < next) {
            return false;
        }
        if self.wanted == Some(Wanted::Unpaid) {
            match self.pay() {
                Ok(()) => self.wanted = Some(Wanted::Paid(Some(self.vm))),
                Err(wait) => self.earned = now + wait,
            }
        }
        self.wanted != Some(Wanted::Unpaid)
    }

    /// Has the VM pay for one. `Err`: it can do so after this time.
    pub(super) fn pay(&self) -> Result<(), Duration> {
        self.ledger.spend(Work::Descriptions, self.vm, LEAST)
    }

    /// Makes one. None is wanted any more if it can be had.
    pub(super) fn make<T, E>(&mut self, describe: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let payer = match self.wanted {
            Some(Wanted::Paid(payer)) => payer,
            // The first one of a connection.
            Some(Wanted::Unpaid) | None => Some(self.vm),
        };
        let began_ns = cpu_time_ns();
        let described = describe();
        let cost = u32::try_from(cpu_time_ns().saturating_sub(began_ns) / MS_NS).unwrap_or(u32::MAX);
        if let (Some(payer), more @ 1..) = (payer, cost.saturating_sub(LEAST)) {
            // A dear one keeps the next waiting for some time, and not for minutes.
            self.ledger.charge(Work::Descriptions, payer, more.min(Work::Descriptions.rate().at_once));
        }
        self.from = Instant::now() + PAUSE;
        if described.is_ok() {
            self.wanted = None;
        }
        described
    }
}

/// What a hypervisor says without being asked: events, and answers to nothing. One that says too much is not listened to for a while,
/// and waits itself once its socket is full.
#[derive(Debug)]
pub(super) struct Listening {
    ledger: Ledger,
    vm: Party,
    from: Instant,
}

impl Listening {
    pub(super) fn new(ledger: Ledger, vm: Party) -> Self {
        Self { ledger, vm, from: Instant::now() }
    }

    /// It is not listened to until then.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        Some(self.from).filter(|from| Instant::now() < *from)
    }

    /// It has said so much.
    pub(super) fn heard(&mut self, count: u32) {
        if count == 0 {
            return;
        }
        if let Err(wait) = self.ledger.spend(Work::HypervisorEvents, self.vm, count) {
            self.ledger.charge(Work::HypervisorEvents, self.vm, count);
            self.from = Instant::now() + wait;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: Party = Party::Vm(1);
    const USER: Party = Party::User(7);

    fn made(descriptions: &mut Descriptions) -> bool {
        descriptions.from = Instant::now();
        let due = descriptions.is_due();
        if due {
            assert_eq!(descriptions.make(|| Ok::<_, ()>(())), Ok(()));
        }
        due
    }

    #[test]
    fn a_vm_that_wants_descriptions_without_end_waits_and_nobody_else_does() {
        let mut descriptions = Descriptions::new(Ledger::default(), VM);
        assert!(!descriptions.is_due() && descriptions.next().is_none(), "none is wanted");
        let most = (Work::Descriptions.rate().at_once / LEAST) as usize;
        let count = (0..1000)
            .filter(|_| {
                descriptions.want_by_vm();
                made(&mut descriptions)
            })
            .count();
        assert!((most..=most + 1).contains(&count), "{count}");
        let until = descriptions.next().expect("one is wanted");
        assert!(until > Instant::now() && !descriptions.is_due());
        for payer in [None, Some(USER)] {
            descriptions.want(payer);
            // What the VM wants as well is the same one.
            descriptions.want_by_vm();
            assert!(made(&mut descriptions), "{payer:?}");
            assert!(descriptions.next().is_none());
        }
    }

    #[test]
    fn what_a_description_has_cost_is_taken_from_who_wanted_it() {
        let ledger = Ledger::default();
        let mut descriptions = Descriptions::new(ledger.clone(), VM);
        descriptions.want(Some(USER));
        assert!(descriptions.is_due());
        let all_ns = u64::from(Work::Descriptions.rate().at_once + LEAST) * MS_NS;
        let described = descriptions.make(|| {
            let began_ns = cpu_time_ns();
            while cpu_time_ns() - began_ns < all_ns {}
            Ok::<_, ()>(())
        });
        assert_eq!(described, Ok(()));
        assert!(ledger.spend(Work::Descriptions, USER, 1).is_err());
        assert_eq!(ledger.spend(Work::Descriptions, VM, 1), Ok(()));
        assert!(descriptions.make(|| Err::<(), _>(())).is_err());
        descriptions.want(None);
        assert!(!descriptions.is_due(), "a pause is made, whoever wants the next one");
    }

    #[test]
    fn who_says_too_much_is_not_listened_to_for_as_long_as_that_takes_to_be_earned() {
        let (ledger, rate) = (Ledger::default(), Work::HypervisorEvents.rate());
        let mut listening = Listening::new(ledger.clone(), VM);
        listening.heard(0);
        listening.heard(rate.at_once);
        assert_eq!(listening.rests_until(), None);
        listening.heard(10 * rate.per_s);
        let until = listening.rests_until().expect("it rests");
        assert!(until > Instant::now() + Duration::from_secs(8), "all of it was charged");
        assert_eq!(Listening::new(ledger, Party::Vm(2)).rests_until(), None);
    }
}
