//! Pins of policies, for VMs whose hypervisor's manager keeps pins of its own: that sets the affinities.
//!
//! ```text
//!  core ─Confine─▶ affinities ─────────▶ shell ─PolicyPins─▶ VM worker ─▶ libvirt
//!                  tells scx_vnuma first                        │
//!  core ◀─Confined────────────────────── shell ◀────────────────┘
//!
//!  core ─RestoreMasks─▶ shell ─Unpin─▶ VM worker ─▶ shell ─Restore─▶ affinities ─MasksRestored─▶ core
//! ```
//!
//! Only the VM's worker waits for libvirt. What is asked of it is answered once, however it ends.

use super::{
    Shell,
    affinities::Order,
    inbox::{Inbox, Message, PinOrder},
};
use crate::core::event::{Event, Made, MaskOrder};
use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    io,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_hypervisor::{PinError, PolicyPin};
use vnuma_model::{ApicId, CpuSet, VcpuLocation};
use vnuma_policy::world::{Mechanism, TaskId, Vm, VmId};
use vnuma_process::ActError;

/// How long pins are given back when vnumad stops: one call to libvirt that is not answered, and those that are.
const STOP_LIMIT: Duration = Duration::from_secs(6);

/// There is no connection.
const NOT_CONNECTED: &str = "not connected to what manages the VM, which keeps its pins";

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

    /// As the hypervisor's manager is asked for them.
    pub(crate) fn wanted(&self) -> Vec<PolicyPin> {
        self.orders.iter().map(PinOrder::pin).collect()
    }

    /// They were made, or not. `read` says where a thread is.
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

    /// None was made.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer(self.all_failed(why));
    }

    /// The event that none was made, for who takes no messages.
    fn give_up(mut self) -> Message {
        self.inbox = None;
        self.message(self.all_failed(&NOT_CONNECTED))
    }

    fn error(&self, order: &PinOrder, why: &dyn Display) -> ActError {
        let source = io::Error::other(why.to_string());
        ActError::System { pid: self.pid, tid: order.order.tid, act: "pinning it", source }
    }

    fn all_failed(&self, why: &dyn Display) -> Vec<Result<Made, ActError>> {
        self.orders.iter().map(|order| Err(self.error(order, why))).collect()
    }

    fn message(&self, outcomes: Vec<Result<Made, ActError>>) -> Message {
        let placed = |(order, outcome): &(&PinOrder, &Result<Made, ActError>)| {
            order.by == Mechanism::Scheduler && outcome.is_err()
        };
        // These stay pinned, so that scx_vnuma is not to have them.
        let lost =
            self.orders.iter().zip(&outcomes).filter(placed).map(|(order, _)| order.order.tid).collect();
        let of = self.orders.iter().map(|order| order.order.vcpu);
        let outcomes: Vec<(ApicId, _)> = of.zip(outcomes).collect();
        Message::Pinned(self.pid, lost, Event::Confined(self.task, outcomes))
    }

    fn answer(&mut self, outcomes: Vec<Result<Made, ActError>>) {
        let Some(inbox) = self.inbox.take() else { return };
        // Fails only while vnumad stops.
        let _ = inbox.send(self.message(outcomes));
    }
}

impl Drop for PolicyPins {
    /// Its worker has ended without having looked at it.
    fn drop(&mut self) {
        self.answer(self.all_failed(&"the connection is closed"));
    }
}

/// Learns how many pins were given back.
type Told = Box<dyn FnOnce(Result<usize, String>) + Send>;

/// Pins of policies that are to be given back.
pub(crate) struct Unpin {
    /// Those that stay, by thread.
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

/// The pins that policies want of a VM, by thread.
fn wanted_pins(vm: &Vm) -> BTreeMap<i32, Vec<CpuSet>> {
    let of = |vcpu: &vnuma_model::Vcpu| {
        let mask = vm.scheduling.masks.get(&vcpu.apic_id)?;
        let begun = mask.step.begun().and_then(|begun| begun.mask.as_ref());
        let set = mask.policy.as_ref().filter(|mask| mask.by == Mechanism::Affinity);
        let sets: Vec<CpuSet> = begun.into_iter().chain(set).map(|mask| mask.cpus.clone()).collect();
        (!sets.is_empty()).then_some((vcpu.tid, sets))
    };
    vm.description.vcpus.iter().filter_map(of).collect()
}

impl Shell {
    /// Has pins of policies made by the VM's manager.
    pub(super) fn confine_by_pins(&mut self, task: TaskId, pid: i32, orders: Vec<PinOrder>) {
        let pins = PolicyPins::new((task, pid), orders, Arc::clone(&self.inbox));
        let refused = match self.pinner(task.vm) {
            Some(worker) => worker.pin_all(pins).err(),
            None => Some(pins),
        };
        if let Some(pins) = refused {
            self.take_in(pins.give_up());
        }
    }

    /// One that cannot be queued is given back. It must not send to the inbox from this thread, as that may be full.
    fn unpin(&self, vm: VmId, unpin: Unpin) -> Result<(), Unpin> {
        match self.pinner(vm) {
            Some(worker) => worker.unpin(unpin),
            None => Err(unpin),
        }
    }

    /// Gives back what policies have set in a VM: first pins, as affinities follow them.
    pub(super) fn restore(&self, task: TaskId, pid: i32) {
        let vm = task.vm;
        let pidfd = self.pidfd(vm, pid);
        let (mut vcpus, mut pins) = (Vec::new(), Ok(0));
        if self.keeps_pins(vm) {
            let (inbox, pidfd) = (Arc::clone(&self.inbox), pidfd.clone());
            // Fails only while vnumad stops.
            let told = move |outcome| _ = inbox.send(Message::Unpinned(task, pid, pidfd, outcome));
            match self.unpin(vm, Unpin::new(BTreeMap::new(), told)) {
                Ok(()) => return,
                Err(unpin) => unpin.forget(),
            }
            (vcpus, pins) = (self.threads_of_vcpus(vm), Err(NOT_CONNECTED.to_owned()));
        }
        self.affinities.order(Order::Restore { task, pid, pidfd, vcpus, pins });
    }

    pub(super) fn threads_of_vcpus(&self, vm: VmId) -> Vec<i32> {
        let known = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref());
        known.into_iter().flat_map(|vm| &vm.description.vcpus).map(|vcpu| vcpu.tid).collect()
    }

    /// A connection is up: pins that no policy wants are of an earlier vnumad, or were made after nobody waited for them any more.
    pub(super) fn settle_pins(&self, vm: VmId) {
        let Some(known) = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref()) else { return };
        let name = known.name().to_owned();
        let told = move |outcome| match outcome {
            Ok(0) => {}
            Ok(count) => info!("{name}: {count} vCPUs are pinned as before their policy"),
            Err(error) => warn!("{name}: pins that no policy wants stay until the next connection: {error}"),
        };
        // If it cannot be queued, the connection is gone, and another one follows.
        drop(self.unpin(vm, Unpin::new(wanted_pins(known), told)));
    }

    /// vnumad stops: gives back all pins of policies. What cannot be given back now is by the next vnumad.
    pub(super) fn give_pins_back(&self) {
        let (tell, told) = mpsc::channel();
        let mut left = BTreeMap::new();
        for (vm, managed) in self.core.world().iter().filter(|(_, managed)| managed.abilities.pins) {
            let Some(known) = managed.vm.as_ref().filter(|vm| !wanted_pins(vm).is_empty()) else { continue };
            left.insert(vm, known.name().to_owned());
            let tell = tell.clone();
            // Nobody listens once the time is up.
            drop(self.unpin(vm, Unpin::new(BTreeMap::new(), move |outcome| drop(tell.send((vm, outcome))))));
        }
        let until = Instant::now() + STOP_LIMIT;
        let stays = |name: &str, why: &str| {
            warn!(
                "{name}: its vCPUs stay pinned as its policy had them: {why}; the next vnumad takes that back"
            );
        };
        while !left.is_empty() {
            let Ok((vm, outcome)) = told.recv_timeout(until.saturating_duration_since(Instant::now())) else {
                break;
            };
            if let (Some(name), Err(error)) = (left.remove(&vm), outcome) {
                stays(&name, &error);
            }
        }
        left.values().for_each(|name| stays(name, "what manages it has not answered in time"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_hypervisor::VmError;

    const TASK: TaskId = TaskId { vm: 1, number: 3 };

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

    /// The outcomes of a message, and threads that scx_vnuma is not to have.
    fn read(message: Message) -> (Vec<i32>, Vec<String>) {
        let Message::Pinned(2, lost, Event::Confined(TASK, outcomes)) = message else {
            panic!("{message:?}")
        };
        let shown = |(vcpu, outcome): (ApicId, Result<Made, ActError>)| match outcome {
            Ok(made) => format!("{vcpu}: {:?}", made.by),
            Err(error) => format!("{vcpu}: {error}"),
        };
        (lost, outcomes.into_iter().map(shown).collect())
    }

    /// The one message.
    fn message(inbox: &Inbox) -> (Vec<i32>, Vec<String>) {
        let mut messages = inbox.take_messages();
        assert_eq!(messages.len(), 1);
        read(messages.remove(0))
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
        assert_eq!(read(pins(&inbox).give_up()).1.len(), 2);
        assert!(inbox.take_messages().is_empty(), "who gives them up has the message");
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
