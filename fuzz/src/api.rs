//! Requests to a daemon with one VM. The first line of an input is method and path, the rest is the body.

use crate::{expect_clear, scratch, start_vcpu};
use nix::sys::eventfd::EventFd;
use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};
use vnuma_api::ApiError;
use vnuma_daemon::{BackendFactory, Config};
use vnuma_hypervisor::{ObservedVcpus, Plug, Plugged, VmBackend, VmConnection, VmError, VmEvent};
use vnuma_model::{GuestNode, Vcpu, VmCandidate, VmDescription, VmHandle};
use vnuma_observe::location::Prefer;

/// Only a limit for tests that hang.
const HANG_LIMIT: Duration = Duration::from_secs(15);

/// A request is answered, whatever it is, by what it asked for or by an error that says what is wrong with it.
pub fn run(input: &[u8]) {
    let line = input.iter().position(|&byte| byte == b'\n').unwrap_or(input.len());
    let (request, body) = (&input[..line], input.get(line + 1..).unwrap_or_default());
    let head = format!(" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = UnixStream::connect(daemon()).expect("a daemon that listens");
    stream.set_read_timeout(Some(HANG_LIMIT)).expect("a limit");
    // The answer to a body that is too long may come before its end.
    let _ = stream.write_all(&[request, head.as_bytes(), body].concat());
    let Some((status, kind, answer)) = read_answer(&mut stream) else {
        // hyper closes a connection that begins like HTTP/2 without an answer.
        let preface = b"PRI * HTTP/2.0";
        return assert!(input.windows(preface.len()).any(|bytes| bytes == preface), "no answer");
    };
    assert_ne!(status, 500, "{}", String::from_utf8_lossy(&answer));
    // A HEAD has no body; what is no HTTP is refused before there is anybody to say why.
    if request.starts_with(b"HEAD ") || !kind.contains("json") {
        return assert!(answer.is_empty(), "{status} {kind}: {}", String::from_utf8_lossy(&answer));
    }
    if status >= 400 {
        let error: ApiError = serde_json::from_slice(&answer).expect("an error as documented");
        expect_clear(&error.message);
    } else if !kind.contains("ndjson") {
        serde_json::from_slice::<serde_json::Value>(&answer).expect("JSON");
    }
}

/// Status, type and body; none if the connection was closed without any.
fn read_answer(stream: &mut UnixStream) -> Option<(u16, String, Vec<u8>)> {
    let (mut answer, mut chunk) = (Vec::new(), [0; 4096]);
    let end_of_head = |answer: &[u8]| answer.windows(4).position(|end| end == b"\r\n\r\n");
    let kind_of = |head: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix("content-type: "));
        line.unwrap_or_default().to_owned()
    };
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&chunk[..length]),
            // The fuzzer's own clock.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("no answer: {error}"),
        }
        // Events have no end.
        if let Some(end) = end_of_head(&answer)
            && kind_of(&String::from_utf8_lossy(&answer[..end])).contains("ndjson")
        {
            break;
        }
    }
    if answer.is_empty() {
        return None;
    }
    let end = end_of_head(&answer).expect("an answer with a head");
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Some((status, kind_of(&head), answer.split_off(end + 4)))
}

/// A daemon that lasts as long as this process: its socket.
fn daemon() -> &'static PathBuf {
    static DAEMON: OnceLock<PathBuf> = OnceLock::new();
    DAEMON.get_or_init(|| {
        let root = scratch().join("host");
        write_host(&root).expect("a tree of a host");
        let config = Config {
            socket: scratch().join("api.sock"),
            root,
            location: Prefer::Poll,
            poll_interval: Duration::from_secs(10),
            resync_interval: Duration::from_secs(60),
            records: scratch().join("channels"),
            ..Config::default()
        };
        let socket = config.socket.clone();
        let world = World { tid: start_vcpu() };
        let factory: BackendFactory = Arc::new(move || Box::new(world));
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(vnuma_daemon::run(
                config,
                factory,
                vnuma_daemon::Notifier::default(),
                std::future::pending(),
            ))
        });
        wait_until_it_serves(&socket);
        socket
    })
}

fn wait_until_it_serves(socket: &PathBuf) {
    let end = Instant::now() + HANG_LIMIT;
    loop {
        if let Ok(mut stream) = UnixStream::connect(socket) {
            stream.set_read_timeout(Some(HANG_LIMIT)).expect("a limit");
            let request = b"GET /v1/vms/web HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            if stream.write_all(request).is_ok()
                && read_answer(&mut stream).is_some_and(|answer| answer.0 == 200)
            {
                return;
            }
        }
        assert!(Instant::now() < end, "the daemon does not serve within {HANG_LIMIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Two nodes with the first two CPUs of this machine.
fn write_host(root: &std::path::Path) -> std::io::Result<()> {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, text)
    };
    let system = |path: &str, text: &str| write(&format!("sys/devices/system/{path}"), text);
    system("cpu/online", "0-1\n")?;
    system("node/online", "0-1\n")?;
    for (node, distances) in [(0, "10 21\n"), (1, "21 10\n")] {
        system(&format!("node/node{node}/cpulist"), &format!("{node}\n"))?;
        system(&format!("node/node{node}/distance"), distances)?;
        let memory = format!("Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 1048576 kB\n");
        system(&format!("node/node{node}/meminfo"), &memory)?;
    }
    for (file, text) in
        [("class", "0x020000"), ("vendor", "0x8086"), ("device", "0x10c9"), ("numa_node", "1")]
    {
        write(&format!("sys/bus/pci/devices/0000:81:00.0/{file}"), text)?;
    }
    write("proc/sys/kernel/random/boot_id", "boot\n")
}

/// One VM, `web`, with a guest node and a vCPU.
#[derive(Clone, Copy)]
struct World {
    tid: i32,
}

impl VmBackend for World {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        Ok(vec![VmCandidate::new("fuzz:web", "web", 0)])
    }

    fn connect(&self, _handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).expect("a pidfd");
        let events = EventFd::new().expect("an eventfd");
        Ok(Box::new(Connection { tid: self.tid, pidfd, events, device: None }))
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear_changes(&mut self) {}
}

struct Connection {
    tid: i32,
    pidfd: OwnedFd,
    events: EventFd,
    device: Option<Plug>,
}

impl VmConnection for Connection {
    fn greet(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        None
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        Ok(false)
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        let guest_nodes = vec![GuestNode { id: 0, memory_bytes: 1 << 28, memory: None }];
        let vcpus = vec![Vcpu { index: 0, apic_id: 0, boot_node: Some(0), tid: self.tid }];
        Ok(VmDescription {
            name: "web".into(),
            pid: self.pid(),
            run_state: "running".into(),
            guest_nodes,
            vcpus,
            spare_slots: BTreeMap::from([(0, 1)]),
            devices: Vec::new(),
            memory_devices: Vec::new(),
        })
    }

    fn removable_vcpu(&mut self, apic_id: u32) -> Result<Plugged, VmError> {
        Ok(Plugged { apic_id, tid: self.tid })
    }

    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError> {
        Err(VmError::NoSpareSlot { vm: "web".into(), node })
    }

    fn await_guest(&mut self, apic_id: u32) -> Result<(), VmError> {
        Err(VmError::NoVcpu { vm: "web".into(), vcpu: apic_id })
    }

    fn unplug_vcpu(&mut self, apic_id: u32) -> Result<(), VmError> {
        Err(VmError::NoVcpu { vm: "web".into(), vcpu: apic_id })
    }

    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError> {
        self.device = Some(plug);
        Ok(())
    }

    fn probe(&mut self, _limit: Duration) -> Result<(), VmError> {
        Ok(())
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        Ok(self.device.is_some())
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        self.device.take().map(drop).ok_or(VmError::NotAttached { vm: "web".into() })
    }

    fn poll_event(&mut self, _timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        Ok(None)
    }

    fn pid(&self) -> i32 {
        std::process::id().cast_signed()
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}
