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
use vnuma_model::{CpuSet, VcpuLocation};
use vnuma_policy::world::{Mechanism, TaskId};
use vnuma_process::ActError;

/// Why an order fails without a connection.
pub(super) const NOT_CONNECTED: &str = "not connected to what manages the VM, which keeps its pins";

/// The answer to an order. It is given once: if the order is dropped, as its worker has ended, that the connection is closed.
struct Answer<T>(Option<Told<T>>);

type Told<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

impl<T> Answer<T> {
    fn new(told: impl FnOnce(Result<T, String>) + Send + 'static) -> Self {
        Self(Some(Box::new(told)))
    }

    fn give(&mut self, outcome: Result<T, String>) {
        if let Some(told) = self.0.take() {
            told(outcome);
        }
    }

    /// No answer is sent.
    fn forget(mut self) {
        self.0 = None;
    }
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Answer").finish_non_exhaustive()
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        self.give(Err("the connection is closed".to_owned()));
    }
}

fn error((pid, tid): (i32, i32), why: &dyn Display) -> ActError {
    ActError::System { pid, tid, act: "pinning it", source: io::Error::other(why.to_string()) }
}

/// A move on its way to a VM's worker.
#[derive(Debug)]
pub(crate) struct PinnedMove {
    task: TaskId,
    pid: i32,
    pub(crate) tid: i32,
    pub(crate) cpus: CpuSet,
    answer: Answer<Option<VcpuLocation>>,
}

impl PinnedMove {
    pub(crate) fn new(task: TaskId, (pid, tid): (i32, i32), cpus: CpuSet, inbox: Arc<Inbox>) -> Self {
        let answer = Answer::new(move |outcome: Result<_, String>| {
            // Its mask is the operator's from now on.
            let made = outcome.is_ok().then_some(tid);
            let event = Event::Moved(task, outcome.map_err(|why| error((pid, tid), &why)));
            // Fails only while vnumad stops.
            let _ = inbox.send(Message::Pinned(pid, made.into_iter().collect(), event));
        });
        Self { task, pid, tid, cpus, answer }
    }

    /// Answers that the vCPU was moved.
    pub(crate) fn done(mut self, location: Option<VcpuLocation>) {
        self.answer.give(Ok(location));
    }

    /// Answers that the vCPU was not moved.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer.give(Err(why.to_string()));
    }

    /// The event that the vCPU was not moved, for the core's thread, which must not send to its own inbox.
    pub(crate) fn give_up(self, why: &dyn Display) -> Event {
        self.answer.forget();
        Event::Moved(self.task, Err(error((self.pid, self.tid), why)))
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

/// Of each pin: where the thread is, or why it was not pinned.
type Outcomes = Vec<Result<Option<VcpuLocation>, ActError>>;

/// Pins on their way to a VM's worker.
#[derive(Debug)]
pub(crate) struct PolicyPins {
    pid: i32,
    /// The pins, in the form that the VM's manager takes.
    pub(crate) wanted: Vec<PolicyPin>,
    answer: Answer<Outcomes>,
}

impl PolicyPins {
    pub(crate) fn new((task, pid): (TaskId, i32), orders: Vec<PinOrder>, inbox: Arc<Inbox>) -> Self {
        let wanted = orders.iter().map(PinOrder::pin).collect();
        let answer = Answer::new(move |outcomes: Result<Outcomes, String>| {
            let failed = |why: &str, pin: &PinOrder| Err(error((pid, pin.order.tid), &why));
            let outcomes =
                outcomes.unwrap_or_else(|why| orders.iter().map(|pin| failed(&why, pin)).collect());
            let (mut lost, mut made) = (Vec::new(), Vec::new());
            for (PinOrder { order, by }, outcome) in orders.iter().zip(outcomes) {
                if *by == Mechanism::Scheduler && outcome.is_err() {
                    // It stays pinned, so that scx_vnuma is not to have it.
                    lost.push(order.tid);
                }
                made.push((order.vcpu, outcome.map(|location| Made { location, by: *by })));
            }
            // Fails only while vnumad stops.
            let _ = inbox.send(Message::Pinned(pid, lost, Event::Confined(task, made)));
        });
        Self { pid, wanted, answer }
    }

    /// Answers with the outcome of each pin. `read` says where a thread is.
    pub(crate) fn done(
        mut self,
        outcomes: Vec<Result<(), PinError>>,
        read: impl Fn(i32) -> Option<VcpuLocation>,
    ) {
        let outcome = |(&PolicyPin { tid, .. }, outcome): (&PolicyPin, _)| match outcome {
            Ok(()) => Ok(read(tid)),
            Err(PinError::Changed(found)) => Err(ActError::MaskChanged { tid, found }),
            Err(PinError::Vm(why)) => Err(error((self.pid, tid), &why)),
        };
        let outcomes = self.wanted.iter().zip(outcomes).map(outcome).collect();
        self.answer.give(Ok(outcomes));
    }

    /// Answers that no pin was made.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer.give(Err(why.to_string()));
    }
}

/// Pins of policies that are to be given back.
#[derive(Debug)]
pub(crate) struct Unpin {
    /// Pins that stay, by thread.
    pub(crate) keep: BTreeMap<i32, Vec<CpuSet>>,
    answer: Answer<usize>,
}

impl Unpin {
    /// `told` is called with the number of pins that were given back, or with why they were not.
    pub(crate) fn new(
        keep: BTreeMap<i32, Vec<CpuSet>>,
        told: impl FnOnce(Result<usize, String>) + Send + 'static,
    ) -> Self {
        Self { keep, answer: Answer::new(told) }
    }

    pub(crate) fn answer(mut self, outcome: Result<usize, String>) {
        self.answer.give(outcome);
    }

    /// It is answered by who asks.
    pub(crate) fn forget(self) {
        self.answer.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use vnuma_hypervisor::VmError;
    use vnuma_model::ApicId;

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
        let wanted: Vec<_> = pins(&inbox).wanted.into_iter().map(|pin| (pin.tid, pin.cpus)).collect();
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
