//! VMs whose hypervisor does not answer, not as it should, or stops in the middle of something: each is named, observed
//! all the same, and keeps nobody from anything.

mod common;

use common::{Daemon, http::ask, peer::Peer, wait_for};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::signal::Signal,
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs,
    io::Read,
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};
use vnuma_test_kit::HANG_LIMIT;

#[test]
#[ignore = "the other process of these tests"]
fn peer_process() {
    common::peer::serve_if_asked();
}

struct Host {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

impl Host {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let daemon = Daemon::start_with_qmp(directory.path());
        Self { daemon, directory }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.sock"))
    }

    fn peer(&self, name: &str, kind: &str) -> Peer {
        Peer::start("peer_process", kind, &self.socket(name))
    }

    fn vm(&self, name: &str) -> Value {
        ask(&self.daemon.socket, "GET", &format!("/v1/vms/{name}"), "").1
    }

    fn post(&self, path: &str, body: &str) -> (u16, String) {
        let (status, answer) = ask(&self.daemon.socket, "POST", &format!("/v1/vms/{path}"), body);
        (status, answer["message"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until a VM's hypervisor is seen in this state; how long that took.
    fn wait_until(&self, name: &str, state: &str) -> Duration {
        let started = Instant::now();
        wait_for(&format!("{name} to be {state}"), || self.vm(name)["hypervisor"] == state);
        started.elapsed()
    }

    /// Host nodes of its vCPUs.
    fn nodes(&self, name: &str) -> Vec<Value> {
        let vm = self.vm(name);
        let vcpus = vm["vcpus"].as_array().cloned().unwrap_or_default();
        vcpus.into_iter().map(|vcpu| vcpu["host_node"].clone()).collect()
    }

    fn records(&self) -> usize {
        std::fs::read_dir(&self.daemon.config.records).map_or(0, Iterator::count)
    }
}

fn pin(tid: i32, cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("in range");
    sched_setaffinity(Pid::from_raw(tid), &set).expect("pinned");
}

#[test]
fn each_that_misbehaves_is_named_and_observed_and_disturbs_nobody() {
    let host = Host::start();
    let good = host.peer("good", "healthy");
    host.wait_until("good", "answers");
    let cases = [
        ("nobody accepts", "silent", "QMP: no greeting within 800 ms: is another client connected?"),
        ("slow drip", "silent", "QMP: no greeting within 800 ms: is another client connected?"),
        ("silence", "silent", "QMP: `qmp_capabilities` was not answered within 1000 ms"),
        ("endless line", "lost", "a line of more than 4194304 bytes"),
        ("garbage", "lost", "`SSH-2.0-OpenSSH_9.2` is no QMP greeting"),
        ("cut", "lost", "the connection is closed"),
        ("foreign threads", "lost", "thread 1 given for vCPU 0 does not belong to the VM's process"),
        ("too many", "lost", "the answer is `5000`: more than 4096 vCPUs"),
    ];
    let name = |kind: &str| kind.replace(' ', "-");
    let peers = cases.map(|(kind, ..)| host.peer(&name(kind), kind));
    for ((kind, state, text), peer) in cases.iter().zip(&peers) {
        let vm = name(kind);
        let took = host.wait_until(&vm, state);
        println!("{kind}: {state} {} ms after the last peer was started", took.as_millis());
        wait_for("its vCPUs", || host.nodes(&vm) == [json!(0), json!(1)]);
        let shown = host.vm(&vm);
        let problem = shown["problem"].as_str().unwrap_or_default();
        assert!(problem.contains(text), "{kind}: {problem:?} should say {text:?}");
        assert_eq!((&shown["pid"], &shown["described"]), (&json!(peer.pid()), &json!(false)), "{kind}");
        let (status, message) = host.post(&format!("{vm}/attach"), "");
        assert_eq!(status, 502, "{message}");
        assert!(message.contains(text), "{kind}: {message:?} should say {text:?}");
        let (status, message) = host.post(&format!("{vm}/move"), r#"{"vcpu": 0, "node": 1}"#);
        assert_eq!(status, 502, "{message}");
        assert!(message.contains("do not show APIC ids"), "{message}");
        pin(peer.vcpu(0), 1);
        wait_for("its move", || host.nodes(&vm) == [json!(1), json!(1)]);
    }
    assert_eq!(host.nodes("good"), [json!(0), json!(1)]);
    assert_eq!(host.post("good/attach", "").0, 200);
    assert_eq!(host.post("good/move", r#"{"vcpu": 0, "node": 1}"#).0, 200);
    assert_eq!(host.nodes("good"), [json!(1), json!(1)]);
    assert_eq!(host.vm("good")["pid"], good.pid());
    drop(peers);
    wait_for("them to be gone", || {
        let vms = ask(&host.daemon.socket, "GET", "/v1/vms", "").1;
        vms.as_array().is_some_and(|vms| vms.len() == 1)
    });
}

#[test]
fn one_that_is_stopped_is_named_observed_moved_and_published() {
    let host = Host::start();
    let peer = host.peer("web", "healthy");
    host.wait_until("web", "answers");
    assert_eq!(host.post("web/attach", "").0, 200);
    let published = |host: &Host| host.vm("web")["publication"]["publications"].as_u64().unwrap_or(0);
    wait_for("its vCPUs to be at home", || host.nodes("web") == [json!(0), json!(1)]);
    let before = published(&host);
    peer.signal(Signal::SIGSTOP);
    let took = host.wait_until("web", "stopped");
    println!("stopped: named after {} ms", took.as_millis());
    let problem = host.vm("web")["problem"].clone();
    let expected = format!(
        "the hypervisor (process {}) is stopped by a signal (SIGSTOP); SIGCONT resumes it",
        peer.pid()
    );
    assert_eq!(problem, expected);
    let (status, message) = host.post("web/detach", "");
    assert!(status == 502 && message.contains(&expected), "{message}");
    pin(peer.vcpu(1), 0);
    wait_for("its move to be seen", || host.nodes("web") == [json!(0), json!(0)]);
    wait_for("its guest to be published to", || published(&host) > before);
    assert_eq!(host.post("web/move", r#"{"vcpu": 1, "node": 1}"#).0, 200, "needs no hypervisor");
    assert_eq!(host.nodes("web"), [json!(0), json!(1)]);
    peer.signal(Signal::SIGCONT);
    println!("running again: named after {} ms", host.wait_until("web", "answers").as_millis());
    assert!(host.vm("web")["problem"].is_null());
    assert_eq!(host.post("web/detach", "").0, 200);
}

/// Nobody asks it anything but vnumad of its own accord.
#[test]
fn one_that_hangs_is_named_without_being_needed() {
    let host = Host::start();
    let peer = host.peer("web", "hangs");
    host.wait_until("web", "answers");
    wait_for("its vCPUs to be at home", || host.nodes("web") == [json!(0), json!(1)]);
    let descriptors = descriptors_of(&peer);
    peer.hang();
    let took = host.wait_until("web", "silent");
    println!("hung: named after {} ms", took.as_millis());
    // How long it took is printed, and nothing depends on it.
    let problem = host.vm("web")["problem"].as_str().unwrap_or_default().to_owned();
    assert!(problem.contains("QMP: `query-status` was not answered within 450 ms"), "{problem}");
    assert!(problem.contains("; its main loop is stuck in "), "{problem}");
    let (status, message) = host.post("web/attach", "");
    assert!(status == 502 && message.contains("`query-status` was not answered"), "{message}");
    assert_eq!(host.records(), 0);
    pin(peer.vcpu(1), 0);
    wait_for("its move to be seen", || host.nodes("web") == [json!(0), json!(0)]);
    peer.go_on();
    println!("goes on: named after {} ms", host.wait_until("web", "answers").as_millis());
    assert!(host.vm("web")["problem"].is_null());
    wait_for("no more of it to be kept than before", || descriptors_of(&peer) == descriptors);
}

/// How many pidfds of its process this one has.
fn descriptors_of(peer: &Peer) -> usize {
    let own = format!("Pid:\t{}", peer.pid());
    let files = fs::read_dir("/proc/self/fdinfo").expect("a folder").flatten();
    files
        .filter(|file| fs::read_to_string(file.path()).is_ok_and(|text| text.lines().any(|line| line == own)))
        .count()
}

#[test]
fn one_that_never_stops_talking_waits_itself_and_nobody_else_does() {
    let host = Host::start();
    let (good, peer) = (host.peer("good", "healthy"), host.peer("web", "floods"));
    for name in ["good", "web"] {
        host.wait_until(name, "answers");
    }
    peer.flood();
    let limited = || ask(&host.daemon.socket, "GET", "/v1/daemon", "").1["limited"].clone();
    let is_limited = |limited: &Value| {
        let all = limited.as_array().cloned().unwrap_or_default();
        all.iter().any(|one| one["work"] == "hypervisor-events" && one["party"] == "vm web")
    };
    wait_for("it to be limited", || is_limited(&limited()));
    let before = peer.flooded();
    for (cpu, nodes) in [(1, [1, 1]), (0, [0, 1]), (1, [1, 1])] {
        pin(good.vcpu(0), cpu);
        wait_for("the other's move", || host.nodes("good") == nodes.map(|node| json!(node)));
    }
    assert_eq!(host.post("good/attach", "").0, 200);
    std::thread::sleep(Duration::from_millis(500));
    // What its socket holds, and what is read of it while an answer is waited for. Who reads all reads a million.
    let flooded = peer.flooded() - before;
    assert!(flooded < 50_000, "{flooded} lines were read");
    assert!(limited().as_array().is_some_and(|all| all.iter().all(|one| one["party"] != "vm good")));
}

/// Named it is, but an attach of that moment succeeds.
#[test]
fn one_that_is_slow_for_a_moment_still_does_what_it_is_asked_for() {
    let host = Host::start();
    let peer = host.peer("web", "hangs");
    host.wait_until("web", "answers");
    peer.hang();
    host.wait_until("web", "silent");
    let goes_on = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        peer.go_on();
        peer
    });
    assert_eq!(host.post("web/attach", "").0, 200);
    assert_eq!(
        (host.vm("web")["hypervisor"].clone(), host.vm("web")["problem"].clone()),
        (json!("answers"), Value::Null)
    );
    drop(goes_on.join());
}

#[test]
fn a_monitor_in_use_is_waited_for() {
    let host = Host::start();
    let socket = host.socket("web");
    // The other client is there first: the name that vnumad looks for comes with the link.
    let hidden = host.directory.path().join("web.monitor");
    let peer = Peer::start("peer_process", "healthy", &hidden);
    let mut other = UnixStream::connect(&hidden).expect("connected");
    other.read_exact(&mut [0]).expect("greeted");
    std::os::unix::fs::symlink(&hidden, &socket).expect("linked");
    println!("in use: named after {} ms", host.wait_until("web", "silent").as_millis());
    wait_for("its vCPUs", || host.nodes("web") == [json!(0), json!(1)]);
    assert_eq!(host.vm("web")["pid"], peer.pid());
    drop(other);
    println!("free: connected after {} ms", host.wait_until("web", "answers").as_millis());
    let vm = host.vm("web");
    assert_eq!((&vm["described"], &vm["problem"]), (&json!(true), &Value::Null));
    assert_eq!(vm["nodes"].as_array().map(Vec::len), Some(2));
    wait_for("its vCPUs", || host.nodes("web") == [json!(0), json!(1)]);
}

/// A VM that has not answered goes by the name of its socket, and keeps none from one that is really called so.
#[test]
fn a_name_belongs_to_the_vm_that_says_it() {
    let host = Host::start();
    let _silent = host.peer("web", "nobody accepts");
    wait_for("its vCPUs", || host.nodes("web").len() == 2);
    let other = host.peer("other", "called web");
    wait_for("the one that is called so", || host.vm("web")["pid"] == other.pid());
    let second = host.peer("second", "called web");
    host.wait_until("second", "lost");
    let problem = host.vm("second")["problem"].as_str().unwrap_or_default().to_owned();
    assert!(problem.contains("its name `web` is taken by the VM at"), "{problem}");
    assert_eq!(host.vm("web")["pid"], other.pid());
    drop(second);
}

#[test]
fn one_that_dies_in_mid_attach_leaves_nothing() {
    let host = Host::start();
    let _good = host.peer("good", "healthy");
    host.wait_until("good", "answers");
    for command in ["getfd", "chardev-add", "device_add"] {
        let _peer = host.peer("web", &format!("dies-at {command}"));
        host.wait_until("web", "answers");
        let (status, message) = host.post("web/attach", "");
        assert_eq!(
            (status, message.as_str()),
            (409, "web: the VM ended before the request was done"),
            "{command}"
        );
        wait_for("it to be gone", || host.vm("web")["error"] == "not-found");
        // Removed by a thread that may wait for a disk.
        wait_for("its record to be gone", || host.records() == 0);
        // Another one in its place, which has no time to wait for.
        std::fs::remove_file(host.socket("web")).expect("a leftover");
        let next = host.peer("web", "healthy");
        wait_for("the next", || host.vm("web")["pid"] == next.pid());
        assert_eq!(host.post("web/attach", "").0, 200);
        assert_eq!(host.records(), 1);
        drop(next);
        wait_for("it to be gone", || host.vm("web")["error"] == "not-found");
        wait_for("its record to be gone", || host.records() == 0);
        std::fs::remove_file(host.socket("web")).expect("a leftover");
    }
    assert_eq!(host.post("good/attach", "").0, 200);
}

#[test]
fn an_attach_that_is_not_answered_is_undone_when_it_goes_on() {
    let host = Host::start();
    // What it was asked for meanwhile it does, or has not heard of when it closes the connection.
    let cases = ["hangs-at getfd", "hangs-at chardev-add", "hangs-at device_add", "cuts-at device_add"];
    for kind in cases {
        let (_, command) = kind.split_once(' ').expect("two words");
        let peer = host.peer("web", kind);
        host.wait_until("web", "answers");
        let started = Instant::now();
        let (status, message) = host.post("web/attach", "");
        assert!(started.elapsed() < HANG_LIMIT);
        let expected = format!(
            "web: QMP: `{command}` was not answered within 1000 ms; the attach is undone as soon as it answers"
        );
        assert_eq!((status, message), (502, expected));
        println!("{kind}: refused after {} ms", started.elapsed().as_millis());
        host.wait_until("web", "silent");
        assert_eq!((host.vm("web")["channel"].clone(), host.records()), (json!("none"), 0));
        peer.go_on();
        host.wait_until("web", "answers");
        let undone = |commands: &[String]| {
            let count = |name: &str| commands.iter().filter(|command| *command == name).count();
            count("getfd") == count("closefd") + count("chardev-add")
                && count("chardev-add") == count("chardev-remove")
                && count("device_add") == count("device_del")
        };
        wait_for("it to be undone", || !peer.commands().is_empty() && undone(&peer.commands()));
        wait_for("it to be shown", || host.vm("web")["channel"] == "none");
        assert_eq!(host.post("web/attach", "").0, 200, "{:?}", peer.commands());
        assert_eq!(host.post("web/detach", "").0, 200);
        drop(peer);
        wait_for("it to be gone", || host.vm("web")["error"] == "not-found");
        for end in ["sock", "log", "go"] {
            std::fs::remove_file(host.socket("web").with_extension(end)).expect("removed");
        }
    }
}

/// Its credentials are those of its maker: neither that process nor the one that answers is taken for the VM.
#[test]
fn a_socket_that_was_handed_over_makes_nobody_a_vm() {
    let host = Host::start();
    let listener = std::os::unix::net::UnixListener::bind(host.socket("web")).expect("bound");
    // Nobody accepts yet, and this process has no vCPUs.
    host.wait_until("web", "silent");
    let vm = host.vm("web");
    assert_eq!((&vm["pid"], &vm["vcpus"]), (&Value::Null, &json!([])));
    let peer = Peer::start_at("peer_process", "healthy", &host.socket("web"), listener.into());
    host.wait_until("web", "lost");
    let vm = host.vm("web");
    assert_eq!((&vm["pid"], &vm["vcpus"]), (&Value::Null, &json!([])));
    let problem = vm["problem"].as_str().unwrap_or_default();
    let expected = format!(
        "thread {} given for vCPU 0 does not belong to the VM's process {}; refused",
        peer.vcpu(0),
        std::process::id()
    );
    assert!(problem.contains(&expected), "{problem:?} should say {expected:?}");
}
