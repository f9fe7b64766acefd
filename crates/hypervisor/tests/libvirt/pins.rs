//! Pins of vnumad beside those of an operator.

use super::*;

pub(super) fn has_two_cpus() -> bool {
    let enough = thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
    if !enough {
        println!("skipped: this needs the CPUs 0 and 1");
    }
    enough
}

/// What libvirt says that a vCPU of `web` is pinned to.
pub(super) fn pinned(libvirt: &Libvirt, vcpu: &str) -> String {
    let pins = libvirt.must(&["vcpupin", "web", "--live"]);
    let line = pins.lines().find(|line| line.split_whitespace().next() == Some(vcpu));
    line.and_then(|line| line.split_whitespace().nth(1)).unwrap().to_owned()
}

/// Makes a domain whose vCPUs its operator lets run anywhere.
pub(super) fn create_without_limits(libvirt: &Libvirt) {
    let domain = DOMAIN.replace("DEVICES", "").replace(" cpuset='0-1'", "");
    libvirt.create_from(&domain.replace("<vcpupin vcpu='1' cpuset='0'/>", ""), "web", "");
}

#[test]
fn a_pin_is_libvirts_own_and_stays_within_the_operators() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpus = vm.describe().unwrap().vcpus;
    let pin = |vm: &mut dyn VmConnection, vcpu: usize, cpus: &str| vm.pin_vcpu(vcpus[vcpu].tid, &set(cpus));
    let pinned = |vcpu: &str| pinned(&libvirt, vcpu);
    assert!(vm.keeps_pins());
    pin(&mut *vm, 2, "1").unwrap();
    assert_eq!(pinned("2"), "1");
    let allowed = vnuma_process::read_allowed(vm.pid(), vcpus[2].tid).unwrap();
    assert_eq!(allowed, set("1"), "the thread is where the XML says");
    // Its own pin is no limit: the operator's is 0-1, of the whole domain.
    pin(&mut *vm, 2, "0-7").unwrap();
    assert_eq!(pinned("2"), "0-1");
    // vCPU 1 has one of its own.
    let error = pin(&mut *vm, 1, "1").unwrap_err().to_string();
    assert_eq!(error, "web: an operator's vcpupin lets its vCPU 1 run on CPUs 0 only, none of 1");
    assert_eq!(pinned("1"), "0");
    // What the operator sets later is a limit, too.
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    assert!(pin(&mut *vm, 2, "1").is_err());
    assert_eq!(pinned("2"), "0");
    assert!(!libvirt.is_tainted("web"));
}

/// The kernel refuses a CPU that is not there after vnumad has noted it, as if libvirtd were killed in between.
#[test]
fn a_pin_that_fails_leaves_the_one_before_vnumads() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    create_without_limits(&libvirt);
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let tid = vm.describe().unwrap().vcpus[2].tid;
    vm.pin_vcpu(tid, &set("0")).unwrap();
    for cpus in ["8190", "8191"] {
        let error = vm.pin_vcpu(tid, &set(cpus)).unwrap_err().to_string();
        assert!(error.contains("virDomainPinVcpuFlags"), "{error}");
        assert_eq!(pinned(&libvirt, "2"), "0");
    }
    // Another vnumad does not know what has failed.
    drop(vm);
    let mut vm = libvirt.connect(&mut backend, "web");
    vm.pin_vcpu(tid, &set("1")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(pinned(&libvirt, "2"), "1");
    // What was before is vnumad's no longer.
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    assert!(vm.pin_vcpu(tid, &set("1")).is_err(), "an operator has pinned it since");
}

/// How vnumad calls this run of a domain.
fn run(vm: &dyn VmConnection) -> String {
    let stat =
        vnuma_process::procfs::read_process(vm.pid(), "stat", vnuma_process::procfs::STAT_LIMIT).unwrap();
    format!("{}.{}", vm.pid(), vnuma_process::procfs::start_time(&stat).unwrap())
}

/// Notes pins with `web` as vnumad does.
fn note(libvirt: &Libvirt, pins: &str) {
    let element = format!("<pins>{pins}</pins>");
    let uri = ["--uri", "urn:vnuma:pins:1", "--key", "vnuma", "--live"];
    libvirt.must(&[&["metadata", "web"][..], &uri, &["--set", &element]].concat());
}

/// vnumad was killed after a pin, before it noted that the one before counts no more.
#[test]
fn a_pin_that_was_replaced_is_forgotten_with_the_next_description() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    create_without_limits(&libvirt);
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let tid = vm.describe().unwrap().vcpus[2].tid;
    vm.pin_vcpu(tid, &set("1")).unwrap();
    let run = run(&*vm);
    note(&libvirt, &format!("<vcpu id='2' set='1' before='0' run='{run}'/>"));
    libvirt.must(&["resume", "web"]);
    vm.describe().unwrap();
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    assert!(vm.pin_vcpu(tid, &set("1")).is_err(), "an operator has pinned it since");
}

/// They could not be taken back when it arrived.
#[test]
fn a_move_does_not_make_pins_of_another_host_its_own() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    for vcpu in ["0", "2", "3"] {
        libvirt.must(&["vcpupin", "web", vcpu, "1", "--live"]);
    }
    let pins = ["0", "2"].map(|vcpu| format!("<vcpu id='{vcpu}' set='1' operator='0-1' run='1.1'/>"));
    note(&libvirt, &pins.concat());
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let tid = vm.describe().unwrap().vcpus[2].tid;
    assert_eq!(pinned(&libvirt, "2"), "1", "it does not run yet");
    vm.pin_vcpu(tid, &set("0")).unwrap_or_else(|error| panic!("{error}"));
    libvirt.must(&["resume", "web"]);
    vm.describe().unwrap();
    assert_eq!(["0", "1", "2", "3"].map(|vcpu| pinned(&libvirt, vcpu)), ["0-1", "0", "0", "1"]);
    // What vnumad has pinned here is its own afterwards, too.
    vm.pin_vcpu(tid, &set("1")).unwrap_or_else(|error| panic!("{error}"));
    vm.describe().unwrap();
    assert_eq!(pinned(&libvirt, "2"), "1");
}
