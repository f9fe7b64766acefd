//! A QEMU in a PID namespace of its own, as in a container, counts its threads otherwise than the host does.
//!
//! The peer is this test program, started anew by unshare(1).

use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vnuma_hypervisor::{QmpBackend, VmBackend, VmConnection, VmError};
use vnuma_model::VmDescription;

const SOCKET: &str = "VNUMA_TEST_NAMESPACE_SOCKET";
/// What it names besides its own threads, if anything.
const FOREIGN: &str = "VNUMA_TEST_NAMESPACE_FOREIGN";

struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the host learns of a QEMU in a namespace of its own that names its first thread, one more of its own, and
/// perhaps another one. Its process ends with the peer, and when the connection is closed.
fn describe(foreign: Option<i32>) -> (Result<VmDescription, VmError>, (Peer, Box<dyn VmConnection>)) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vm.sock");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "the_peer", "--ignored", "--nocapture"]).env(SOCKET, &socket);
    if let Some(foreign) = foreign {
        command.env(FOREIGN, foreign.to_string());
    }
    let peer = Peer(command.stdout(Stdio::null()).spawn().expect("unshare is part of util-linux"));
    let end = Instant::now() + Duration::from_secs(30);
    while !socket.exists() {
        assert!(Instant::now() < end, "the peer does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    let mut vm = QmpBackend::default().connect(&QmpBackend::handle(&socket).unwrap()).unwrap();
    let description = vm.greet().and_then(|()| vm.describe());
    (description, (peer, vm))
}

#[test]
#[cfg_attr(not(root), ignore = "a PID namespace needs root")]
fn its_threads_are_known_by_the_hosts_numbers() {
    let (description, _peer) = describe(None);
    let description = description.unwrap_or_else(|error| panic!("{error}"));
    let pid = description.pid;
    assert_ne!(pid, 1, "that is its own number");
    let names: Vec<_> = description
        .vcpus
        .iter()
        .map(|vcpu| {
            fs::read_to_string(format!("/proc/{pid}/task/{}/comm", vcpu.tid)).expect("its own thread")
        })
        .collect();
    assert_eq!(description.vcpus[0].tid, pid, "its number 1 is its first thread, and not the host's init");
    assert_eq!(names[1].trim(), "inner-vcpu");
}

#[test]
#[cfg_attr(not(root), ignore = "a PID namespace needs root")]
fn a_number_that_is_none_of_its_threads_is_refused() {
    // The host's numbers of our own threads mean nothing there.
    for foreign in [nix::unistd::gettid().as_raw(), 0, -1, i32::MAX] {
        let error = describe(Some(foreign)).0.unwrap_err();
        assert!(
            matches!(error, VmError::ForeignThread { tid, .. } if tid == i64::from(foreign)),
            "{foreign}: {error}"
        );
    }
}

/// Answers as a QEMU of two or three vCPUs does; only as a process of its own.
#[test]
#[ignore = "the peer of the other tests"]
fn the_peer() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let (tell, told) = mpsc::channel();
    let vcpu = move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        thread::sleep(Duration::from_secs(3600));
    };
    thread::Builder::new().name("inner-vcpu".to_owned()).spawn(vcpu).unwrap();
    let mut tids = vec![std::process::id().cast_signed(), told.recv().unwrap()];
    tids.extend(std::env::var(FOREIGN).ok().and_then(|tid| tid.parse::<i32>().ok()));
    let hidden = Path::new(&socket).with_extension("new");
    let listener = UnixListener::bind(&hidden).unwrap();
    fs::rename(hidden, socket).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    writeln!(stream, r#"{{"QMP": {{"version": {{}}, "capabilities": []}}}}"#).unwrap();
    for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        let answer = match command["execute"].as_str().unwrap() {
            "query-status" => json!({"status": "running"}),
            "query-cpus-fast" => tids
                .iter()
                .enumerate()
                .map(|(i, tid)| json!({"cpu-index": i, "qom-path": i.to_string(), "thread-id": tid}))
                .collect(),
            "qom-get" => command["arguments"]["path"].as_str().unwrap().parse::<u32>().unwrap().into(),
            "query-hotpluggable-cpus" => json!([]),
            "human-monitor-command" => json!("0 nodes\r\n"),
            "qom-list" => json!([]),
            _ => json!({}),
        };
        let line = json!({"return": answer, "id": command["id"]});
        if writeln!(stream, "{line}").is_err() {
            return;
        }
    }
}
