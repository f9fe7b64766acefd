//! Orders for a VM's manager that keeps pins of its own: moves, pins of policies, and to give these back. Each order is answered once,
//! however it ends.

use super::inbox::{Inbox, Message};
use crate::core::event::{Event, Made, MaskOrder};
use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    io,
    sync::Arc,
};
use vnuma_hypervisor::{PinError, PolicyPin};
use vnuma_model::{ApicId, CpuSet, VcpuLocation};
use vnuma_policy::world::{Mechanism, TaskId};
use vnuma_process::ActError;

/// Why an order fails without a connection.
pub(super) const NOT_CONNECTED: &str = "not connected to what manages the VM, which keeps its pins";

/// A move on its way to a VM's worker.
#[derive(Debug)]
pub(crate) struct PinnedMove {
    pub(crate) task: TaskId,
    pub(crate) pid: i32,
    pub(crate) tid: i32,
    pub(crate) cpus: CpuSet,
    /// `None` once it is answered.
    inbox: Option<Arc<Inbox>>,
}

impl PinnedMove {
    pub(crate) fn new(task: TaskId, (pid, tid): (i32, i32), cpus: CpuSet, inbox: Arc<Inbox>) -> Self {
        Self { task, pid, tid, cpus, inbox: Some(inbox) }
    }

    /// Answers that the vCPU was moved.
    pub(crate) fn done(mut self, location: Option<VcpuLocation>) {
        self.answer(Ok(location));
    }

    /// Answers that the vCPU was not moved.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer(Err(self.error(why)));
    }

    /// The event that the vCPU was not moved, for the core's thread, which must not send to its own inbox.
    pub(crate) fn give_up(mut self, why: &dyn Display) -> Event {
        self.inbox = None;
        Event::Moved(self.task, Err(self.error(why)))
    }

    fn error(&self, why: &dyn Display) -> ActError {
        let source = io::Error::other(why.to_string());
        ActError::System { pid: self.pid, tid: self.tid, act: "pinning it", source }
    }

    fn answer(&mut self, outcome: Result<Option<VcpuLocation>, ActError>) {
        let Some(inbox) = self.inbox.take() else { return };
        // Its mask is the operator's from now on.
        let made = outcome.is_ok().then_some(self.tid);
        let event = Event::Moved(self.task, outcome);
        // Fails only while vnumad stops.
        let _ = inbox.send(Message::Pinned(self.pid, made.into_iter().collect(), event));
    }
}

impl Drop for PinnedMove {
    /// Its worker has ended without having looked at it.
    fn drop(&mut self) {
        self.answer(Err(self.error(&"the connection is closed")));
    }
}

/// A vCPU to pin, or one that scx_vnuma has from now on, whose pin is taken back.
#[derive(Debug)]
pub(crate) struct PinOrder {
    pub(crate) order: MaskOrder,
    pub(crate) by: Mechanism,
}

impl PinOrder {
    fn pin(&self) -> PolicyPin {
        let MaskOrder { tid, expected, operator, cpus, .. } = self.order.clone();
        PolicyPin { tid, expected, operator, cpus: cpus.filter(|_| self.by == Mechanism::Affinity) }
    }
}

/// Pins on their way to a VM's worker.
#[derive(Debug)]
pub(crate) struct PolicyPins {
    pub(crate) task: TaskId,
    pid: i32,
    orders: Vec<PinOrder>,
    /// `None` once it is answered.
    inbox: Option<Arc<Inbox>>,
}

impl PolicyPins {
    pub(crate) fn new((task, pid): (TaskId, i32), orders: Vec<PinOrder>, inbox: Arc<Inbox>) -> Self {
        Self { task, pid, orders, inbox: Some(inbox) }
    }

    /// The pins, in the form that the VM's manager takes.
    pub(crate) fn wanted(&self) -> Vec<PolicyPin> {
        self.orders.iter().map(PinOrder::pin).collect()
    }

    /// Answers with the outcome of each pin. `read` says where a thread is.
    pub(crate) fn done(
        mut self,
        outcomes: Vec<Result<(), PinError>>,
        read: impl Fn(i32) -> Option<VcpuLocation>,
    ) {
        let outcome = |(order, outcome): (&PinOrder, Result<(), PinError>)| match outcome {
            Ok(()) => Ok(Made { location: read(order.order.tid), by: order.by }),
            Err(PinError::Changed(found)) => Err(ActError::MaskChanged { tid: order.order.tid, found }),
            Err(PinError::Vm(error)) => Err(self.error(order, &error)),
        };
        let outcomes = self.orders.iter().zip(outcomes).map(outcome).collect();
        self.answer(outcomes);
    }

    /// Answers that no pin was made.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer(self.all_failed(why));
    }

    fn error(&self, order: &PinOrder, why: &dyn Display) -> ActError {
        let source = io::Error::other(why.to_string());
        ActError::System { pid: self.pid, tid: order.order.tid, act: "pinning it", source }
    }

    fn all_failed(&self, why: &dyn Display) -> Vec<Result<Made, ActError>> {
        self.orders.iter().map(|order| Err(self.error(order, why))).collect()
    }

    fn answer(&mut self, outcomes: Vec<Result<Made, ActError>>) {
        let Some(inbox) = self.inbox.take() else { return };
        let placed = |(order, outcome): &(&PinOrder, &Result<Made, ActError>)| {
            order.by == Mechanism::Scheduler && outcome.is_err()
        };
        // These stay pinned, so that scx_vnuma is not to have them.
        let lost =
            self.orders.iter().zip(&outcomes).filter(placed).map(|(order, _)| order.order.tid).collect();
        let of = self.orders.iter().map(|order| order.order.vcpu);
        let outcomes: Vec<(ApicId, _)> = of.zip(outcomes).collect();
        // Fails only while vnumad stops.
        let _ = inbox.send(Message::Pinned(self.pid, lost, Event::Confined(self.task, outcomes)));
    }
}

impl Drop for PolicyPins {
    /// Its worker has ended without having looked at it.
    fn drop(&mut self) {
        self.answer(self.all_failed(&"the connection is closed"));
    }
}

/// Called with the number of pins that were given back, or with why they were not.
type Told = Box<dyn FnOnce(Result<usize, String>) + Send>;

/// Pins of policies that are to be given back.
pub(crate) struct Unpin {
    /// Pins that stay, by thread.
    pub(crate) keep: BTreeMap<i32, Vec<CpuSet>>,
    told: Option<Told>,
}

impl fmt::Debug for Unpin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Unpin").field("keep", &self.keep).finish_non_exhaustive()
    }
}

impl Unpin {
    pub(crate) fn new(
        keep: BTreeMap<i32, Vec<CpuSet>>,
        told: impl FnOnce(Result<usize, String>) + Send + 'static,
    ) -> Self {
        Self { keep, told: Some(Box::new(told)) }
    }

    pub(crate) fn answer(mut self, outcome: Result<usize, String>) {
        self.tell(outcome);
    }

    /// It is answered by who asks.
    pub(crate) fn forget(mut self) {
        self.told = None;
    }

    fn tell(&mut self, outcome: Result<usize, String>) {
        if let Some(told) = self.told.take() {
            told(outcome);
        }
    }
}

impl Drop for Unpin {
    fn drop(&mut self) {
        self.tell(Err("the connection is closed".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use vnuma_hypervisor::VmError;

    const TASK: TaskId = TaskId { vm: 1, number: 3 };

    fn pin(inbox: &Arc<Inbox>) -> PinnedMove {
        PinnedMove::new(TASK, (2, 4), CpuSet::new(), Arc::clone(inbox))
    }

    /// The outcome of the one message; `None` if there is none.
    fn outcome(inbox: &Inbox) -> Option<String> {
        let mut messages = inbox.take_messages();
        assert!(messages.len() <= 1);
        match messages.pop()? {
            Message::Pinned(2, tids, Event::Moved(TASK, outcome)) => {
                assert_eq!(tids, if outcome.is_ok() { vec![4] } else { Vec::new() });
                Some(outcome.map_or_else(|error| error.to_string(), |_| "made".to_owned()))
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_move_is_answered_once_however_it_ends() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        pin(&inbox).done(None);
        assert_eq!(outcome(&inbox).as_deref(), Some("made"));
        pin(&inbox).failed(&"no");
        assert_eq!(outcome(&inbox).as_deref(), Some("thread 4 of process 2: pinning it: no"));
        drop(pin(&inbox));
        assert_eq!(
            outcome(&inbox).as_deref(),
            Some("thread 4 of process 2: pinning it: the connection is closed")
        );
        assert!(matches!(pin(&inbox).give_up(&"no"), Event::Moved(TASK, Err(_))));
        assert_eq!(outcome(&inbox), None, "who gives it up has the event");
    }

    fn set(list: &str) -> CpuSet {
        list.parse().expect("a list")
    }

    /// Of two vCPUs, of which scx_vnuma is to have the second.
    fn pins(inbox: &Arc<Inbox>) -> PolicyPins {
        let order = |vcpu: u32, by| {
            let (expected, operator, cpus) = (set("4"), set("0-7"), Some(set("5")));
            PinOrder { order: MaskOrder { vcpu, tid: 10 + vcpu as i32, expected, operator, cpus }, by }
        };
        let orders = vec![order(0, Mechanism::Affinity), order(1, Mechanism::Scheduler)];
        PolicyPins::new((TASK, 2), orders, Arc::clone(inbox))
    }

    /// The outcomes of the one message, and threads that scx_vnuma is not to have.
    fn message(inbox: &Inbox) -> (Vec<i32>, Vec<String>) {
        let mut messages = inbox.take_messages();
        assert_eq!(messages.len(), 1);
        let Message::Pinned(2, lost, Event::Confined(TASK, outcomes)) = messages.remove(0) else {
            panic!("another message")
        };
        let shown = |(vcpu, outcome): (ApicId, Result<Made, ActError>)| match outcome {
            Ok(made) => format!("{vcpu}: {:?}", made.by),
            Err(error) => format!("{vcpu}: {error}"),
        };
        (lost, outcomes.into_iter().map(shown).collect())
    }

    #[test]
    fn pins_are_answered_once_however_they_end() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let wanted: Vec<_> = pins(&inbox).wanted().into_iter().map(|pin| (pin.tid, pin.cpus)).collect();
        assert_eq!(wanted, [(10, Some(set("5"))), (11, None)], "what scx_vnuma has is not pinned");
        let closed =
            |vcpu| format!("{vcpu}: thread 1{vcpu} of process 2: pinning it: the connection is closed");
        assert_eq!(message(&inbox), (vec![11], vec![closed(0), closed(1)]), "it was dropped");
        pins(&inbox).done(vec![Ok(()), Ok(())], |_| None);
        assert_eq!(message(&inbox), (vec![], vec!["0: Affinity".to_owned(), "1: Scheduler".to_owned()]));
        let silent = VmError::NoAnswer { vm: "web".to_owned(), reason: "no answer".to_owned() };
        pins(&inbox).done(vec![Err(silent.into()), Err(PinError::Changed(set("6")))], |_| None);
        let (lost, outcomes) = message(&inbox);
        assert_eq!(
            (lost, outcomes[0].as_str()),
            (vec![11], "0: thread 10 of process 2: pinning it: web: no answer")
        );
        assert!(outcomes[1].contains("its affinity is 6 now: somebody else"), "{outcomes:?}");
        pins(&inbox).failed(&"no");
        assert_eq!(message(&inbox).1[0], "0: thread 10 of process 2: pinning it: no");
    }

    #[test]
    fn who_waits_for_pins_to_be_given_back_is_told_once() {
        let (tell, told) = mpsc::channel();
        let unpin = || {
            let tell = tell.clone();
            Unpin::new(BTreeMap::new(), move |outcome| drop(tell.send(outcome)))
        };
        unpin().answer(Ok(3));
        drop(unpin());
        unpin().forget();
        drop(tell);
        let told: Vec<_> = told.iter().collect();
        assert_eq!(told, [Ok(3), Err("the connection is closed".to_owned())]);
    }
}
