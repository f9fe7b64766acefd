//! A policy in a whole daemon: counters or the place of pages are read, masks are set, recorded and given back.

mod common;

use common::{
    Daemon,
    http::ask,
    vms::{describe, pin},
    wait_for,
};
use serde_json::{Value, json};
use std::{
    hint::black_box,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use vnuma_hypervisor::resident::{read_guest_mappings, sum_pages};
use vnuma_model::CpuSet;
use vnuma_process::{
    procfs::{read_allowed_nodes, read_cgroup},
    read_allowed,
};

/// More than a last-level cache.
const MEMORY: usize = 64 << 20;

fn own_pid() -> i32 {
    process::id().cast_signed()
}

/// A thread that does nothing but miss the cache, until it is dropped.
struct Hungry {
    tid: i32,
    stop: Arc<AtomicBool>,
}

impl Hungry {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            let mut memory = vec![1_u8; MEMORY];
            sender.send(nix::unistd::gettid().as_raw()).expect("the test waits");
            let mut at = 0;
            while !stopped.load(Ordering::Relaxed) {
                for _ in 0..10_000 {
                    at = (at + 4096 * 61 + 64) % MEMORY;
                    memory[at] = memory[at].wrapping_add(1);
                }
                black_box(&memory);
            }
        });
        Self { tid: receiver.recv().expect("started"), stop }
    }

    fn allowed(&self) -> CpuSet {
        read_allowed(own_pid(), self.tid).expect("it runs")
    }
}

impl Drop for Hungry {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn policy(daemon: &Daemon) -> Value {
    ask(&daemon.socket, "GET", "/v1/vms/a/policy", "").1
}

fn set_policy(daemon: &Daemon, policy: &str) -> (u16, Value) {
    let body = json!({ "policy": policy }).to_string();
    ask(&daemon.socket, "POST", "/v1/vms/a/policy", &body)
}

#[test]
fn a_vcpu_is_confined_to_the_node_of_its_memory_and_given_back() {
    let mut daemon = Daemon::start_with(None, |config| config.policy_period = Duration::from_millis(100));
    let thread = Hungry::start();
    let pages = sum_pages(&read_guest_mappings(own_pid()).expect("numa_maps"));
    // The host of these tests has a CPU on each of its two nodes, with the same number.
    let near = pages.iter().max_by_key(|(_, kib)| *kib).expect("pages").0;
    let (all, near): (CpuSet, CpuSet) = (thread.allowed(), [near].into_iter().collect());
    if ![0, 1].iter().all(|cpu| all.contains(*cpu)) {
        return eprintln!("skipped: this needs the CPUs 0 and 1");
    }
    daemon.add("a", describe("a", own_pid(), &[0, 1], &[thread.tid]));
    wait_for("the VM", || ask(&daemon.socket, "GET", "/v1/vms/a", "").1["described"] == true);
    assert_eq!(policy(&daemon)["policy"], "off");
    let group = read_cgroup(own_pid(), own_pid()).expect("readable");
    if let Some(group) = &group {
        let directory = daemon.config.root.join("sys/fs/cgroup").join(group.trim_start_matches('/'));
        std::fs::create_dir_all(&directory).expect("created");
        std::fs::write(directory.join("cpu.weight"), "250\n").expect("written");
    }
    let record = daemon.config.records.join(format!("{}.masks", own_pid()));

    let (status, refused) = set_policy(&daemon, "best");
    assert_eq!((status, &refused["error"]), (400, &json!("bad-request")), "{refused}");
    assert!(refused["message"].as_str().is_some_and(|text| text.contains("`best`")), "{refused}");

    assert_eq!(set_policy(&daemon, "vprobe").0, 200);
    wait_for("the vCPU to be confined to the node of its memory", || thread.allowed() == near);
    assert!(record.exists());
    wait_for("that to be shown", || policy(&daemon)["vcpus"][0]["policy_cpus"] == json!(near));
    let vcpu = policy(&daemon)["vcpus"][0].clone();
    assert_eq!(vcpu["operator_cpus"], json!(all), "{vcpu}");
    assert_eq!(vcpu["weight"], if group.is_some() { 250 } else { 100 }, "{vcpu}");
    assert!(vcpu["last"]["cause"].is_string() && vcpu["moves"] == 1, "{vcpu}");
    let (_, about) = ask(&daemon.socket, "GET", "/v1/daemon", "");
    let quality = if about["counters"]["source"] == "none" { "assumed" } else { "counted" };
    assert_eq!((&vcpu["quality"], &about["counters"]["threads"]), (&json!(quality), &json!(1)), "{about}");

    let (status, off) = set_policy(&daemon, "off");
    assert_eq!((status, &off["policy"], thread.allowed()), (200, &json!("off"), all.clone()), "{off}");
    assert!(!record.exists());
    wait_for("nothing to be counted", || {
        ask(&daemon.socket, "GET", "/v1/daemon", "").1["counters"]["threads"] == 0
    });

    assert_eq!(set_policy(&daemon, "vprobe").0, 200);
    wait_for("the vCPU to be confined again", || thread.allowed() == near);
    daemon.stop();
    assert_eq!(thread.allowed(), all, "vnumad has given back what it had set");
    assert!(!record.exists());
}

#[test]
fn memory_goes_to_a_pinned_vcpu() {
    let nodes = read_allowed_nodes(own_pid()).expect("readable");
    if ![0, 1].iter().all(|node| nodes.contains(*node)) {
        eprintln!("skipped: this needs memory on the nodes 0 and 1, and there is some on {nodes}");
        return;
    }
    let daemon = Daemon::start_with(None, |config| {
        config.policy_period = Duration::from_millis(100);
        config.policy_memory = 1 << 30;
    });
    let thread = Hungry::start();
    let lies = |node: u32| {
        let pages = sum_pages(&read_guest_mappings(own_pid()).expect("numa_maps"));
        pages.iter().find(|(known, _)| *known == node).map_or(0, |(_, kib)| *kib)
    };
    let (from, to) = if lies(0) > lies(1) { (0, 1) } else { (1, 0) };
    pin(thread.tid, to as usize);
    daemon.add("a", describe("a", own_pid(), &[0, 1], &[thread.tid]));
    wait_for("the VM", || ask(&daemon.socket, "GET", "/v1/vms/a", "").1["described"] == true);
    assert_eq!(set_policy(&daemon, "vprobe").0, 200);
    let memory = || policy(&daemon)["memory"].clone();
    wait_for("a move to end", || memory()["last"]["ended"] == true);
    let shown = memory();
    let last = &shown["last"];
    assert_eq!((&last["from"], &last["to"]), (&json!(from), &json!(to)), "{shown}");
    assert_eq!(
        (&last["cause"], &shown["moves"]),
        (&json!("its vCPUs may not run there"), &json!(1)),
        "{shown}"
    );
    assert!(last["moved_bytes"].as_u64() >= Some(MEMORY as u64 / 2), "{shown}");
    assert!(lies(to) > lies(from), "{shown}");
}
