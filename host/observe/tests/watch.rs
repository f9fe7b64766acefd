//! A host whose topology changes while it is watched.

mod workers;

use std::{
    fs,
    path::Path,
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};
use vnuma_model::HostTopology;
use vnuma_observe::{HostWatcher, read_host_topology};
use vnuma_process::{Change, Workers};
use workers::{HANG, change, until_it_waits};

/// As short as it can be.
const INTERVAL: Duration = Duration::from_millis(100);

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Replaced in one step: no reader sees half of it.
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

fn write_node(root: &Path, node: u32, cpus: &str, free: u64, distances: &str) {
    let base = format!("sys/devices/system/node/node{node}");
    write(root, &format!("{base}/cpulist"), cpus);
    let meminfo = format!("Node {node} MemTotal: 1000 kB\nNode {node} MemFree: {free} kB\n");
    write(root, &format!("{base}/meminfo"), &meminfo);
    write(root, &format!("{base}/hugepages/hugepages-2048kB/nr_hugepages"), "8\n");
    write(root, &format!("{base}/hugepages/hugepages-2048kB/free_hugepages"), &format!("{}\n", free % 8));
    write(root, &format!("{base}/distance"), distances);
}

fn online(root: &Path, cpus: &str, nodes: &str) {
    write(root, "sys/devices/system/cpu/online", cpus);
    write(root, "sys/devices/system/node/online", nodes);
}

/// One node of two CPUs, and whoever follows it.
fn one_node() -> (tempfile::TempDir, HostWatcher, Receiver<HostTopology>) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write_node(root, 0, "0-1", 500, "10\n");
    online(root, "0-1", "0");
    let (send, changed) = mpsc::channel();
    let known = read_host_topology(root).unwrap();
    let watcher = HostWatcher::start(&Workers::default(), root, known, INTERVAL, move |topology| {
        send.send(topology).unwrap();
    });
    (directory, watcher.unwrap(), changed)
}

/// Until it has been read twice more: the first may have been under way.
fn wait_for_reads(watcher: &HostWatcher) {
    let (before, end) = (watcher.reads(), Instant::now() + HANG);
    while watcher.reads() < before + 2 {
        assert!(Instant::now() < end, "it is not read any more");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn cpus_and_nodes_that_come_and_go_are_reported() {
    let (directory, watcher, changed) = one_node();
    let root = directory.path();
    assert!(watcher.why_polling().unwrap().ends_with("is not the running host's tree"));
    write_node(root, 0, "0-1", 500, "10 21\n");
    write_node(root, 1, "2-3", 500, "21 10\n");
    online(root, "0-2", "0-1");
    // What is read while it changes may be reported as well.
    let until = |condition: &dyn Fn(&HostTopology) -> bool| loop {
        let topology = changed.recv_timeout(HANG).expect("a change");
        if condition(&topology) {
            return topology;
        }
    };
    let topology = until(&|topology| topology.node_of_cpu(2) == Some(1));
    assert_eq!((topology.distance(0, 1), topology.node_of_cpu(3)), (Some(21), None), "CPU 3 is offline");
    online(root, "0-3", "0-1");
    until(&|topology| topology.node_of_cpu(3) == Some(1));
    online(root, "0-1", "0-1");
    until(&|topology| topology.node_of_cpu(2).is_none());
}

#[test]
fn free_memory_is_no_change() {
    let (directory, watcher, changed) = one_node();
    write_node(directory.path(), 0, "0-1", 3, "10\n");
    wait_for_reads(&watcher);
    assert_eq!(changed.try_iter().count(), 0);
    write(directory.path(), "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "9\n");
    let topology = changed.recv_timeout(HANG).unwrap();
    assert_eq!((topology.nodes[0].memory_free_kib, topology.nodes[0].huge_pages[0].total), (3, 9));
}

#[test]
fn a_tree_that_makes_no_sense_is_tried_again() {
    let (directory, watcher, changed) = one_node();
    let root = directory.path();
    write(root, "sys/devices/system/node/node0/cpulist", "nonsense");
    wait_for_reads(&watcher);
    assert_eq!(changed.try_iter().count(), 0, "the one known before is kept");
    write_node(root, 0, "0", 500, "10\n");
    let topology = changed.recv_timeout(HANG).unwrap();
    assert_eq!((topology.node_of_cpu(0), topology.node_of_cpu(1)), (Some(0), None));
}

/// The kernel sends a message about a device when it is asked to.
#[test]
#[cfg_attr(not(root), ignore = "asking the kernel for an event needs root")]
fn an_event_of_the_kernel_makes_it_read_again() {
    let known = read_host_topology(Path::new("/")).unwrap();
    let hour = Duration::from_secs(3600);
    let watcher = HostWatcher::start(&Workers::default(), Path::new("/"), known, hour, |_| {}).unwrap();
    assert_eq!(watcher.why_polling(), None);
    let uevent = Path::new("/sys/devices/system/cpu/cpu0/uevent");
    let network = Path::new("/sys/class/net/lo/uevent");
    if let Err(error) = fs::write(network, "change").and_then(|()| fs::write(uevent, "change")) {
        use std::io::Write as _;
        // Not by a macro: what those print is shown for failed tests only.
        let _ = writeln!(std::io::stderr(), "skipped: {}: {error}", uevent.display());
        return;
    }
    let end = Instant::now() + HANG;
    while watcher.reads() == 0 {
        assert!(Instant::now() < end, "the event is not heard");
        thread::sleep(Duration::from_millis(5));
    }
    // Many events that come together are one reason to look.
    let (before, began) = (watcher.reads(), Instant::now());
    (0..50).for_each(|_| fs::write(uevent, "change").unwrap());
    while watcher.reads() == before {
        assert!(Instant::now() < end, "the event is not heard");
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(Duration::from_millis(300));
    let (reads, took_ms) = (watcher.reads() - before, began.elapsed().as_millis());
    assert!(u128::from(reads) <= took_ms / 100 + 2, "{reads} reads in {took_ms} ms, not one each 100 ms");
}

#[test]
fn a_panic_and_a_silence_of_its_thread_are_seen() {
    let directory = tempfile::tempdir().unwrap();
    write_node(directory.path(), 0, "0-1", 500, "10\n");
    online(directory.path(), "0-1", "0");
    let (workers, known) = (Workers::default(), read_host_topology(directory.path()).unwrap());
    let ((begin, begun), (release, held)) = (mpsc::channel(), mpsc::channel::<()>());
    let on_change = move |_| {
        begin.send(()).unwrap();
        panic!("{:?}", held.recv_timeout(HANG));
    };
    let _watcher = HostWatcher::start(&workers, directory.path(), known, INTERVAL, on_change).unwrap();
    until_it_waits(&workers);
    online(directory.path(), "0", "0");
    begun.recv_timeout(HANG).unwrap();
    assert!(matches!(change(&workers), Change::Silent(name, _) if name == "vnuma-host"));
    release.send(()).unwrap();
    assert_eq!(change(&workers), Change::Panicked("vnuma-host".to_owned(), "Ok(())".to_owned()));
}
