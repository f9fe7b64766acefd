//! A host of two nodes, and waiting: what every test of the daemon needs.

use crate::http::client;
use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};
use vnuma_api::OPENAPI;
use vnuma_client::Method;

/// Only a limit for tests that hang.
pub const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A tree with two nodes: CPU 0 and CPU 1 of the machine that the test runs on.
pub fn write_host(root: &Path) {
    let write = |path: &str, text: &str| {
        let path = root.join("sys/devices/system").join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        std::fs::write(path, text).expect("written");
    };
    write("cpu/online", "0-1\n");
    write("node/online", "0-1\n");
    for (node, distances) in [(0, "10 21\n"), (1, "21 10\n")] {
        write(&format!("node/node{node}/cpulist"), &format!("{node}\n"));
        write(&format!("node/node{node}/distance"), distances);
        let meminfo = format!("Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: 2097152 kB\n");
        write(&format!("node/node{node}/meminfo"), &meminfo);
    }
}

/// Waits until `ready`.
pub fn wait_for(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + HANG_LIMIT;
    while !ready() {
        assert!(Instant::now() < end, "{what}: not within {HANG_LIMIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a daemon answers there: it listens before it has read its host, and answers after that.
pub fn answers(socket: &Path) -> bool {
    // One that ends takes its connections along.
    client(socket).send(Method::GET, OPENAPI, "").is_ok_and(|answer| answer.status == 200)
}

/// Two nodes with 16 CPUs and 16 GiB each, and a device on each. CPUs 0 and 1 are those of the machine.
pub fn large_host(root: &Path) {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        fs::write(path, text).expect("written");
    };
    write("proc/sys/kernel/random/boot_id", "9f2c1d4e-boot\n");
    write("sys/devices/system/cpu/online", "0-31\n");
    for (node, cpus) in [(0, "0,2-16\n"), (1, "1,17-31\n")] {
        write(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
        let meminfo = format!("Node {node} MemTotal: 16777216 kB\nNode {node} MemFree: 16777216 kB\n");
        write(&format!("sys/devices/system/node/node{node}/meminfo"), &meminfo);
        for (file, pages) in [("nr_hugepages", "4\n"), ("free_hugepages", "4\n")] {
            write(&format!("sys/devices/system/node/node{node}/hugepages/hugepages-1048576kB/{file}"), pages);
        }
        let device = format!("sys/bus/pci/devices/0000:8{node}:00.0");
        for (file, text) in [("class", "0x020000\n"), ("vendor", "0x8086\n"), ("device", "0x10c9\n")] {
            write(&format!("{device}/{file}"), text);
        }
        write(&format!("{device}/numa_node"), &format!("{node}\n"));
    }
}
