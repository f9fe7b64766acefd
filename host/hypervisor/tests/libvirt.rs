//! Domains of a real libvirt, whose machines have no operating system. A libvirtd of its own, in a mount namespace of its own, so
//! that the machine's libvirt, if it has one, is not touched. Needs root, libvirtd, virsh and `qemu-system-x86_64`; skipped without.

#[path = "libvirt/attaching.rs"]
mod attaching;
#[path = "libvirt/container.rs"]
mod container;
#[path = "libvirt/detaching.rs"]
mod detaching;
#[path = "libvirt/faults.rs"]
mod faults;
#[path = "libvirt/migrating.rs"]
mod migrating;
#[path = "libvirt/pins.rs"]
mod pins;
#[path = "libvirt/real.rs"]
mod real;

use nix::{
    sys::{
        eventfd::EventFd,
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
        socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair},
    },
    unistd::Pid,
};
use real::{DOMAIN, EMULATOR, HANG, LETS_IN, Libvirt, wait_for};
use std::{
    collections::BTreeMap,
    fs,
    io::IoSlice,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use vnuma_hypervisor::{
    JoinedBackend, LibvirtBackend, PinError, Plug, PolicyPin, QmpBackend, VmBackend, VmConnection, VmError,
    VmEvent,
};
use vnuma_model::{CpuSet, MigrationStatus, NumaPolicy, RunState, VmHandle};

impl Libvirt {
    fn backend(&self) -> LibvirtBackend {
        let backend =
            LibvirtBackend::new(&[self.uri()], vec![self.states()], self.dir.path().join("sockets"));
        backend.unwrap_or_else(|error| panic!("{error}"))
    }

    fn connect(&self, backend: &mut LibvirtBackend, name: &str) -> Box<dyn VmConnection> {
        let handle = find(backend, name);
        let mut vm = backend.connect(&handle).unwrap_or_else(|error| panic!("{error}"));
        vm.greet().unwrap_or_else(|error| panic!("{error}"));
        vm
    }
}

fn find(backend: &mut dyn VmBackend, name: &str) -> VmHandle {
    wait_for(name, || {
        let candidates = backend.scan().unwrap();
        candidates.into_iter().find(|candidate| candidate.name == name).map(|candidate| candidate.handle)
    })
}

/// The next event that is this one.
fn await_event(vm: &mut dyn VmConnection, wanted: VmEvent) {
    let mut before = Vec::new();
    wait_for(&format!("{wanted:?}"), || {
        let event = vm.poll_event(Duration::from_millis(200)).unwrap()?;
        if event == wanted {
            return Some(());
        }
        before.push(event);
        println!("events before {wanted:?}: {before:?}");
        // Nothing follows.
        let is_last = matches!(before.last(), Some(VmEvent::Disconnected | VmEvent::Shutdown));
        assert!(!is_last, "waiting for {wanted:?}: {before:?}");
        None
    });
}

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// A channel's end, with its messages in it.
fn channel() -> (OwnedFd, Plug) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
    send_messages(&ours);
    (ours, Plug::Ivshmem(theirs))
}

/// Messages of a channel. The memory's file has the name that the channel gives it.
fn send_messages(to: &impl AsRawFd) {
    let memory = memfd_create("vnuma-topology", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&memory, 1 << 20).unwrap();
    let send = |value: i64, descriptor: Option<i32>| {
        let rights = descriptor.map(|descriptor| [descriptor]);
        let control = rights.as_ref().map(|rights| ControlMessage::ScmRights(rights));
        let bytes = value.to_le_bytes();
        let buffers = [IoSlice::new(&bytes)];
        sendmsg::<()>(to.as_raw_fd(), &buffers, control.as_slice(), MsgFlags::empty(), None).unwrap();
    };
    send(0, None);
    send(0, None);
    send(-1, Some(memory.as_raw_fd()));
    for peer in [1, 0] {
        (0..16).for_each(|_| {
            let event = EventFd::new().unwrap();
            send(peer, Some(std::os::fd::AsFd::as_fd(&event).as_raw_fd()));
        });
    }
}

#[test]
fn a_domain_is_described_as_it_runs_and_not_tainted() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web-1", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web-1");
    let description = vm.describe().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((description.name.as_str(), description.pid), ("web-1", libvirt.pid("web-1")));
    assert_eq!((vm.pid(), description.run_state.as_ref()), (description.pid, "paused"));
    let vcpus: Vec<_> =
        description.vcpus.iter().map(|vcpu| (vcpu.index, vcpu.apic_id, vcpu.boot_node)).collect();
    assert_eq!(vcpus, [(0, 0, Some(0)), (1, 1, Some(0)), (2, 2, Some(1)), (3, 3, Some(1))]);
    for vcpu in &description.vcpus {
        let name = fs::read_to_string(format!("/proc/{}/task/{}/comm", description.pid, vcpu.tid)).unwrap();
        assert_eq!(name.trim(), format!("CPU {}/TCG", vcpu.index), "its thread");
    }
    let nodes: Vec<_> =
        description.guest_nodes.iter().map(|node| (node.id, node.memory_bytes >> 20)).collect();
    assert_eq!(nodes, [(0, 64), (1, 64)]);
    let memory: Vec<_> = description.guest_nodes.iter().filter_map(|node| node.memory.as_ref()).collect();
    assert!(
        memory.iter().all(|memory| memory.policy == NumaPolicy::Default && memory.mapping.is_some()),
        "{memory:?}"
    );
    assert!(!vm.channel_attached().unwrap() && !vm.tidy_channel().unwrap());
    assert!(vm.observe_vcpus().is_some(), "what is seen without libvirt");
    vm.probe(Duration::from_secs(5)).unwrap();
    assert!(!libvirt.is_tainted("web-1"));
}

/// Both have one size, so that only their order tells them apart. QEMU says by a command where an address of the guest is.
#[test]
fn the_memory_of_each_guest_node_is_found() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let nodes = vm.describe().unwrap().guest_nodes;
    for (node, first_mib) in nodes.iter().zip([0, 64]) {
        let command = format!("gpa2hva {:#x}", first_mib << 20);
        let answer = libvirt.must(&["qemu-monitor-command", "web", "--hmp", &command]);
        let address =
            answer.rsplit_once("is 0x").and_then(|(_, address)| u64::from_str_radix(address.trim(), 16).ok());
        let mapping = node.memory.as_ref().and_then(|memory| memory.mapping);
        assert_eq!(mapping.map(|mapping| mapping.start), address, "node {}: {answer}", node.id);
    }
    assert!(libvirt.is_tainted("web"), "such a command taints, so vnuma gives none");
}

#[test]
fn what_happens_to_a_domain_is_an_event() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    libvirt.must(&["resume", "web"]);
    await_event(&mut *vm, VmEvent::Resumed);
    libvirt.must(&["suspend", "web"]);
    await_event(&mut *vm, VmEvent::Stopped);
    assert_eq!(vm.describe().unwrap().run_state, RunState::Paused);
    libvirt.must(&["resume", "web"]);
    await_event(&mut *vm, VmEvent::Resumed);
    assert_eq!(vm.describe().unwrap().run_state, RunState::Running);
    libvirt.must(&["reset", "web"]);
    await_event(&mut *vm, VmEvent::Rebooted);
    libvirt.must(&["vcpupin", "web", "2", "1", "--live"]);
    await_event(&mut *vm, VmEvent::VcpusChanged);
    backend.clear_changes();
    libvirt.must(&["destroy", "web"]);
    await_event(&mut *vm, VmEvent::Shutdown);
    let mut wait = [nix::poll::PollFd::new(backend.changes().unwrap(), nix::poll::PollFlags::POLLIN)];
    assert_eq!(nix::poll::poll(&mut wait, 10_000u16), Ok(1), "another scan finds something else");
    assert_eq!(backend.scan().unwrap(), []);
}

#[test]
fn a_libvirtd_that_is_killed_loses_no_domain() {
    let Some(mut libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (handle, before) = (find(&mut backend, "web"), vm.describe().unwrap());
    libvirt.kill_daemon();
    await_event(&mut *vm, VmEvent::Disconnected);
    let error = vm.describe().unwrap_err();
    assert!(matches!(error, VmError::Connect { .. }) && !error.may_be_answered(), "{error}");
    drop(vm);
    assert_eq!(find(&mut backend, "web"), handle, "it is still listed");
    assert!(backend.connect(&handle).is_err());
    libvirt.start_daemon();
    let mut vm = wait_for("a connection", || {
        backend.scan().unwrap();
        backend.connect(&handle).ok()
    });
    vm.greet().unwrap();
    let after = vm.describe().unwrap();
    assert_eq!((after.name, after.pid, after.vcpus), (before.name, before.pid, before.vcpus));
}

#[test]
fn a_domain_that_ends_without_libvirtd_is_forgotten() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    libvirt.create("db", "");
    let mut backend = libvirt.backend();
    find(&mut backend, "web");
    find(&mut backend, "db");
    libvirt.kill_daemon();
    kill(Pid::from_raw(libvirt.pid("web")), Signal::SIGKILL).unwrap();
    wait_for("the domain to be gone", || {
        let names: Vec<_> = backend.scan().unwrap().into_iter().map(|found| found.name).collect();
        (names == ["db"]).then_some(())
    });
}

#[test]
fn a_libvirtd_that_hangs_keeps_nobody() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let happens = |vm: &dyn VmConnection, limit_ms: u16| {
        let mut wait = [nix::poll::PollFd::new(vm.event_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut wait, limit_ms).unwrap() == 1
    };
    assert_eq!(vm.poll_event(Duration::ZERO).unwrap(), None);
    libvirt.must(&["resume", "web"]);
    assert!(happens(&*vm, 60_000), "an event");
    libvirt.signal(Signal::SIGSTOP);
    let error = vm.describe().unwrap_err();
    assert!(error.may_be_answered(), "{error}");
    assert!(vm.greet().is_err());
    assert!(
        !happens(&*vm, 500),
        "what has happened before does not end the wait for an answer again and again"
    );
    assert!(
        error.to_string().contains("libvirt has not answered `virDomainGetXMLDesc` within 3000 ms"),
        "{error}"
    );
    assert_eq!(backend.scan().unwrap().len(), 1, "the domains that were listed last");
    assert!(vm.observe_vcpus().is_some());
    libvirt.signal(Signal::SIGCONT);
    assert!(happens(&*vm, 60_000), "the late answer is noticed");
    // Two calls were not answered. On a busy machine the second one may take longer than the limit of the third.
    wait_for("an answer", || vm.greet().ok());
    assert_eq!(vm.poll_event(Duration::ZERO).unwrap(), Some(VmEvent::Resumed));
    assert_eq!(vm.describe().unwrap().vcpus.len(), 4);
}

#[test]
fn a_channel_is_plugged_by_libvirt_and_unplugged_when_the_guest_is_reset() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(vm.channel_attached().unwrap() && vm.tidy_channel().unwrap());
    let xml = libvirt.must(&["dumpxml", "web"]);
    assert!(
        xml.contains("<model type='ivshmem-doorbell'/>") && xml.contains("<alias name='ua-vnuma'/>"),
        "{xml}"
    );
    assert!(!libvirt.is_tainted("web"));
    assert_eq!(fs::read_dir(libvirt.dir.path().join("sockets")).unwrap().count(), 0, "no socket is left");
    let (_ours, again) = channel();
    assert!(matches!(vm.attach_channel(again), Err(VmError::AlreadyAttached { .. })));
    // No operating system gives it back.
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })), "asked again");
    libvirt.must(&["resume", "web"]);
    libvirt.reset("web");
    await_event(&mut *vm, VmEvent::ChannelDetached);
    assert!(!vm.channel_attached().unwrap());
    assert!(matches!(vm.detach_channel(), Err(VmError::NotAttached { .. })));
}

/// libvirt changes the XML first, and tells the event later.
#[test]
fn a_device_that_was_plugged_anew_is_not_told_as_gone() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    libvirt.must(&["resume", "web"]);
    libvirt.reset("web");
    wait_for("it to be gone", || (!vm.channel_attached().unwrap()).then_some(()));
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    let told: Vec<_> = std::iter::from_fn(|| vm.poll_event(Duration::from_millis(500)).unwrap()).collect();
    assert!(
        !told.contains(&VmEvent::ChannelDetached) && told.contains(&VmEvent::ChannelAttached),
        "{told:?}"
    );
}

/// libvirt saves by migrating into a file.
#[test]
fn a_domain_is_saved_and_restored_when_it_is_not_attached() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    let (image, memory) =
        (libvirt.dir.path().join("lib/web.save"), libvirt.dir.path().join("lib/web.memory"));
    let image = image.to_str().unwrap();
    let memspec = format!("file={},snapshot=external", memory.display());
    for words in [&["save", "web", image][..], &["snapshot-create-as", "web", "one", "--memspec", &memspec]] {
        let refused = libvirt.virsh(words).expect_err("an attached domain is saved");
        assert!(refused.contains("'peer mode' in device 'ivshmem'"), "{words:?}: {refused}");
        assert!(vm.channel_attached().unwrap() && vm.describe().is_ok(), "it is there as before");
    }
    libvirt.must(&["resume", "web"]);
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    libvirt.reset("web");
    await_event(&mut *vm, VmEvent::ChannelDetached);
    let before = vm.describe().unwrap();
    libvirt.must(&["save", "web", image]);
    await_event(&mut *vm, VmEvent::Shutdown);
    assert_eq!(backend.scan().unwrap(), []);
    libvirt.must(&["restore", image, "--paused"]);
    let mut vm = libvirt.connect(&mut backend, "web");
    let after = vm.describe().unwrap();
    assert!(after.pid != before.pid && after.vcpus.len() == before.vcpus.len(), "{after:?}");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(!libvirt.is_tainted("web"));
}

/// An emulator with another default does not taint a domain. Nor does it help: libvirt goes by the XML.
#[test]
fn an_attached_domain_is_not_saved_either_where_qemu_would_do_it() {
    let Some(libvirt) = Libvirt::start() else { return };
    let emulator = libvirt.dir.path().join("lib/qemu-vnuma");
    let script = format!("#!/bin/sh\nexec {EMULATOR} \"$@\" -global ivshmem-doorbell.master=on\n");
    fs::write(&emulator, script).unwrap();
    fs::set_permissions(&emulator, fs::Permissions::from_mode(0o755)).unwrap();
    libvirt.create_with("web", "", emulator.to_str().unwrap());
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(!libvirt.is_tainted("web"));
    let image = libvirt.dir.path().join("lib/web.save");
    let refused = libvirt.virsh(&["save", "web", image.to_str().unwrap()]).expect_err("it is saved");
    assert!(refused.contains("only shmem with role='master' can be migrated"), "{refused}");
    assert!(vm.channel_attached().unwrap() && vm.describe().is_ok(), "it is there as before");
}

#[test]
fn a_domain_without_a_free_port_cannot_be_attached() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let device = libvirt.dir.path().join("device.xml");
    for bus in ["0x01", "0x02"] {
        let address = format!("<address type='pci' domain='0x0000' bus='{bus}' slot='0x00' function='0x0'/>");
        fs::write(
            &device,
            format!("<rng model='virtio'><backend model='random'>/dev/urandom</backend>{address}</rng>"),
        )
        .unwrap();
        libvirt.must(&["attach-device", "web", device.to_str().unwrap(), "--live"]);
    }
    let (_ours, theirs) = channel();
    let error = vm.attach_channel(theirs).unwrap_err().to_string();
    assert!(error.starts_with("web: no free PCIe root port: "), "{error}");
}

#[test]
fn a_domain_with_a_qmp_socket_of_vnumas_is_one_vm() {
    let Some(libvirt) = Libvirt::start() else { return };
    let (extra, socket) = libvirt.monitor("web");
    libvirt.create("web", &extra);
    libvirt.create("db", "");
    let qmp = QmpBackend::new(Some(libvirt.dir.path().join("qmp")), Vec::new());
    let mut joined = JoinedBackend::new(vec![Box::new(qmp), Box::new(libvirt.backend())]);
    let db = find(&mut joined, "db");
    let handles: Vec<_> = joined.scan().unwrap().into_iter().map(|found| found.handle).collect();
    let web = QmpBackend::handle(&socket).unwrap();
    assert_eq!(handles, [web.clone(), db.clone()], "the QMP socket has the VM");
    for (handle, name) in [(web, "web"), (db, "db")] {
        let mut vm = joined.connect(&handle).unwrap_or_else(|error| panic!("{error}"));
        vm.greet().unwrap();
        let description = vm.describe().unwrap();
        assert_eq!((description.name.as_str(), description.pid), (name, libvirt.pid(name)));
    }
}

#[test]
fn a_number_that_belongs_to_another_process_now_is_no_domain() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let handle = find(&mut backend, "web");
    let file = libvirt.states().join("web.xml");
    let pid = format!("pid='{}'", libvirt.pid("web"));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(&pid));
    fs::write(&file, text.replacen(&pid, &format!("pid='{}'", std::process::id()), 1)).unwrap();
    let error = backend.connect(&handle).err().unwrap().to_string();
    assert!(
        error.ends_with(&format!("process {} is not the QEMU of domain web", std::process::id())),
        "{error}"
    );
}

/// Its QEMU is killed before libvirt is asked to plug the device, in between, and after that.
#[test]
fn a_domain_that_ends_while_it_is_attached_is_an_error_and_leaves_nothing() {
    let Some(libvirt) = Libvirt::start() else { return };
    let mut failed = 0;
    for moment_ms in [0, 2, 4, 6, 8, 12] {
        libvirt.create("web", "");
        let mut backend = libvirt.backend();
        let mut vm = libvirt.connect(&mut backend, "web");
        let qemu = Pid::from_raw(vm.pid());
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(moment_ms));
            kill(qemu, Signal::SIGKILL).unwrap();
        });
        let (_ours, theirs) = channel();
        if let Err(error) = vm.attach_channel(theirs) {
            println!("killed after {moment_ms} ms: {error}");
            failed += 1;
        }
        killer.join().unwrap();
        wait_for("its end to be noticed", || vm.describe().is_err().then_some(()));
        // A call that has taken too long goes on, and removes it at its end.
        let sockets = || fs::read_dir(libvirt.dir.path().join("sockets")).map_or(0, Iterator::count);
        wait_for("its socket to be removed", || (sockets() == 0).then_some(()));
        wait_for("it to be gone", || backend.scan().unwrap().is_empty().then_some(()));
    }
    assert!(failed > 0, "it was always attached before");
}

#[test]
fn a_connection_that_fails_takes_nothing_from_another_one() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let nowhere = format!("qemu+unix:///system?socket={}", libvirt.dir.path().join("nowhere").display());
    // libvirt's own driver for tests has a domain as well, and no file of it.
    let uris = [nowhere, libvirt.uri(), "test:///default".to_owned()];
    let backend = LibvirtBackend::new(&uris, vec![libvirt.states()], libvirt.dir.path().join("sockets"));
    let mut backend = backend.unwrap_or_else(|error| panic!("{error}"));
    let mut vm = libvirt.connect(&mut backend, "web");
    assert_eq!(backend.scan().unwrap().len(), 1);
    assert_eq!(vm.describe().unwrap().pid, libvirt.pid("web"));
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
}

/// What libvirt has of it outlasts the run; what vnumad does to it does not.
#[test]
fn a_domain_that_is_defined_is_started_pinned_saved_and_started_again() {
    let Some(libvirt) = Libvirt::start() else { return };
    let file = libvirt.dir.path().join("domain.xml");
    fs::write(&file, DOMAIN.replace("NAME", "web").replace("DEVICES", "").replace("EXTRA", "")).unwrap();
    libvirt.must(&["define", file.to_str().unwrap()]);
    libvirt.must(&["start", "web", "--paused"]);
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let before = vm.describe().unwrap();
    vm.pins().unwrap().pin(before.vcpus[2].tid, &set("1")).unwrap();
    let defined = libvirt.must(&["dumpxml", "web", "--inactive"]);
    assert!(!defined.contains("vcpu='2'") && !defined.contains("urn:vnuma"), "the pin outlasts the run");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(!libvirt.must(&["dumpxml", "web", "--inactive"]).contains("ua-vnuma"));
    let refused = libvirt.virsh(&["managedsave", "web"]).expect_err("an attached domain is saved");
    assert!(refused.contains("'peer mode' in device 'ivshmem'"), "{refused}");
    libvirt.must(&["resume", "web"]);
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    libvirt.reset("web");
    await_event(&mut *vm, VmEvent::ChannelDetached);
    libvirt.must(&["managedsave", "web", "--paused"]);
    await_event(&mut *vm, VmEvent::Shutdown);
    assert_eq!(backend.scan().unwrap(), []);
    libvirt.must(&["start", "web", "--paused"]);
    let mut vm = libvirt.connect(&mut backend, "web");
    let after = vm.describe().unwrap();
    assert!(after.pid != before.pid && after.vcpus.len() == before.vcpus.len(), "{after:?}");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(!libvirt.is_tainted("web"));
    libvirt.must(&["destroy", "web"]);
    libvirt.must(&["undefine", "web"]);
}
