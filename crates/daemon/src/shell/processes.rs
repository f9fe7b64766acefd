//! Checks regularly whether the processes of VMs run, as one that is stopped, hangs or has ended does not report that.

use super::inbox::{Inbox, Message};
use crate::core::event::Event;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use vnuma_placement::world::{StopReason, VmId};
use vnuma_process::{StopReason as Seen, main_loop, spawn_worker};

/// Time between two checks: an operator is to know within a second.
const INTERVAL: Duration = Duration::from_millis(500);

enum Order {
    Watch(VmId, i32, Option<Arc<OwnedFd>>),
    Unwatch(VmId, i32),
}

/// A process that is watched.
struct Watched {
    pid: i32,
    pidfd: Option<Arc<OwnedFd>>,
    stopped: Option<StopReason>,
}

/// A thread that checks processes.
#[derive(Debug)]
pub(super) struct Processes {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Processes {
    pub(super) fn start(inbox: Arc<Inbox>) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let thread = spawn_worker("processes", move || run(&received, &inbox))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    /// Checks a VM's process from now on, and no other of that VM.
    pub(super) fn watch(&self, vm: VmId, pid: i32, pidfd: Option<Arc<OwnedFd>>) {
        self.send(Order::Watch(vm, pid, pidfd));
    }

    /// Checks this process of a VM no longer.
    pub(super) fn unwatch(&self, vm: VmId, pid: i32) {
        self.send(Order::Unwatch(vm, pid));
    }

    fn send(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // Fails only while vnumad stops.
            let _ = orders.send(order);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

fn run(orders: &mpsc::Receiver<Order>, inbox: &Inbox) {
    let mut watched: BTreeMap<VmId, Watched> = BTreeMap::new();
    let mut look_at = Instant::now() + INTERVAL;
    loop {
        let order = if watched.is_empty() {
            orders.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected)
        } else {
            orders.recv_timeout(look_at.saturating_duration_since(Instant::now()))
        };
        match order {
            Ok(Order::Watch(vm, pid, pidfd)) => {
                let mut new = Watched { pid, pidfd, stopped: None };
                if !new.look(vm, inbox, false) {
                    return;
                }
                watched.insert(vm, new);
            }
            Ok(Order::Unwatch(vm, pid)) => {
                if watched.get(&vm).is_some_and(|known| known.pid == pid) {
                    watched.remove(&vm);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if look_at <= Instant::now() {
            look_at = Instant::now() + INTERVAL;
            if !watched.iter_mut().all(|(vm, process)| process.look(*vm, inbox, true)) {
                return;
            }
        }
    }
}

impl Watched {
    /// Checks it, and reports what has changed. False once the inbox is closed.
    fn look(&mut self, vm: VmId, inbox: &Inbox, main_loop_too: bool) -> bool {
        let send = |event| inbox.send(Message::Event(event));
        if self.pidfd.as_ref().is_some_and(|pidfd| has_ended(pidfd)) {
            return send(Event::ProcessEnded(vm, self.pid));
        }
        let stopped = match Seen::of(self.pid).ok().flatten() {
            Some(Seen::Signal) => Some(StopReason::Signal),
            Some(Seen::Tracer) => Some(StopReason::Tracer),
            None => None,
        };
        if std::mem::replace(&mut self.stopped, stopped) != stopped {
            return send(Event::ProcessState(vm, self.pid, stopped));
        }
        // If the kernel does not show it, the hypervisor is probed now and then.
        let busy = || main_loop_too && stopped.is_none() && matches!(main_loop::waits(self.pid), Ok(false));
        !busy() || send(Event::MainLoopBusy(vm, self.pid))
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
