//! vnumad with domains of a real libvirt. Needs root, libvirtd, virsh and `qemu-system-x86_64`; skipped without.

mod common;
#[path = "../../hypervisor/tests/libvirt/real.rs"]
mod real;

use common::{Daemon, http::ask};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use real::Libvirt;
use serde_json::Value;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_daemon::BackendFactory;
use vnuma_hypervisor::{JoinedBackend, LibvirtBackend, QmpBackend};

/// Paused, as hundreds of guests that run would take all CPUs.
const MANY: usize = 200;
/// Longer than any step takes for all of them, on any machine.
const LIMIT: Duration = Duration::from_secs(300);

fn backend(libvirt: &Libvirt) -> BackendFactory {
    let sockets = libvirt.dir.path().join("sockets");
    let backend = LibvirtBackend::new(&[libvirt.uri()], vec![libvirt.states()], sockets);
    let backend = backend.unwrap_or_else(|error| panic!("{error}"));
    Arc::new(move || Box::new(backend.clone()))
}

/// The same, beside VMs with QMP sockets.
fn with_qmp(libvirt: &Libvirt) -> BackendFactory {
    let (sockets, domains) = (libvirt.dir.path().join("qmp"), backend(libvirt));
    let qmp = move || Box::new(QmpBackend::new(Some(sockets.clone()), Vec::new()));
    Arc::new(move || Box::new(JoinedBackend::new(vec![qmp(), domains()])))
}

fn show(daemon: &Daemon, vm: &str) -> Value {
    let (status, shown) = ask(&daemon.socket, "GET", &format!("/v1/vms/{vm}"), "");
    assert_eq!(status, 200, "{shown}");
    shown
}

/// Does something to a VM, and returns the status and what was answered.
fn act(daemon: &Daemon, vm: &str, what: &str) -> (u16, String) {
    let (status, answer) = ask(&daemon.socket, "POST", &format!("/v1/vms/{vm}/{what}"), "");
    (status, answer.to_string())
}

/// A vCPU of each VM comes to the other node of the host that vnumad is shown, which it sees. The guest needs no telling: the memory
/// of all its nodes is on the node that the machine has.
fn all_are_watched(daemon: &Daemon, vms: &[&str]) {
    for vm in vms {
        let before = show(daemon, vm);
        let vcpu = &before["vcpus"][0];
        let (tid, node) =
            (vcpu["tid"].as_i64().expect("a thread"), vcpu["host_node"].as_u64().expect("known"));
        // Each node has the CPU of its number.
        let mut cpus = CpuSet::new();
        cpus.set(1 - node as usize).expect("one of two");
        sched_setaffinity(Pid::from_raw(tid as i32), &cpus).expect("its thread");
        real::wait_for(&format!("vCPU 0 of {vm} to be seen"), || {
            (show(daemon, vm)["vcpus"][0]["host_node"] == 1 - node).then_some(())
        });
    }
}

/// Two domains, and one that is known by its QMP socket: attached, and running.
fn three_that_are_attached(libvirt: &Libvirt) -> Daemon {
    let (extra, _) = libvirt.monitor("qmp");
    [("web", ""), ("db", ""), ("qmp", &extra)].iter().for_each(|(name, extra)| libvirt.create(name, extra));
    let daemon = Daemon::start_with(Some(with_qmp(libvirt)), |_| {});
    await_all(&daemon, "described", 3, |vm| vm["described"] == true);
    for name in ["web", "db", "qmp"] {
        assert_eq!(act(&daemon, name, "attach").0, 200, "{name}");
        libvirt.must(&["resume", name]);
    }
    let backends = ["web", "db", "qmp"].map(|name| show(&daemon, name)["backend"].clone());
    assert_eq!(backends, ["libvirt", "libvirt", "qmp"]);
    daemon
}

#[test]
fn a_libvirtd_that_is_stopped_keeps_nothing_from_any_guest() {
    let Some(libvirt) = Libvirt::start() else { return };
    let daemon = three_that_are_attached(&libvirt);
    all_are_watched(&daemon, &["web", "db", "qmp"]);
    libvirt.signal(Signal::SIGSTOP);
    // It is noticed by what is asked, which is answered before the VM is shown as silent.
    let (status, answer) = act(&daemon, "web", "detach");
    assert!(status != 200 && answer.contains("libvirt has not answered"), "{status}: {answer}");
    real::wait_for("web to be silent", || (show(&daemon, "web")["hypervisor"] == "silent").then_some(()));
    all_are_watched(&daemon, &["web", "db", "qmp"]);
    // The other one is served as ever.
    assert_eq!(show(&daemon, "qmp")["hypervisor"], "answers");
    let (status, answer) = act(&daemon, "qmp", "detach");
    assert!(answer.contains("has not released"), "{status}: {answer}");
    libvirt.signal(Signal::SIGCONT);
    await_all(&daemon, "after it goes on", 3, |vm| vm["hypervisor"] == "answers" && vm["attached"] == true);
    all_are_watched(&daemon, &["web", "db", "qmp"]);
}

#[test]
fn an_attached_domain_outlasts_libvirtd() {
    let Some(mut libvirt) = Libvirt::start() else { return };
    let daemon = three_that_are_attached(&libvirt);
    libvirt.kill_daemon();
    await_all(&daemon, "without libvirtd", 3, |vm| {
        vm["attached"] == true && (vm["hypervisor"] == "answers") == (vm["backend"] == "qmp")
    });
    all_are_watched(&daemon, &["web", "db", "qmp"]);
    libvirt.start_daemon();
    await_all(&daemon, "with the next one", 3, |vm| vm["hypervisor"] == "answers" && vm["attached"] == true);
    all_are_watched(&daemon, &["web", "db", "qmp"]);
    assert!(libvirt.must(&["dumpxml", "web"]).contains("ua-vnuma"));
    // The next one unplugs it.
    let (status, answer) = act(&daemon, "web", "detach");
    assert!(answer.contains("has not released"), "{status}: {answer}");
    libvirt.reset("web");
    real::wait_for("it to be detached", || (show(&daemon, "web")["attached"] == false).then_some(()));
    libvirt.must(&["resume", "web"]);
    assert_eq!(act(&daemon, "web", "attach").0, 200);
    assert!(!libvirt.is_tainted("web"));
}

fn list(daemon: &Daemon) -> Vec<Value> {
    let (status, vms) = ask(&daemon.socket, "GET", "/v1/vms", "");
    assert_eq!(status, 200, "{vms}");
    vms.as_array().expect("a list").clone()
}

/// Waits until there are so many VMs, all of them like that, and prints how long it took.
fn await_all(daemon: &Daemon, what: &str, count: usize, is: impl Fn(&Value) -> bool) {
    let began = Instant::now();
    loop {
        let vms = list(daemon);
        if vms.len() == count && vms.iter().all(&is) {
            println!("{what}: {count} VMs after {:?} (measured)", began.elapsed());
            return;
        }
        let other = vms.iter().find(|vm| !is(vm));
        assert!(began.elapsed() < LIMIT, "{what}: {} VMs, one of them {other:?}", vms.len());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "takes minutes: make soak"]
fn hundreds_of_domains_are_attached_and_outlast_libvirtd_and_vnumad() {
    let Some(mut libvirt) = Libvirt::start() else { return };
    let names: Vec<String> = (0..MANY).map(|number| format!("vm-{number:03}")).collect();
    names.iter().for_each(|name| libvirt.create(name, ""));
    let mut daemon = Daemon::start_with(Some(backend(&libvirt)), |_| {});
    let described = |vm: &Value| vm["described"] == true && vm["backend"] == "libvirt";
    await_all(&daemon, "described", MANY, described);

    let (began, mut longest) = (Instant::now(), Duration::ZERO);
    for name in &names {
        let (status, answer) = ask(&daemon.socket, "POST", &format!("/v1/vms/{name}/attach"), "");
        assert_eq!(status, 200, "{name}: {answer}");
        let asked = Instant::now();
        assert_eq!(list(&daemon).len(), MANY);
        longest = longest.max(asked.elapsed());
    }
    println!("{MANY} VMs attached in {:?}, and listed in {longest:?} at most (measured)", began.elapsed());
    let attached = |vm: &Value| described(vm) && vm["attached"] == true;
    await_all(&daemon, "attached", MANY, attached);
    assert!(names.iter().all(|name| !libvirt.is_tainted(name)));

    libvirt.kill_daemon();
    let stays = Instant::now();
    while stays.elapsed() < 5 * daemon.config.resync_interval {
        let vms = list(&daemon);
        assert!(vms.len() == MANY && vms.iter().all(attached), "{} VMs without libvirtd", vms.len());
        std::thread::sleep(Duration::from_millis(100));
    }
    // Another vnumad, which has not heard of them.
    daemon.restart_with(backend(&libvirt));
    libvirt.start_daemon();
    await_all(&daemon, "after libvirtd and vnumad", MANY, attached);
    let ended = &names[..MANY / 4];
    ended.iter().for_each(|name| kill(Pid::from_raw(libvirt.pid(name)), Signal::SIGKILL).expect("killed"));
    await_all(&daemon, "those that have not ended", MANY - ended.len(), |vm| {
        attached(vm) && !ended.iter().any(|name| vm["name"] == **name)
    });
    let (status, answer) = ask(&daemon.socket, "POST", &format!("/v1/vms/{}/detach", names[MANY - 1]), "");
    // Nobody lets go of the device in a guest that stands still.
    assert!(status != 200 && answer.to_string().contains("has not released"), "{status}: {answer}");
}

/// A name that no domain of another test has, as those of one name share a control group, whatever libvirt they are of.
fn name() -> String {
    format!("policy-{}", std::process::id())
}

/// What libvirt says that the vCPUs of the domain are pinned to.
fn pins(libvirt: &Libvirt) -> Vec<String> {
    let pins = libvirt.must(&["vcpupin", &name(), "--live"]);
    let sets = pins.lines().filter_map(|line| line.split_whitespace().nth(1));
    sets.map(str::to_owned).collect()
}

fn policy(daemon: &Daemon) -> Value {
    ask(&daemon.socket, "GET", &format!("/v1/vms/{}/policy", name()), "").1
}

fn set_policy(daemon: &Daemon, policy: &str) {
    let body = format!("{{\"policy\":\"{policy}\"}}");
    let (status, answer) = ask(&daemon.socket, "POST", &format!("/v1/vms/{}/policy", name()), &body);
    assert_eq!(status, 200, "{answer}");
}

/// The vCPUs that a policy confines: by their index, with the CPUs.
fn confined(daemon: &Daemon) -> Vec<(usize, String)> {
    let vcpus = policy(daemon)["vcpus"].as_array().cloned().unwrap_or_default();
    let cpus = |vcpu: &Value| vcpu["policy_cpus"].as_str().map(str::to_owned);
    vcpus.iter().enumerate().filter_map(|(at, vcpu)| Some((at, cpus(vcpu)?))).collect()
}

fn await_described(daemon: &Daemon) {
    await_all(daemon, "described", 1, |vm| vm["described"] == true);
}

/// A machine whose first vCPU never rests: what it boots is `jmp $`.
fn create_busy(libvirt: &Libvirt) {
    let image = libvirt.dir.path().join("lib/boot.img");
    let mut disk = vec![0_u8; 16 << 20];
    (disk[0], disk[1], disk[510], disk[511]) = (0xeb, 0xfe, 0x55, 0xaa);
    std::fs::write(&image, disk).expect("written");
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/><target dev='sda' bus='sata'/></disk>",
        image.display()
    );
    let domain = real::DOMAIN.replace("DEVICES", &disk);
    libvirt.create_from(&domain.replace("<vcpupin vcpu='1' cpuset='0'/>", ""), &name(), "");
    libvirt.must(&["resume", &name()]);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one story")]
fn a_policy_pins_by_libvirt_within_what_an_operator_allows_and_gives_back() {
    let Some(mut libvirt) = Libvirt::start() else { return };
    create_busy(&libvirt);
    // Whatever runs uses memory.
    let change = |config: &mut vnuma_daemon::Config| {
        config.policy_period = Duration::from_millis(200);
        (config.policy_bounds.low, config.policy_bounds.high) = (1e-9, 2e-9);
    };
    let mut daemon = Daemon::start_with(Some(backend(&libvirt)), change);
    let pid = libvirt.pid(&name());
    let tids: Vec<i32> = {
        await_described(&daemon);
        let (_, vm) = ask(&daemon.socket, "GET", &format!("/v1/vms/{}", name()), "");
        let vcpus = vm["vcpus"].as_array().expect("vCPUs").clone();
        vcpus.iter().map(|vcpu| vcpu["tid"].as_i64().expect("a thread") as i32).collect()
    };
    let allowed = |vcpu: usize| vnuma_process::read_allowed(pid, tids[vcpu]).expect("it runs").to_string();
    let agree = |expected: &dyn Fn(usize) -> String| {
        let pins = pins(&libvirt);
        (0..4).all(|vcpu| pins[vcpu] == expected(vcpu) && allowed(vcpu) == expected(vcpu))
    };
    let are_free = || agree(&|_| "0-1".to_owned());
    let confine = |daemon: &Daemon| {
        await_described(daemon);
        set_policy(daemon, "vprobe-paper");
        common::wait_for("the first vCPU to be confined as libvirt, the kernel and vnumad say", || {
            let known = confined(daemon);
            let of = |vcpu| {
                known.iter().find(|(at, _)| *at == vcpu).map_or("0-1".to_owned(), |(_, cpus)| cpus.clone())
            };
            known.iter().any(|(vcpu, _)| *vcpu == 0) && agree(&of)
        });
    };

    confine(&daemon);
    let record =
        std::fs::read_to_string(daemon.config.records.join(format!("{pid}.masks"))).unwrap_or_default();
    assert!(
        !tids.iter().any(|tid| record.contains(&format!("\"{tid}\""))),
        "the domain has the record: {record}"
    );
    // An operator pins one that a policy has, to where the policy does not have it.
    let cpus = confined(&daemon)[0].1.clone();
    let other = if cpus == "0" { "1" } else { "0" };
    libvirt.must(&["vcpupin", &name(), "0", other, "--live"]);
    common::wait_for("that to be a limit", || policy(&daemon)["vcpus"][0]["operator_cpus"] == *other);
    for _ in 0..10 {
        std::thread::sleep(daemon.config.policy_period);
        assert_eq!((pins(&libvirt)[0].as_str(), allowed(0).as_str()), (other, other));
    }
    set_policy(&daemon, "off");
    assert!(
        agree(&|vcpu| if vcpu == 0 { other.to_owned() } else { "0-1".to_owned() }),
        "{:?}",
        pins(&libvirt)
    );
    libvirt.must(&["vcpupin", &name(), "0", "0-1", "--live"]);

    // vnumad stops, with libvirtd and without.
    confine(&daemon);
    daemon.stop();
    assert!(are_free(), "{:?}", pins(&libvirt));
    daemon.restart_with(backend(&libvirt));
    confine(&daemon);
    libvirt.signal(Signal::SIGSTOP);
    assert_eq!(list(&daemon).len(), 1, "nobody waits for libvirtd");
    let began = Instant::now();
    daemon.stop();
    println!("stopped in {:?} while libvirtd hung (measured)", began.elapsed());
    libvirt.signal(Signal::SIGCONT);
    assert!(!are_free(), "nobody could free them");
    daemon.restart_with(backend(&libvirt));
    await_described(&daemon);
    common::wait_for("the next vnumad to give back what was left", are_free);
    // One that has the same libvirt again keeps what its policy wants, and takes back the rest.
    confine(&daemon);
    libvirt.kill_daemon();
    common::wait_for("libvirt to be gone", || list(&daemon)[0]["hypervisor"] == "lost");
    libvirt.start_daemon();
    common::wait_for("it to be connected again", || list(&daemon)[0]["hypervisor"] == "answers");
    std::thread::sleep(5 * daemon.config.policy_period);
    assert_ne!(pins(&libvirt)[0], "0-1");
    set_policy(&daemon, "off");
    assert_eq!(pins(&libvirt), ["0-1"; 4]);
    assert!(!libvirt.is_tainted(&name()));
}
