//! A host of two nodes, and waiting: what every test of the daemon needs.

// Each test binary uses a part of it.
#![allow(dead_code)]

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

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
