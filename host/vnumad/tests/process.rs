//! The program itself: its arguments, its socket, its end.

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
    sys::signal::{SigHandler, Signal, kill, signal},
    unistd::Pid,
};
use std::{
    io::Read,
    os::{
        fd::AsRawFd,
        unix::{net::UnixListener, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Output, Stdio},
};
use vnuma_test_kit::host::{answers, wait_for, write_host};
use vnuma_test_kit::http::ask;

fn vnumad(directory: &Path) -> Command {
    let config = directory.join("vnumad.toml");
    let [socket, vms, records] = ["run/vnumad.sock", "vms", "run/channels"].map(|name| directory.join(name));
    let text = format!(
        "[api]\nsocket = {socket:?}\n[vms]\ndirectory = {vms:?}\n[observe]\nlocation = \"poll\"\n\
         [publish]\nrecords = {records:?}\n"
    );
    std::fs::write(&config, text).expect("written");
    write_host(directory);
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnumad"));
    command.arg("--config").arg(config).arg("--root").arg(directory).stdin(Stdio::null());
    command
}

fn failed(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_serves_refuses_a_second_one_survives_its_own_death_and_stops_in_order() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("run/vnumad.sock");
    let serving = || socket.exists() && std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let mut first = Running(vnumad(directory.path()).stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("the first", serving);
    let mut refused = Running(vnumad(directory.path()).stderr(Stdio::piped()).spawn().expect("runs"));
    wait_for("the second to give up", || refused.0.try_wait().expect("a child").is_some());
    assert_eq!(refused.0.wait().expect("ended").code(), Some(1));
    let mut error = String::new();
    refused.0.stderr.take().expect("piped").read_to_string(&mut error).expect("UTF-8");
    assert!(
        error.contains(&format!("another vnumad (process {}) serves this socket", first.0.id())),
        "{error}"
    );

    // With a socket of its own it would still take over the channels of the first.
    let config = directory.path().join("vnumad.toml");
    let text = std::fs::read_to_string(&config).expect("written");
    let other = directory.path().join("other.toml");
    std::fs::write(&other, text.replacen("vnumad.sock", "other.sock", 1)).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnumad"));
    command.arg("--config").arg(&other).arg("--root").arg(directory.path());
    let error = failed(&command.stdin(Stdio::null()).output().expect("runs"));
    let owner = format!("another vnumad (process {}) keeps its records there", first.0.id());
    assert!(error.contains(&owner), "{error}");

    first.0.kill().expect("killed");
    first.0.wait().expect("ended");
    assert!(socket.exists(), "a leftover");
    let mut second = Running(vnumad(directory.path()).stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("the second", serving);
    let (status, daemon) = ask(&socket, "GET", "/v1/daemon", "");
    assert_eq!((status, &daemon["pid"]), (200, &second.0.id().into()));

    kill(Pid::from_raw(second.0.id().cast_signed()), Signal::SIGTERM).expect("asked to stop");
    assert!(second.0.wait().expect("ended").success());
    assert!(!socket.exists());
}

/// The exit code of a child says whether a QEMU has got its channel.
#[test]
fn it_waits_for_its_children_though_who_started_it_does_not() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("run/vnumad.sock");
    let mut command = vnumad(directory.path());
    let ignore = || {
        // SAFETY: the signal has no handler before and after.
        let before = unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) };
        before.map(drop).map_err(std::io::Error::from)
    };
    // SAFETY: the child makes one system call.
    let command = unsafe { command.pre_exec(ignore) };
    let daemon = Running(command.stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("it", || answers(&socket));
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.0.id())).expect("it runs");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask").trim();
    let ignored = u64::from_str_radix(ignored, 16).expect("a number");
    assert_eq!(ignored & 1 << (Signal::SIGCHLD as u32 - 1), 0, "{ignored:x}");
}

/// With the library, and without.
#[test]
fn a_libvirt_that_is_not_there_is_shown_and_keeps_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("run/vnumad.sock");
    let mut command = vnumad(directory.path());
    let config = directory.path().join("vnumad.toml");
    let text = std::fs::read_to_string(&config).expect("written");
    let uri = format!("qemu+unix:///system?socket={}", directory.path().join("nowhere").display());
    std::fs::write(&config, format!("{text}[libvirt]\nuris = [{uri:?}]\n")).expect("written");
    let _daemon = Running(command.stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("it", || socket.exists() && std::os::unix::net::UnixStream::connect(&socket).is_ok());
    wait_for("the connection to be shown with its problem", || {
        let (_, daemon) = ask(&socket, "GET", "/v1/daemon", "");
        let shown = &daemon["libvirt"][0];
        shown["uri"] == uri.as_str() && shown["problem"].as_str().is_some_and(|why| why.contains("libvirt"))
    });
    assert_eq!(ask(&socket, "GET", "/v1/vms", "").0, 200);
}

/// One that takes connections and answers nothing, as a libvirtd does that is stopped.
#[test]
fn a_libvirt_that_hangs_is_shown_and_holds_nothing_up() {
    let directory = tempfile::tempdir().expect("a directory");
    let [socket, silent, vms] =
        ["run/vnumad.sock", "libvirt.sock", "vms"].map(|name| directory.path().join(name));
    let _libvirt = UnixListener::bind(&silent).expect("listens");
    std::fs::create_dir(&vms).expect("created");
    let mut command = vnumad(directory.path());
    let config = directory.path().join("vnumad.toml");
    let text = std::fs::read_to_string(&config).expect("written");
    let uri = format!("qemu+unix:///system?socket={}", silent.display());
    std::fs::write(&config, format!("{text}[libvirt]\nuris = [{uri:?}]\n")).expect("written");
    let _daemon = Running(command.stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("it", || answers(&socket));
    wait_for("the connection to be shown with its problem", || {
        let (_, daemon) = ask(&socket, "GET", "/v1/daemon", "");
        daemon["libvirt"][0]["problem"].as_str().is_some_and(|why| why.contains("libvirt"))
    });
    // A VM of another kind that appears now is found.
    let _qemu = UnixListener::bind(vms.join("web.sock")).expect("listens");
    wait_for("a VM that is not libvirt's", || {
        let (status, vms) = ask(&socket, "GET", "/v1/vms", "");
        assert_eq!(status, 200, "{vms}");
        vms[0]["name"] == "web"
    });
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("run/vnumad.sock");
    let (log, writer) = nix::unistd::pipe().expect("a pipe");
    fcntl(&log, FcntlArg::F_SETPIPE_SZ(4096)).expect("made small");
    let mut command = vnumad(directory.path());
    let daemon = Running(command.args(["--log", "trace"]).stderr(Stdio::from(writer)).spawn().expect("runs"));
    drop(command);
    wait_for("it", || socket.exists() && std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let unread = || {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one integer.
        unsafe { libc::ioctl(log.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
        bytes
    };
    wait_for("the pipe to be full", || {
        assert_eq!(ask(&socket, "GET", "/v1/daemon", "").0, 200);
        unread() > 4096 - 512
    });
    for _ in 0..50 {
        assert_eq!(ask(&socket, "GET", "/v1/daemon", "").0, 200);
    }
    drop(daemon);
}

#[test]
fn a_configuration_can_be_checked() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("bad.toml");
    std::fs::write(&path, "[publish]\ndwell = 5\n").expect("written");
    let run = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_vnumad")).args(arguments).output().expect("runs")
    };
    let path = path.to_str().expect("UTF-8");
    let error = failed(&run(&["--check", "--config", path]));
    assert!(error.contains(&format!("{path}: line 2: unknown field `dwell`")), "{error}");
    std::fs::write(path, "[publish]\ndwell_ms = 5\n").expect("written");
    assert!(run(&["--check", "--config", path]).status.success());
    assert!(failed(&run(&["--config", "/nonexistent.toml"])).contains("/nonexistent.toml"));
}

#[test]
fn nonsense_on_the_command_line_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let nowhere = directory.path().join("nowhere").display().to_string();
    for (arguments, status, expected) in [
        (vec!["--confg", "x"], 2, "unexpected argument '--confg'"),
        (vec!["--config"], 2, "--config <FILE>"),
        (vec!["serve"], 2, "unexpected argument 'serve'"),
        (vec!["--check", "--print-topology"], 2, "'--check' cannot be used with '--print-topology'"),
        (vec!["--print-topology", "--root", &nowhere], 1, nowhere.as_str()),
        (vec!["--log", "vnumad=loudly"], 1, "--log vnumad=loudly"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vnumad")).args(&arguments).output().expect("runs");
        let error = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(error.contains(expected), "{arguments:?}: {error:?} should say {expected:?}");
    }
}

#[test]
fn a_recorded_host_can_be_printed() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = vnumad(directory.path()).arg("--print-topology").output().expect("runs");
    let topology: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(topology["nodes"][1]["cpus"], "1");
    std::fs::remove_dir_all(directory.path().join("sys")).expect("removed");
    let broken = Command::new(env!("CARGO_BIN_EXE_vnumad"))
        .args(["--print-topology", "--root"])
        .arg(directory.path())
        .output()
        .expect("runs");
    assert!(failed(&broken).contains(&directory.path().display().to_string()));
}

#[test]
fn it_may_have_as_many_files_as_the_hard_limit_allows() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("run/vnumad.sock");
    let vnumad = vnumad(directory.path());
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -S -n 256 && exec \"$0\" \"$@\""]).arg(vnumad.get_program());
    let running = Running(shell.args(vnumad.get_args()).stderr(Stdio::null()).spawn().expect("runs"));
    wait_for("it to serve", || socket.exists());
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", running.0.id())).expect("alive");
    let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    let values: Vec<_> = files.split_whitespace().skip(3).take(2).collect();
    assert_eq!(values[0], values[1], "{files}");
}
