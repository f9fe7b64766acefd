//! What a service manager hears of vnumad: that it serves, that its loop turns, that it stops.

use nix::{
    libc,
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_test_kit::host::{HANG_LIMIT, wait_for, write_host};
use vnuma_test_kit::http::ask;

/// How long the manager waits for a sign of the loop.
const WATCHDOG: Duration = Duration::from_millis(600);

/// A vnumad with a manager.
struct Service {
    vnumad: Child,
    manager: UnixDatagram,
    api: PathBuf,
    directory: tempfile::TempDir,
}

impl Service {
    fn start(pid: Option<&str>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        write_host(root);
        let [config, api, vms, notify, records] =
            ["vnumad.toml", "run/vnumad.sock", "vms", "notify", "run/channels"].map(|name| root.join(name));
        // The interval is longer than the manager waits.
        let text = format!(
            "[api]\nsocket = {api:?}\n[vms]\ndirectory = {vms:?}\n[observe]\nlocation = \"poll\"\nresync_interval_ms = 60000\n\
             [publish]\nrecords = {records:?}\n"
        );
        fs::write(&config, text).expect("written");
        let manager = UnixDatagram::bind(&notify).expect("bound");
        manager.set_read_timeout(Some(HANG_LIMIT)).expect("a limit");
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnumad"));
        command.arg("--config").arg(config).arg("--root").arg(root);
        command.env("NOTIFY_SOCKET", &notify).env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
        if let Some(pid) = pid {
            command.env("WATCHDOG_PID", pid);
        }
        let vnumad = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs");
        Self { vnumad, manager, api, directory }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.vnumad.id().cast_signed())
    }

    /// The next message.
    fn heard(&self) -> String {
        let mut bytes = [0; 256];
        let length = self.manager.recv(&mut bytes).expect("a message");
        String::from_utf8(bytes[..length].to_vec()).expect("UTF-8")
    }

    /// The next message that begins so; nothing but signs of the loop may come before.
    fn hears(&self, begin: &str) -> String {
        loop {
            let message = self.heard();
            if message.starts_with(begin) {
                return message;
            }
            assert_eq!(message, "WATCHDOG=1", "before {begin}");
        }
    }

    /// What has come, without waiting.
    fn count(&self) -> usize {
        self.manager.set_nonblocking(true).expect("set");
        let count = std::iter::from_fn(|| self.manager.recv(&mut [0; 256]).ok()).count();
        self.manager.set_nonblocking(false).expect("set");
        count
    }

    fn thread(&self, name: &str) -> Pid {
        let tasks = Path::new("/proc").join(self.vnumad.id().to_string()).join("task");
        let mut tasks = fs::read_dir(tasks).expect("it runs").flatten();
        let found = tasks.find(|task| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        });
        let name = found.expect("such a thread").file_name();
        Pid::from_raw(name.to_str().and_then(|tid| tid.parse().ok()).expect("a number"))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.vnumad.kill();
        let _ = self.vnumad.wait();
    }
}

/// Stands still as long as this lives, while the other threads of its process run.
struct Stopped(Pid);

impl Stopped {
    fn stop(thread: Pid) -> Self {
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            let nothing = std::ptr::null_mut::<libc::c_void>();
            // SAFETY: neither request reads or writes memory of this process.
            let done = unsafe { libc::ptrace(request, thread.as_raw(), nothing, nothing) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        }
        let status = waitpid(thread, Some(WaitPidFlag::__WALL)).expect("a thread of ours");
        assert!(matches!(status, WaitStatus::PtraceEvent(..)), "{status:?}");
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the request neither reads nor writes memory of this process.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0.as_raw(), nothing, nothing) };
    }
}

#[test]
fn a_manager_hears_when_it_serves_and_when_it_stops() {
    let mut service = Service::start(None);
    let ready = service.hears("READY=1\n");
    assert!(ready.contains(&format!("STATUS=serving {}, 2 host nodes", service.api.display())), "{ready}");
    // Not a moment too early: nothing is waited for here.
    assert_eq!(ask(&service.api, "GET", "/v1/vms", "").0, 200);
    kill(service.pid(), Signal::SIGTERM).expect("asked to stop");
    service.hears("STOPPING=1\n");
    assert!(service.vnumad.wait().expect("ended").success());
}

/// Only the core's thread feeds the watchdog: not the API's thread, nor another one.
#[test]
fn a_loop_that_stands_still_is_noticed() {
    let service = Service::start(None);
    service.hears("READY=1\n");
    // Nothing else wakes the loop up for a minute.
    service.manager.set_read_timeout(Some(HANG_LIMIT / 3)).expect("a limit");
    for _ in 0..4 {
        assert_eq!(service.heard(), "WATCHDOG=1");
    }
    let core = Stopped::stop(service.thread("core"));
    service.count();
    // The rest of it does run meanwhile: this needs the API's thread alone.
    let begin = Instant::now();
    while begin.elapsed() < 3 * WATCHDOG {
        assert_eq!(ask(&service.api, "GET", "/v1/nothing", "").0, 404);
    }
    assert_eq!(service.count(), 0, "signs of a loop that stands still");
    drop(core);
    assert_eq!(service.heard(), "WATCHDOG=1");
}

#[test]
fn the_variables_of_another_process_do_not_count() {
    let service = Service::start(Some("1"));
    service.hears("READY=1\n");
    wait_for("it to serve", || ask(&service.api, "GET", "/v1/vms", "").0 == 200);
    kill(service.pid(), Signal::SIGTERM).expect("asked to stop");
    assert!(service.heard().starts_with("STOPPING=1\n"), "a sign that nobody waits for");
}

#[test]
fn a_manager_that_is_gone_is_no_reason_not_to_serve() {
    let mut service = Service::start(None);
    service.hears("READY=1\n");
    fs::remove_file(service.directory.path().join("notify")).expect("removed");
    let (mut again, api) = {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnumad"));
        command.arg("--config").arg(service.directory.path().join("vnumad.toml"));
        command.arg("--root").arg(service.directory.path());
        command.env("NOTIFY_SOCKET", service.directory.path().join("notify"));
        kill(service.pid(), Signal::SIGTERM).expect("asked to stop");
        assert!(service.vnumad.wait().expect("ended").success());
        (command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs"), &service.api)
    };
    wait_for("it to serve", || std::os::unix::net::UnixStream::connect(api).is_ok());
    kill(Pid::from_raw(again.id().cast_signed()), Signal::SIGTERM).expect("asked to stop");
    assert!(again.wait().expect("ended").success());
}
