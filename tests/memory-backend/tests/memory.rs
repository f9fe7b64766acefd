//! VMs in memory carry out commands by the same trait as real ones.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vnuma_hypervisor::{ObservedVcpus, Plug, Plugged, VmBackend, VmConnection, VmError, VmEvent, roll_back};
use vnuma_memory_backend::{MemoryBackend, MemoryVm, Unplug};
use vnuma_model::{GuestNode, RunState, Vcpu, VmDescription};

/// Whatever a VM does, no call takes this long.
const HANG: Duration = Duration::from_secs(600);

/// A VM of two nodes and two vCPUs.
fn vm(name: &str) -> MemoryVm {
    let node = |id| GuestNode { id, memory_bytes: 1 << 28, memory: None };
    let vcpu = |index| Vcpu { index, apic_id: index, boot_node: Some(index), tid: 100 + index as i32 };
    MemoryVm::simulated(VmDescription {
        name: name.to_owned(),
        pid: 99,
        run_state: RunState::Running,
        guest_nodes: vec![node(0), node(1)],
        vcpus: vec![vcpu(0), vcpu(1)],
        spare_slots: BTreeMap::from([(1, 1)]),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    })
    .unwrap()
}

/// A backend with one VM, and a connection to it.
fn one() -> (MemoryBackend, Box<dyn VmConnection>) {
    let backend = MemoryBackend::new().unwrap();
    let handle = backend.add("web", vm("web"));
    let connection = backend.connect(&handle).unwrap();
    (backend, connection)
}

fn ready(fd: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() > 0
}

#[test]
fn vms_come_and_go_and_changes_say_so() {
    let mut backend = MemoryBackend::new().unwrap();
    assert_eq!(backend.scan().unwrap(), []);
    assert!(!ready(backend.changes().unwrap()), "nothing has changed yet");
    let handle = backend.add("web", vm("web"));
    assert!(ready(backend.changes().unwrap()));
    backend.clear_changes();
    assert!(!ready(backend.changes().unwrap()));
    let first = backend.scan().unwrap();
    assert_eq!((first[0].name.as_str(), &first[0].handle), ("web", &handle));
    // Another VM takes its place: same handle, another instance.
    backend.add("web", vm("web"));
    let second = backend.clone().scan().unwrap();
    assert_eq!(second[0].handle, handle);
    assert_ne!(second[0].instance, first[0].instance);
    backend.clear_changes();
    backend.change("web", |vm| vm.listed = false).unwrap();
    assert!(ready(backend.changes().unwrap()));
    assert_eq!(backend.scan().unwrap(), []);
    assert!(backend.connect(&handle).is_ok(), "it lives on");
    backend.set_blind(true);
    assert!(matches!(backend.scan(), Err(VmError::Directory { .. })));
    assert_eq!(backend.scans(), 5);
}

#[test]
fn a_vm_that_refuses_or_is_not_there_is_not_connected_to() {
    let backend = MemoryBackend::new().unwrap();
    let handle = backend.add("web", vm("web"));
    backend.change("web", |vm| vm.refuses = true);
    assert!(backend.connect(&handle).err().unwrap().nobody_listening());
    backend.end("web");
    assert!(backend.connect(&handle).err().unwrap().nobody_listening());
    assert!(backend.change("web", |_| ()).is_none());
}

#[test]
fn the_end_of_a_vm_breaks_its_connection() {
    let (backend, mut connection) = one();
    assert!(!ready(connection.pidfd()));
    backend.end("web");
    assert!(ready(connection.pidfd()), "its process has ended");
    assert!(ready(connection.event_fd()));
    assert_eq!(connection.poll_event(HANG).unwrap(), Some(VmEvent::Disconnected));
    assert!(matches!(connection.describe(), Err(VmError::Disconnected { .. })));
    // Nor does it speak to one that comes in its place.
    backend.add("web", vm("web"));
    assert!(matches!(connection.describe(), Err(VmError::Disconnected { .. })));
}

#[test]
fn events_come_in_order() {
    let (backend, mut connection) = one();
    assert_eq!(connection.poll_event(Duration::ZERO).unwrap(), None);
    for event in [VmEvent::Rebooted, VmEvent::Stopped] {
        backend.event("web", event);
    }
    assert!(ready(connection.event_fd()));
    assert_eq!(connection.poll_event(Duration::ZERO).unwrap(), Some(VmEvent::Rebooted));
    assert_eq!(backend.change("web", |vm| vm.pending_events()), Some(1));
    assert_eq!(connection.poll_event(Duration::ZERO).unwrap(), Some(VmEvent::Stopped));
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        backend.event("web", VmEvent::Resumed);
    });
    assert_eq!(connection.poll_event(HANG).unwrap(), Some(VmEvent::Resumed));
    sender.join().unwrap();
}

#[test]
fn a_silent_vm_answers_nothing_and_speaks_when_it_wakes() {
    let (backend, mut connection) = one();
    backend.change("web", |vm| vm.silent = true);
    assert!(matches!(connection.describe(), Err(VmError::Timeout { .. })));
    let vcpus = ObservedVcpus { vcpus: Vec::new(), certain: true };
    backend.change("web", |vm| vm.observed = Some(vcpus.clone()));
    assert_eq!(connection.observe_vcpus(), Some(vcpus), "the kernel needs no answer");
    assert!(!ready(connection.event_fd()));
    backend.change("web", |vm| vm.silent = false);
    assert!(ready(connection.event_fd()));
    assert_eq!(connection.describe().unwrap().name, "web");
    assert_eq!(backend.change("web", |vm| vm.described), Some(1));
}

#[test]
fn a_stuck_vm_holds_up_whoever_asks_and_nobody_else() {
    let (backend, mut connection) = one();
    backend.change("web", |vm| vm.stuck = true);
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(connection.describe().map(|description| description.name)));
    assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
    let other = backend.add("other", vm("other"));
    assert_eq!(backend.connect(&other).unwrap().describe().unwrap().name, "other");
    backend.change("web", |vm| vm.stuck = false);
    assert_eq!(told.recv_timeout(HANG).unwrap().unwrap(), "web");
}

#[test]
fn answers_can_be_late_or_wrong() {
    let (backend, mut connection) = one();
    let delay = Duration::from_millis(30);
    backend.change("web", |vm| {
        vm.delay = delay;
        vm.errors.push_back(VmError::Refused { vm: "web".into(), command: "x".into(), reason: "y".into() });
    });
    let began = Instant::now();
    assert!(matches!(connection.describe(), Err(VmError::Refused { .. })));
    assert!(began.elapsed() >= delay);
    assert!(connection.describe().is_ok());
}

#[test]
fn the_channel_is_plugged_and_released() {
    let (backend, mut connection) = one();
    let socket = || Plug::Ivshmem(std::os::unix::net::UnixStream::pair().unwrap().0.into());
    assert!(matches!(connection.detach_channel(), Err(VmError::NotAttached { .. })));
    backend.change("web", |vm| vm.free_port = false);
    assert!(matches!(connection.attach_channel(socket()), Err(VmError::NoFreePort { .. })));
    backend.change("web", |vm| vm.free_port = true);
    connection.attach_channel(socket()).unwrap();
    assert!(matches!(connection.attach_channel(socket()), Err(VmError::AlreadyAttached { .. })));
    assert!(backend.change("web", |vm| vm.device.is_some()).unwrap());
    backend.change("web", |vm| vm.releases_device = false);
    assert!(matches!(connection.detach_channel(), Err(VmError::DetachPending { .. })));
    assert!(connection.channel_attached().unwrap());
    backend.change("web", |vm| vm.releases_device = true);
    connection.detach_channel().unwrap();
    assert!(!connection.tidy_channel().unwrap());
    backend.change("web", |vm| vm.foreign_channel = true);
    assert!(connection.channel_attached().unwrap());
}

/// APIC ids of a VM's vCPUs.
fn vcpus(connection: &mut dyn VmConnection) -> Vec<u32> {
    connection.describe().unwrap().vcpus.iter().map(|vcpu| vcpu.apic_id).collect()
}

#[test]
fn a_vcpu_is_replugged_or_nothing_is_changed() {
    let (backend, mut connection) = one();
    let connection = &mut *connection;
    assert!(matches!(connection.removable_vcpu(0), Err(VmError::BootVcpu { .. })));
    assert!(matches!(connection.removable_vcpu(9), Err(VmError::NoVcpu { .. })));
    assert!(matches!(connection.plug_vcpu(1), Err(VmError::NoSpareSlot { .. })));
    let spare = Plugged { apic_id: 4, tid: 104 };
    backend.change("web", |vm| vm.spare.push_back(spare));

    backend.change("web", |vm| vm.takes_vcpus = false);
    let new = connection.plug_vcpu(1).unwrap();
    assert_eq!((new, vcpus(connection)), (spare, vec![0, 1, 4]));
    let cause = connection.await_guest(4).unwrap_err();
    assert!(matches!(roll_back(connection, new, cause), VmError::PlugIgnored { .. }));
    assert_eq!(vcpus(connection), [0, 1]);

    backend.change("web", |vm| (vm.takes_vcpus, vm.unplug) = (true, Unplug::Refuse));
    let new = connection.plug_vcpu(1).unwrap();
    connection.await_guest(4).unwrap();
    let cause = connection.unplug_vcpu(1).unwrap_err();
    assert!(matches!(roll_back(connection, new, cause), VmError::UnplugRefused { .. }));
    assert_eq!(vcpus(connection), [0, 1]);

    // A guest that has not answered may yet do what it was asked for: both stay.
    backend.change("web", |vm| vm.unplug = Unplug::Ignore);
    let new = connection.plug_vcpu(1).unwrap();
    let cause = connection.unplug_vcpu(1).unwrap_err();
    assert!(matches!(roll_back(connection, new, cause), VmError::UnplugPending { .. }));
    assert_eq!(vcpus(connection), [0, 1, 4]);

    // What cannot be undone is said.
    let cause = VmError::PlugIgnored { vm: "web".into(), limit_ms: 1 };
    assert!(matches!(roll_back(connection, new, cause), VmError::NotUndone { .. }));
    backend.change("web", |vm| vm.unplug = Unplug::Obey);
    connection.unplug_vcpu(1).unwrap();
    assert_eq!(vcpus(connection), [0, 4]);
}
