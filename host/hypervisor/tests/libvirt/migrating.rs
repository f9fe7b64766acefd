//! A domain that migrates to another libvirt, or stays.

use super::{
    pins::{create_without_limits, has_two_cpus, pinned},
    *,
};
use vnuma_libvirt::DomainXml;
use vnuma_model::RunState;

/// What came of a migration that was begun.
fn outcome(vm: &mut dyn VmConnection) -> MigrationStatus {
    wait_for("the migration to end", || {
        // For a moment libvirt says only that the domain has gone.
        let migration = vm.migrates().unwrap().progress().inspect_err(|error| println!("{error}")).ok()?;
        if let Some(problem) = &migration.problem {
            println!("{problem}");
        }
        (migration.status != MigrationStatus::Active).then_some(migration.status)
    })
}

/// No process is left that could take anything back.
#[test]
fn a_domain_that_leaves_takes_no_pins_of_vnumad_along() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    let other = libvirt.start_other();
    create_without_limits(&libvirt);
    libvirt.must(&["vcpupin", "web", "1", "0", "--live"]);
    libvirt.must(&["vcpupin", "web", "3", "0-1", "--live"]);
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpus = vm.describe().unwrap().vcpus;
    vm.pins().unwrap().pin(vcpus[2].tid, &set("1")).unwrap();
    vm.pins().unwrap().pin(vcpus[3].tid, &set("1")).unwrap();
    vm.migrates().unwrap().mark(true).unwrap();
    vm.migrates().unwrap().migrate(&other.uri(), false).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome(&mut *vm), MigrationStatus::Completed);
    assert!(
        vm.migrates().unwrap().is_leaving() && vm.migrates().unwrap().has_left() && vm.describe().is_err(),
        "whoever describes it now learns that it has left"
    );
    let xml = other.must(&["dumpxml", "web"]);
    let pins: Vec<_> = xml.lines().map(str::trim).filter(|line| line.contains("<vcpupin")).collect();
    assert_eq!(
        pins,
        ["<vcpupin vcpu='1' cpuset='0'/>", "<vcpupin vcpu='3' cpuset='0-1'/>"],
        "the operator's"
    );
    assert!(!xml.contains("urn:vnuma:pins") && xml.contains("urn:vnuma:attach"), "{xml}");
    assert_eq!(pinned(&other, "2"), "0-1");
    other.must(&["destroy", "web"]);
}

/// docs/libvirt.md and docs/migration.md explain what libvirt says then.
#[test]
fn an_attached_domain_is_not_migrated_by_other_tools() {
    let Some(libvirt) = Libvirt::start() else { return };
    let other = libvirt.start_other();
    libvirt.create("web", "");
    let mut vm = libvirt.connect(&mut libvirt.backend(), "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(!vm.gets_channel_anew(), "a channel of it that is lost is its operator's to plug anew");
    let refused = libvirt.virsh(&["migrate", "--live", "web", &other.uri()]).expect_err("it is migrated");
    assert!(refused.contains("'peer mode' in device 'ivshmem'"), "{refused}");
    assert!(vm.channel_attached().unwrap() && vm.describe().is_ok(), "it is there as before");
    assert!(other.virsh(&["domstate", "web"]).is_err(), "it is at the destination");
}

/// The option by which QEMU sends the channel's device with the VM, by an emulator that has it, which does not taint a domain. That emulator is
/// made by the commands of the manual.
fn create_that_takes_its_channel_along(libvirt: &Libvirt) {
    let manual = include_str!("../../../../docs/libvirt.md");
    let of_root = |line: &'static str| line.strip_prefix("    ").unwrap_or(line);
    let lines = manual.lines().map(of_root).skip_while(|line| !line.starts_with("# cat > "));
    let mut script: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    [0, script.len() - 1]
        .into_iter()
        .for_each(|line| script[line] = script[line].strip_prefix("# ").unwrap());
    let emulator = libvirt.dir.path().join("lib/qemu-vnuma");
    let script = script.join("\n").replace("/usr/local/bin/qemu-vnuma", emulator.to_str().unwrap());
    assert!(script.contains(EMULATOR), "{script}");
    let made = Command::new("sh").args(["-e", "-c", &script]).status().unwrap();
    assert!(made.success(), "{script}");
    libvirt.create_with("web", "", emulator.to_str().unwrap());
}

/// Such a domain, attached by a vnumad that serves those that arrive.
fn attached_so_that_it_takes_its_channel_along(libvirt: &Libvirt) -> (LibvirtBackend, Box<dyn VmConnection>) {
    create_that_takes_its_channel_along(libvirt);
    let mut backend = libvirt.backend();
    backend.serve_arrivals(Box::new(|| Ok(channel().1))).unwrap();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    (backend, vm)
}

/// By any tool, and saved and restored: what connects at the destination is served by the vnumad there.
#[test]
fn a_domain_takes_its_channel_along_if_qemu_is_told_to() {
    let Some(libvirt) = Libvirt::start() else { return };
    let other = libvirt.start_other();
    let (mut here, vm) = attached_so_that_it_takes_its_channel_along(&libvirt);
    let socket = libvirt.dir.path().join("sockets/channel.sock");
    let xml = libvirt.must(&["dumpxml", "web"]);
    assert!(xml.contains(&format!("<server path='{}'/>", socket.display())), "{xml}");
    assert!(xml.contains("<shmem name='vnuma' role='master'>") && !libvirt.is_tainted("web"), "{xml}");
    libvirt.must(&["resume", "web"]);
    // One host has the directories of both.
    let mut there = other.backend();
    for live in [&["--live"][..], &["--live", "--p2p"]] {
        let (from, to) = if live.len() == 1 { (&libvirt, &other) } else { (&other, &libvirt) };
        from.must(&[&["migrate"], live, &["web", &to.uri()]].concat());
        let mut vm = to.connect(if live.len() == 1 { &mut there } else { &mut here }, "web");
        assert!(vm.gets_channel_anew() && vm.channel_attached().unwrap() && vm.tidy_channel().unwrap());
        assert_eq!(wait_for("it to run", || vm.describe().ok()).run_state, RunState::Running);
        assert!(from.virsh(&["domstate", "web"]).is_err());
    }
    drop(vm);
    let image = libvirt.dir.path().join("lib/web.save");
    libvirt.must(&["save", "web", image.to_str().unwrap()]);
    libvirt.must(&["restore", image.to_str().unwrap(), "--paused"]);
    let mut vm = libvirt.connect(&mut here, "web");
    assert!(vm.gets_channel_anew() && vm.channel_attached().unwrap());
    libvirt.must(&["destroy", "web"]);
}

/// Where the socket is not served nothing arrives, and the domain runs on where it was.
#[test]
fn a_domain_that_takes_its_channel_along_stays_where_no_vnumad_is() {
    let Some(libvirt) = Libvirt::start() else { return };
    let other = libvirt.start_other();
    let (here, vm) = attached_so_that_it_takes_its_channel_along(&libvirt);
    libvirt.must(&["resume", "web"]);
    drop((vm, here));
    let socket = libvirt.dir.path().join("sockets/channel.sock");
    wait_for("the socket to go", || (!socket.exists()).then_some(()));
    let refused = libvirt.virsh(&["migrate", "--live", "web", &other.uri()]).expect_err("it is migrated");
    assert!(refused.contains(&format!("Failed to connect to '{}'", socket.display())), "{refused}");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    assert!(vm.channel_attached().unwrap() && vm.describe().unwrap().run_state == RunState::Running);
    // A domain that is attached while the socket is not served stays as others do.
    libvirt.must(&["destroy", "web"]);
    create_that_takes_its_channel_along(&libvirt);
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    let xml = libvirt.must(&["dumpxml", "web"]);
    assert!(!xml.contains("role=") && xml.contains(&format!("sockets/{}.sock", vm.pid())), "{xml}");
}

/// virsh takes vnumad's pins along, again and again. libvirt cannot remove them, so that one to all CPUs of a host is left.
#[test]
fn a_pin_to_all_cpus_of_a_host_is_no_limit_on_the_next() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    let other = libvirt.start_other();
    create_without_limits(&libvirt);
    let (mut here, mut there) = (libvirt.backend(), other.backend());
    let mut vm = libvirt.connect(&mut here, "web");
    let tid = vm.describe().unwrap().vcpus[2].tid;
    vm.pins().unwrap().pin(tid, &set("1")).unwrap();
    libvirt.must(&["resume", "web"]);
    let hosts = [(&libvirt, &other), (&other, &libvirt)];
    for (round, (from, to)) in hosts.into_iter().enumerate() {
        from.must(&["migrate", "--live", "--p2p", "web", &to.uri()]);
        let backend = if round == 0 { &mut there } else { &mut here };
        let mut vm = to.connect(backend, "web");
        assert_eq!(wait_for("it to run", || vm.describe().ok()).run_state, RunState::Running);
        let xml = DomainXml::parse("web", &to.must(&["dumpxml", "web"])).unwrap();
        assert_eq!(xml.pin(2), Some(&set(&online())), "taken back");
        assert_eq!(xml.limit(2), None, "an operator has pinned nothing");
        assert_eq!(xml.set_pins().len(), 1);
        assert_eq!(xml.own_pins[&2].before, [], "it is settled");
        let run = xml.own_pins[&2].run.clone().unwrap();
        assert!(run.starts_with(&format!("{}.", vm.pid())), "of this host: {run}");
        assert_eq!(xml.stale_pins(&run), []);
    }
    libvirt.must(&["destroy", "web"]);
}

fn online() -> String {
    fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim().to_owned()
}

/// Whether vnumad sees its end or not: it may have been restarted, or libvirtd.
#[test]
fn a_domain_that_stays_keeps_its_pins() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    create_without_limits(&libvirt);
    let mut backend = libvirt.backend();
    for looks in [true, false] {
        let mut vm = libvirt.connect(&mut backend, "web");
        let tid = vm.describe().unwrap().vcpus[2].tid;
        vm.pins().unwrap().pin(tid, &set("1")).unwrap();
        vm.migrates().unwrap().migrate("qemu+unix:///system?socket=/run/nobody", false).unwrap();
        if looks {
            assert_eq!(outcome(&mut *vm), MigrationStatus::Failed);
        }
        drop(vm);
        let mut vm = libvirt.connect(&mut backend, "web");
        assert_eq!(pinned(&libvirt, "2"), "1");
        vm.pins().unwrap().pin(tid, &set("0")).unwrap_or_else(|error| panic!("it is vnumad's: {error}"));
        assert_eq!(pinned(&libvirt, "2"), "0");
    }
}
