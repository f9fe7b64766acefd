//! Describes, attaches and detaches with a real QEMU, whose machine stands still at its
//! first instruction. Needs `qemu-system-x86_64` and fails without it.

use nix::sys::{
    eventfd::EventFd,
    memfd::{MFdFlags, memfd_create},
    signal::{Signal, kill},
    socket::{ControlMessage, MsgFlags, sendmsg},
};
use std::{
    fs,
    io::{IoSlice, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use vnuma_hypervisor::{Plug, QmpBackend, VmBackend, VmConnection, VmError, VmEvent};
use vnuma_lab_qmp::Qmp;
use vnuma_model::{MemoryDevice, MigrationProgress, MigrationStatus, RunState, VmDescription, VmHandle};

/// No step takes this long, on no machine.
const HANG: Duration = Duration::from_secs(60);

/// One QEMU at a time: each wants a core and some memory.
static TURN: Mutex<()> = Mutex::new(());

struct Qemu {
    child: Child,
    dir: TempDir,
    /// Of the first one of a test.
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Qemu {
    fn start(args: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut qemu = Self::beside(args);
        qemu._turn = Some(turn);
        qemu
    }
    /// Another one in the same test.
    fn beside(args: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{},server=on,wait=off", dir.path().join(name).display());
        let child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-M", "q35", "-nodefaults", "-display", "none", "-S", "-m", "512"])
            .args(["-qmp", &socket("vm.sock"), "-qmp", &socket("ctl")])
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("qemu-system-x86_64 is needed by this test: {error}"));
        let qemu = Self { child, dir, _turn: None };
        let end = Instant::now() + HANG;
        while UnixStream::connect(qemu.path("ctl")).is_err() {
            assert!(Instant::now() < end, "QEMU does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        // It listens before its memory is allocated, and answers after that.
        qemu.control(r#"{"execute": "query-status"}"#);
        qemu
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn backend(&self) -> (QmpBackend, VmHandle) {
        let mut backend = QmpBackend::new(Some(self.dir.path().to_owned()), Vec::new());
        let candidates = backend.scan().unwrap();
        let handle = QmpBackend::handle(&self.path("vm.sock")).unwrap();
        assert_eq!(
            candidates.iter().map(|vm| (vm.name.as_str(), &vm.handle)).collect::<Vec<_>>(),
            [("vm", &handle)]
        );
        (backend, handle)
    }
    fn connect(&self) -> Box<dyn VmConnection> {
        let (backend, handle) = self.backend();
        let mut vm = backend.connect(&handle).unwrap_or_else(|error| panic!("{error}"));
        vm.greet().unwrap_or_else(|error| panic!("{error}"));
        vm
    }
    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }
    fn signal(&self, signal: Signal) {
        kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }
    /// Gives a command over the second monitor; its answer, or why it was refused.
    fn control(&self, command: &str) -> String {
        let mut monitor = Qmp::connect_within(&self.path("ctl"), HANG).unwrap();
        let answer = monitor.execute(&serde_json::from_str(command).unwrap());
        answer.map_or_else(|error| format!("{error:#}"), |answer| format!("return: {answer}"))
    }
    fn has_chardev(&self) -> bool {
        self.control(r#"{"execute": "query-chardev"}"#).contains("vnuma-channel")
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const TWO_NODES: &str = "-name guest=web-1 -smp 4,sockets=4 \
    -object memory-backend-ram,id=ramB,size=256M,prealloc=on -object memory-backend-memfd,id=ramA,size=256M,share=on \
    -numa node,nodeid=0,cpus=0-1,memdev=ramA -numa node,nodeid=1,cpus=2-3,memdev=ramB \
    -device pcie-root-port,id=other,chassis=1,slot=1 -device pcie-root-port,id=vnuma0,chassis=2,slot=2 \
    -device virtio-rng-pci,bus=vnuma0 -device pcie-root-port,id=vnuma1,chassis=3,slot=3";

const INFO_RAMBLOCK: &str =
    r#"{"execute": "human-monitor-command", "arguments": {"command-line": "info ramblock"}}"#;

/// What the ivshmem server tells a client when it connects, all of it at once.
fn server() -> (UnixStream, Plug) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let memory = memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&memory, 1 << 20).unwrap();
    let send = |value: i64, fd: Option<i32>| {
        let fds = fd.map(|fd| [fd]);
        let control = fds.as_ref().map(|fds| ControlMessage::ScmRights(fds));
        let bytes = value.to_le_bytes();
        sendmsg::<()>(ours.as_raw_fd(), &[IoSlice::new(&bytes)], control.as_slice(), MsgFlags::empty(), None)
            .unwrap();
    };
    send(0, None);
    send(0, None);
    send(-1, Some(memory.as_raw_fd()));
    for peer in [1, 0] {
        for _ in 0..8 {
            send(peer, Some(EventFd::new().unwrap().as_fd().as_raw_fd()));
        }
    }
    (ours, Plug::Ivshmem(theirs.into()))
}

#[test]
fn a_vm_is_described() {
    // Of equal size and made in either order: only their place in the RAM tells the backends apart.
    let swapped = TWO_NODES.replace("memdev=ramA", "memdev=x").replace("memdev=ramB", "memdev=ramA");
    let swapped = swapped.replace("memdev=x", "memdev=ramB");
    for (args, backends) in [(TWO_NODES, ["ramA", "ramB"]), (&swapped, ["ramB", "ramA"])] {
        let qemu = Qemu::start(args);
        let mut vm = qemu.connect();
        assert_eq!(vm.pid(), qemu.pid());
        check_two_nodes(&qemu, &vm.describe().unwrap(), backends);
    }
}

fn check_two_nodes(qemu: &Qemu, description: &VmDescription, backends: [&str; 2]) {
    assert_eq!((description.name.as_str(), description.pid), ("web-1", qemu.pid()));
    let vcpus: Vec<_> = description.vcpus.iter().map(|v| (v.index, v.apic_id, v.boot_node)).collect();
    assert_eq!(vcpus, [(0, 0, Some(0)), (1, 1, Some(0)), (2, 2, Some(1)), (3, 3, Some(1))]);
    for vcpu in &description.vcpus {
        assert!(Path::new(&format!("/proc/{}/task/{}", qemu.pid(), vcpu.tid)).exists());
    }
    let nodes: Vec<_> = description.guest_nodes.iter().map(|node| (node.id, node.memory_bytes)).collect();
    assert_eq!(nodes, [(0, 256 << 20), (1, 256 << 20)]);
    let memory = description.guest_nodes.iter().map(|node| node.memory.as_ref().unwrap());
    for (memory, id) in memory.zip(backends) {
        assert_eq!((memory.id.as_str(), memory.policy.as_ref()), (id, "default"));
        assert_eq!(memory.size_bytes, 256 << 20);
        if id != "ramB" {
            continue;
        }
        // QEMU before 8.1 does not tell where each is, and nothing else tells the two apart.
        let kib: u64 = memory.resident_kib.iter().map(|(_, kib)| kib).sum();
        let told = qemu.control(INFO_RAMBLOCK).contains("HVA") && fs::exists("/proc/self/numa_maps").unwrap();
        assert_eq!(kib, if told { 256 << 10 } else { 0 }, "{memory:?}");
    }
}

#[test]
fn apic_ids_differ_from_indices_and_bindings_are_seen() {
    // Three cores to a socket leave a gap in the APIC ids.
    let qemu = Qemu::start(
        "-smp 4,sockets=2,cores=3,maxcpus=6 -object memory-backend-ram,id=m,size=512M,host-nodes=0,policy=bind \
         -numa node,nodeid=0,cpus=0-2,memdev=m -numa node,nodeid=1,cpus=3-5",
    );
    let description = qemu.connect().describe().unwrap();
    assert_eq!(description.name, "vm", "named after its socket");
    let vcpus: Vec<_> = description.vcpus.iter().map(|v| (v.index, v.apic_id, v.boot_node)).collect();
    assert_eq!(vcpus, [(0, 0, Some(0)), (1, 1, Some(0)), (2, 2, Some(0)), (3, 4, Some(1))]);
    let node = &description.guest_nodes[0];
    let memory = node.memory.as_ref().unwrap();
    assert_eq!((memory.policy.as_ref(), memory.host_nodes.as_slice()), ("bind", &[0][..]));
    assert_eq!(memory.resident_kib, [], "not counted where it is bound");
    assert_eq!((description.guest_nodes[1].memory_bytes, &description.guest_nodes[1].memory), (0, &None));
}

#[test]
fn memory_devices_are_described_and_sized() {
    let device = |number: u32, more: &str| {
        format!(
            "-object memory-backend-ram,id=plug{number},size=64M -device virtio-mem-pci,memdev=plug{number},node={number}{more} "
        )
    };
    let (named, nameless) = (device(1, ",id=vmem1,requested-size=4M"), device(0, ""));
    let args =
        format!("{} -m 512M,maxmem=4G {named}{nameless}", TWO_NODES.replace("prealloc=on", "prealloc=off"));
    let qemu = Qemu::start(&args);
    let mut vm = qemu.connect();
    let shown = |vm: &mut dyn VmConnection| {
        let mut devices = vm.describe().unwrap().memory_devices;
        devices.sort_by_key(|device| device.guest_node);
        assert!(
            devices.iter().all(|device| device.memory.size_bytes == 64 << 20 && device.plugged_bytes == 0)
        );
        assert!(devices.iter().all(|device| device.block_bytes >= 1 << 20), "{devices:?}");
        let one = |device: MemoryDevice| {
            (device.id, device.guest_node, device.requested_bytes >> 20, device.memory.id)
        };
        devices.into_iter().map(one).collect::<Vec<_>>()
    };
    let expected =
        |mib| [(None, 0, 0, "plug0".to_owned()), (Some("vmem1".to_owned()), 1, mib, "plug1".to_owned())];
    assert_eq!(shown(&mut *vm), expected(4));
    vm.sizes().unwrap().request("vmem1", 32 << 20).unwrap();
    assert_eq!(shown(&mut *vm), expected(32));
    for (id, bytes, reason) in
        [("vmem1", 1, "multiple"), ("vmem1", 1 << 40, "exceed"), ("vmem9", 0, "not found")]
    {
        let refused = vm.sizes().unwrap().request(id, bytes).unwrap_err();
        assert!(
            matches!(&refused, VmError::Refused { reason: found, .. } if found.contains(reason)),
            "{refused}"
        );
    }
    assert_eq!(shown(&mut *vm), expected(32));
}

#[test]
fn a_uma_vm_has_no_nodes_and_resident_pages_are_counted() {
    let qemu = Qemu::start("-smp 2,sockets=2");
    let description = qemu.connect().describe().unwrap();
    assert!(description.guest_nodes.is_empty());
    assert!(description.vcpus.iter().all(|vcpu| vcpu.boot_node.is_none()));
    drop(qemu);
    let qemu = Qemu::start(
        "-smp 2,sockets=2 -object memory-backend-ram,id=m,size=512M,prealloc=on -numa node,nodeid=0,memdev=m",
    );
    let description = qemu.connect().describe().unwrap();
    let memory = description.guest_nodes[0].memory.as_ref().unwrap();
    // This kernel may have no NUMA and then no numa_maps.
    if fs::exists("/proc/self/numa_maps").unwrap() {
        let resident: u64 = memory.resident_kib.iter().map(|(_, kib)| kib).sum();
        assert_eq!(resident, 512 << 10, "{memory:?}");
    }
}

#[test]
fn the_channel_is_attached_once_and_detached_when_the_guest_lets_go() {
    let qemu = Qemu::start(TWO_NODES);
    let mut vm = qemu.connect();
    assert!(!vm.channel_attached().unwrap());
    assert!(matches!(vm.detach_channel(), Err(VmError::NotAttached { .. })));
    let (ours, theirs) = server();
    vm.attach_channel(theirs).unwrap();
    assert!(vm.channel_attached().unwrap());
    let port = r#"{"execute": "qom-list", "arguments": {"path": "/machine/peripheral/vnuma1/vnuma1"}}"#;
    assert!(qemu.control(port).contains("link<ivshmem-doorbell>"), "in the free port kept for it");
    assert!(matches!(vm.attach_channel(server().1), Err(VmError::AlreadyAttached { .. })));
    // The machine stands still, so its guest cannot let go. Asking twice is no error.
    for _ in 0..2 {
        assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    }
    assert!(vm.channel_attached().unwrap());
    assert_eq!(vm.poll_event(Duration::ZERO).unwrap(), None);
    // A reset ends what the guest has been asked for.
    qemu.control(r#"{"execute": "system_reset"}"#);
    assert_eq!(wait_for(&mut *vm, &VmEvent::ChannelDetached), VmEvent::ChannelDetached);
    assert!(!vm.channel_attached().unwrap());
    assert!(!qemu.has_chardev());
    drop(ours);
    // And again, in the same VM.
    let (_ours, theirs) = server();
    vm.attach_channel(theirs).unwrap();
    assert!(vm.channel_attached().unwrap());
}

/// The next event of this kind; QEMU tells others in between.
fn wait_for(vm: &mut dyn VmConnection, wanted: &VmEvent) -> VmEvent {
    let end = Instant::now() + HANG;
    while Instant::now() < end {
        match vm.poll_event(Duration::from_millis(500)).unwrap() {
            Some(event) if event == *wanted => return event,
            _ => {}
        }
    }
    panic!("no event {wanted:?}");
}

#[test]
fn a_failed_attach_leaves_nothing_behind() {
    let qemu = Qemu::start(TWO_NODES);
    let mut vm = qemu.connect();
    // A server that says nothing of a protocol: QEMU refuses the device.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(&[0xff; 64]).unwrap();
    let error = vm.attach_channel(Plug::Ivshmem(theirs.into())).unwrap_err();
    assert!(matches!(&error, VmError::Refused { command, .. } if command == "device_add"), "{error}");
    assert!(!vm.channel_attached().unwrap());
    assert!(!qemu.has_chardev());
    // No socket at all: QEMU refuses the character device.
    let error = vm.attach_channel(Plug::Ivshmem(fs::File::open("/dev/null").unwrap().into())).unwrap_err();
    assert!(matches!(&error, VmError::Refused { command, .. } if command == "chardev-add"), "{error}");
    let getfd = r#"{"execute": "closefd", "arguments": {"fdname": "vnuma-channel"}}"#;
    assert!(qemu.control(getfd).contains("not found"), "the descriptor is given back");
    let (_ours, theirs) = server();
    vm.attach_channel(theirs).unwrap();
}

#[test]
fn an_attach_that_a_crash_left_half_way_is_no_obstacle() {
    let qemu = Qemu::start(TWO_NODES);
    let listener = qemu.path("stale");
    let _stale = std::os::unix::net::UnixListener::bind(&listener).unwrap();
    let added = qemu.control(&format!(
        r#"{{"execute": "chardev-add", "arguments": {{"id": "vnuma-channel", "backend": {{"type": "socket",
        "data": {{"addr": {{"type": "unix", "data": {{"path": "{}"}}}}, "server": false}}}}}}}}"#,
        listener.display()
    ));
    assert!(added.contains("return"), "{added}");
    let (_ours, theirs) = server();
    qemu.connect().attach_channel(theirs).unwrap();
}

#[test]
fn without_a_free_port_nothing_is_attached() {
    let qemu = Qemu::start(
        "-device pcie-root-port,id=full,chassis=1,slot=1 -device virtio-rng-pci,bus=full \
         -device pcie-root-port,id=cold,chassis=2,slot=2,hotplug=off",
    );
    let mut vm = qemu.connect();
    assert!(matches!(vm.attach_channel(server().1), Err(VmError::NoFreePort { .. })));
    assert!(!qemu.has_chardev());
}

#[test]
fn a_port_without_an_id_is_found() {
    let qemu = Qemu::start("-device pcie-root-port,chassis=1,slot=1 -device pcie-root-port,chassis=2,slot=2");
    let mut vm = qemu.connect();
    vm.attach_channel(server().1).unwrap();
    assert!(vm.channel_attached().unwrap());
}

#[test]
fn events_arrive_and_the_end_is_one() {
    let qemu = Qemu::start("-smp 2,sockets=4,maxcpus=4");
    let mut vm = qemu.connect();
    assert_eq!(vm.poll_event(Duration::from_millis(1)).unwrap(), None);
    qemu.control(r#"{"execute": "cont"}"#);
    wait_for(&mut *vm, &VmEvent::Resumed);
    qemu.control(r#"{"execute": "stop"}"#);
    wait_for(&mut *vm, &VmEvent::Stopped);
    let plugged = r#"{"execute": "device_add", "arguments": {"driver": "qemu64-x86_64-cpu", "id": "c",
        "socket-id": 2, "core-id": 0, "thread-id": 0}}"#;
    let answer = qemu.control(plugged);
    assert!(answer.contains("return"), "{answer}");
    let vcpus = vm.describe().unwrap().vcpus;
    assert_eq!(vcpus.iter().map(|vcpu| vcpu.apic_id).collect::<Vec<_>>(), [0, 1, 2]);
    qemu.control(r#"{"execute": "quit"}"#);
    wait_for(&mut *vm, &VmEvent::Disconnected);
    assert_eq!(vm.poll_event(Duration::ZERO).unwrap(), Some(VmEvent::Disconnected), "and stays so");
    assert!(matches!(vm.describe(), Err(VmError::Disconnected { .. })));
}

#[test]
fn a_stopped_process_and_a_monitor_in_use_are_told_in_time() {
    let qemu = Qemu::start("-smp 1");
    let (backend, handle) = qemu.backend();
    let mut vm = qemu.connect();
    let mut second = backend.connect(&handle).unwrap();
    let error = second.greet().expect_err("somebody else has the monitor");
    assert!(matches!(error, VmError::NoGreeting { .. }), "{error}");
    assert_eq!(second.pid(), qemu.pid(), "the kernel knows it all the same");
    qemu.signal(Signal::SIGSTOP);
    let error = vm.describe().unwrap_err();
    assert!(matches!(&error, VmError::Timeout { command, .. } if command == "query-name"), "{error}");
    qemu.signal(Signal::SIGCONT);
    // Late answers are not taken for those that are waited for.
    let end = Instant::now() + HANG;
    while vm.describe().is_err() {
        assert!(Instant::now() < end, "the connection is of no use any more");
    }
    assert_eq!(vm.describe().unwrap().vcpus.len(), 1);
}

/// Sets a migration's speed low enough to be met in the middle.
const SLOW: &str = r#"{"execute": "migrate-set-parameters", "arguments": {"max-bandwidth": 65536}}"#;
const CONT: &str = r#"{"execute": "cont"}"#;
const NODE: &str = "-smp 2,sockets=2 -object memory-backend-ram,id=m,size=512M -numa node,nodeid=0,memdev=m \
    -device pcie-root-port,id=vnuma0,chassis=1";

fn wait_for_status(vm: &mut dyn VmConnection, wanted: &[MigrationStatus]) -> MigrationProgress {
    let end = Instant::now() + HANG;
    loop {
        let migration = vm.migrates().unwrap().progress().unwrap();
        if wanted.contains(&migration.status) {
            return migration;
        }
        assert!(Instant::now() < end, "{migration:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_vm_is_marked_in_its_own_process() {
    let qemu = Qemu::start(NODE);
    let mut vm = qemu.connect();
    assert!(!vm.migrates().unwrap().is_marked().unwrap());
    for _ in 0..2 {
        vm.migrates().unwrap().mark(true).unwrap();
        assert!(vm.migrates().unwrap().is_marked().unwrap());
    }
    drop(vm);
    let mut next = qemu.connect();
    assert!(next.migrates().unwrap().is_marked().unwrap(), "it outlasts the connection");
    for _ in 0..2 {
        next.migrates().unwrap().mark(false).unwrap();
        assert!(!next.migrates().unwrap().is_marked().unwrap());
    }
    drop((next, qemu));
    let by_command_line = Qemu::start("-chardev null,id=vnuma-attach");
    assert!(by_command_line.connect().migrates().unwrap().is_marked().unwrap());
}

#[test]
fn a_migration_fails_is_cancelled_and_arrives() {
    let qemu = Qemu::start(NODE);
    qemu.control(CONT);
    let mut vm = qemu.connect();
    assert_eq!(vm.migrates().unwrap().progress().unwrap().status, MigrationStatus::None);
    let refused = vm.migrates().unwrap().migrate("tcp:", false).unwrap_err();
    assert!(matches!(refused, VmError::Refused { .. }), "{refused}");
    let socket = qemu.path("in.sock");
    vm.migrates().unwrap().migrate(&format!("unix:{}", socket.display()), false).unwrap();
    let failed = wait_for_status(&mut *vm, &[MigrationStatus::Failed]);
    assert!(failed.problem.unwrap().contains("No such file"), "why");
    assert_eq!(vm.describe().unwrap().run_state, RunState::Running);

    let other = Qemu::beside(&format!("{NODE} -incoming unix:{}", socket.display()));
    let mut there = other.connect();
    assert_eq!(there.describe().unwrap().run_state, RunState::Arriving);
    // Post-copy is allowed with it, if this machine can do it.
    there.migrates().unwrap().mark(true).unwrap();
    qemu.control(SLOW);
    vm.migrates().unwrap().migrate(&format!("unix:{}", socket.display()), false).unwrap();
    let under_way = wait_for_status(&mut *vm, &[MigrationStatus::Active]);
    assert!(under_way.total_bytes > 512 << 20 || under_way.total_bytes == 0, "{under_way:?}");
    assert!(matches!(vm.attach_channel(server().1), Err(VmError::Refused { .. })), "while it migrates");
    vm.migrates().unwrap().cancel().unwrap();
    wait_for_status(&mut *vm, &[MigrationStatus::Cancelled]);
    assert_eq!(vm.describe().unwrap().run_state, RunState::Running);
    drop(other);

    let socket = qemu.path("again.sock");
    let mut other = Qemu::beside(&format!("{NODE} -incoming unix:{}", socket.display()));
    let mut there = other.connect();
    there.migrates().unwrap().mark(true).unwrap();
    qemu.control(&SLOW.replace("65536", "1073741824"));
    vm.migrates().unwrap().migrate(&format!("unix:{}", socket.display()), false).unwrap();
    let done = wait_for_status(&mut *vm, &[MigrationStatus::Completed]);
    assert!(done.sent_bytes > 0 && done.downtime_ms.is_some(), "{done:?}");
    assert_eq!(vm.describe().unwrap().run_state, RunState::Left);
    // It was started with -S.
    assert_eq!(there.describe().unwrap().run_state, RunState::Paused);
    other.control(CONT);
    assert_eq!(there.describe().unwrap().run_state, RunState::Running);
    assert!(there.migrates().unwrap().is_marked().unwrap(), "the mark is not overwritten by what arrives");
    let (_ours, theirs) = server();
    there.attach_channel(theirs).unwrap();
    assert!(other.child.try_wait().unwrap().is_none());
}

/// What comes with the VM is in the channel of the destination.
#[test]
fn a_vm_migrates_with_its_channel_if_the_destination_has_one() {
    let qemu = Qemu::start(NODE);
    qemu.control(CONT);
    let mut vm = qemu.connect();
    let (_ours, theirs) = server();
    vm.attach_channel(theirs).unwrap();
    for plugged in [false, true] {
        let socket = qemu.path(if plugged { "with" } else { "without" });
        let other = Qemu::beside(&format!("{NODE} -incoming unix:{}", socket.display()));
        let mut there = other.connect();
        let (_ours, theirs) = server();
        if plugged {
            there.attach_channel(theirs).unwrap();
        }
        vm.migrates().unwrap().migrate(&format!("unix:{}", socket.display()), false).unwrap();
        let ended = wait_for_status(&mut *vm, &[MigrationStatus::Completed, MigrationStatus::Failed]);
        assert_eq!(ended.status == MigrationStatus::Completed, plugged, "{ended:?}");
        assert_eq!(
            vm.describe().unwrap().run_state,
            if plugged { RunState::Left } else { RunState::Running }
        );
        assert!(!plugged || there.channel_attached().unwrap());
    }
}
