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

/// What a look at a main loop showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// The kernel does not show it.
    Hidden,
    /// It was on a CPU or waited for one.
    Runs,
    /// It slept, and not for an event.
    Sleeps,
    /// It waited for an event, at this address.
    Waits(Place),
}

/// What is known of a main loop.
#[derive(Clone, Copy, Debug, Default)]
struct MainLoop {
    /// The last look. `None`: there was none.
    last: Option<Look>,
    /// Where it waited last.
    place: Option<Place>,
}

impl MainLoop {
    /// Takes in a look. Is there a reason to probe it?
    ///
    /// A main loop that waits where it waited before will answer as it did before, and so will one that had something to do
    /// just then. One that runs at the next look as well may never come back.
    fn look(&mut self, now: Look) -> bool {
        let before = self.last.replace(now);
        match now {
            Look::Hidden => false,
            Look::Runs => before == Some(Look::Runs),
            Look::Sleeps => true,
            Look::Waits(place) => self.place.replace(place).is_some_and(|known| known != place),
        }
    }

    /// Does the kernel not show it?
    fn is_hidden(&self) -> bool {
        self.last.is_none_or(|last| last == Look::Hidden)
    }
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
    let seen = |process: &Watched| !process.main_loop.is_hidden();
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
        let (stopped, main_loop, asked_at) = (None, MainLoop::default(), Instant::now());
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

    /// Is there a reason to probe it?
    fn looks_busy(&mut self) -> bool {
        let text = self.syscall.as_ref().and_then(|file| file.read().ok());
        self.main_loop.look(text.as_deref().map_or(Look::Hidden, look_of))
    }
}

/// What a `syscall` file shows.
fn look_of(syscall: &str) -> Look {
    match main_loop::parse_place(syscall) {
        Some(place) => Look::Waits(place),
        None if main_loop::runs(syscall) => Look::Runs,
        None => Look::Sleeps,
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits_at(stack: &str) -> Look {
        look_of(&format!("271 0x1 0x6 0x2 0x0 0x8 0x0 {stack} 0x7f3c"))
    }

    /// VMs that are all due, the first one for longest.
    fn due(look: Look, count: u64) -> BTreeMap<VmId, Watched> {
        let long_ago = Instant::now() - 2 * ASK_AFTER;
        let mut main_loop = MainLoop::default();
        main_loop.look(look);
        let vm = |vm| {
            let asked_at = long_ago + Duration::from_millis(vm);
            (vm, Watched { main_loop, asked_at, ..Watched::new(i32::MAX, None) })
        };
        (1..=count).map(vm).collect()
    }

    fn asked(watched: &mut BTreeMap<VmId, Watched>, ask_at: &mut Instant) -> Vec<VmId> {
        let inbox = Inbox::new().expect("an inbox");
        assert!(ask_some(watched, ask_at, &inbox));
        let turn = inbox.take(Instant::now(), &[]).expect("open");
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
        let (mut watched, mut ask_at) = (due(Look::Hidden, 30), Instant::now() + ASK_PAUSE);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 30);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 0, "they were");
    }

    #[test]
    fn a_main_loop_that_waits_elsewhere_than_before_may_not_answer() {
        let (outer, nested) = (waits_at("0x20"), waits_at("0x10"));
        let (runs, sleeps) =
            (look_of("running\n"), look_of("17 0x3 0x7f 0x400 0x0 0x0 0x0 0x7ffe00 0x7f3c\n"));
        for (looks, suspicious) in [
            (&[outer, outer, outer][..], &[false, false, false][..]),
            (&[outer, nested, nested, outer], &[false, true, false, true]),
            (&[Look::Hidden, outer, Look::Hidden, nested], &[false, false, false, true]),
            (&[runs, outer, runs, outer], &[false, false, false, false]),
            (&[outer, runs, nested], &[false, false, true]),
            (&[runs, runs, runs], &[false, true, true]),
            (&[outer, sleeps, sleeps, runs, outer], &[false, true, true, false, false]),
        ] {
            let mut main_loop = MainLoop::default();
            let seen: Vec<bool> = looks.iter().map(|&look| main_loop.look(look)).collect();
            assert_eq!(seen, suspicious, "{looks:?}");
        }
    }
}
