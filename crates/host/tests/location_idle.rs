//! A watcher with nothing to tell sleeps. Alone in its program, so that there is one
//! watcher to look at.

use std::{fs, sync::mpsc, thread, time::Duration};
use vnuma_host::location::{LocationWatcher, Prefer};
use vnuma_topology::{HostNode, HostTopology};

/// Times that the watcher's thread of this name went to sleep by itself.
fn sleeps_of(name: &str) -> u64 {
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |key| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim();
        if field("Name:") == name {
            return field("voluntary_ctxt_switches:").parse().unwrap();
        }
    }
    panic!("no thread `{name}`");
}

fn idle_for_a_second(prefer: Prefer, name: &str, watch: bool) -> (u64, usize) {
    let node = HostNode { id: 0, cpus: (0..64).collect(), ..HostNode::default() };
    let host = HostTopology { nodes: vec![node], ..HostTopology::default() };
    let (send, events) = mpsc::channel();
    let on_event = move |event| send.send(event).unwrap();
    let watcher = LocationWatcher::start(&host, prefer, Duration::from_millis(5), on_event).unwrap();
    let (stop, stopped) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let sleeper = thread::spawn(move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        let _ = stopped.recv();
    });
    if watch {
        watcher.watch(i32::try_from(std::process::id()).unwrap(), told.recv().unwrap()).unwrap();
    }
    thread::sleep(Duration::from_millis(300));
    let before = sleeps_of(name);
    // Threads that nobody watches are migrated and end meanwhile.
    for _ in 0..100 {
        thread::spawn(|| thread::sleep(Duration::from_millis(5))).join().unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    let slept = sleeps_of(name) - before;
    drop(watcher);
    drop(stop);
    sleeper.join().unwrap();
    (slept, events.try_iter().count())
}

#[test]
fn nothing_wakes_up_while_nothing_happens() {
    if nix::unistd::geteuid().is_root() {
        assert_eq!(idle_for_a_second(Prefer::Bpf, "vnuma-bpf", true), (0, 0));
    } else {
        eprintln!("not root: BPF is not tested");
    }
    assert_eq!(idle_for_a_second(Prefer::Poll, "vnuma-poll", false), (0, 0), "nothing to poll");
    let (wakeups, _) = idle_for_a_second(Prefer::Poll, "vnuma-poll", true);
    assert!(wakeups > 0, "the measurement would not see a wake-up");
}
