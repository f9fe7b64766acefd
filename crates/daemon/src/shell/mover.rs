//! Sets the CPU affinity of vCPU threads, in a thread of its own because the system call can block.

use super::{
    inbox::{Inbox, Message},
    locator::Reader,
};
use crate::core::event::Event;
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
    thread::JoinHandle,
};
use vnuma_placement::world::VmId;
use vnuma_process::{ActError, pin_thread, spawn_worker};
use vnuma_topology::{ApicId, CpuSet, HostNodeId};

/// A move to make.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) vm: VmId,
    pub(super) pid: i32,
    /// The process, as a pidfd, so that a reused PID cannot be meant. `None`: it has ended.
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) vcpu: ApicId,
    pub(super) tid: i32,
    pub(super) node: HostNodeId,
    pub(super) cpus: CpuSet,
}

/// A thread that makes moves, one after the other.
#[derive(Debug)]
pub(super) struct Mover {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    pub(super) fn start(reader: Reader, inbox: Arc<Inbox>) -> io::Result<Self> {
        let (orders, received) = mpsc::channel::<Order>();
        let thread = spawn_worker("mover", move || {
            for order in received {
                let outcome = make(&order, &reader);
                let moved = Event::Moved(order.vm, order.vcpu, order.node, outcome);
                if !inbox.send(Message::Event(moved)) {
                    return;
                }
            }
        })?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    /// Queues a move; [`Event::Moved`] follows.
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

/// The thread's affinity is set in one system call, so the move is made or not made.
fn make(order: &Order, reader: &Reader) -> Result<Option<vnuma_topology::VcpuLocation>, ActError> {
    let Some(pidfd) = &order.pidfd else { return Err(ActError::Exited { pid: order.pid }) };
    pin_thread(pidfd.as_fd(), order.pid, order.tid, &order.cpus)?;
    Ok(reader.read(order.pid, order.tid))
}
