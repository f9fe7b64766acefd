//! Threads that work for all VMs go on when one VM's process does not answer, or makes a look panic.

use super::{
    hotness::HotnessWatcher,
    inbox::{Inbox, Message},
    observer, page_mover,
    pages::PageReader,
    processes::{self, Probed},
};
use crate::{config::Config, core::event::Event};
use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_observe::location::Prefer;
use vnuma_policy::{
    memory_move::{MemoryReason, MoveMemory},
    world::{TaskId, VmId},
};
use vnuma_process::{
    Groups,
    faults::{Fault, Injected, inject},
    open_pidfd,
};

/// No other test has VMs with these numbers.
const STUCK: VmId = 1_000_001;
const OTHER: VmId = 1_000_002;

/// A process of a VM, which does nothing.
struct Process(std::process::Child);

impl Process {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().expect("sleep"))
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        Some(Arc::new(open_pidfd(self.pid()).expect("a pidfd")))
    }

    fn end(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Looks of this thread at one of the VMs go wrong.
fn wrong(thread: &'static str, fault: Fault) -> Injected {
    inject(move |name, vm| (name == thread && vm == Some(STUCK)).then_some(fault))
}

fn task(vm: VmId) -> TaskId {
    TaskId { vm, number: vm }
}

/// Waits for this event. Others are passed over.
fn await_event<T>(inbox: &Inbox, wanted: impl Fn(&Event) -> Option<T>) -> T {
    let limit = Instant::now() + Duration::from_secs(60);
    while Instant::now() < limit {
        let turn = inbox.take(limit, &[]).expect("open");
        let found = turn.messages.iter().find_map(|message| match message {
            Message::Event(event) => wanted(event),
            _ => None,
        });
        if let Some(found) = found {
            return found;
        }
    }
    panic!("not within a minute");
}

/// What a thread says of a VM: why it was not looked at, if it was not.
type Say = Box<dyn Fn(VmId) -> Option<String>>;

/// A thread that is told to look at a VM.
type Start = fn(&Groups, &Arc<Inbox>, &Arc<[Process; 2]>) -> Say;

fn process_of(processes: &[Process; 2], vm: VmId) -> &Process {
    &processes[usize::from(vm == OTHER)]
}

fn look_at_memory(groups: &Groups, inbox: &Arc<Inbox>, processes: &Arc<[Process; 2]>) -> Say {
    let worker = observer::start(groups, PathBuf::from("/"), Arc::clone(inbox)).expect("started");
    let (inbox, processes) = (Arc::clone(inbox), Arc::clone(processes));
    Box::new(move |vm| {
        let process = process_of(&processes, vm);
        let (pid, pidfd) = (process.pid(), process.pidfd());
        worker.order(observer::Order { task: task(vm), pid, pidfd, areas: Vec::new() });
        await_event(&inbox, |event| match event {
            Event::MemoryObserved(of, outcome) if of.vm == vm => Some(outcome.as_ref().err().cloned()),
            _ => None,
        })
    })
}

fn move_memory(groups: &Groups, inbox: &Arc<Inbox>, processes: &Arc<[Process; 2]>) -> Say {
    let worker = page_mover::start(groups, PathBuf::from("/"), Arc::clone(inbox)).expect("started");
    let (inbox, processes) = (Arc::clone(inbox), Arc::clone(processes));
    Box::new(move |vm| {
        let process = process_of(&processes, vm);
        let (pid, pidfd) = (process.pid(), process.pidfd());
        let order = MoveMemory {
            from: 0,
            to: 0,
            bytes: 0,
            page_kib: 4,
            reserve_kib: 0,
            within: None,
            parts: None,
            why: MemoryReason::Rehome(0),
        };
        worker.order(page_mover::Order::Move { task: task(vm), pid, pidfd, order });
        await_event(&inbox, |event| match event {
            Event::MemoryMoved(of, moved, true) if of.vm == vm => Some(moved.problem.clone()),
            _ => None,
        })
    })
}

fn watch_hotness(groups: &Groups, inbox: &Arc<Inbox>, processes: &Arc<[Process; 2]>) -> Say {
    // Without DAMON, as it is of the whole host.
    let root = tempfile::tempdir().expect("a directory");
    let watcher = HotnessWatcher::start(groups, root.path().into(), Arc::clone(inbox)).expect("started");
    let (inbox, processes) = (Arc::clone(inbox), Arc::clone(processes));
    Box::new(move |vm| {
        let (process, _root) = (process_of(&processes, vm), &root);
        watcher.watch(task(vm), process.pid(), process.pidfd(), Vec::new());
        await_event(&inbox, |event| match event {
            Event::HotnessWatched(of, outcome) if of.vm == vm => Some(outcome.as_ref().err().cloned()),
            _ => None,
        })
    })
}

/// Is this why a VM was not looked at?
fn was_left_alone(why: Option<&String>) -> bool {
    why.is_some_and(|why| why.contains("does not answer looks") || why.contains("panicked while it looked"))
}

#[test]
fn a_look_that_hangs_or_panics_is_one_vms_alone_whichever_thread_has_it_made() {
    let threads: [(&str, Start); 3] =
        [("observer-look", look_at_memory), ("memory-look", move_memory), ("hotness-look", watch_hotness)];
    for (thread, start) in threads {
        for fault in [Fault::Hang, Fault::Panic] {
            let (groups, inbox) = (Groups::default(), Arc::new(Inbox::new().expect("an inbox")));
            let processes = Arc::new([Process::start(), Process::start()]);
            let say = start(&groups, &inbox, &processes);
            let injected = wrong(thread, fault);
            for _ in 0..3 {
                let (stuck, other) = (say(STUCK), say(OTHER));
                assert!(was_left_alone(stuck.as_ref()), "{thread}, {fault:?}: {stuck:?}");
                assert!(!was_left_alone(other.as_ref()), "{thread}, {fault:?}: {other:?}");
            }
            let hanging: Vec<VmId> = groups.looks.hanging().iter().map(|hanging| hanging.vm).collect();
            assert_eq!(hanging, if fault == Fault::Hang { vec![STUCK] } else { Vec::new() }, "{thread}");
            drop(injected);
            let limit = Instant::now() + Duration::from_secs(60);
            while !groups.looks.hanging().is_empty() {
                assert!(Instant::now() < limit, "{thread}: the look has not returned");
                std::thread::sleep(Duration::from_millis(2));
            }
            let again = say(STUCK);
            assert!(!was_left_alone(again.as_ref()), "{thread}, {fault:?}: {again:?}");
        }
    }
}

#[test]
fn pages_of_other_vms_are_counted_while_looks_at_one_hang_or_panic() {
    if !std::fs::exists("/proc/self/numa_maps").unwrap_or(false) {
        eprintln!("skipped: this kernel has no NUMA");
        return;
    }
    for fault in [Fault::Hang, Fault::Panic] {
        let injected = wrong("pages-look", fault);
        let processes = [Process::start(), Process::start()];
        let reader = PageReader::start(&Groups::default(), PathBuf::from("/"), false).expect("started");
        reader.watch(STUCK, processes[0].pid());
        reader.watch(OTHER, processes[1].pid());
        let limit = Instant::now() + Duration::from_secs(60);
        while reader.of(OTHER).0.is_empty() {
            assert!(Instant::now() < limit, "{fault:?}: it is not counted");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(reader.of(STUCK).0, [], "{fault:?}");
        drop(injected);
    }
}

#[test]
fn processes_of_other_vms_are_seen_to_end_while_looks_at_one_hang_or_panic() {
    for fault in [Fault::Hang, Fault::Panic] {
        let injected = wrong("processes-look", fault);
        let mut processes = [Process::start(), Process::start()];
        let (groups, inbox) = (Groups::default(), Arc::new(Inbox::new().expect("an inbox")));
        let config = Config { location: Prefer::Poll, ..Config::default() };
        let worker = processes::start(&groups, &config, Arc::clone(&inbox)).expect("started");
        for (vm, process) in [STUCK, OTHER].into_iter().zip(&processes) {
            worker.order(processes::Order::Watch(vm, process.pid(), process.pidfd(), Probed::Yes));
        }
        processes.iter_mut().for_each(Process::end);
        let mut ended = Vec::new();
        while ended.len() < 2 {
            ended.push(await_event(&inbox, |event| match event {
                Event::ProcessEnded(vm, _) if !ended.contains(vm) => Some(*vm),
                _ => None,
            }));
        }
        // An end needs no look.
        assert!(ended.contains(&STUCK) && ended.contains(&OTHER), "{fault:?}: {ended:?}");
        drop(injected);
    }
}
