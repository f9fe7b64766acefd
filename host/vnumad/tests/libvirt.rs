//! vnumad with a real libvirt, and on a host without one. Needs root, and for most tests libvirtd, virsh and `qemu-system-x86_64`.

#[path = "../../hypervisor/tests/libvirt/real.rs"]
mod real;

use real::Libvirt;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    os::unix::{fs::MetadataExt, net::UnixListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};
use vnuma_lab_qmp::Qmp;
use vnuma_test_kit::host::{answers, wait_for, write_host};
use vnuma_test_kit::http::ask;

/// The name of a channel's memory.
const MEMORY: &str = "/memfd:vnuma-topology";

/// A vnumad, and its directory.
struct Vnumad {
    child: Child,
    directory: tempfile::TempDir,
}

impl Vnumad {
    /// Starts it by a command to which its own is appended.
    fn start(mut command: Command, libvirt: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let config = directory.path().join("vnumad.toml");
        let [socket, vms, records] =
            ["vnumad.sock", "vms", "channels"].map(|name| directory.path().join(name));
        fs::create_dir(&vms).expect("created");
        let text = format!(
            "[api]\nsocket = {socket:?}\n[vms]\ndirectory = {vms:?}\n[observe]\nlocation = \"poll\"\n\
             [publish]\nrecords = {records:?}\n[libvirt]\n{libvirt}\n"
        );
        fs::write(&config, text).expect("written");
        write_host(directory.path());
        command.arg(env!("CARGO_BIN_EXE_vnumad")).arg("--config").arg(config);
        command.arg("--root").arg(directory.path()).stdin(Stdio::null()).stderr(Stdio::null());
        let started = Self { child: command.spawn().expect("runs"), directory };
        wait_for("vnumad", || answers(&started.socket()));
        started
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("vnumad.sock")
    }

    fn read(&self, path: &str) -> Value {
        let (status, answer) = ask(&self.socket(), "GET", path, "");
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn attach(&self, vm: &str) -> (u16, String) {
        let (status, answer) = ask(&self.socket(), "POST", &format!("/v1/vms/{vm}/attach"), "");
        (status, answer.to_string())
    }

    /// Inodes of the channels that it has.
    fn channels(&self) -> BTreeSet<u64> {
        channels(self.child.id())
    }
}

impl Drop for Vnumad {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Inodes of the channels' memory that a process has open or mapped.
fn channels(pid: u32) -> BTreeSet<u64> {
    let process = Path::new("/proc").join(pid.to_string());
    let maps = fs::read_to_string(process.join("maps")).expect("it runs");
    let mapped = maps.lines().filter(|line| line.contains(MEMORY));
    let mapped = mapped.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
    let files = fs::read_dir(process.join("fd")).expect("it runs").flatten();
    let open = files.filter(|file| {
        fs::read_link(file.path()).is_ok_and(|name| name.to_string_lossy().starts_with(MEMORY))
    });
    mapped.chain(open.filter_map(|file| Some(fs::metadata(file.path()).ok()?.ino()))).collect()
}

/// Does a QEMU answer?
fn answers_at(monitor: &Path) {
    let status = Qmp::connect(monitor).and_then(|mut monitor| monitor.run("query-status"));
    assert!(status.expect("it answers")["running"].is_boolean());
}

/// Each has a socket and records of its own, as it must, and the directory for QEMU's sockets in common, as it is by default.
#[test]
fn two_vnumads_on_one_libvirt_attach_each_domain_once_and_stop_no_guest() {
    let Some(libvirt) = Libvirt::start() else { return };
    let sockets = libvirt.dir.path().join("sockets");
    let settings = format!(
        "uris = [{:?}]\nstate_directories = [{:?}]\nsocket_directory = {sockets:?}",
        libvirt.uri(),
        libvirt.states()
    );
    let names = ["a", "b", "c", "d", "e", "f"];
    let monitors = names.map(|name| {
        let (extra, monitor) = libvirt.monitor(name);
        libvirt.create(name, &extra);
        monitor
    });
    let both = [(); 2].map(|()| Vnumad::start(Command::new("env"), &settings));
    for vnumad in &both {
        wait_for("all domains", || {
            let vms = vnumad.read("/v1/vms");
            let vms = vms.as_array().expect("a list");
            vms.len() == names.len() && vms.iter().all(|vm| vm["described"] == true)
        });
    }
    for (name, monitor) in names.iter().zip(&monitors) {
        let outcomes = thread::scope(|scope| {
            let attaches = both.each_ref().map(|vnumad| scope.spawn(move || vnumad.attach(name)));
            attaches.map(|attach| attach.join().expect("answered"))
        });
        println!("{name}: {outcomes:?}");
        answers_at(monitor);
        let succeeded = outcomes.iter().filter(|(status, _)| *status == 200).count();
        assert_eq!(succeeded, 1, "{name}: {outcomes:?}");
        let process = both[0].read(&format!("/v1/vms/{name}"))["pid"].as_u64().expect("a process");
        let memory = channels(process as u32);
        assert_eq!(memory.len(), 1, "{name}: one channel");
        for (vnumad, (status, _)) in both.iter().zip(&outcomes) {
            assert_eq!(vnumad.channels().is_superset(&memory), *status == 200, "{name}: whose memory it is");
        }
    }
}

/// As where the library is not installed.
#[test]
fn without_the_library_vnumad_has_the_other_vms_and_says_why() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: this needs root");
    }
    let hide = r#"
for file in $(ldconfig -p | sed -n 's/.*libvirt\.so\.0 .*=> //p'); do
    mount --bind /dev/null "$(readlink -f "$file")" || exit 1
done
exec "$@"
"#;
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-c", hide, "sh"]);
    let vnumad = Vnumad::start(command, "uris = [\"qemu:///system\"]");
    let libvirt = vnumad.read("/v1/daemon")["libvirt"].clone();
    assert_eq!(libvirt[0]["uri"], "qemu:///system");
    let problem = libvirt[0]["problem"].as_str().unwrap_or_default();
    assert!(problem.starts_with("libvirt cannot be used: ") && problem.contains("libvirt.so.0"), "{problem}");
    let _qemu = UnixListener::bind(vnumad.directory.path().join("vms/web.sock")).expect("listens");
    wait_for("a VM with a QMP socket", || vnumad.read("/v1/vms")[0]["name"] == "web");
}
