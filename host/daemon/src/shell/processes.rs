//! Checks regularly whether the processes of VMs run: a process that is stopped, hangs or has ended does not report it.
//!
//! | by | |
//! |---|---|
//! | `bpf` | one call for all main threads |
//! | `files` | `stat` and `syscall` of each one, and its pidfd; one that does not answer is left to a thread that waits for it |

use super::{
    capabilities::{Capabilities, FILES},
    inbox::{Inbox, Message},
};
use crate::{config::Config, core::event::Event};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_model::{Abilities, Capability, StopReason, VmId};
use vnuma_observe::{
    location::{BPF, Prefer},
    tasks::{Call, Doing, TaskLook, TaskReader},
};
use vnuma_process::{
    Groups, Jobs, Looker as Looks, Next, Worker,
    main_loop::{self, Place},
    procfs::KeptFile,
    stopped_by_stat,
};

/// Least time between two probes of VMs whose main loops look idle, as a part of the time after which one is due: each wakes
/// several threads of the host. With more VMs than this the interval of each one grows. A VM whose main loop is not at rest
/// is probed without this limit, and so is every VM if the kernel does not show main loops.
const PROBES: u32 = 5;

/// How long a look at the files of a process may take. One takes microseconds.
const LIMIT: Duration = Duration::from_secs(5);

pub(super) enum Order {
    /// Checks a VM's process from now on, and no other of that VM.
    Watch(VmId, i32, Option<Arc<OwnedFd>>, Probed),
    /// Checks this process of a VM no longer.
    Unwatch(VmId, i32),
}

/// Is a VM probed? Not if another program would answer for its QEMU, which would show nothing of the main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probed {
    Yes,
    No,
}

impl Probed {
    /// A VM whose hypervisor can do this, if that is known.
    pub(super) fn of(abilities: Option<Abilities>) -> Self {
        if abilities.is_some_and(|abilities| abilities.answered_for) { Self::No } else { Self::Yes }
    }
}

/// A process that is watched.
struct Watched {
    pid: i32,
    probed: Probed,
    pidfd: Option<Arc<OwnedFd>>,
    /// `stat` and `syscall`, kept open if they are read at every look. Those that cannot be opened are missing.
    files: Option<Files>,
    /// When its main thread began, once BPF has shown it: its number may be reused.
    start_ns: Option<u64>,
    stopped: Option<StopReason>,
    main_loop: MainLoop,
    /// When it was probed last, or connected.
    asked_at: Instant,
}

type Files = [Option<KeptFile>; 2];

/// What a look at a process showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Ended,
    Stopped(StopReason),
    /// What its main loop did, and how often that has begun to sleep, if that is known.
    Runs(Look, Option<u64>),
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
    /// How often it had begun to sleep at the last look.
    sleeps: Option<u64>,
}

impl MainLoop {
    /// Takes the result of a look. True if the main loop is to be probed.
    ///
    /// A main loop that waits where it waited before will answer as it did before, and so will one that had something to do
    /// just then. One that runs at the next look as well, and has not slept meanwhile, may never come back.
    fn look(&mut self, now: Look, sleeps: Option<u64>) -> bool {
        let before = self.last.replace(now);
        let slept_before = std::mem::replace(&mut self.sleeps, sleeps);
        let slept = slept_before.zip(sleeps).is_some_and(|(before, now)| before != now);
        match now {
            Look::Hidden => false,
            Look::Runs => before == Some(Look::Runs) && !slept,
            Look::Sleeps => true,
            Look::Waits(place) => self.place.replace(place).is_some_and(|known| known != place),
        }
    }

    /// True if the kernel does not show the main loop.
    fn is_hidden(&self) -> bool {
        self.last.is_none_or(|last| last == Look::Hidden)
    }
}

pub(super) fn start(groups: &Groups, config: &Config, inbox: Arc<Inbox>) -> io::Result<Worker<Order>> {
    let (intervals, prefer, all) = (config.intervals, config.location, groups.clone());
    groups.host.start("processes", move |orders: Jobs<Order>| {
        let files = Looks::new(&all, orders.heartbeat(), LIMIT, || ());
        let looker = Looker::new(prefer, files, inbox.capabilities.clone());
        run(&orders, (intervals.process, intervals.probe), looker, &inbox);
    })
}

fn run(orders: &Jobs<Order>, (every, probe): (Duration, Duration), mut looker: Looker, inbox: &Inbox) {
    let mut watched: BTreeMap<VmId, Watched> = BTreeMap::new();
    let mut look_at = Instant::now() + every;
    let mut ask_at = Instant::now();
    loop {
        match orders.wait((!watched.is_empty()).then_some(look_at)) {
            Next::Job(Order::Watch(vm, pid, pidfd, probed)) => {
                let mut new = Watched { probed, ..Watched::new(pid, pidfd) };
                if !looker.look(&mut [(vm, &mut new)], inbox, false) {
                    return;
                }
                watched.insert(vm, new);
            }
            Next::Job(Order::Unwatch(vm, pid)) => {
                if watched.get(&vm).is_some_and(|known| known.pid == pid) {
                    watched.remove(&vm);
                }
            }
            Next::End => return,
            Next::Nothing => {}
        }
        if look_at <= Instant::now() {
            look_at = Instant::now() + every;
            let mut all: Vec<_> = watched.iter_mut().map(|(vm, process)| (*vm, process)).collect();
            if !looker.look(&mut all, inbox, true) {
                return;
            }
            if !ask_some(&mut watched, &mut ask_at, probe, inbox) {
                return;
            }
        }
    }
}

/// Orders probes of the VMs that are due. False once the inbox is closed.
fn ask_some(
    watched: &mut BTreeMap<VmId, Watched>,
    ask_at: &mut Instant,
    probe: Duration,
    inbox: &Inbox,
) -> bool {
    let now = Instant::now();
    let due = |process: &Watched| {
        process.probed == Probed::Yes && process.stopped.is_none() && now >= process.asked_at + probe
    };
    let seen = |process: &Watched| !process.main_loop.is_hidden();
    let hidden = watched.iter().filter(|(_, process)| due(process) && !seen(process)).map(|(vm, _)| *vm);
    let mut asked: Vec<VmId> = hidden.collect();
    if now >= *ask_at {
        // The VM that was not probed for longest.
        let seen = watched.iter().filter(|(_, process)| due(process) && seen(process));
        if let Some((&vm, _)) = seen.min_by_key(|(_, process)| process.asked_at) {
            *ask_at = now + probe / PROBES;
            asked.push(vm);
        }
    }
    asked.into_iter().all(|vm| {
        let Some(process) = watched.get_mut(&vm) else { return true };
        process.asked_at = now;
        inbox.send(Message::Event(Event::MainLoopBusy(vm, process.pid)))
    })
}

/// How processes are looked at.
struct Looker {
    prefer: Prefer,
    /// Loaded with the first look: without VMs there is no cost.
    bpf: Option<TaskReader>,
    tried: bool,
    /// By files.
    files: Looks<()>,
    capabilities: Capabilities,
}

impl Looker {
    fn new(prefer: Prefer, files: Looks<()>, capabilities: Capabilities) -> Self {
        Self { prefer, bpf: None, tried: false, files, capabilities }
    }

    fn load(&mut self) {
        if std::mem::replace(&mut self.tried, true) {
            return;
        }
        let loaded = match self.prefer {
            Prefer::Poll => Err("BPF is switched off (observe.location = \"poll\")".to_owned()),
            Prefer::Auto | Prefer::Bpf => TaskReader::load_for_threads(),
        };
        let by = Capability::either(Capability::PROCESSES, [BPF, FILES], loaded.as_ref().err());
        info!(source = by.in_use, passed_over = by.why(), "looking at processes of VMs");
        self.capabilities.publish(by);
        self.bpf = loaded.ok();
    }

    /// Looks at processes and reports what has changed. False once the inbox is closed.
    fn look(&mut self, all: &mut [(VmId, &mut Watched)], inbox: &Inbox, main_loop_too: bool) -> bool {
        self.load();
        let mut seen = vec![None; all.len()];
        if let Some(bpf) = &mut self.bpf {
            let pids: Vec<i32> = all.iter().map(|(_, process)| process.pid).collect();
            if let Err(error) = bpf.look(&pids, |at, look| seen[at] = all[at].1.found(look)) {
                warn!(%error, "processes cannot be looked at by BPF any more: their files are read");
                self.bpf = None;
                let by = Capability::either(Capability::PROCESSES, [BPF, FILES], Some(error));
                self.capabilities.publish(by);
            }
        }
        let by_files = self.bpf.is_none();
        all.iter_mut().zip(seen).all(|((vm, process), seen)| {
            let seen = match seen {
                Some(seen) if !by_files => seen,
                _ if by_files => process.read(*vm, &mut self.files, main_loop_too),
                // Its main thread is gone, and its process, too, unless that lives on without.
                _ if process.has_ended() => Seen::Ended,
                _ => Seen::Runs(Look::Hidden, None),
            };
            process.report(*vm, seen, inbox, main_loop_too)
        })
    }
}

impl Watched {
    fn new(pid: i32, pidfd: Option<Arc<OwnedFd>>) -> Self {
        let (files, start_ns, stopped, main_loop) = (None, None, None, MainLoop::default());
        Self {
            pid,
            probed: Probed::Yes,
            pidfd,
            files,
            start_ns,
            stopped,
            main_loop,
            asked_at: Instant::now(),
        }
    }

    fn has_ended(&self) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| has_ended(pidfd))
    }

    /// BPF has found a thread with its number. `None`: that is not its main thread, or that has ended.
    fn found(&mut self, TaskLook { pid, start_ns, doing, sleeps }: TaskLook) -> Option<Seen> {
        if pid != self.pid || doing == Doing::Ended {
            return None;
        }
        if self.start_ns != Some(start_ns) {
            // Its number may be another's already, unless it is known to live on.
            if self.start_ns.is_some() || self.has_ended() {
                return None;
            }
            self.start_ns = Some(start_ns);
        }
        Some(match doing {
            Doing::Stopped => Seen::Stopped(StopReason::Signal),
            Doing::Traced => Seen::Stopped(StopReason::Tracer),
            Doing::Runs => Seen::Runs(Look::Runs, Some(sleeps)),
            Doing::Sleeps(call) => Seen::Runs(waits_in(call).map_or(Look::Sleeps, Look::Waits), Some(sleeps)),
            Doing::Ended => return None,
        })
    }

    fn read(&mut self, vm: VmId, looks: &mut Looks<()>, main_loop_too: bool) -> Seen {
        let (pid, files) = (self.pid, self.files.take());
        let pidfd = self.pidfd.clone();
        let looked = looks.look((vm, pid), move |()| read_files(pid, pidfd.as_deref(), files, main_loop_too));
        match looked {
            Ok((seen, files)) => {
                self.files = Some(files);
                seen
            }
            Err(_) if self.has_ended() => Seen::Ended,
            // What is not known has not changed.
            Err(_) => self.stopped.map_or(Seen::Runs(Look::Hidden, None), Seen::Stopped),
        }
    }

    /// Reports what has changed. False once the inbox is closed.
    fn report(&mut self, vm: VmId, seen: Seen, inbox: &Inbox, main_loop_too: bool) -> bool {
        let send = |event| inbox.send(Message::Event(event));
        let (stopped, look, sleeps) = match seen {
            Seen::Ended => return send(Event::ProcessEnded(vm, self.pid)),
            Seen::Stopped(why) => (Some(why), Look::Hidden, None),
            Seen::Runs(look, sleeps) => (None, look, sleeps),
        };
        if std::mem::replace(&mut self.stopped, stopped) != stopped {
            return send(Event::ProcessState(vm, self.pid, stopped));
        }
        // If the kernel does not show the main loop, the VM is probed regularly.
        let looks_busy = main_loop_too && stopped.is_none() && self.main_loop.look(look, sleeps);
        if !looks_busy || self.probed == Probed::No {
            return true;
        }
        self.asked_at = Instant::now();
        send(Event::MainLoopBusy(vm, self.pid))
    }
}

fn read_files(pid: i32, pidfd: Option<&OwnedFd>, files: Option<Files>, main_loop_too: bool) -> (Seen, Files) {
    let open = || ["stat", "syscall"].map(|file| KeptFile::of_main_thread(pid, file).ok());
    let files = files.unwrap_or_else(open);
    // They are its files if it lives now.
    if pidfd.is_some_and(has_ended) {
        return (Seen::Ended, files);
    }
    let text = |at: usize| files[at].as_ref()?.read().ok();
    let seen = match text(0).as_deref().and_then(stopped_by_stat) {
        Some(reason) => Seen::Stopped(reason),
        None if !main_loop_too => Seen::Runs(Look::Hidden, None),
        None => Seen::Runs(text(1).as_deref().map_or(Look::Hidden, look_of), None),
    };
    (seen, files)
}

/// Where a main loop waits for something to do, if it does.
fn waits_in(call: Option<Call>) -> Option<Place> {
    let Call { number, stack } = call?;
    Place::of(number.into(), stack)
}

/// What a `syscall` file shows.
fn look_of(syscall: &str) -> Look {
    match main_loop::parse_place(syscall) {
        Some(place) => Look::Waits(place),
        None if main_loop::runs(syscall) => Look::Runs,
        None => Look::Sleeps,
    }
}

pub(super) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    use std::process::Command;
    use vnuma_process::Heartbeat;

    const PROBE: Duration = Duration::from_secs(20);

    fn waits_at(stack: &str) -> Look {
        look_of(&format!("271 0x1 0x6 0x2 0x0 0x8 0x0 {stack} 0x7f3c"))
    }

    /// VMs that are all due, the first one for longest.
    fn due(look: Look, count: u64) -> BTreeMap<VmId, Watched> {
        let long_ago = Instant::now() - 2 * PROBE;
        let mut main_loop = MainLoop::default();
        main_loop.look(look, None);
        let vm = |vm| {
            let asked_at = long_ago + Duration::from_millis(vm);
            (vm, Watched { main_loop, asked_at, ..Watched::new(i32::MAX, None) })
        };
        (1..=count).map(vm).collect()
    }

    fn asked(watched: &mut BTreeMap<VmId, Watched>, ask_at: &mut Instant) -> Vec<VmId> {
        let inbox = Inbox::new().expect("an inbox");
        assert!(ask_some(watched, ask_at, PROBE, &inbox));
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
        let pause = ask_at.saturating_duration_since(Instant::now());
        assert!(pause <= PROBE / 5 && pause > PROBE / 10, "{pause:?}");
        assert_eq!(asked(&mut watched, &mut Instant::now()), [2]);
    }

    #[test]
    fn those_that_cannot_be_seen_are_all_asked() {
        let (mut watched, mut ask_at) = (due(Look::Hidden, 30), Instant::now() + PROBE);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 30);
        assert_eq!(asked(&mut watched, &mut ask_at).len(), 0, "they were");
    }

    #[test]
    fn a_vm_that_another_program_answers_for_is_not_probed() {
        let answered_for = Abilities { answered_for: true, ..Abilities::default() };
        assert_eq!(Probed::of(Some(answered_for)), Probed::No);
        assert_eq!([Probed::of(Some(Abilities::default())), Probed::of(None)], [Probed::Yes; 2]);
    }

    #[test]
    fn those_for_which_another_program_answers_are_not_asked() {
        for (probed, count) in [(Probed::Yes, 2), (Probed::No, 0)] {
            let mut watched = due(Look::Hidden, 2);
            watched.values_mut().for_each(|process| process.probed = probed);
            assert_eq!(asked(&mut watched, &mut Instant::now()).len(), count, "{probed:?}, hidden");
            let mut watched = due(waits_at("0x10"), 2);
            watched.values_mut().for_each(|process| process.probed = probed);
            assert_eq!(asked(&mut watched, &mut Instant::now()).len(), count.min(1), "{probed:?}, idle");
            let inbox = Inbox::new().expect("an inbox");
            let mut process = Watched { probed, ..Watched::new(77, None) };
            for look in [waits_at("0x20"), waits_at("0x10"), Look::Sleeps] {
                assert!(process.report(7, Seen::Runs(look, None), &inbox, true));
            }
            assert_eq!(sent(&inbox).len(), count, "{probed:?}, busy");
            assert!(process.report(7, Seen::Stopped(StopReason::Signal), &inbox, true));
            assert!(process.report(7, Seen::Ended, &inbox, true));
            assert_eq!(sent(&inbox).len(), 2, "{probed:?}: that needs no answer");
        }
    }

    /// What was sent since the last call.
    fn sent(inbox: &Inbox) -> Vec<String> {
        let turn = inbox.take(Instant::now(), &[]).expect("open");
        turn.messages.iter().map(|message| format!("{message:?}")).collect()
    }

    #[test]
    fn both_ways_see_a_process_wait_stop_and_end() {
        for prefer in [Prefer::Auto, Prefer::Poll] {
            let mut child = Command::new("perl").args(["-e", "select(undef, undef, undef, 1000)"]).spawn();
            let child = child.as_mut().expect("perl");
            let pid = child.id().cast_signed();
            let pidfd = Arc::new(vnuma_process::open_pidfd(pid).expect("a pidfd"));
            let files = Looks::new(&Groups::default(), &Arc::new(Heartbeat::new("test")), LIMIT, || ());
            let mut looker = Looker::new(prefer, files, Capabilities::default());
            let mut process = Watched::new(pid, Some(pidfd));
            let inbox = Inbox::new().expect("an inbox");
            let limit = Instant::now() + Duration::from_secs(60);
            let mut until = |process: &mut Watched, wanted: &dyn Fn(&Watched, &[String]) -> bool| loop {
                assert!(looker.look(&mut [(7, process)], &inbox, true));
                if wanted(process, &sent(&inbox)) {
                    break;
                }
                assert!(Instant::now() < limit, "{prefer:?}: {:?}", process.main_loop);
                std::thread::sleep(Duration::from_millis(1));
            };
            let waits = |process: &Watched| matches!(process.main_loop.last, Some(Look::Waits(_)));
            until(&mut process, &|process, sent| waits(process) && sent.is_empty());
            let place = process.main_loop.place;
            until(&mut process, &|process, sent| process.main_loop.place == place && sent.is_empty());
            kill(Pid::from_raw(pid), Signal::SIGSTOP).expect("stopped");
            until(&mut process, &|_, sent| sent.iter().any(|event| event.contains("Some(Signal)")));
            until(&mut process, &|process, sent| process.stopped.is_some() && sent.is_empty());
            kill(Pid::from_raw(pid), Signal::SIGCONT).expect("it goes on");
            until(&mut process, &|_, sent| sent.iter().any(|event| event.contains("ProcessState(7")));
            until(&mut process, &|process, _| waits(process) && process.stopped.is_none());
            child.kill().expect("killed");
            // Before anybody waits for it, and after that.
            until(&mut process, &|_, sent| sent.iter().any(|event| event.contains("ProcessEnded(7")));
            child.wait().expect("ended");
            until(&mut process, &|_, sent| sent.iter().any(|event| event.contains("ProcessEnded(7")));
        }
    }

    #[test]
    fn another_process_with_the_number_is_not_taken_for_it() {
        let look = |pid: i32, start_ns: u64| TaskLook { pid, start_ns, doing: Doing::Stopped, sleeps: 5 };
        let mut process = Watched::new(77, None);
        assert_eq!(process.found(look(76, 1)), None, "a thread of another process");
        assert_eq!(process.found(look(77, 1)), Some(Seen::Stopped(StopReason::Signal)));
        assert_eq!(process.found(look(77, 2)), None, "it began later");
        assert_eq!(process.found(TaskLook { doing: Doing::Ended, ..look(77, 1) }), None);
        let seen = process.found(TaskLook { doing: Doing::Sleeps(None), ..look(77, 1) });
        assert_eq!(seen, Some(Seen::Runs(Look::Sleeps, Some(5))));
        let mut ended = Command::new("true").spawn().expect("true");
        let pid = ended.id().cast_signed();
        let mut process = Watched::new(pid, Some(Arc::new(vnuma_process::open_pidfd(pid).expect("a pidfd"))));
        ended.wait().expect("ended");
        assert_eq!(process.found(look(pid, 1)), None, "its number may be another's");
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
            let seen: Vec<bool> = looks.iter().map(|&look| main_loop.look(look, None)).collect();
            assert_eq!(seen, suspicious, "{looks:?}");
        }
        // It has slept meanwhile, and will again.
        let mut main_loop = MainLoop::default();
        let mut look = |sleeps: u64| main_loop.look(runs, Some(sleeps));
        assert_eq!([look(7), look(8), look(8), look(9)], [false, false, true, false]);
    }
}
