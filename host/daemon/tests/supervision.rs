//! Threads of the daemon that panic or hang, each of them, and a process of a VM that does not answer looks.

mod common;

use common::{
    Daemon,
    http::ask,
    vms::{Process, describe},
    wait_for,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};
use tokio::sync::oneshot;
use vnuma_daemon::Config;
use vnuma_policy::scheduling::Policy;
use vnuma_process::faults::{Fault, inject};

/// All threads that work for each VM, by what they are started by: the thread that the daemon is started by, or another one.
const THREADS: [(&str, &str); 11] = [
    ("daemon", "hotness"),
    ("daemon", "locator"),
    ("daemon", "memory"),
    ("daemon", "mover"),
    ("daemon", "observer"),
    ("daemon", "processes"),
    ("daemon", "sampler"),
    ("daemon", "scanner"),
    ("daemon", "vnuma-host"),
    ("daemon", "vnuma-poll"),
    ("sampler", "pages"),
];

/// Other threads: the connections and the looks of single VMs.
fn is_of_a_vm(name: &str) -> bool {
    name.starts_with("vm-") || name.ends_with("-look")
}

/// What one test injects is not for the daemons of another one.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// With a policy, so that vCPUs are counted.
fn with_policy(config: &mut Config) {
    config.policy = Policy::Vprobe;
    config.policy_period = Duration::from_millis(100);
    config.resync_interval = Duration::from_millis(100);
    config.intervals.process = Duration::from_millis(20);
}

/// Adds a VM whose only thread runs its vCPU.
fn add(daemon: &Daemon, name: &str) -> Process {
    let process = Process::start();
    daemon.add(name, describe(name, process.pid(), &[0, 1], &[process.pid()]));
    process
}

#[test]
fn all_threads_are_known_here() {
    let _alone = alone();
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let theirs = Arc::clone(&seen);
    let names = move || theirs.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let injected = inject(move |name, vm| {
        if vm.is_none() && !is_of_a_vm(name) {
            seen.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        }
        None
    });
    let daemon = Daemon::start_with(None, with_policy);
    let _vm = add(&daemon, "web");
    wait_for("its pages to be counted", || names().contains("pages"));
    let known: BTreeSet<String> = THREADS.iter().map(|(_, name)| (*name).to_owned()).collect();
    assert_eq!(names(), known);
    drop(injected);
}

/// Why a daemon ends if that happens to its thread of this name.
fn end_after(fault: Fault, by: &'static str, name: &'static str) -> String {
    let of_daemon = format!("{name} of a daemon");
    let starts = if by == "daemon" { of_daemon.clone() } else { by.to_owned() };
    let injected = inject(move |thread, vm| {
        let is_it = thread == name && vm.is_none();
        (is_it && thread::current().name() == Some(&starts)).then_some(fault)
    });
    let daemon = Daemon::prepare(None, with_policy);
    let _process = add(&daemon, "web");
    // It is not stopped: while the sender is there, only the daemon itself can end it.
    let (_running, stop) = oneshot::channel();
    let ended = thread::scope(|scope| {
        let run = thread::Builder::new().name(of_daemon).spawn_scoped(scope, || daemon.run(stop));
        run.expect("started").join().expect("no panic of its own")
    });
    drop(injected);
    ended.map_or_else(|error| format!("{error:#}"), |()| "it was stopped".to_owned())
}

#[test]
fn each_thread_that_works_for_all_vms_ends_the_daemon_if_it_panics_or_hangs_which_says_so() {
    let _alone = alone();
    let (by_daemon, by_others): (Vec<_>, Vec<_>) = THREADS.into_iter().partition(|(by, _)| *by == "daemon");
    for (fault, why) in
        [(Fault::Panic, "panicked: a test wants it so"), (Fault::Hang, "has made no progress for 36")]
    {
        let check = |(by, name)| {
            let (end, expected) = (end_after(fault, by, name), format!("the thread {name} {why}"));
            assert!(end.starts_with(&expected), "{end}, not {expected}");
        };
        thread::scope(|scope| by_daemon.iter().for_each(|of| drop(scope.spawn(move || check(*of)))));
        // Any daemon's thread starts these: one after the other.
        by_others.iter().for_each(|of| check(*of));
    }
}

#[test]
fn a_vm_whose_process_does_not_answer_looks_is_shown_and_the_others_go_on() {
    let _alone = alone();
    let daemon = Daemon::start_with(None, with_policy);
    let _vms = ["first", "second"].map(|name| add(&daemon, name));
    let problem =
        |name: &str| ask(&daemon.socket, "GET", &format!("/v1/vms/{name}"), "").1["problem"].clone();
    wait_for("both", || ["first", "second"].map(problem) == [Value::Null, Value::Null]);
    // The one that is looked at first from now on.
    let chosen = Mutex::new(None);
    let injected = inject(move |name, vm| {
        let vm = vm.filter(|_| name == "processes-look" && thread::current().name() == Some("processes"))?;
        let mut chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
        (*chosen.get_or_insert(vm) == vm).then_some(Fault::Hang)
    });
    let about = || ask(&daemon.socket, "GET", "/v1/daemon", "").1;
    wait_for("it to be shown", || {
        ["first", "second"].map(problem).iter().filter(|problem| problem.is_string()).count() == 1
    });
    let stuck = if problem("first").is_string() { "first" } else { "second" };
    let text = problem(stuck).as_str().unwrap_or_default().to_owned();
    assert!(text.contains("does not answer looks: it is not known where its memory is"), "{text}");
    let hanging = about()["hanging_looks"].clone();
    assert_eq!((&hanging[0]["vm"], &hanging[0]["thread"]), (&json!(stuck), &json!("processes-look")));
    assert_eq!(about()["silent_threads"], Value::Null);
    drop(injected);
    wait_for("looks to return", || problem(stuck) == Value::Null && about()["hanging_looks"] == Value::Null);
}
