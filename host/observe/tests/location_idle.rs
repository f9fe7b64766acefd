//! A watcher with nothing to report sleeps. Alone in its program, with one watcher of each kind.

mod taker;

use std::{
    fs,
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vnuma_model::{HostNode, HostTopology};
use vnuma_observe::location::Prefer;
use vnuma_process::Workers;

/// A field of the status of the watcher's thread of this name.
fn status_of(name: &str, key: &str) -> String {
    // A thread names itself, a moment after it was started.
    let until = Instant::now() + Duration::from_secs(600);
    while Instant::now() < until {
        for task in fs::read_dir("/proc/self/task").unwrap() {
            // A thread may end meanwhile.
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
            let field =
                |key| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
            if field("Name:") == name {
                return field(key).to_owned();
            }
        }
    }
    panic!("no thread `{name}`");
}

/// Times that this thread went to sleep by itself.
fn sleeps_of(name: &str) -> u64 {
    status_of(name, "voluntary_ctxt_switches:").parse().unwrap()
}

/// All signals but SIGKILL (9) and SIGSTOP (19), which cannot be blocked.
const BLOCKABLE: u64 = !(1 << (9 - 1) | 1 << (19 - 1));
/// How often it is looked whether a watcher sleeps: on a slow machine it may still be starting at first.
const SPANS: usize = 5;
/// Signals that the C library keeps for itself: it does not let anybody block them.
const OF_LIBC: u64 = 1 << (32 - 1) | 1 << (33 - 1);

fn idle_for_seconds(prefer: Prefer, name: &str, watch: bool) -> (u64, usize) {
    let node = HostNode { id: 0, cpus: (0..64).collect(), ..HostNode::default() };
    let host = HostTopology { nodes: vec![node], ..HostTopology::default() };
    let (send, events) = mpsc::channel();
    let on_event = move |event| send.send(event).unwrap();
    let watcher = taker::start(&Workers::default(), &host, prefer, Duration::from_millis(5), on_event);
    let watcher = watcher.unwrap();
    let (stop, stopped) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let sleeper = thread::spawn(move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        let _ = stopped.recv();
    });
    if watch {
        watcher.watch(i32::try_from(std::process::id()).unwrap(), told.recv().unwrap()).unwrap();
    }
    let blocked = u64::from_str_radix(&status_of(name, "SigBlk:"), 16).unwrap();
    assert_eq!(blocked | OF_LIBC, BLOCKABLE, "{name} takes signals of the process");
    let span = || {
        let before = sleeps_of(name);
        // Meanwhile other threads, which are not watched, are migrated and end.
        for _ in 0..100 {
            thread::spawn(|| thread::sleep(Duration::from_millis(5))).join().unwrap();
            Command::new("true").status().unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        sleeps_of(name) - before
    };
    let spans: Vec<u64> = (0..SPANS).map(|_| span()).collect();
    // One that is woken is so in each of them.
    let slept = spans.into_iter().min().unwrap();
    drop(watcher);
    drop(stop);
    sleeper.join().unwrap();
    (slept, events.try_iter().count())
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn bpf_wakes_nobody_while_nothing_happens() {
    assert_eq!(idle_for_seconds(Prefer::Bpf, "vnuma-bpf", true), (0, 0));
}

#[test]
fn polling_wakes_nobody_while_there_is_nothing_to_poll() {
    assert_eq!(idle_for_seconds(Prefer::Poll, "vnuma-poll", false), (0, 0), "nothing to poll");
    let (wakeups, _) = idle_for_seconds(Prefer::Poll, "vnuma-poll", true);
    assert!(wakeups > 0, "the measurement would not see a wake-up");
}
