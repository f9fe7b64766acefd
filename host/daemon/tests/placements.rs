//! Placements and reservations over the API: requests at once, VMs that come and go, a restart, a file that is broken.

mod common;

use common::{
    Daemon,
    host::large_host,
    http::ask,
    vms::{Process, describe},
    wait_for,
};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::symlink, path::Path, thread};
use vnuma_observe::devices::DESCRIPTORS;

fn start() -> Daemon {
    Daemon::start_with(None, |config| {
        large_host(&config.root);
        config.connections_per_user = 100;
    })
}

fn place(daemon: &Daemon, name: &str, vcpus: u32, devices: &[&str]) -> (u16, Value) {
    let body = json!({ "name": name, "vcpus": vcpus, "memory_bytes": 512 << 20, "devices": devices });
    ask(&daemon.socket, "POST", "/v1/placements", &body.to_string())
}

fn reservations(daemon: &Daemon) -> Vec<Value> {
    let (status, answer) = ask(&daemon.socket, "GET", "/v1/placements", "");
    assert_eq!(status, 200, "{answer}");
    answer.as_array().expect("an array").clone()
}

fn cpus(placement: &Value) -> Vec<u64> {
    let nodes = placement["guest_nodes"].as_array().expect("guest nodes").iter();
    let pins = nodes.flat_map(|node| node["vcpus"].as_array().expect("vCPUs"));
    pins.map(|pin| pin["cpu"].as_u64().expect("a CPU")).collect()
}

#[test]
fn fifty_requests_at_once_share_nothing() {
    let daemon = start();
    let answers: Vec<(u16, Value)> = thread::scope(|scope| {
        let ask = |number: u32| {
            let daemon = &daemon;
            scope.spawn(move || place(daemon, &format!("vm{number}"), 2, &[]))
        };
        let threads: Vec<_> = (0..50).map(ask).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let placed: Vec<&Value> =
        answers.iter().filter(|answer| answer.0 == 200).map(|answer| &answer.1["reservation"]).collect();
    let mut taken: Vec<u64> = placed.iter().flat_map(|one| cpus(&one["placement"])).collect();
    taken.sort_unstable();
    assert_eq!((placed.len(), taken), (16, (0..32).collect()), "each CPU once");
    for (status, answer) in answers.iter().filter(|answer| answer.0 != 200) {
        let message = answer["message"].as_str().expect("a message");
        assert_eq!((*status, &answer["error"]), (409, &json!("conflict")));
        assert!(message.starts_with("the host lacks 2 CPUs: 2 are needed, 0 are free"), "{message}");
    }
    assert_eq!(reservations(&daemon).len(), 16);
}

#[test]
fn a_reservation_becomes_its_vms_and_outlives_vnumad() {
    let mut daemon = start();
    let (status, answer) = place(&daemon, "a", 4, &["0000:80:00.0"]);
    assert_eq!(status, 200, "{answer}");
    let homes = |placement: &Value| {
        let nodes = placement["guest_nodes"].as_array().expect("guest nodes").iter();
        nodes.map(|node| node["home"].as_u64().expect("a home")).collect::<Vec<_>>()
    };
    let placement = &answer["reservation"]["placement"];
    assert_eq!((homes(placement), answer["explanation"]["rule"].as_str()), (vec![0, 1], Some("equations")));
    let waits = answer["reservation"]["waits_ms"].as_u64().expect("a time");
    assert_eq!(waits, 60_000);

    daemon.restart();
    let all = reservations(&daemon);
    assert_eq!((all.len(), &all[0]["placement"], &all[0]["pid"]), (1, placement, &Value::Null));

    let mut process = Process::start();
    daemon.add("a", describe("a", process.pid(), &[0, 1], &[process.pid()]));
    wait_for("its reservation to be held", || !reservations(&daemon)[0]["pid"].is_null());
    let (status, answer) = ask(&daemon.socket, "POST", "/v1/placements/a/release", "");
    assert_eq!(status, 409);
    let message = answer["message"].as_str().expect("a message");
    assert!(message.starts_with("reservation 0 is held by the VM a, PID "), "{message}");
    let (status, answer) = place(&daemon, "a", 1, &[]);
    assert_eq!((status, &answer["message"]), (409, &json!("name a: a VM of this name runs")));

    process.kill();
    daemon.backend.end("a");
    wait_for("its reservation to end with it", || reservations(&daemon).is_empty());
}

#[test]
fn a_process_that_has_got_the_number_of_a_vm_holds_no_reservation() {
    let daemon = start();
    assert_eq!(place(&daemon, "a", 4, &[]).0, 200);
    let mut process = Process::start();
    let directory = daemon.config.root.join(format!("proc/{}", process.pid()));
    fs::create_dir_all(&directory).expect("created");
    // Field 22 is when it started.
    let pid = process.pid();
    let started = |ticks: u32| {
        let stat = format!("{pid} (qemu) S {} {ticks} 0\n", ["0"; 18].join(" "));
        fs::write(directory.join("stat"), stat).expect("written");
    };
    started(100);
    daemon.add("a", describe("a", pid, &[0, 1], &[pid]));
    wait_for("its reservation to be held", || !reservations(&daemon)[0]["pid"].is_null());
    process.kill();
    daemon.backend.end("a");
    wait_for("the VM to be gone", || {
        ask(&daemon.socket, "GET", "/v1/vms", "").1.as_array().is_some_and(Vec::is_empty)
    });
    assert_eq!(reservations(&daemon).len(), 1, "its process is there, and may be found again");
    started(200);
    assert!(reservations(&daemon).is_empty());
}

#[test]
fn what_is_wrong_is_named_and_nothing_is_reserved() {
    let daemon = start();
    let ask = |body: &str| {
        let (status, answer) = ask(&daemon.socket, "POST", "/v1/placements", body);
        (status, answer["message"].as_str().expect("a message").to_owned())
    };
    for (body, status, message) in [
        ("{}", 400, "the body is no placement request: missing field `name`"),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":2097152,"x":1}"#,
            400,
            "the body is no placement request: unknown fiel",
        ),
        (r#"{"name":"a b","vcpus":1,"memory_bytes":2097152}"#, 400, "name \"a b\": expected 1 to 64 letters"),
        (r#"{"name":"a","vcpus":0,"memory_bytes":2097152}"#, 400, "vcpus 0: expected 1 to 4096"),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":4096}"#,
            400,
            "memory 4 KiB: not a multiple of 2 MiB, so that",
        ),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":536870912,"page_bytes":1073741824}"#,
            400,
            "memory 512 MiB: not a multiple of 1 GiB, the size of its pages",
        ),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":2097152,"page_bytes":2097152}"#,
            400,
            "page size 2 MiB: the host has pages of 4 KiB, 1 GiB",
        ),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":2097152,"lifetime_ms":10}"#,
            400,
            "lifetime 10 ms: expected 1000 to 3600000",
        ),
        (
            r#"{"name":"a","vcpus":1,"memory_bytes":2097152,"devices":["0000:90:00.0"]}"#,
            404,
            "device \"0000:90:00.0\": the host has no such PCI function",
        ),
    ] {
        let (got, text) = ask(body);
        assert_eq!(got, status, "{text}");
        assert!(text.starts_with(message), "{text}");
    }
    assert!(reservations(&daemon).is_empty());
    assert!(!daemon.config.records.join("reservations.json").exists(), "nothing was written");
    assert_eq!(place(&daemon, "b", 1, &["0000:81:00.0"]).0, 200);
    let (status, answer) = place(&daemon, "c", 1, &["0000:81:00.0"]);
    assert_eq!((status, &answer["message"]), (409, &json!("device 0000:81:00.0: in use by b")));
    let release =
        |name: &str| common::http::ask(&daemon.socket, "POST", &format!("/v1/placements/{name}/release"), "");
    assert_eq!(release("b").0, 200);
    let (status, answer) = release("b");
    assert_eq!((status, &answer["message"]), (404, &json!("there is no reservation of the name \"b\"")));
}

/// Gives the device on each node a group of its own and a driver, and another function to the group of that on node 0.
fn with_groups(root: &Path) {
    let device = |address: &str| root.join("sys/bus/pci/devices").join(address);
    fs::create_dir_all(device("0000:80:00.1")).expect("created");
    for (file, text) in
        [("class", "0x020000"), ("vendor", "0x8086"), ("device", "0x10c9"), ("numa_node", "0")]
    {
        fs::write(device("0000:80:00.1").join(file), text).expect("written");
    }
    for (address, group) in [("0000:80:00.0", 17), ("0000:80:00.1", 17), ("0000:81:00.0", 18)] {
        let link = |name: &str, target: &str| symlink(target, device(address).join(name)).expect("linked");
        link("iommu_group", &format!("../../../kernel/iommu_groups/{group}"));
        link("driver", if address.ends_with('1') { "../drivers/igb" } else { "../drivers/vfio-pci" });
    }
}

/// Has a process open a file, as `/proc` shows it.
fn open(root: &Path, pid: i32, fd: u32, target: &str, info: &str) {
    let process = root.join("proc").join(pid.to_string());
    for directory in ["fd", "fdinfo"] {
        fs::create_dir_all(process.join(directory)).expect("created");
    }
    symlink(target, process.join(format!("fd/{fd}"))).expect("linked");
    fs::write(process.join(format!("fdinfo/{fd}")), info).expect("written");
}

#[test]
fn a_device_that_somebody_has_without_a_reservation_is_in_use() {
    let daemon = start();
    let root = &daemon.config.root;
    with_groups(root);
    let process = Process::start();
    let pid = process.pid();
    open(root, pid, 3, "/dev/vfio/17", "pos: 0\n");
    open(root, pid, 4, "/dev/net/tun", "iff:\ttap0\n");
    open(root, pid, 5, "/dev/vhost-net", "");
    // Some program that is no VM. On this root, no other number can be one of a VM.
    open(root, 999_999, 3, "/dev/vfio/18", "pos: 0\n");
    fs::write(root.join("proc/999999/comm"), "testpmd\n").expect("written");
    daemon.add("old", describe("old", pid, &[0, 1], &[pid]));
    let devices = || {
        let (status, answer) = ask(&daemon.socket, "GET", "/v1/devices", "");
        assert_eq!(status, 200, "{answer}");
        answer
    };
    wait_for("the VM to be known", || !devices()["vhost"].as_array().expect("an array").is_empty());
    for (device, message) in [
        ("0000:80:00.0", "device 0000:80:00.0: in use by old"),
        (
            "0000:80:00.1",
            "device 0000:80:00.1: shares IOMMU group 17 with 0000:80:00.0, which is in use by old",
        ),
        ("0000:81:00.0", "device 0000:81:00.0: in use by process 999999 (testpmd)"),
    ] {
        let (status, answer) = place(&daemon, "new", 1, &[device]);
        assert_eq!((status, &answer["message"]), (409, &json!(message)));
    }
    assert!(reservations(&daemon).is_empty(), "nothing is half reserved");

    let shown = devices();
    let user = |at: usize| &shown["functions"][at]["user"];
    assert_eq!(user(0), &json!({ "kind": "vm", "name": "old", "pid": pid }));
    assert_eq!(user(1), &Value::Null, "it is not bound to VFIO");
    assert_eq!(user(2), &json!({ "kind": "process", "name": "testpmd", "pid": 999_999 }));
    assert_eq!(shown["interfaces"], json!([{ "vm": "old", "pid": pid, "interface": "tap0", "devices": [] }]));
    assert_eq!(shown["vhost"], json!([{ "vm": "old", "pid": pid, "device": "vhost-net", "files": 1 }]));

    // Freed by both, it can be had, and is shown as reserved.
    fs::remove_file(root.join(format!("proc/{pid}/fd/3"))).expect("removed");
    assert_eq!(place(&daemon, "new", 1, &["0000:80:00.0"]).0, 200);
    assert_eq!(
        devices()["functions"][0]["user"],
        json!({ "kind": "reservation", "name": "new", "pid": null })
    );

    // It is not known what a VM has: no device can be given away, but VMs without devices can be placed.
    fs::rename(root.join(format!("proc/{pid}/fd")), root.join("proc/fd")).expect("renamed");
    fs::write(root.join(format!("proc/{pid}/fd")), "").expect("written");
    let (status, answer) = place(&daemon, "newer", 1, &["0000:80:00.0"]);
    let message = answer["message"].as_str().expect("a message");
    assert!(
        message.starts_with("it is not known which devices are in use: devices of the VM old: "),
        "{message}"
    );
    assert!(message.contains(&format!("proc/{pid}/fd: ")) && status == 500, "{status} {message}");
    assert_eq!(place(&daemon, "newer", 1, &[]).0, 200);
    assert_eq!(devices()["problems"].as_array().map(Vec::len), Some(1));
}

#[test]
fn of_a_vm_with_very_many_files_it_is_not_guessed_which_devices_it_has() {
    let daemon = start();
    let root = &daemon.config.root;
    with_groups(root);
    let process = Process::start();
    let pid = process.pid();
    // Some program that is no VM, and a VM.
    for (pid, target) in [(999_999, "/dev/vfio/18"), (pid, "/dev/vhost-net")] {
        open(root, pid, 0, target, "");
        let fd = |fd: usize| root.join(format!("proc/{pid}/fd/{fd}"));
        (1..=DESCRIPTORS).for_each(|number| symlink(target, fd(number)).expect("linked"));
    }
    fs::write(root.join("proc/999999/comm"), "testpmd\n").expect("written");
    let placed = |name: &str, device: &str| {
        let (status, answer) = place(&daemon, name, 1, &[device]);
        (status, answer["message"].as_str().unwrap_or_default().to_owned())
    };
    let used = (409, "device 0000:81:00.0: in use by process 999999 (testpmd)".to_owned());
    assert_eq!(placed("new", "0000:81:00.0"), used);
    assert_eq!(placed("new", "0000:80:00.0").0, 200, "another process keeps nothing else");
    daemon.add("old", describe("old", pid, &[0, 1], &[pid]));
    let devices = || ask(&daemon.socket, "GET", "/v1/devices", "").1;
    wait_for("the VM to be known", || !devices()["vhost"].as_array().expect("an array").is_empty());
    let (status, message) = placed("newer", "0000:80:00.1");
    assert_eq!(status, 500, "{message}");
    assert!(message.contains(&format!("/proc/{pid}/fd: more than {DESCRIPTORS} open files: ")), "{message}");
}

#[test]
fn what_keeps_a_device_from_being_passed_through_is_told_with_its_placement() {
    let daemon = start();
    let root = &daemon.config.root;
    let device = |path: &str| root.join("sys/bus/pci/devices").join(path);
    let obstacles = |name: &str, devices: &[&str]| {
        let (status, answer) = place(&daemon, name, 1, devices);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(ask(&daemon.socket, "POST", &format!("/v1/placements/{name}/release"), "").0, 200);
        answer["obstacles"].clone()
    };
    let no_group = "device 0000:80:00.0: in no IOMMU group: the host has no IOMMU, or it is off";
    assert_eq!(obstacles("a", &["0000:80:00.0"]), json!([no_group]));

    // 80:00.0 has VFIO's driver, 80:00.1 of the same group has another one.
    with_groups(root);
    assert_eq!(obstacles("a", &[]), json!([]));
    fs::remove_file(device("0000:81:00.0/driver")).expect("removed");
    let own = "device 0000:81:00.0: no driver has it; QEMU needs vfio-pci to have it, libvirt changes that by itself";
    assert_eq!(obstacles("a", &["0000:81:00.0"]), json!([own]));
    fs::create_dir_all(device("0000:80:00.1/net/eth0")).expect("created");
    let shared = "device 0000:80:00.0: shares IOMMU group 17 with 0000:80:00.1: the host's driver igb has it (eth0); \
                  until it gives that up no VM gets a device of the group";
    assert_eq!(obstacles("a", &["0000:80:00.0"]), json!([shared]));
    // Asked for both, only that one's driver is in the way.
    let own = "device 0000:80:00.1: the host's driver igb has it (eth0); QEMU needs vfio-pci to have it, libvirt changes that by itself";
    assert_eq!(obstacles("a", &["0000:80:00.0", "0000:80:00.1"]), json!([own]));
    for driver in ["vfio-pci", "pcieport", "pci-stub"] {
        fs::remove_file(device("0000:80:00.1/driver")).expect("removed");
        symlink(format!("../drivers/{driver}"), device("0000:80:00.1/driver")).expect("linked");
        assert_eq!(obstacles("a", &["0000:80:00.0"]), json!([]), "{driver}");
    }
    fs::remove_file(device("0000:80:00.1/driver")).expect("removed");
    assert_eq!(obstacles("a", &["0000:80:00.0"]), json!([]), "no driver");
}

#[test]
fn a_physical_function_is_in_use_while_a_virtual_one_is() {
    let daemon = start();
    let root = &daemon.config.root;
    with_groups(root);
    let physical = root.join("sys/bus/pci/devices/0000:82:00.0");
    fs::create_dir_all(&physical).expect("created");
    for (file, text) in
        [("class", "0x020000"), ("vendor", "0x8086"), ("device", "0x10c9"), ("numa_node", "0")]
    {
        fs::write(physical.join(file), text).expect("written");
    }
    symlink("../0000:82:00.0", root.join("sys/bus/pci/devices/0000:81:00.0/physfn")).expect("linked");
    let refused = |holder: &str| {
        let (status, answer) = place(&daemon, "new", 1, &["0000:82:00.0"]);
        let message =
            format!("device 0000:82:00.0: in use by {holder}, which has its virtual function 0000:81:00.0");
        assert_eq!((status, &answer["message"]), (409, &json!(message)));
    };
    open(root, 999_999, 3, "/dev/vfio/18", "pos: 0\n");
    fs::write(root.join("proc/999999/comm"), "testpmd\n").expect("written");
    refused("process 999999 (testpmd)");
    fs::remove_file(root.join("proc/999999/fd/3")).expect("removed");
    assert_eq!(place(&daemon, "first", 1, &["0000:81:00.0"]).0, 200);
    refused("first");
    assert_eq!(ask(&daemon.socket, "POST", "/v1/placements/first/release", "").0, 200);
    assert_eq!(place(&daemon, "new", 1, &["0000:82:00.0"]).0, 200);
}

#[test]
fn what_is_free_is_net_of_vms_and_reservations() {
    let daemon = start();
    let free = || {
        let (status, answer) = ask(&daemon.socket, "GET", "/v1/capacity", "");
        assert_eq!(status, 200, "{answer}");
        let node = |node: &Value| {
            let memory = &node["memory"][0];
            assert_eq!((&node["usable_cpus"], &memory["total_bytes"]), (&json!(16), &json!(16_u64 << 30)));
            (node["free_cpus"].as_u64().expect("CPUs"), memory["free_bytes"].as_u64().expect("bytes") >> 20)
        };
        answer.as_array().expect("an array").iter().map(node).collect::<Vec<_>>()
    };
    assert_eq!(free(), [(16, 16_384), (16, 16_384)]);
    // Half of it is on each node: the device is on node 1, and the equations give it a half.
    assert_eq!(place(&daemon, "a", 4, &["0000:81:00.0"]).0, 200);
    assert_eq!(free(), [(14, 16_128), (14, 16_128)]);
    let (status, _) = ask(&daemon.socket, "POST", "/v1/placements/a/release", "");
    assert_eq!((status, free()), (200, vec![(16, 16_384), (16, 16_384)]));
    // A VM without a reservation has the CPU that it runs on.
    let process = Process::start();
    daemon.add("b", describe("b", process.pid(), &[0], &[process.pid()]));
    wait_for("a CPU to be used", || free().iter().map(|node| node.0).sum::<u64>() == 31);
}

#[test]
fn a_file_that_makes_no_sense_is_named_and_stays() {
    let daemon = start();
    let file = daemon.config.records.join("reservations.json");
    fs::create_dir_all(&daemon.config.records).expect("created");
    fs::write(&file, "{\"version\":7,\"boot_id\":\"x\"}").expect("written");
    let (status, answer) = place(&daemon, "a", 1, &[]);
    let expected = format!(
        "{}: version: 7: expected 1; remove the file when no VM that was placed is being started",
        file.display()
    );
    assert_eq!((status, answer["message"].as_str()), (500, Some(expected.as_str())));
    assert!(fs::read_to_string(&file).expect("there").contains("7"));
    fs::remove_file(&file).expect("removed");
    assert_eq!(place(&daemon, "a", 1, &[]).0, 200);
    assert!(fs::read_to_string(&file).expect("there").contains("9f2c1d4e-boot"));
}

#[test]
fn what_cannot_be_written_is_not_reserved() {
    let daemon = start();
    let records = &daemon.config.records;
    // The new file is written under this name first.
    fs::create_dir_all(records.join("reservations.json.new")).expect("created");
    let (status, answer) = place(&daemon, "a", 2, &["0000:80:00.0"]);
    let message = answer["message"].as_str().expect("a message");
    let file = records.join("reservations.json");
    assert!(status == 500 && message.starts_with(&format!("{}: ", file.display())), "{status} {message}");
    assert!(reservations(&daemon).is_empty() && !file.exists());
    fs::remove_dir(records.join("reservations.json.new")).expect("removed");
    // Neither its number nor its name, device and CPUs are taken.
    let (status, answer) = place(&daemon, "a", 2, &["0000:80:00.0"]);
    assert_eq!((status, &answer["reservation"]["id"]), (200, &json!(0)));
    // What is there stays if it cannot be given up for the same reason.
    fs::create_dir_all(records.join("reservations.json.new")).expect("created");
    assert_eq!(ask(&daemon.socket, "POST", "/v1/placements/a/release", "").0, 500);
    assert_eq!(reservations(&daemon).len(), 1);
}

#[test]
fn a_reservation_whose_vm_does_not_come_ends_and_a_vm_that_comes_late_has_none() {
    let daemon = start();
    let body = json!({ "name": "a", "vcpus": 2, "memory_bytes": 512 << 20, "lifetime_ms": 1000 });
    let (status, answer) = ask(&daemon.socket, "POST", "/v1/placements", &body.to_string());
    assert_eq!((status, &answer["reservation"]["waits_ms"]), (200, &json!(1000)));
    wait_for("the reservation to end", || reservations(&daemon).is_empty());
    let free = || {
        let (_, nodes) = ask(&daemon.socket, "GET", "/v1/capacity", "");
        let nodes = nodes.as_array().expect("nodes").iter();
        nodes.filter_map(|node| node["free_cpus"].as_u64()).sum::<u64>()
    };
    assert_eq!(free(), 32, "what it had is free");
    let process = Process::start();
    daemon.add("a", describe("a", process.pid(), &[0, 1], &[process.pid()]));
    wait_for("the VM to be known", || free() == 31);
    assert!(reservations(&daemon).is_empty());
    let (status, answer) = ask(&daemon.socket, "POST", "/v1/placements", &body.to_string());
    assert_eq!((status, &answer["message"]), (409, &json!("name a: a VM of this name runs")));
}
