//! Sets the CPU affinity of vCPU threads, in a thread of its own because system calls and the record of masks can block.

use super::{
    inbox::{Inbox, Message},
    locator::Reader,
    masks::{Masks, still},
};
use crate::core::event::{Event, MaskOrder};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, mpsc},
    thread::JoinHandle,
};
use vnuma_placement::world::VmId;
use vnuma_process::{ActError, pin_thread, pin_thread_if, spawn_worker};
use vnuma_topology::{ApicId, CpuSet, HostNodeId, VcpuLocation};

/// A move to make.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) vm: VmId,
    pub(super) pid: i32,
    /// The process, as a pidfd, so that a reused PID cannot be meant. `None`: it has ended.
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) vcpu: ApicId,
    pub(super) tid: i32,
    pub(super) node: HostNodeId,
    pub(super) cpus: CpuSet,
}

/// What is to be done, one after the other.
#[derive(Debug)]
pub(super) enum Order {
    /// An operator's move; [`Event::Moved`] follows.
    Move(Move),
    /// Masks of policies; [`Event::Confined`] follows.
    Confine { vm: VmId, pid: i32, pidfd: Option<Arc<OwnedFd>>, masks: Vec<MaskOrder> },
    /// Masks of policies are given back; [`Event::MasksRestored`] follows.
    Restore { vm: VmId, pid: i32, pidfd: Option<Arc<OwnedFd>> },
    /// A thread has its operator's mask.
    Forget { pid: i32, tid: i32 },
    /// A process has ended.
    ForgetProcess(i32),
}

/// A thread that sets masks, one after the other. When it is dropped, and all orders are carried out, it gives back all masks
/// that policies have set.
#[derive(Debug)]
pub(super) struct Mover {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    pub(super) fn start(records: PathBuf, reader: Reader, inbox: Arc<Inbox>) -> io::Result<Self> {
        let (orders, received) = mpsc::channel::<Order>();
        let mut task = Task { masks: Masks::new(records), reader };
        let thread = spawn_worker("mover", move || {
            task.masks.tidy();
            for order in received {
                if let Some(outcome) = task.carry_out(order) {
                    // Fails only while vnumad stops, and orders are carried out until then.
                    let _ = inbox.send(Message::Event(outcome));
                }
            }
            task.masks.restore_all(&task.reader.online());
        })?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    /// Queues something to do.
    pub(super) fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // Fails only while vnumad stops.
            let _ = orders.send(order);
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

struct Task {
    masks: Masks,
    reader: Reader,
}

impl Task {
    fn carry_out(&mut self, order: Order) -> Option<Event> {
        match order {
            Order::Move(order) => {
                let outcome = self.make(&order);
                Some(Event::Moved(order.vm, order.vcpu, order.node, outcome))
            }
            Order::Confine { vm, pid, pidfd, masks } => {
                Some(Event::Confined(vm, pid, self.confine(pid, pidfd, masks)))
            }
            Order::Restore { vm, pid, pidfd } => {
                let outcome = self.masks.restore(pid, pidfd.as_ref(), &self.reader.online());
                Some(Event::MasksRestored(vm, pid, outcome))
            }
            Order::Forget { pid, tid } => {
                self.masks.forget(pid, &[tid]);
                None
            }
            Order::ForgetProcess(pid) => {
                self.masks.forget_process(pid);
                None
            }
        }
    }

    /// The thread's affinity is set in one system call, so the move is made or not made.
    fn make(&mut self, order: &Move) -> Result<Option<VcpuLocation>, ActError> {
        let Some(pidfd) = &order.pidfd else { return Err(ActError::Exited { pid: order.pid }) };
        pin_thread(pidfd.as_fd(), order.pid, order.tid, &order.cpus)?;
        self.masks.forget(order.pid, &[order.tid]);
        Ok(self.reader.read(order.pid, order.tid))
    }

    /// Records the masks, then sets them. Without a record none is set.
    fn confine(
        &mut self,
        pid: i32,
        pidfd: Option<Arc<OwnedFd>>,
        orders: Vec<MaskOrder>,
    ) -> Vec<(ApicId, Result<Option<VcpuLocation>, ActError>)> {
        let Some(pidfd) = pidfd else {
            return orders.iter().map(|order| (order.vcpu, Err(ActError::Exited { pid }))).collect();
        };
        if let Err(problem) = self.masks.note(pid, &pidfd, &orders) {
            let failed = |order: &MaskOrder| {
                let (act, source) = ("recording its operator's mask", io::Error::other(problem.clone()));
                (order.vcpu, Err(ActError::System { pid, tid: order.tid, act, source }))
            };
            return orders.iter().map(failed).collect();
        }
        let online = self.reader.online();
        let (mut outcomes, mut given_back) = (Vec::with_capacity(orders.len()), Vec::new());
        for order in orders {
            let expected = |found: &CpuSet| still(&order.expected, found, &online);
            let cpus = order.cpus.as_ref().unwrap_or(&order.operator);
            let outcome = pin_thread_if(pidfd.as_fd(), pid, order.tid, expected, cpus);
            let operators = match &outcome {
                Ok(()) => order.cpus.is_none(),
                Err(error) => matches!(error, ActError::MaskChanged { .. }),
            };
            if operators {
                given_back.push(order.tid);
            }
            outcomes.push((order.vcpu, outcome.map(|()| self.reader.read(pid, order.tid))));
        }
        self.masks.forget(pid, &given_back);
        outcomes
    }
}
