//! A peer that speaks QMP badly, slowly, endlessly, or of threads that are not its own.
//!
//! The peer is a thread of the test, so the process behind the socket is the test's own.

use proptest::prelude::*;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{fs::symlink, net::UnixListener, net::UnixStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use vnuma_hypervisor::{Plugged, QmpBackend, VmBackend, VmConnection, VmError, VmEvent, roll_back};
use vnuma_model::{RunState, VmHandle};

/// Whatever a peer does, no call takes this long.
const HANG: Duration = Duration::from_secs(600);
/// For a command of a peer that answers, on a slow machine, too.
const PATIENT: Duration = Duration::from_secs(60);
/// For a command of one that does not answer.
const SHORT: Duration = Duration::from_secs(2);

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

struct Peer {
    dir: TempDir,
    /// For a command.
    limit: Duration,
}

/// Asks again while the answer does not come in time.
fn patiently<T>(mut call: impl FnMut() -> Result<T, VmError>) -> T {
    let end = Instant::now() + HANG;
    loop {
        match call() {
            Err(VmError::NoGreeting { .. } | VmError::Timeout { .. }) if Instant::now() < end => {}
            done => return done.unwrap(),
        }
    }
}

impl Peer {
    /// Serves one connection with `serve`.
    fn start(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vm.sock")).unwrap();
        thread::spawn(move || {
            if let Ok((stream, _)) = listener.accept() {
                serve(stream);
            }
        });
        Self { dir, limit: PATIENT }
    }

    /// Greets, and answers each command with the line that `answer` makes for it, if it makes one.
    fn answering(mut answer: impl FnMut(&str, &Value) -> String + Send + 'static) -> Self {
        Self::start(move |mut stream| {
            let commands = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut say = |line: String| writeln!(stream, "{line}").is_ok();
            let mut open = say(GREETING.to_owned());
            for command in commands.map_while(Result::ok) {
                let command: Value = serde_json::from_str(&command).unwrap();
                let line = match command["execute"].as_str().unwrap() {
                    "qmp_capabilities" => json!({"return": {}, "id": command["id"]}).to_string(),
                    name => answer(name, &command),
                };
                open = open && (line.is_empty() || say(line));
                if !open {
                    break;
                }
            }
        })
    }

    fn handle(&self) -> VmHandle {
        QmpBackend::handle(&self.dir.path().join("vm.sock")).unwrap()
    }

    fn connect(&self) -> Result<Box<dyn VmConnection>, VmError> {
        let began = Instant::now();
        let connection = QmpBackend::default().with_limit(self.limit).connect(&self.handle());
        let connection = connection.and_then(|mut vm| vm.greet().map(|()| vm));
        assert!(began.elapsed() < HANG, "connecting took {:?}", began.elapsed());
        connection
    }

    /// With a limit that ends soon, but for the greeting.
    fn connect_impatiently(&self) -> Box<dyn VmConnection> {
        let mut vm = QmpBackend::default().with_limit(SHORT).connect(&self.handle()).unwrap();
        patiently(|| vm.greet());
        vm
    }

    /// What becomes of a description.
    fn describe(&self) -> Result<String, VmError> {
        let mut vm = self.connect()?;
        let began = Instant::now();
        let description = vm.describe();
        assert!(began.elapsed() < HANG, "describing took {:?}", began.elapsed());
        description.map(|description| format!("{description:?}"))
    }
}

fn own_pid() -> i64 {
    i64::from(std::process::id())
}

/// A VM with these vCPUs, given as thread and APIC id, whose other answers are as they should be.
fn vm_of(cpus: &[(Value, Value)]) -> Peer {
    let cpus = cpus.to_vec();
    Peer::answering(move |name, command| {
        let answer = match name {
            "query-name" => json!({"name": "good"}),
            "query-status" => json!({"status": "running", "running": true}),
            "query-cpus-fast" => cpus
                .iter()
                .enumerate()
                .map(|(i, (tid, _))| json!({"cpu-index": i, "qom-path": i.to_string(), "thread-id": tid, "new": 1}))
                .collect(),
            "qom-get" => {
                let cpu: usize = command["arguments"]["path"].as_str().unwrap().parse().unwrap();
                cpus[cpu].1.clone()
            }
            "query-hotpluggable-cpus" | "qom-list" => json!([]),
            "human-monitor-command" => json!("0 nodes\r\n"),
            other => panic!("{other}"),
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    })
}

#[test]
fn an_honest_peer_is_believed() {
    let peer = vm_of(&[(json!(own_pid()), json!(3))]);
    let description = peer.connect().unwrap().describe().unwrap();
    assert_eq!((description.name.as_str(), i64::from(description.pid)), ("good", own_pid()));
    assert_eq!((description.vcpus[0].apic_id, i64::from(description.vcpus[0].tid)), (3, own_pid()));
}

/// A VM of one vCPU and so many devices with an id, all behind the first of them, which is a bridge to bus 7, and another one without
/// an id on the root bus.
fn vm_with_devices(count: usize) -> Peer {
    Peer::answering(move |name, command| {
        let arguments = &command["arguments"];
        let property = arguments["property"].as_str().unwrap_or_default();
        let devices = || (0..count).map(|i| format!("device{i}"));
        let passed = |name: &str| json!({"name": name, "type": "child<vfio-pci>"});
        let answer = match name {
            "query-name" => json!({}),
            "query-status" => json!({"status": "running"}),
            "query-cpus-fast" | "query-hotpluggable-cpus" => json!([]),
            "human-monitor-command" => json!("0 nodes"),
            "qom-list" if arguments["path"] == "/machine/peripheral" => {
                devices().map(|name| passed(&name)).collect()
            }
            "qom-list" => {
                json!([passed("device[0]"), {"name": "device[1]", "type": "child<virtio-net-pci>"}])
            }
            "query-pci" => {
                let behind: Vec<_> = devices()
                    .enumerate()
                    .map(|(i, name)| json!({"bus": 7, "slot": i, "function": 0, "qdev_id": name}))
                    .collect();
                json!([{"bus": 0, "devices": [{"bus": 0, "slot": 1, "function": 0, "qdev_id": "rp",
                    "pci_bridge": {"bus": {"secondary": 7}, "devices": behind}}]}])
            }
            "qom-get" => match property {
                "host" if arguments["path"].as_str().unwrap().ends_with("[0]") => json!("../../0000:00:00.0"),
                "host" => json!("0000:81:00.0"),
                "sysfsdev" => json!("/sys/bus/pci/devices/0000:82:00.0"),
                "addr" => json!(0x18),
                "parent_bus" => json!("/machine/q35/pcihost/pcie.0"),
                other => panic!("{other}"),
            },
            other => panic!("{other}"),
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    })
}

#[test]
fn devices_that_are_passed_through_are_found_with_their_addresses_in_the_guest() {
    let mut vm = vm_with_devices(2).connect().unwrap();
    let devices = vm.describe().unwrap().devices;
    let shown: Vec<_> =
        devices.iter().map(|device| (device.host.as_str(), device.guest.unwrap().to_string())).collect();
    let expected = [
        ("0000:81:00.0", "0000:07:00.0"),
        ("0000:81:00.0", "0000:07:01.0"),
        ("0000:82:00.0", "0000:00:03.0"),
    ];
    assert_eq!(shown, expected.map(|(host, guest)| (host, guest.to_owned())));
}

#[test]
fn devices_without_end_are_refused() {
    let error = vm_with_devices(256).describe().unwrap_err().to_string();
    assert!(
        error.contains("qom-list") && error.contains("257") && error.contains("more than 256"),
        "{error}"
    );
}

#[test]
fn a_state_that_is_none_is_refused() {
    for (state, good) in
        [("internal-error", true), ("", false), ("run\u{1b}[2J", false), (&"a".repeat(33), false)]
    {
        let state = state.to_owned();
        let peer = Peer::answering(move |name, command| {
            let answer = match name {
                "query-name" => json!({}),
                "query-status" => json!({"status": state}),
                "query-cpus-fast" | "query-hotpluggable-cpus" | "qom-list" => json!([]),
                _ => json!("0 nodes"),
            };
            json!({"return": answer, "id": command["id"]}).to_string()
        });
        match peer.connect().unwrap().describe() {
            Ok(description) => assert!(good && description.run_state == RunState::InternalError),
            Err(error) => assert!(!good && error.to_string().contains("query-status"), "{error}"),
        }
    }
}

/// What a guest does about its vCPUs.
#[derive(Clone, Copy, PartialEq)]
enum Hotplug {
    Takes,
    Refuses,
}

/// A QEMU with vCPUs 0 and 1 and a spare slot of guest node 1, APIC id 2. What is done is told.
fn hotplug_peer(guest: Hotplug) -> (Peer, std::sync::mpsc::Receiver<String>) {
    let (tell, told) = std::sync::mpsc::channel();
    let mut cpus: Vec<(i64, String)> = vec![(0, "/m/cpu0".into()), (1, "/m/cpu1".into())];
    let mut reports = [(0, 0); 3];
    let peer = Peer::answering(move |name, command| {
        let arguments = &command["arguments"];
        let answer = match name {
            "query-cpus-fast" => cpus
                .iter()
                .map(|(i, p)| json!({"cpu-index": i, "qom-path": p, "thread-id": own_pid()}))
                .collect(),
            "query-hotpluggable-cpus" => json!([
                {"type": "t", "vcpus-count": 1, "props": {"socket-id": 2, "node-id": 1}},
                {"type": "t", "vcpus-count": 1, "props": {"socket-id": 1, "node-id": 1}, "qom-path": "/m/cpu1"},
            ]),
            "query-acpi-ospm-status" => {
                let slot = |(i, &(source, status)): (usize, &(i64, i64))| json!({"slot": i.to_string(), "slot-type": "CPU", "source": source, "status": status});
                reports.iter().enumerate().map(slot).collect()
            }
            "qom-get" => {
                let path = arguments["path"].as_str().unwrap();
                json!(cpus.iter().find(|(_, p)| p == path).unwrap().0)
            }
            "device_add" => {
                assert_eq!(
                    *arguments,
                    json!({"driver": "t", "id": "vnuma-vcpu-2", "node-id": 1, "socket-id": 2})
                );
                cpus.push((2, "/machine/peripheral/vnuma-vcpu-2".into()));
                reports[2] = (1, 0);
                tell.send("add".to_owned()).unwrap();
                json!({})
            }
            "device_del" => {
                let path = arguments["id"].as_str().unwrap();
                if guest == Hotplug::Refuses && path == "/m/cpu1" {
                    reports[1] = (3, 0x82);
                } else {
                    cpus.retain(|(_, p)| p != path);
                }
                tell.send(format!("del {path}")).unwrap();
                json!({})
            }
            other => panic!("{other}"),
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    });
    (peer, told)
}

/// Replugs a vCPU as the daemon does; `confine` gets the threads of the old one and the new one.
fn replug(
    vm: &mut dyn VmConnection,
    vcpu: u32,
    node: u32,
    confine: impl FnOnce(i32, i32) -> Result<(), VmError>,
) -> Result<Plugged, VmError> {
    let old = vm.removable_vcpu(vcpu)?;
    let new = vm.plug_vcpu(node)?;
    let moved = confine(old.tid, new.tid)
        .and_then(|()| vm.await_guest(new.apic_id))
        .and_then(|()| vm.unplug_vcpu(vcpu));
    moved.map(|()| new).map_err(|cause| roll_back(vm, new, cause))
}

#[test]
fn a_vcpu_is_replugged_or_nothing_is_changed() {
    let confined = |peer: &Peer, vcpu, node| {
        let mut threads = None;
        let done = replug(&mut *peer.connect().unwrap(), vcpu, node, |old, new| {
            threads = Some((old, new));
            Ok(())
        });
        (done, threads)
    };
    let new = "/machine/peripheral/vnuma-vcpu-2";
    let tid = own_pid() as i32;

    let (peer, told) = hotplug_peer(Hotplug::Takes);
    let (done, threads) = confined(&peer, 1, 1);
    assert_eq!((done.unwrap(), threads), (Plugged { apic_id: 2, tid }, Some((tid, tid))));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), ["add", "del /m/cpu1"]);

    let (peer, told) = hotplug_peer(Hotplug::Refuses);
    let error = confined(&peer, 1, 1).0.unwrap_err();
    assert!(matches!(error, VmError::UnplugRefused { vcpu: 1, status: 0x82, .. }), "{error}");
    assert_eq!(
        told.try_iter().collect::<Vec<_>>(),
        ["add".into(), "del /m/cpu1".into(), format!("del {new}")]
    );

    // What cannot be is refused before anything is done.
    for (vcpu, node, reason) in
        [(0, 1, "first vCPU"), (9, 1, "APIC id 9"), (1, 0, "guest node 0 has no spare slot")]
    {
        let (peer, told) = hotplug_peer(Hotplug::Takes);
        let error = confined(&peer, vcpu, node).0.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        assert_eq!(told.try_iter().count(), 0);
    }

    // Nor is the old one taken away when the new one cannot be confined.
    let (peer, told) = hotplug_peer(Hotplug::Takes);
    let refusal = || VmError::ReplugFailed { vm: "vm".into(), vcpu: 1, reason: "no".into() };
    let error = replug(&mut *peer.connect().unwrap(), 1, 1, |_, _| Err(refusal())).unwrap_err();
    assert!(matches!(error, VmError::ReplugFailed { .. }), "{error}");
    assert_eq!(told.try_iter().collect::<Vec<_>>(), ["add".into(), format!("del {new}")]);
}

#[test]
fn the_first_vcpu_is_not_unplugged() {
    let (peer, told) = hotplug_peer(Hotplug::Takes);
    let error = peer.connect().unwrap().unplug_vcpu(0).unwrap_err();
    assert!(matches!(error, VmError::BootVcpu { .. }), "{error}");
    assert_eq!(told.try_iter().count(), 0);
}

#[test]
fn only_a_vcpu_that_was_plugged_here_is_waited_for() {
    let (peer, _told) = hotplug_peer(Hotplug::Takes);
    let mut vm = peer.connect().unwrap();
    assert!(matches!(vm.await_guest(1), Err(VmError::NoVcpu { vcpu: 1, .. })));
    let new = vm.plug_vcpu(1).unwrap();
    vm.await_guest(new.apic_id).unwrap();
    assert!(matches!(vm.await_guest(new.apic_id), Err(VmError::NoVcpu { .. })), "it has been taken");
}

#[test]
fn threads_of_others_are_refused() {
    for foreign in [1, 0, -1, i64::MAX, i64::from(u32::MAX) + 2] {
        let error = vm_of(&[(json!(foreign), json!(0))]).describe().unwrap_err();
        assert!(
            matches!(error, VmError::ForeignThread { tid, vcpu: 0, .. } if tid == foreign),
            "{foreign}: {error}"
        );
    }
}

#[test]
fn ids_that_cannot_be_are_named() {
    let me = || json!(own_pid());
    for (cpus, message) in [
        (vec![(me(), json!("x"))], "vm: `qom-get`: apic-id is `\\\"x\\\"`: not an APIC id"),
        (vec![(me(), json!(-1))], "vm: `qom-get`: apic-id is `-1`: not an APIC id"),
        (vec![(me(), json!(0)), (me(), json!(1))], "`query-cpus-fast`: thread-id is"),
    ] {
        let error = vm_of(&cpus).describe().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let other = thread::spawn(move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        let _ = stopped.recv();
    });
    let error = vm_of(&[(me(), json!(7)), (json!(told.recv().unwrap()), json!(7))]).describe().unwrap_err();
    assert_eq!(error.to_string(), "vm: `qom-get`: apic-id is `7`: two vCPUs have it");
    drop(stop);
    other.join().unwrap();
}

#[test]
fn answers_of_a_wrong_shape_are_named_and_survived() {
    let mut calls = 0;
    let peer = Peer::answering(move |_, command| {
        calls += 1;
        let answer = if calls == 1 { json!({"name": ["x"]}) } else { json!([]) };
        json!({"return": answer, "id": command["id"]}).to_string()
    });
    let mut vm = peer.connect().unwrap();
    let error = vm.describe().unwrap_err();
    let expected = "vm: `query-name`: the answer is not usable: invalid type: sequence, expected a string";
    assert_eq!(error.to_string(), expected);
    assert!(!vm.channel_attached().unwrap(), "the connection is still of use");
}

#[test]
fn a_name_that_is_none_is_not_used() {
    let peer = Peer::answering(|name, command| {
        let answer = match name {
            "query-name" => json!({"name": "../../etc\u{1b}[2J"}),
            "query-status" => json!({"status": "running"}),
            "query-cpus-fast" | "query-hotpluggable-cpus" | "qom-list" => json!([]),
            _ => json!("0 nodes"),
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    });
    let mut vm = peer.connect().unwrap();
    assert_eq!(vm.describe().unwrap().name, "vm");
    let complaints = vm.complaints();
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(complaints[0].starts_with("using the name of the socket: ") && !complaints[0].contains('\u{1b}'));
    // How many are kept does not depend on the peer.
    (0..100).for_each(|_| drop(vm.describe().unwrap()));
    assert_eq!([vm.complaints().len(), vm.complaints().len()], [16, 0]);
}

#[test]
fn what_is_no_qmp_is_said_to_be_none() {
    for greeting in ["SSH-2.0-OpenSSH_9.2\n", "{}\n", "{\"QMP\": 1}\n", "\n", "\u{0}\n"] {
        let peer = Peer::start(move |mut stream| stream.write_all(greeting.as_bytes()).unwrap());
        let error = peer.connect().err().unwrap();
        assert!(matches!(&error, VmError::Protocol { command, .. } if command == "greeting"), "{error}");
    }
    let peer = Peer::start(drop);
    assert!(matches!(peer.connect().err().unwrap(), VmError::Disconnected { .. }));
    let peer = Peer::answering(|_, _| "garbage".to_owned());
    let error = peer.describe().unwrap_err();
    assert!(error.to_string().ends_with("in `garbage`"), "{error}");
}

#[test]
fn silence_and_single_bytes_end_in_time() {
    let mut peer = Peer::start(|stream| {
        thread::sleep(HANG);
        drop(stream);
    });
    peer.limit = Duration::from_secs(1);
    assert!(matches!(peer.connect().err().unwrap(), VmError::NoGreeting { limit_ms: 800, .. }));
    // Each byte comes in time, the line does not.
    let mut peer = Peer::start(|mut stream| {
        let began = Instant::now();
        while began.elapsed() < HANG && stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    peer.limit = SHORT;
    assert!(matches!(peer.connect().err().unwrap(), VmError::NoGreeting { .. }));
    let peer = Peer::answering(|_, _| String::new());
    let error = peer.connect_impatiently().describe().unwrap_err();
    assert!(matches!(&error, VmError::Timeout { command, .. } if command == "query-name"), "{error}");
}

/// On a host whose QEMUs wait long for a CPU the user lets them.
#[test]
fn a_peer_that_is_slow_is_waited_for_as_the_user_says() {
    let peer = Peer::answering(|_, command| {
        thread::sleep(Duration::from_millis(1500));
        json!({"return": [], "id": command["id"]}).to_string()
    });
    let mut vm = QmpBackend::default().with_limit(HANG).connect(&peer.handle()).unwrap();
    vm.greet().unwrap();
    assert!(!vm.channel_attached().unwrap());
}

#[test]
fn what_comes_late_is_taken_when_it_is_waited_for_again() {
    let (go, told) = std::sync::mpsc::channel::<()>();
    let peer = Peer::start(move |mut stream| {
        let commands = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        told.recv().unwrap();
        writeln!(stream, "{GREETING}").unwrap();
        // The first question is answered when it has been asked again, others as QEMU does.
        let mut first = None;
        for (number, command) in commands.enumerate() {
            let command: Value = serde_json::from_str(&command).unwrap();
            if number == 0 {
                first = Some(command["id"].clone());
                continue;
            }
            if let Some(id) = first.take() {
                writeln!(stream, "{}", json!({"return": {}, "id": id})).unwrap();
            }
            let refusal = json!({"desc": "Capabilities negotiation is already complete, command ignored"});
            let answer = match command["execute"].as_str() {
                Some("qmp_capabilities") => json!({"error": refusal, "id": command["id"]}),
                _ => json!({"return": [], "id": command["id"]}),
            };
            writeln!(stream, "{answer}").unwrap();
        }
    });
    let mut vm = QmpBackend::default().with_limit(SHORT).connect(&peer.handle()).unwrap();
    assert!(matches!(vm.greet().unwrap_err(), VmError::NoGreeting { .. }));
    go.send(()).unwrap();
    let greeted =
        std::iter::repeat_with(|| vm.greet()).find(|end| !matches!(end, Err(VmError::NoGreeting { .. })));
    assert!(matches!(greeted, Some(Err(VmError::Timeout { .. }))), "it was greeted, and asked");
    patiently(|| vm.greet());
    assert!(!patiently(|| vm.channel_attached()));
}

#[test]
fn vcpus_are_seen_without_a_word() {
    let peer = Peer::start(|_| thread::sleep(HANG));
    let vm = QmpBackend::default().connect(&peer.handle()).unwrap();
    assert_eq!(vm.observe_vcpus(), None, "this process has no vCPUs yet");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let body = move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        let _ = stopped.recv();
    };
    let thread = thread::Builder::new().name("CPU 3/KVM".to_owned()).spawn(body).unwrap();
    let tid = told.recv().unwrap();
    let observed = vm.observe_vcpus().unwrap();
    let seen: Vec<_> = observed.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.tid, vcpu.boot_node)).collect();
    assert_eq!((seen, observed.certain), (vec![(3, tid, None)], false));
    drop(stop);
    thread.join().unwrap();
}

#[test]
fn slow_answers_to_many_commands_end_in_time() {
    let backends: Vec<Value> = (0..200).map(|i| json!({"id": i.to_string(), "size": 1 << 20})).collect();
    let peer = Peer::answering(move |name, command| {
        let answer = match name {
            "query-name" => json!({}),
            "query-status" => json!({"status": "running"}),
            "human-monitor-command" => json!("node 0 size: 200 MB"),
            "query-memdev" => json!(backends),
            "query-cpus-fast" => json!([]),
            // Asked for each backend.
            _ => {
                thread::sleep(Duration::from_millis(900));
                json!([])
            }
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    });
    let error = QmpBackend::default().connect(&peer.handle()).and_then(|mut vm| {
        patiently(|| vm.greet());
        vm.describe()
    });
    let error = error.unwrap_err();
    assert!(matches!(error, VmError::Timeout { .. }), "{error}");
}

/// A VM with one guest node, and this answer to `query-memory-devices`.
fn with_memory_devices(devices: Value) -> Result<String, VmError> {
    let peer = Peer::answering(move |name, command| {
        let answer = match name {
            "query-name" => json!({}),
            "query-status" => json!({"status": "running"}),
            "human-monitor-command" => json!("node 0 size: 200 MB"),
            "query-memory-devices" => devices.clone(),
            _ => json!([]),
        };
        json!({"return": answer, "id": command["id"]}).to_string()
    });
    peer.describe()
}

#[test]
fn memory_devices_that_make_no_sense_are_refused() {
    let good = json!({"id": "a", "node": 0, "size": 0, "requested-size": 0, "max-size": 4096, "block-size": 4096,
                      "memdev": "/objects/m"});
    let with = |field: &str, value: Value| {
        let mut data = good.clone();
        data[field] = value;
        with_memory_devices(json!([{"type": "virtio-mem", "data": data}]))
    };
    for (field, value, reason) in [
        ("node", json!(-1), "not a node number"),
        ("node", json!("a"), "query-memory-devices"),
        ("size", json!(8192), "above max-size, 4096"),
        ("requested-size", json!(4097), "above max-size, 4096"),
        ("block-size", json!(0), "not a power of two"),
        ("block-size", json!(3), "not a power of two"),
        ("max-size", json!(-5), "query-memory-devices"),
        ("memdev", json!("x".repeat(5000)), "more than 1024 bytes"),
    ] {
        let error = with(field, value).unwrap_err().to_string();
        assert!(error.contains(reason) && error.len() < 1000, "{field}: {error}");
    }
    // What would lead out of its place in QEMU's tree is no id.
    for id in ["../machine", "a/b", "", "a b"] {
        let described = with("id", json!(id)).unwrap();
        assert!(described.contains("id: None, guest_node: 0"), "{id}: {described}");
    }
    assert!(with("id", json!("vmem-0")).unwrap().contains("id: Some(\"vmem-0\")"));
    let other = with_memory_devices(json!([{"type": "dimm", "data": {"id": 7}}, {"type": "new"}])).unwrap();
    assert!(other.contains("memory_devices: []"), "{other}");
    let twice = json!({"type": "virtio-mem", "data": good});
    assert!(
        with_memory_devices(json!([twice, twice])).unwrap_err().to_string().contains("another device has it")
    );
    assert!(
        with_memory_devices(json!(vec![twice; 1025])).unwrap_err().to_string().contains("more than 1024")
    );
}

#[test]
fn endless_lines_and_endless_events_end() {
    let peer = Peer::start(|mut stream| {
        let piece = [b'['; 65_536];
        while stream.write_all(&piece).is_ok() {}
    });
    let error = peer.connect().err().unwrap();
    assert!(error.to_string().contains("a line of more than 4194304 bytes"), "{error}");
    let mut peer = Peer::start(|mut stream| {
        let mut lines = format!("{GREETING}\n{{\"return\": {{}}, \"id\": 1}}\n");
        while stream.write_all(lines.as_bytes()).is_ok() {
            lines = "{\"event\": \"STOP\", \"data\": {}}\n{\"event\": \"NEW\"}\n".repeat(100);
        }
    });
    peer.limit = 2 * SHORT;
    let mut vm = peer.connect().unwrap();
    let error = vm.describe().unwrap_err();
    assert!(matches!(error, VmError::Timeout { .. }), "{error}");
    assert_eq!(vm.poll_event(Duration::ZERO).unwrap(), Some(VmEvent::Stopped));
}

#[test]
fn an_event_that_comes_again_and_again_is_kept_once() {
    let peer = Peer::answering(|_, command| {
        let events = "{\"event\": \"STOP\"}\n".repeat(1000);
        format!("{events}{{\"event\": \"RESUME\"}}\n{}", json!({"return": [], "id": command["id"]}))
    });
    let mut vm = peer.connect().unwrap();
    assert!(!vm.channel_attached().unwrap());
    let events: Vec<_> = std::iter::from_fn(|| vm.poll_event(Duration::from_millis(100)).unwrap()).collect();
    assert_eq!(events, [VmEvent::Stopped, VmEvent::Resumed]);
    assert_eq!([vm.overheard(), vm.overheard()], [999, 0]);
}

/// The socket announces nothing once they have been received.
#[test]
fn an_event_behind_others_that_mean_nothing_is_found() {
    let peer = Peer::answering(|_, command| {
        let answer = json!({"return": [], "id": command["id"]});
        format!("{answer}\n{}{{\"event\": \"RESET\"}}", "{\"event\": \"NEW\"}\n".repeat(300))
    });
    let mut vm = peer.connect().unwrap();
    assert!(!vm.channel_attached().unwrap());
    // All of it has come.
    thread::sleep(Duration::from_millis(200));
    let first = vm.poll_event(Duration::ZERO).unwrap();
    assert_eq!((first, vm.overheard()), (None, 256), "there may be more");
    assert_eq!((vm.poll_event(Duration::ZERO).unwrap(), vm.overheard()), (Some(VmEvent::Rebooted), 44));
    assert_eq!((vm.poll_event(Duration::ZERO).unwrap(), vm.overheard()), (None, 0));
}

/// What a peer can have read while it does not answer.
#[test]
fn a_peer_that_talks_instead_of_answering_waits_itself() {
    let (say, said) = std::sync::mpsc::channel();
    let mut peer = Peer::start(move |mut stream| {
        let mut lines = format!("{GREETING}\n{{\"return\": {{}}, \"id\": 1}}\n");
        let mut sent = 0_u64;
        while stream.write_all(lines.as_bytes()).is_ok() {
            lines = "{\"event\": \"NEW\", \"data\": {}}\n{\"return\": 1, \"id\": 77}\n".repeat(10);
            sent += 20;
        }
        say.send(sent).unwrap();
    });
    peer.limit = SHORT;
    let mut vm = peer.connect().unwrap();
    assert!(matches!(vm.describe().unwrap_err(), VmError::Timeout { .. }));
    drop(vm);
    let sent = said.recv_timeout(HANG).unwrap();
    // 1000 a second and 4000 at once, and what the socket holds.
    assert!(sent < 30_000, "{sent}");
}

#[test]
fn answers_to_other_commands_are_not_taken() {
    let peer = Peer::answering(|_, command| {
        let own = json!({"return": [], "id": command["id"]});
        format!("{}\n{}\n{own}", json!({"return": [{"name": 1}], "id": 99}), json!({"return": "no id"}))
    });
    assert!(!peer.connect().unwrap().channel_attached().unwrap());
}

#[test]
fn a_listener_that_nobody_serves_is_not_waited_for() {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
    use std::os::fd::AsRawFd;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.sock");
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let error = QmpBackend::default().connect(&QmpBackend::handle(&path).unwrap()).err().unwrap();
    assert!(error.to_string().contains("others wait for this monitor already"), "{error}");
}

#[test]
fn a_scan_finds_sockets_with_usable_names() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let names = ["b.sock", "a.sock", "-bad.sock", "noext", "x y.sock"];
    let _listeners: Vec<_> = names.iter().map(|name| UnixListener::bind(path(name)).unwrap()).collect();
    let single = elsewhere.path().join("single.monitor");
    let same_name = elsewhere.path().join("a.monitor");
    let _others = [&single, &same_name].map(|path| UnixListener::bind(path).unwrap());
    fs::write(path("file.sock"), "").unwrap();
    symlink(path("nowhere"), path("dangling.sock")).unwrap();
    symlink(&single, path("link.sock")).unwrap();
    let mut backend = QmpBackend::new(
        Some(dir.path().to_owned()),
        vec![single.clone(), same_name.clone(), path("gone.sock")],
    );
    let candidate = |name: &str, socket: &Path| (name.to_owned(), QmpBackend::handle(socket).unwrap());
    let expected = [
        candidate("a", &same_name),
        candidate("b", &path("b.sock")),
        candidate("link", &path("link.sock")),
        candidate("single", &single),
    ];
    let mut scan = || {
        let found = backend.scan().unwrap();
        found.into_iter().map(|candidate| (candidate.name, candidate.handle)).collect::<Vec<_>>()
    };
    assert_eq!(scan(), expected);
    assert_eq!(scan(), expected);
    let mut absent = QmpBackend::new(Some(path("absent")), Vec::new());
    assert_eq!(absent.scan().unwrap(), []);
    let file = path("file.sock");
    let mut unreadable = QmpBackend::new(Some(file.clone()), Vec::new());
    let error = unreadable.scan().unwrap_err().to_string();
    assert!(error.starts_with(&file.display().to_string()), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_answer_is_survived(answers in prop::collection::vec(any_answer(), 0..6), raw in any::<bool>()) {
        let mut answers = answers.into_iter();
        let peer = Peer::start(move |mut stream| {
            let commands = BufReader::new(stream.try_clone().unwrap()).lines();
            let _ = writeln!(stream, "{GREETING}\n{}", json!({"return": {}, "id": 1}));
            // The first command is the one just answered.
            for command in commands.map_while(Result::ok).skip(1) {
                let command: Value = serde_json::from_str(&command).unwrap();
                let Some(answer) = answers.next() else { return };
                let line = if raw { answer.to_string() } else { json!({"return": answer, "id": command["id"]}).to_string() };
                if writeln!(stream, "{line}").is_err() || raw {
                    return;
                }
            }
        });
        if let Ok(mut vm) = peer.connect() {
            let _ = vm.describe();
            let _ = vm.channel_attached();
        }
    }
}

fn any_answer() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        Just(json!(own_pid())),
        ".{0,20}".prop_map(Value::from),
        Just(json!("node 0 size: 1 MB\nnode 0 plugged: 2 MB\n")),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let key = prop::sample::select(vec![
            "cpu-index",
            "qom-path",
            "thread-id",
            "props",
            "node-id",
            "name",
            "type",
            "id",
            "size",
            "policy",
            "host-nodes",
            "error",
            "event",
            "return",
            "data",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A peer that answers `migrate` only when it is asked more, and with `answers` that as well, first thing then.
fn slow_migration(answers: bool, refused: bool, status: &'static str) -> Peer {
    let mut begun = String::new();
    Peer::answering(move |name, command| {
        let id = &command["id"];
        match name {
            "migrate" => {
                begun = match refused {
                    true => format!("{}\n", json!({"error": {"desc": "no room"}, "id": id})),
                    false => format!("{}\n", json!({"return": {}, "id": id})),
                };
                String::new()
            }
            "query-migrate" if !answers => String::new(),
            "query-migrate" => {
                std::mem::take(&mut begun) + &json!({"return": {"status": status}, "id": id}).to_string()
            }
            _ => json!({"return": {}, "id": id}).to_string(),
        }
    })
}

#[test]
fn a_migration_whose_begin_is_answered_late_has_begun_or_was_refused() {
    let begin = |peer: Peer| peer.connect_impatiently().migrates().unwrap().migrate("tcp:b:1", false);
    begin(slow_migration(true, false, "active")).unwrap();
    // What QEMU says of an earlier migration does not hide that.
    let refused = begin(slow_migration(true, true, "completed"));
    assert!(
        matches!(&refused, Err(VmError::Refused { command, reason, .. }) if command == "migrate" && reason == "no room"),
        "{refused:?}"
    );
    let never = begin(slow_migration(false, false, "active"));
    assert!(
        matches!(&never, Err(error @ VmError::Timeout { command, .. }) if command == "migrate" && error.may_be_answered()),
        "{never:?}"
    );
}

#[test]
fn what_is_said_of_a_migration_is_checked() {
    for (answer, part) in [
        (json!({"status": "flying"}), "query-migrate`: status is `flying`"),
        (json!({"ram": {"remaining": -1}}), "ram.remaining is `-1`"),
        (json!({"status": 7}), "query-migrate"),
        (json!([]), "query-migrate"),
    ] {
        let peer =
            Peer::answering(move |_, command| json!({"return": answer, "id": command["id"]}).to_string());
        let error = peer.connect().unwrap().migrates().unwrap().progress().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
