//! Checks regularly whether the processes of VMs run: a process that is stopped, hangs or has ended does not report it.

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
use vnuma_process::{
    StopReason as Seen,
    main_loop::{self, Place},
    procfs::KeptFile,
    spawn_worker,
};

/// Time between two checks, so that an operator is told within a second.
const INTERVAL: Duration = Duration::from_millis(500);

/// Each VM is probed after this time even if its main loop looks idle.
const ASK_AFTER: Duration = Duration::from_secs(20);

/// Least time between two such probes on a host, as each wakes several threads: with more VMs than five the interval of
/// each one grows. A VM whose main loop is not at rest is probed without this limit, and so is every VM if the kernel does
/// not show main loops.
const ASK_PAUSE: Duration = Duration::from_secs(4);

enum Order {
    Watch(VmId, i32, Option<Arc<OwnedFd>>),
    Unwatch(VmId, i32),
}

/// A process that is watched.
struct Watched {
    pid: i32,
    pidfd: Option<Arc<OwnedFd>>,
    /// Kept open, as they are read twice a second. `None` if they cannot be opened.
    stat: Option<KeptFile>,
    syscall: Option<KeptFile>,
    stopped: Option<StopReason>,
    main_loop: MainLoop,
    /// When it was probed last, or connected.
    asked_at: Instant,
}

/// The last observation of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MainLoop {
    /// The kernel does not show it.
    Hidden,
    /// It ran, or was stuck.
    Busy,
    /// It waited for an event, at this address.
    Waits(Place),
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
    let mut ask_at = Instant::now();
    loop {
        let order = if watched.is_empty() {
            orders.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected)
        } else {
            orders.recv_timeout(look_at.saturating_duration_since(Instant::now()))
        };
        match order {
            Ok(Order::Watch(vm, pid, pidfd)) => {
                let mut new = Watched::new(pid, pidfd);
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
            if !ask_some(&mut watched, &mut ask_at, inbox) {
                return;
            }
        }
    }
}

/// Has the VMs probed that are due. False once the inbox is closed.
fn ask_some(watched: &mut BTreeMap<VmId, Watched>, ask_at: &mut Instant, inbox: &Inbox) -> bool {
    let now = Instant::now();
    let due = |process: &Watched| process.stopped.is_none() && now >= process.asked_at + ASK_AFTER;
    let seen = |process: &Watched| process.main_loop != MainLoop::Hidden;
    let hidden = watched.iter().filter(|(_, process)| due(process) && !seen(process)).map(|(vm, _)| *vm);
    let mut asked: Vec<VmId> = hidden.collect();
    if now >= *ask_at {
        // The VM that was not probed for longest.
        let seen = watched.iter().filter(|(_, process)| due(process) && seen(process));
        if let Some((&vm, _)) = seen.min_by_key(|(_, process)| process.asked_at) {
            *ask_at = now + ASK_PAUSE;
            asked.push(vm);
        }
    }
    asked.into_iter().all(|vm| {
        let Some(process) = watched.get_mut(&vm) else { return true };
        process.asked_at = now;
        inbox.send(Message::Event(Event::MainLoopBusy(vm, process.pid)))
    })
}

impl Watched {
    fn new(pid: i32, pidfd: Option<Arc<OwnedFd>>) -> Self {
        let kept = |file| KeptFile::of_main_thread(pid, file).ok();
        let (stat, syscall) = (kept("stat"), kept("syscall"));
        let (stopped, main_loop, asked_at) = (None, MainLoop::Hidden, Instant::now());
        Self { pid, pidfd, stat, syscall, stopped, main_loop, asked_at }
    }

    /// Checks one process and reports what has changed. False once the inbox is closed.
    fn look(&mut self, vm: VmId, inbox: &Inbox, main_loop_too: bool) -> bool {
        let send = |event| inbox.send(Message::Event(event));
        if self.pidfd.as_ref().is_some_and(|pidfd| has_ended(pidfd)) {
            return send(Event::ProcessEnded(vm, self.pid));
        }
        let stat = self.stat.as_ref().and_then(|stat| stat.read().ok());
        let stopped = match stat.as_deref().and_then(Seen::from_stat) {
            Some(Seen::Signal) => Some(StopReason::Signal),
            Some(Seen::Tracer) => Some(StopReason::Tracer),
            None => None,
        };
        if std::mem::replace(&mut self.stopped, stopped) != stopped {
            return send(Event::ProcessState(vm, self.pid, stopped));
        }
        if !main_loop_too || stopped.is_some() || !self.looks_busy() {
            return true;
        }
        // If the kernel does not show the main loop, the VM is probed regularly.
        self.asked_at = Instant::now();
        send(Event::MainLoopBusy(vm, self.pid))
    }

    /// Is there a reason to probe it? A main loop that waits where it waited before will answer as it did before.
    fn looks_busy(&mut self) -> bool {
        let now = match self.syscall.as_ref().map(KeptFile::read) {
            Some(Ok(text)) => main_loop::parse_place(&text).map_or(MainLoop::Busy, MainLoop::Waits),
            Some(Err(_)) | None => MainLoop::Hidden,
        };
        is_suspicious(std::mem::replace(&mut self.main_loop, now), now)
    }
}

fn is_suspicious(before: MainLoop, now: MainLoop) -> bool {
    match (before, now) {
        (_, MainLoop::Busy) => true,
        (MainLoop::Waits(before), MainLoop::Waits(now)) => before != now,
        _ => false,
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits_at(stack: &str) -> MainLoop {
        let text = format!("271 0x1 0x6 0x2 0x0 0x8 0x0 {stack} 0x7f3c");
        main_loop::parse_place(&text).map_or(MainLoop::Busy, MainLoop::Waits)
    }

    /// VMs that are all due, the first one for longest.
    fn due(main_loop: MainLoop, count: u64) -> BTreeMap<VmId, Watched> {
        let long_ago = Instant::now() - 2 * ASK_AFTER;
        let vm = |vm| {
            let asked_at = long_ago + Duration::from_millis(vm);
            (vm, Watched { main_loop, asked_at, ..Watched::new(i32::MAX, None) })
        };
        (1..=count).map(vm).collect()
    }

    fn asked(watched: &mut BTreeMap<VmId, Watched>, ask_at: &mut Instant) -> Vec<VmId> {
        let inbox = Inbox::default();
        assert!(ask_some(watched, ask_at, &inbox));
        let turn = inbox.take(Instant::now()).expect("open");
        let vm = |message| match message {
            Message::Event(Event::MainLoopBusy(vm, _)) => vm,
            other => panic!("{other:?}"),
        };
        turn.messages.into_iter().map(vm).collect()
    }

    #[test]
    fn of_hundreds_one_is_asked_at_a_time_and_the_one_that_waited_longest() {
        let (mut watched, mut ask_at) = (due(waits_at("0x10"), 500), Instant::now());
        assert_eq!(asked(&mut watched, &mut ask_at), [1]);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 0, "not within the pause");
        assert_eq!(asked(&mut watched, &mut Instant::now()), [2]);
    }

    #[test]
    fn those_that_cannot_be_seen_are_all_asked() {
        let (mut watched, mut ask_at) = (due(MainLoop::Hidden, 30), Instant::now() + ASK_PAUSE);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 30);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 0, "they were");
    }

    #[test]
    fn a_main_loop_that_waits_elsewhere_than_before_may_not_answer() {
        let (outer, nested) = (waits_at("0x20"), waits_at("0x10"));
        for (before, now, suspicious) in [
            (outer, outer, false),
            (outer, nested, true),
            (nested, outer, true),
            (MainLoop::Hidden, outer, false),
            (MainLoop::Busy, outer, false),
            (outer, MainLoop::Busy, true),
            (MainLoop::Busy, MainLoop::Busy, true),
            (outer, MainLoop::Hidden, false),
        ] {
            assert_eq!(is_suspicious(before, now), suspicious, "{before:?} {now:?}");
        }
    }
}
