//! vnumactl, vnumad and a real QEMU, whose machine is stopped before its first instruction: its threads are there,
//! its devices are there, and no guest is needed.

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::Value;
use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};
use tokio::sync::oneshot;
use vnuma_channel_model::{Topology, read};
use vnuma_daemon::{BackendFactory, Config};
use vnuma_hypervisor::QmpBackend;
use vnuma_lab_qmp::Qmp;
use vnuma_observe::location::Prefer;
use vnuma_test_kit::host::{HANG_LIMIT, answers, wait_for, write_host};

struct Qemu(Child);

impl Qemu {
    /// Two guest nodes; the memory of the first is bound to node 0, that of the second to nothing and untouched.
    fn start(socket: &Path, numa: bool) -> Self {
        Self::spawn(&mut Self::command(socket, if numa { &["host-nodes=0,policy=bind", ""] } else { &[] }))
    }

    /// The memory of each of the two guest nodes is bound to the host node of its number. The machine that the test
    /// runs on need not have them: QEMU's bindings succeed and do nothing.
    fn start_on_two_nodes(socket: &Path) -> Self {
        let bindings = ["host-nodes=0,policy=bind", "host-nodes=1,policy=bind"];
        let mut command = Self::command(socket, &bindings);
        // SAFETY: between fork and exec there are two system calls, and nothing is allocated.
        unsafe { command.pre_exec(ignore_bindings) };
        Self::spawn(&mut command)
    }

    /// One with a guest node for each of `memory`, what its backend is made of.
    fn command(socket: &Path, memory: &[&str]) -> Command {
        let qmp = format!("unix:{},server=on,wait=off", socket.display());
        let mut command = Command::new("qemu-system-x86_64");
        command.args("-accel tcg -M q35 -nodefaults -display none -S -m 128 -smp 4,sockets=4".split(' '));
        let name = socket.file_stem().and_then(|name| name.to_str()).expect("UTF-8");
        command.args(["-name", &format!("{name},debug-threads=on")]);
        command.args(["-device", "pcie-root-port,id=vnuma0,chassis=1", "-qmp", &qmp]);
        for (node, binding) in memory.iter().enumerate() {
            let backend = format!("memory-backend-ram,id=ram{node},size=64M,{binding}");
            command.args(["-object", backend.trim_end_matches(',')]);
            let cpus = format!("{}-{}", 2 * node, 2 * node + 1);
            command.args(["-numa", &format!("node,nodeid={node},cpus={cpus},memdev=ram{node}")]);
        }
        command
    }

    fn spawn(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::null()).spawn();
        Self(child.expect("qemu-system-x86_64 (package qemu-system-x86) is needed for this test"))
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(status.expect("kill").success());
    }

    /// Copies of all eventfds that it has open. They are the same open files as its own.
    fn eventfds(&self) -> Vec<OwnedFd> {
        let pid = Pid::from_child(&self.0);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.0.id())).expect("it runs");
        let eventfds = descriptors.flatten().filter(|descriptor| {
            std::fs::read_link(descriptor.path()).is_ok_and(|link| link == Path::new("anon_inode:[eventfd]"))
        });
        let copy = |descriptor: std::fs::DirEntry| {
            let number = descriptor.file_name().to_string_lossy().parse().expect("a number");
            pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).expect("copied")
        };
        eventfds.map(copy).collect()
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

/// Lets mbind(2) succeed without doing anything, in this process and what it executes.
fn ignore_bindings() -> std::io::Result<()> {
    // SAFETY: the macros build plain integers.
    let mut filter = unsafe {
        [
            libc::BPF_STMT((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0),
            libc::BPF_JUMP(
                (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
                libc::SYS_mbind as u32,
                0,
                1,
            ),
            libc::BPF_STMT((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ERRNO),
            libc::BPF_STMT((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ALLOW),
        ]
    };
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: no memory is involved.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel reads the program, which outlives the call, and its filter of that length.
    let filtered =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if privileges != 0 || filtered != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Sets an eventfd's counter, and lets reads and writes of it wait from now on.
fn make_blocking(eventfd: &OwnedFd, counter: u64) {
    let flags = OFlag::from_bits_retain(fcntl(eventfd, FcntlArg::F_GETFL).expect("its flags"));
    fcntl(eventfd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).expect("set");
    // Empty already is as good.
    let _ = nix::unistd::read(eventfd.as_fd(), &mut [0; 8]);
    nix::unistd::write(eventfd, &counter.to_ne_bytes()).expect("set");
    fcntl(eventfd, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).expect("set");
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
            records: directory.path().join("channels"),
            resync_interval: Duration::from_secs(1),
            poll_interval: Duration::from_millis(20),
            policy_period: Duration::from_millis(100),
            location: Prefer::Poll,
            ..Config::default()
        };
        let factory: BackendFactory =
            Arc::new(move || Box::new(QmpBackend::new(Some(qmp.clone()), Vec::new())));
        let (stop, stopped) = oneshot::channel();
        let daemon = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(vnuma_daemon::run(config, factory, vnuma_daemon::Notifier::default(), async {
                drop(stopped.await)
            }))
        });
        let host = Self { directory, stop: Some(stop), daemon: Some(daemon) };
        let socket = host.directory.path().join("api.sock");
        wait_for("vnumad", || answers(&socket));
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

    /// What it prints, as long as the daemon answers.
    fn output(&self, arguments: &[&str]) -> Output {
        let mut command = self.vnumactl(arguments);
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(command.output()));
        let output = receiver.recv_timeout(HANG_LIMIT);
        output.unwrap_or_else(|_| panic!("{arguments:?}: no answer within {HANG_LIMIT:?}")).expect("runs")
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[arguments, &["--json"]].concat())).expect("JSON")
    }

    fn fails(&self, arguments: &[&str], status: i32, text: &str) {
        let output = self.output(arguments);
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
        let daemon = self.daemon.take().expect("started");
        if !thread::panicking() {
            wait_for("the daemon's end", || daemon.is_finished());
            daemon.join().expect("no panic").expect("an orderly end");
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

/// `O_NONBLOCK` belongs to the open file, so that a QEMU can let vnumad's own reads and writes of an eventfd wait.
#[test]
fn a_qemu_that_makes_its_eventfds_block_delays_nobody() {
    let host = Host::start();
    let vms = ["hostile", "other"].map(|name| (name, Qemu::start_on_two_nodes(&host.qmp(name))));
    host.wait_until_listed(2);
    for (name, qemu) in &vms {
        wait_for("its homes", || {
            let nodes = &host.json(&["show", name])["nodes"];
            (&nodes[0]["home"], &nodes[1]["home"]) == (&0.into(), &1.into())
        });
        for vcpu in ["0", "1", "2", "3"] {
            host.text(&["move", name, "--vcpu", vcpu, "--node", "0"]);
        }
        host.text(&["attach", name]);
        assert!(qemu.topology().expect("published").vcpus.iter().all(|vcpu| vcpu.node == 0));
    }
    // So that it empties none of its counters.
    vms[0].1.signal("-STOP");
    wait_for("it to be stopped", || host.json(&["show", "hostile"])["hypervisor"] == "stopped");
    for counter in [0, u64::MAX - 1] {
        let eventfds = vms[0].1.eventfds();
        assert!(eventfds.len() >= 8, "{} eventfds: the channel alone has 8", eventfds.len());
        for (vcpu, node) in [(1, 1), (3, 1), (1, 0), (3, 0)] {
            // Again for each publication: the one before has left other counters.
            eventfds.iter().for_each(|eventfd| make_blocking(eventfd, counter));
            for (name, qemu) in &vms {
                let before = qemu.topology().expect("published").generation;
                let (vcpu, node) = (vcpu.to_string(), node.to_string());
                host.text(&["move", name, "--vcpu", &vcpu, "--node", &node]);
                wait_for("the publication", || qemu.topology().is_some_and(|now| now.generation != before));
            }
            for (name, qemu) in &vms {
                assert_eq!(qemu.topology().expect("published").vcpus[vcpu].node, node, "{name}");
                assert_eq!(host.json(&["show", name])["vcpus"][vcpu]["host_node"], node, "{name}");
            }
            host.wait_until_listed(2);
        }
    }
    // The daemon's orderly end is waited for when `host` is dropped.
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
    assert!(host.text(&["show", "web"]).contains("vCPUs are those that the host kernel shows"));
    assert!(host.text(&["doctor"]).contains("silent, observed only"));
    host.fails(&["attach", "web"], 1, "web: not connected to its hypervisor");
    drop(other);
    assert_eq!(wait_until("answers")["described"], true);

    qemu.signal("-STOP");
    wait_until("stopped");
    let doctor = host.text(&["doctor"]);
    assert!(doctor.contains(&format!("remedy: kill -CONT {}", qemu.0.id())), "{doctor}");
    host.text(&["move", "web", "--vcpu", "3", "--node", "1"]);
    host.fails(&["attach", "web"], 1, "is stopped by a signal (SIGSTOP)");
    qemu.signal("-CONT");
    assert_eq!(wait_until("answers")["vcpus"][3]["host_node"], 1);
    assert!(host.text(&["attach", "web"]).contains("attached"));
}

/// Has a QEMU go on, by a monitor that vnumad does not use.
fn go_on(monitor: &Path) {
    let mut monitor = Qmp::connect(monitor).expect("a monitor");
    monitor.run("cont").expect("an answer");
    monitor.await_event("RESUME").expect("it goes on");
}

#[test]
fn a_vm_migrates_to_another_qemu_and_is_attached_when_it_runs_there() {
    let host = Host::start();
    let path = |name: &str| host.directory.path().join(name);
    let to = format!("unix:{}", path("in.sock").display());
    let _here = Qemu::start(&host.qmp("here"), true);
    host.wait_until_listed(1);
    host.fails(&["migrate", "here"], 1, "here: vnumad knows of no migration of it");
    host.fails(
        &["migrate", "here", "exec:true"],
        1,
        "here: it cannot migrate to `exec:true`: it does not begin with tcp:",
    );
    host.fails(&["migrate", "here", &to], 1, "here: it did not migrate to unix:");
    let failed = host.json(&["migrate", "here"]);
    assert_eq!(failed["state"], "failed");
    assert!(failed["problem"].as_str().is_some_and(|problem| problem.contains("No such file")), "{failed}");

    let monitor = path("there.monitor");
    let mut command = Qemu::command(&host.qmp("there"), &["host-nodes=0,policy=bind", ""]);
    let qmp = format!("unix:{},server=on,wait=off", monitor.display());
    let there = Qemu::spawn(command.args(["-incoming", &to, "-qmp", &qmp]));
    host.wait_until_listed(2);
    assert_eq!(host.json(&["show", "there"])["run_state"], "inmigrate");
    assert!(host.text(&["doctor"]).contains("its QEMU waits for the VM to come from another host"));
    host.fails(&["migrate", "there", &to], 1, "there: its guest is not here yet");
    let marked = host.text(&["attach", "there", "--on-arrival"]);
    assert_eq!(marked, "there: it is attached as soon as its guest runs here\n");
    assert_eq!(host.json(&["migrate", "here", &to])["state"], "done");
    host.fails(&["show", "here"], 1, "there is no VM `here`");
    assert_eq!(host.json(&["migrate", "here"])["state"], "done", "it can still be asked for");
    // The source was started with -S, and so the guest stands still at its destination, too.
    let waits = host.json(&["show", "there"]);
    assert_eq!((&waits["channel"], &waits["attach_on_arrival"]), (&"none".into(), &true.into()));
    assert!(there.topology().is_none());
    go_on(&monitor);
    wait_for("the VM to be attached", || host.json(&["show", "there"])["channel"] == "attached");
    assert_eq!(there.topology().expect("published").vcpus.len(), 4);
    wait_for("the mark to be gone", || host.json(&["show", "there"])["attach_on_arrival"] == false);
    host.wait_until_listed(1);
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
    assert_eq!(kinds.by_ref().take(2).collect::<Vec<_>>(), ["attached", "published"]);
    watch.kill().expect("killed");
    watch.wait().expect("ended");
    host.fails(&["watch", "--events", "gone,moved"], 2, "moved");
}

#[test]
fn watching_prints_the_kinds_that_are_asked_for() {
    use std::io::{BufRead, BufReader};
    let host = Host::start();
    let mut watch = host
        .vnumactl(&["watch", "--json", "--events", "attached,gone"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("runs");
    wait_for("the watcher", || host.json(&["daemon"])["watchers"] == 1);
    let qemu = Qemu::start(&host.qmp("web"), true);
    host.wait_until_listed(1);
    host.text(&["attach", "web"]);
    drop(qemu);
    let lines = BufReader::new(watch.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let kinds = lines.map(|line| serde_json::from_str::<Value>(&line).expect("JSON")["event"].clone());
    assert_eq!(kinds.take(2).collect::<Vec<_>>(), ["attached", "gone"]);
    watch.kill().expect("killed");
    watch.wait().expect("ended");
}

#[test]
fn a_recording_is_replayed_by_another_policy() {
    let host = Host::start();
    let _qemu = Qemu::start(&host.qmp("web"), true);
    host.wait_until_listed(1);
    let path = host.directory.path().join("periods.jsonl");
    let file = path.to_str().expect("UTF-8");
    host.text(&["policy", "web", "--set", "observe"]);
    assert_eq!(host.text(&["record", file, "--periods", "3"]), format!("{file}: 3 periods\n"));
    let recorded = std::fs::read_to_string(&path).expect("a recording");
    assert_eq!((recorded.lines().next(), recorded.lines().count()), (Some("{\"vnuma_recording\":1}"), 4));
    host.fails(&["record", file], 1, &format!("{file}: File exists"));
    // A replay does not need vnumad.
    let replay = |policy: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnumactl"));
        let arguments = ["--socket", "/nonexistent/v.sock", "--json", "replay", file, "--policy", policy];
        let output = command.args(arguments).output().expect("runs");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let replayed = replay("vprobe");
    let vm = &replayed["vms"][0];
    assert_eq!((&replayed["policy"], &replayed["periods"]), (&"vprobe".into(), &3.into()));
    assert_eq!(
        (&vm["vm"], &vm["recorded_policy"], &vm["vcpus"]),
        (&"web".into(), &"observe".into(), &4.into())
    );
    // The machine is stopped: there is nothing that a policy would do for it.
    assert_eq!((&vm["steps"], &replayed["step_count"]), (&0.into(), &0.into()));
    let shown = host.text(&["replay", file, "--policy", "lb"]);
    assert!(
        shown.starts_with("3 periods through lb: 0 steps\n") && shown.contains("web  observe"),
        "{shown}"
    );
    host.fails(&["replay", file, "--policy", "fast"], 2, "there is no policy `fast`");
    host.fails(&["policy", "web", "--set", "fast"], 2, "there is no policy `fast`");
    host.fails(&["record", "other", "--periods", "0"], 2, "not a number from 1 to 4294967295");
    std::fs::write(&path, recorded.replace("\"weight\":100", "\"weight\":0")).expect("written");
    let problem = format!("{file}: line 2: vms: web: vCPU 0: weight = 0: expected 1 to 10000");
    host.fails(&["replay", file, "--policy", "lb"], 1, &problem);
}

#[test]
fn a_recording_that_is_interrupted_is_whole() {
    let host = Host::start();
    let _qemu = Qemu::start(&host.qmp("web"), true);
    host.wait_until_listed(1);
    let path = host.directory.path().join("periods.jsonl");
    let mut record = host.vnumactl(&["record", path.to_str().expect("UTF-8")]);
    let said = host.directory.path().join("said");
    let record = record.stdout(Stdio::piped()).stderr(std::fs::File::create(&said).expect("made"));
    let record = record.spawn().expect("runs");
    // No VM has a policy: nothing is read, and there is nothing to record.
    wait_for("the file", || path.exists());
    let hint = "no period yet: does any VM have a policy other than off?";
    wait_for("a hint", || std::fs::read_to_string(&said).is_ok_and(|said| said.contains(hint)));
    host.text(&["policy", "web", "--set", "observe"]);
    let lines = || std::fs::read_to_string(&path).expect("a recording").lines().count();
    wait_for("periods", || lines() > 3);
    let status = Command::new("kill").args(["-INT", &record.id().to_string()]).status();
    assert!(status.expect("kill").success());
    let output = record.wait_with_output().expect("ended");
    let periods = lines() - 1;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.ends_with(&format!(": {periods} periods\n")), "{text}");
    let replayed = host.json(&["replay", path.to_str().expect("UTF-8"), "--policy", "vprobe"]);
    assert_eq!(replayed["periods"], periods);
}

/// `vnumactl top` on a terminal of its own.
struct Terminal {
    script: Child,
    output: std::process::ChildStdout,
    shown: String,
}

impl Terminal {
    fn start(host: &Host) -> Self {
        let socket = host.directory.path().join("api.sock");
        let top = format!(
            "trap : INT; stty cols 120 rows 12; timeout --foreground {} {} --socket {} top; echo ended $?",
            HANG_LIMIT.as_secs(),
            env!("CARGO_BIN_EXE_vnumactl"),
            socket.display()
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--command", &top, "/dev/null"]);
        let script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut script = script.expect("script (package bsdutils) is needed for this test");
        let output = script.stdout.take().expect("piped");
        Self { script, output, shown: String::new() }
    }

    /// Reads on until what was shown since the last picture began says this.
    fn wait_for(&mut self, text: &str) {
        use std::io::Read;
        while !self.picture().contains(text) {
            let mut bytes = [0; 4096];
            let length = self.output.read(&mut bytes).expect("it runs");
            assert!(length > 0, "it ended without {text:?}: {:?}", self.shown);
            self.shown += &String::from_utf8_lossy(&bytes[..length]);
        }
    }

    fn picture(&self) -> &str {
        self.shown.rsplit("\x1b[H").next().unwrap_or_default()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn top_is_shown_anew_until_it_is_interrupted() {
    use std::io::Write;
    let host = Host::start();
    let _qemu = Qemu::start(&host.qmp("web"), true);
    host.wait_until_listed(1);
    host.text(&["policy", "web", "--set", "observe"]);
    wait_for("figures", || host.json(&["policy", "web"])["vcpus"][0]["quality"].is_string());
    let once = host.text(&["top", "--once"]);
    assert!(once.starts_with("VM   VCPU  NODE  CPUS"), "{once}");
    assert_eq!(once.lines().filter(|line| line.starts_with("web")).count(), 4, "{once}");
    assert_eq!(host.json(&["top"])[0]["vm"], "web");

    let mut terminal = Terminal::start(&host);
    terminal.wait_for("1 VMs, 4 vCPUs, 0 confined by policies; a period of 100 ms; counters:");
    terminal.wait_for("LAST STEP");
    assert!(terminal.shown.contains("\x1b[?1049h\x1b[?25l"), "{:?}", terminal.shown);
    let _other = Qemu::start(&host.qmp("db"), false);
    terminal.wait_for("2 VMs, 8 vCPUs, 0 confined");
    terminal.script.stdin.as_mut().expect("piped").write_all(b"\x03").expect("a key");
    terminal.wait_for("ended 0");
    assert!(terminal.picture().contains("\x1b[?25h\x1b[?1049l"), "{:?}", terminal.picture());
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
