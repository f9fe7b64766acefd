//! A domain that migrates to another libvirt, or stays.

use super::{
    pins::{create_without_limits, has_two_cpus, pinned},
    *,
};
use vnuma_libvirt::DomainXml;

/// What came of a migration that was begun.
fn outcome(vm: &mut dyn VmConnection) -> MigrationStatus {
    wait_for("the migration to end", || {
        // For a moment libvirt says only that the domain has gone.
        let migration = vm.migration().inspect_err(|error| println!("{error}")).ok()?;
        if let Some(problem) = &migration.problem {
            println!("{problem}");
        }
        (migration.status != MigrationStatus::Active).then_some(migration.status)
    })
}

/// Nobody is there who could take anything back.
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
    vm.pin_vcpu(vcpus[2].tid, &set("1")).unwrap();
    vm.pin_vcpu(vcpus[3].tid, &set("1")).unwrap();
    vm.mark(true).unwrap();
    vm.migrate(&other.uri(), false).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome(&mut *vm), MigrationStatus::Completed);
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
    let refused = libvirt.virsh(&["migrate", "--live", "web", &other.uri()]).expect_err("it is migrated");
    assert!(refused.contains("'peer mode' in device 'ivshmem'"), "{refused}");
    assert!(vm.channel_attached().unwrap() && vm.describe().is_ok(), "it is there as before");
    assert!(other.virsh(&["domstate", "web"]).is_err(), "it is at the destination");
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
    vm.pin_vcpu(tid, &set("1")).unwrap();
    libvirt.must(&["resume", "web"]);
    let hosts = [(&libvirt, &other), (&other, &libvirt)];
    for (round, (from, to)) in hosts.into_iter().enumerate() {
        from.must(&["migrate", "--live", "--p2p", "web", &to.uri()]);
        let backend = if round == 0 { &mut there } else { &mut here };
        let mut vm = to.connect(backend, "web");
        assert_eq!(wait_for("it to run", || vm.describe().ok()).run_state, "running");
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
        vm.pin_vcpu(tid, &set("1")).unwrap();
        vm.migrate("qemu+unix:///system?socket=/run/nobody", false).unwrap();
        if looks {
            assert_eq!(outcome(&mut *vm), MigrationStatus::Failed);
        }
        drop(vm);
        let mut vm = libvirt.connect(&mut backend, "web");
        assert_eq!(pinned(&libvirt, "2"), "1");
        vm.pin_vcpu(tid, &set("0")).unwrap_or_else(|error| panic!("it is vnumad's: {error}"));
        assert_eq!(pinned(&libvirt, "2"), "0");
    }
}
