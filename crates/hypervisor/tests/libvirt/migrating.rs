//! A domain that migrates to another libvirt, or stays.

use super::{
    pins::{create_without_limits, has_two_cpus, pinned},
    *,
};

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
