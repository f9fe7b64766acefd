//! vnumactl, vnumad and a real QEMU, whose machine is stopped before its first instruction: its threads are there,
//! its devices are there, and no guest is needed.

#[path = "../../../crates/daemon/tests/common/host.rs"]
mod host;

use host::{wait_for, write_host};
use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tokio::sync::oneshot;
use vnuma_channel_model::{Topology, read};
use vnuma_daemon::{BackendFactory, Config};
use vnuma_host::location::Prefer;
use vnuma_hypervisor::QmpBackend;

struct Qemu(Child);

impl Qemu {
    /// Two guest nodes; the memory of the first is bound to node 0, that of the second to nothing and untouched.
    fn start(socket: &Path, numa: bool) -> Self {
        let qmp = format!("unix:{},server=on,wait=off", socket.display());
        let mut command = Command::new("qemu-system-x86_64");
        command.args("-accel tcg -M q35 -nodefaults -display none -S -m 128 -smp 4,sockets=4".split(' '));
        let name = socket.file_stem().and_then(|name| name.to_str()).expect("UTF-8");
        command.args(["-name", &format!("{name},debug-threads=on")]);
        command.args(["-device", "pcie-root-port,id=vnuma0,chassis=1", "-qmp", &qmp]);
        if numa {
            command.args(["-object", "memory-backend-ram,id=ram0,size=64M,host-nodes=0,policy=bind"]);
            command.args(["-object", "memory-backend-ram,id=ram1,size=64M"]);
            command.args(["-numa", "node,nodeid=0,cpus=0-1,memdev=ram0"]);
            command.args(["-numa", "node,nodeid=1,cpus=2-3,memdev=ram1"]);
        }
        let child = command.stdin(Stdio::null()).spawn();
        Self(child.expect("qemu-system-x86_64 (package qemu-system-x86) is needed for this test"))
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(status.expect("kill").success());
    }

    /// What its guest would read from the channel.
    fn topology(&self) -> Option<Topology> {
        use std::os::unix::fs::FileExt;
        let descriptors = format!("/proc/{}/fd", self.0.id());
        let files = std::fs::read_dir(descriptors).expect("it runs");
        let named = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("memfd:vnuma-topology"))
        };
        let path = files.filter_map(|entry| Some(entry.ok()?.path())).find(named)?;
        let file = std::fs::File::open(path).ok()?;
        let load = |offset: usize| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, offset as u64).expect("inside the region");
            u64::from_le_bytes(word)
        };
        read(load).ok()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Host {
    directory: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    daemon: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Host {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        write_host(directory.path());
        let qmp = directory.path().join("qmp");
        std::fs::create_dir(&qmp).expect("created");
        let config = Config {
            socket: directory.path().join("api.sock"),
            root: directory.path().into(),
            directory: Some(qmp.clone()),
            resync_interval: Duration::from_secs(1),
            poll_interval: Duration::from_millis(20),
            location: Prefer::Poll,
            ..Config::default()
        };
        let factory: BackendFactory =
            Arc::new(move || Box::new(QmpBackend::new(Some(qmp.clone()), Vec::new())));
        let (stop, stopped) = oneshot::channel();
        let daemon = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(vnuma_daemon::run(config, factory, async { drop(stopped.await) }))
        });
        let host = Self { directory, stop: Some(stop), daemon: Some(daemon) };
        wait_for("vnumad", || host.directory.path().join("api.sock").exists());
        host
    }

    fn qmp(&self, name: &str) -> PathBuf {
        self.directory.path().join("qmp").join(format!("{name}.sock"))
    }

    fn vnumactl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnumactl"));
        command.arg("--socket").arg(self.directory.path().join("api.sock")).args(arguments);
        command
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.vnumactl(arguments).output().expect("runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[arguments, &["--json"]].concat())).expect("JSON")
    }

    fn fails(&self, arguments: &[&str], status: i32, text: &str) {
        let output = self.vnumactl(arguments).output().expect("runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(error.contains(text), "{arguments:?}: {error:?} should say {text:?}");
    }

    fn wait_until_listed(&self, count: usize) {
        wait_for("the list", || self.json(&["list"]).as_array().is_some_and(|vms| vms.len() == count));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.daemon.take().map(JoinHandle::join);
        if !thread::panicking() {
            ended.expect("started").expect("no panic").expect("an orderly end");
        }
    }
}

#[test]
fn a_vm_is_found_shown_attached_moved_and_forgotten() {
    let host = Host::start();
    assert!(host.text(&["list"]).starts_with("no VMs"));
    let mut qemu = Qemu::start(&host.qmp("web"), true);
    host.wait_until_listed(1);
    let vm = host.json(&["show", "web"]);
    assert_eq!((&vm["name"], &vm["pid"]), (&"web".into(), &qemu.0.id().into()));
    assert_eq!(vm["nodes"][0]["home"], 0);
    assert_eq!(vm["vcpus"].as_array().map(Vec::len), Some(4));
    host.fails(&["detach", "web"], 1, "web: no topology channel is attached");

    // QEMU's threads are on either node so far; at home there is something to change.
    host.text(&["move", "web", "--vcpu", "0", "--node", "0"]);
    assert!(host.text(&["attach", "web"]).contains("web: topology channel attached"));
    let first = qemu.topology().expect("published by the time attach returns");
    assert_eq!(first.vcpus.iter().map(|vcpu| vcpu.apic_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    host.fails(&["attach", "web"], 1, "attached already");

    // Host node 1 backs no guest node: the nearest guest node stays the right one, which is no news for the guest.
    let moved = host.text(&["move", "web", "--vcpu", "0", "--node", "1"]);
    assert!(moved.contains("vCPU 0 is confined to host node 1; its guest's view is approximate"), "{moved}");
    let second = qemu.topology().expect("published");
    assert_eq!((second.generation, second.vcpus[0].node), (first.generation, 0));
    let shown = host.text(&["show", "web"]);
    assert!(shown.contains("channel attached") && shown.contains("approximate"), "{shown}");

    host.fails(&["move", "web", "--vcpu", "9", "--node", "1"], 1, "no vCPU with APIC id 9");
    host.fails(&["move", "web", "--vcpu", "0", "--node", "7"], 1, "the host has no node 7");
    host.fails(&["move", "web", "--vcpu", "0"], 2, "--node");
    host.fails(&["show", "nobody"], 1, "there is no VM `nobody`");

    qemu.0.kill().expect("killed");
    qemu.0.wait().expect("ended");
    host.wait_until_listed(0);
}

#[test]
fn a_qemu_that_cannot_be_asked_is_named_and_observed() {
    let host = Host::start();
    let wait_until = |state: &str| {
        wait_for(state, || host.json(&["list"])[0]["hypervisor"] == state);
        host.json(&["show", "web"])
    };
    // Another client has its monitor before vnumad sees it.
    let monitor = host.directory.path().join("web.monitor");
    let qemu = Qemu::start(&monitor, true);
    wait_for("the monitor", || std::os::unix::net::UnixStream::connect(&monitor).is_ok());
    let mut other = std::os::unix::net::UnixStream::connect(&monitor).expect("connected");
    std::io::Read::read_exact(&mut other, &mut [0]).expect("greeted");
    std::os::unix::fs::symlink(&monitor, host.qmp("web")).expect("linked");
    let vm = wait_until("silent");
    assert_eq!((&vm["pid"], &vm["described"]), (&qemu.0.id().into(), &false.into()));
    wait_for("its vCPUs", || host.json(&["show", "web"])["vcpus"].as_array().map(Vec::len) == Some(4));
    assert!(host.text(&["list"]).contains("is another client connected?"));
    assert!(host.text(&["show", "web"]).contains("its vCPUs were seen from outside"));
    assert!(host.text(&["doctor"]).contains("silent, observed only"));
    host.fails(&["attach", "web"], 1, "web: not connected to its hypervisor");
    drop(other);
    assert_eq!(wait_until("answers")["described"], true);

    qemu.signal("-STOP");
    wait_until("stopped");
    let doctor = host.text(&["doctor"]);
    assert!(doctor.contains(&format!("to raise it: kill -CONT {}", qemu.0.id())), "{doctor}");
    host.text(&["move", "web", "--vcpu", "3", "--node", "1"]);
    host.fails(&["attach", "web"], 1, "is stopped by a signal (SIGSTOP)");
    qemu.signal("-CONT");
    assert_eq!(wait_until("answers")["vcpus"][3]["host_node"], 1);
    assert!(host.text(&["attach", "web"]).contains("attached"));
}

#[test]
fn a_uma_vm_is_shown_and_has_nothing_to_tell() {
    let host = Host::start();
    let _qemu = Qemu::start(&host.qmp("flat"), false);
    host.wait_until_listed(1);
    assert!(host.text(&["show", "flat"]).contains("a UMA VM"));
    host.fails(&["attach", "flat"], 1, "flat: a UMA VM");
}

#[test]
fn watching_prints_an_event_a_line() {
    use std::io::{BufRead, BufReader};
    let host = Host::start();
    let mut watch = host.vnumactl(&["watch", "--json"]).stdout(Stdio::piped()).spawn().expect("runs");
    wait_for("the watcher", || host.json(&["daemon"])["watchers"] == 1);
    let _qemu = Qemu::start(&host.qmp("web"), true);
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut next =
        || serde_json::from_str::<Value>(&lines.next().expect("a line").expect("UTF-8")).expect("JSON");
    let event = next();
    assert_eq!((&event["event"], &event["vm"]), (&"appeared".into(), &"web".into()));
    host.text(&["attach", "web"]);
    // QEMU's threads may move in between.
    let mut kinds = std::iter::repeat_with(|| next()["event"].clone()).filter(|kind| *kind != "changed");
    assert_eq!(kinds.by_ref().take(2).collect::<Vec<_>>(), ["attached", "told"]);
    watch.kill().expect("killed");
    watch.wait().expect("ended");
}

#[test]
fn the_host_is_shown_from_its_tree() {
    let host = Host::start();
    let hardware = host.json(&["hardware"]);
    assert_eq!(hardware["distances"], serde_json::json!([[10, 21], [21, 10]]));
    assert_eq!(hardware["nodes"][1]["cpus"], "1");
    assert!(host.text(&["hardware"]).contains("Distances"));
    // A file of it is broken: named, and nothing else suffers.
    let list = host.directory.path().join("sys/devices/system/node/node1/cpulist");
    std::fs::write(&list, "nonsense").expect("written");
    host.fails(&["hardware"], 1, &list.display().to_string());
    assert_eq!(host.json(&["list"]), serde_json::json!([]));
}

#[test]
fn without_vnumad_it_says_how_to_start_it() {
    let run = |arguments: &[&str]| -> Output {
        Command::new(env!("CARGO_BIN_EXE_vnumactl")).args(arguments).output().expect("runs")
    };
    let output = run(&["--socket", "/nonexistent/v.sock", "list"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3));
    assert!(error.contains("/nonexistent/v.sock") && error.contains("Start it with `vnumad`"), "{error}");
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["--help"]).status.code(), Some(0));
}
