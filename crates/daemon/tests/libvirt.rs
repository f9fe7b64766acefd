//! vnumad with domains of a real libvirt. Needs root, libvirtd, virsh and `qemu-system-x86_64`; skipped without.

mod common;
#[path = "../../hypervisor/tests/libvirt/real.rs"]
mod real;

use common::{Daemon, http::ask};
use nix::{
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
use vnuma_hypervisor::LibvirtBackend;

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
