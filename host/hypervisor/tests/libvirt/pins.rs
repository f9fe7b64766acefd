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
    let pin = |vm: &mut dyn VmConnection, vcpu: usize, cpus: &str| {
        vm.pins().unwrap().pin(vcpus[vcpu].tid, &set(cpus))
    };
    let pinned = |vcpu: &str| pinned(&libvirt, vcpu);
    assert!(vm.pins().is_some());
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
    vm.pins().unwrap().pin(tid, &set("0")).unwrap();
    for cpus in ["8190", "8191"] {
        let error = vm.pins().unwrap().pin(tid, &set(cpus)).unwrap_err().to_string();
        assert!(error.contains("virDomainPinVcpuFlags"), "{error}");
        assert_eq!(pinned(&libvirt, "2"), "0");
    }
    // Another vnumad does not know what has failed.
    drop(vm);
    let mut vm = libvirt.connect(&mut backend, "web");
    vm.pins().unwrap().pin(tid, &set("1")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(pinned(&libvirt, "2"), "1");
    // What was before is vnumad's no longer.
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    assert!(vm.pins().unwrap().pin(tid, &set("1")).is_err(), "an operator has pinned it since");
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
    vm.pins().unwrap().pin(tid, &set("1")).unwrap();
    let run = run(&*vm);
    note(&libvirt, &format!("<vcpu id='2' set='1' before='0' run='{run}'/>"));
    libvirt.must(&["resume", "web"]);
    vm.describe().unwrap();
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    assert!(vm.pins().unwrap().pin(tid, &set("1")).is_err(), "an operator has pinned it since");
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
    vm.pins().unwrap().pin(tid, &set("0")).unwrap_or_else(|error| panic!("{error}"));
    libvirt.must(&["resume", "web"]);
    vm.describe().unwrap();
    assert_eq!(["0", "1", "2", "3"].map(|vcpu| pinned(&libvirt, vcpu)), ["0-1", "0", "0", "1"]);
    // What vnumad has pinned here is its own afterwards, too.
    vm.pins().unwrap().pin(tid, &set("1")).unwrap_or_else(|error| panic!("{error}"));
    vm.describe().unwrap();
    assert_eq!(pinned(&libvirt, "2"), "1");
}

fn confine(tid: i32, expected: &str, operator: &str, cpus: Option<&str>) -> PolicyPin {
    PolicyPin { tid, expected: set(expected), operator: set(operator), cpus: cpus.map(set) }
}

/// The affinities of vCPUs 2 and 3.
fn allowed(vm: &dyn VmConnection, tids: [i32; 2]) -> [String; 2] {
    tids.map(|tid| vnuma_process::read_allowed(vm.pid(), tid).unwrap().to_string())
}

fn is_noted(libvirt: &Libvirt) -> bool {
    libvirt.must(&["dumpxml", "web"]).contains("urn:vnuma:pins:1")
}

#[test]
fn policies_pin_as_libvirt_does_and_give_back_what_was_before() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpus = vm.describe().unwrap().vcpus;
    let tids = [vcpus[2].tid, vcpus[3].tid];
    let pinned = || ["2", "3"].map(|vcpu| pinned(&libvirt, vcpu));
    // vCPU 1 has a pin of its operator's, and no thread has the number 1.
    let outcomes = vm.pins().unwrap().confine(&[
        confine(tids[0], "0-1", "0-1", Some("1")),
        confine(vcpus[1].tid, "0", "0", Some("0-1")),
        confine(1, "0", "0", Some("0")),
        confine(tids[1], "0-1", "0-1", Some("0")),
    ]);
    let outcomes: Vec<_> =
        outcomes.into_iter().map(|outcome| outcome.map_err(|error| error.to_string())).collect();
    let refused = [
        "web: an operator's vcpupin lets its vCPU 1 run on CPUs 0 only, not on all of 0-1",
        "web: thread 1 runs no vCPU of the domain any more",
    ];
    let refused = refused.map(|reason| Err(reason.to_owned()));
    assert_eq!(outcomes, [Ok(()), refused[0].clone(), refused[1].clone(), Ok(())]);
    assert_eq!(
        (pinned(), allowed(&*vm, tids)),
        (["1", "0"].map(str::to_owned), ["1", "0"].map(str::to_owned))
    );
    // One is given back.
    vm.pins().unwrap().confine(&[confine(tids[1], "0", "0-1", None)]).remove(0).unwrap();
    assert_eq!(
        (pinned(), allowed(&*vm, tids)),
        (["1", "0-1"].map(str::to_owned), ["1", "0-1"].map(str::to_owned))
    );
    // What an operator pins meanwhile is the operator's: it stays, and is a limit.
    libvirt.must(&["vcpupin", "web", "2", "0", "--live"]);
    for cpus in [Some("0-1"), None] {
        let outcome = vm.pins().unwrap().confine(&[confine(tids[0], "1", "0-1", cpus)]).remove(0);
        assert!(outcome.is_err(), "{cpus:?}");
        assert_eq!(pinned()[0], "0");
    }
    let outcome = vm.pins().unwrap().confine(&[confine(tids[0], "1", "0-1", None)]).remove(0);
    assert!(matches!(&outcome, Err(PinError::Changed(found)) if *found == set("0")), "{outcome:?}");
    let outcome = vm.pins().unwrap().confine(&[confine(tids[0], "0", "0", Some("1"))]).remove(0);
    assert!(outcome.unwrap_err().to_string().contains("run on CPUs 0 only"), "the next placement is within");
    // Nor does a policy take an affinity that somebody has set.
    vnuma_process::pin_thread(vm.pidfd(), vm.pid(), tids[1], &set("1")).unwrap();
    let outcome = vm.pins().unwrap().confine(&[confine(tids[1], "0-1", "0-1", Some("0"))]).remove(0);
    assert!(matches!(&outcome, Err(PinError::Changed(found)) if *found == set("1")), "{outcome:?}");
    assert_eq!(vm.pins().unwrap().give_back(&BTreeMap::new()).unwrap(), 0);
    assert_eq!(allowed(&*vm, tids), ["0", "1"]);
    assert!(!libvirt.is_tainted("web"));
}

/// vnumad is killed while policies have vCPUs, one of which an operator has moved before.
#[test]
fn the_next_vnumad_takes_back_what_policies_have_pinned() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpus = vm.describe().unwrap().vcpus;
    let tids = [vcpus[2].tid, vcpus[3].tid];
    let is_noted = || is_noted(&libvirt);
    vm.pins().unwrap().pin(vcpus[0].tid, &set("1")).unwrap();
    let policys = [confine(tids[0], "0-1", "0-1", Some("1")), confine(tids[1], "0-1", "0-1", Some("0"))];
    assert!(vm.pins().unwrap().confine(&policys).into_iter().all(|outcome| outcome.is_ok()));
    let again = confine(vcpus[0].tid, "1", "1", Some("1"));
    vm.pins().unwrap().confine(&[again]).remove(0).unwrap();
    drop(vm);
    let mut vm = libvirt.connect(&mut backend, "web");
    // The same vnumad, which has lost libvirt, keeps what its policies still want.
    let keep = BTreeMap::from([(tids[0], vec![set("0"), set("1")]), (tids[1], vec![set("1")])]);
    assert_eq!(
        vm.pins().unwrap().give_back(&keep).unwrap(),
        2,
        "that of the move, and one that no policy wants"
    );
    assert_eq!(allowed(&*vm, tids), ["1", "0-1"]);
    drop(vm);
    // Another one keeps none. libvirtd was killed before it had written a pin down.
    let mut vm = libvirt.connect(&mut backend, "web");
    vm.pins().unwrap().confine(&[confine(tids[1], "0-1", "0-1", Some("0"))]).remove(0).unwrap();
    libvirt.must(&["vcpupin", "web", "3", "0-1", "--live"]);
    vnuma_process::pin_thread(vm.pidfd(), vm.pid(), tids[1], &set("0")).unwrap();
    assert_eq!(vm.pins().unwrap().give_back(&BTreeMap::new()).unwrap(), 2);
    assert_eq!(allowed(&*vm, tids), ["0-1", "0-1"]);
    assert_eq!(["0", "2", "3"].map(|vcpu| pinned(&libvirt, vcpu)), ["1", "0-1", "0-1"]);
    assert!(is_noted(), "the move stays");
    assert_eq!(vm.pins().unwrap().give_back(&BTreeMap::new()).unwrap(), 0);
    vm.pins().unwrap().pin(vcpus[0].tid, &set("0-1")).unwrap();
    assert!(!is_noted());
}

/// Somebody has set an affinity since, by which the vCPU stays.
#[test]
fn an_affinity_that_somebody_has_set_outlasts_the_policy() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let tid = vm.describe().unwrap().vcpus[2].tid;
    vm.pins().unwrap().confine(&[confine(tid, "0-1", "0-1", Some("0-1"))]).remove(0).unwrap();
    vnuma_process::pin_thread(vm.pidfd(), vm.pid(), tid, &set("0")).unwrap();
    assert_eq!(vm.pins().unwrap().give_back(&BTreeMap::new()).unwrap(), 1);
    assert_eq!(pinned(&libvirt, "2"), "0");
    assert_eq!(vnuma_process::read_allowed(vm.pid(), tid).unwrap(), set("0"));
    vm.pins().unwrap().pin(tid, &set("0-1")).unwrap();
    assert_eq!(pinned(&libvirt, "2"), "0-1", "it is not the operator's pin");
}

#[test]
fn a_libvirtd_that_hangs_is_waited_for_once_and_pins_nothing() {
    let Some(libvirt) = Libvirt::start() else { return };
    if !has_two_cpus() {
        return;
    }
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpus = vm.describe().unwrap().vcpus;
    libvirt.signal(Signal::SIGSTOP);
    let began = Instant::now();
    let pins: Vec<_> = vcpus.iter().map(|vcpu| confine(vcpu.tid, "0-1", "0-1", Some("0"))).collect();
    let outcomes = vm.pins().unwrap().confine(&pins);
    println!("not answered within {:?}", began.elapsed());
    libvirt.signal(Signal::SIGCONT);
    assert_eq!(outcomes.len(), 4);
    assert!(matches!(&outcomes[0], Err(PinError::Vm(VmError::NoAnswer { .. }))), "{outcomes:?}");
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    wait_for("libvirtd to answer", || vm.describe().ok().map(drop));
    assert_eq!(vm.pins().unwrap().give_back(&BTreeMap::new()).unwrap(), 0, "it was not asked to pin any");
    assert_eq!(["0", "1", "2", "3"].map(|vcpu| pinned(&libvirt, vcpu)), ["0-1", "0", "0-1", "0-1"]);
}
