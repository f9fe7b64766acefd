//! The daemon with VMs in memory: the corners that a real hypervisor does not reach on demand.

mod common;

use common::{
    Daemon,
    http::{Watch, ask},
    vms::{Process, VcpuThread, describe, pin},
    wait_for,
};
use serde_json::{Value, json};
use std::{
    mem::offset_of,
    os::unix::fs::PermissionsExt,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use vnuma_abi_topology_channel::{Guest, MODE_SAFE};
use vnuma_channel_model::GuestEnd;
use vnuma_hypervisor::{Plugged, VmError, VmEvent};
use vnuma_model::MigrationStatus;
use vnuma_observe::location::Prefer;
use vnuma_process::faults::{self, Fault};

fn own_pid() -> i32 {
    process::id().cast_signed()
}

fn get(daemon: &Daemon, path: &str) -> (u16, Value) {
    ask(&daemon.socket, "GET", path, "")
}

fn post(daemon: &Daemon, path: &str, body: &str) -> (u16, Value) {
    ask(&daemon.socket, "POST", path, body)
}

/// (host node, guest node published, state) of each vCPU.
fn states(daemon: &Daemon, vm: &str) -> Vec<(Value, Value, Value)> {
    let (_, vm) = get(daemon, &format!("/v1/vms/{vm}"));
    let vcpus = vm["vcpus"].as_array().cloned().unwrap_or_default();
    vcpus.into_iter().map(|v| (v["host_node"].clone(), v["guest_node"].clone(), v["state"].clone())).collect()
}

fn wait_for_states(daemon: &Daemon, vm: &str, expected: &[(u32, u32, &str)]) {
    let expected: Vec<_> = expected.iter().map(|&(h, g, s)| (json!(h), json!(g), json!(s))).collect();
    let mut last = Vec::new();
    wait_for(&format!("{vm} to be {expected:?}"), || {
        let now = states(daemon, vm);
        if now != last {
            eprintln!("{vm}: {now:?}");
            last = now;
        }
        last == expected
    });
}

/// A VM of two vCPUs at home on both nodes.
fn two_nodes(daemon: &Daemon, name: &str) -> [VcpuThread; 2] {
    let threads = [VcpuThread::start(), VcpuThread::start()];
    threads[0].pin(0);
    threads[1].pin(1);
    let tids = threads.each_ref().map(|thread| thread.tid);
    daemon.add(name, describe(name, own_pid(), &[0, 1], &tids));
    wait_for_states(daemon, name, &[(0, 0, "true"), (1, 1, "true")]);
    threads
}

/// An attached VM beside the tested one. Once something was published to it, it would have been to the other, too.
struct Control {
    guest: GuestEnd,
    threads: [VcpuThread; 2],
}

impl Control {
    fn start(daemon: &Daemon) -> Self {
        let threads = two_nodes(daemon, "control");
        assert_eq!(post(daemon, "/v1/vms/control/attach", "").0, 200);
        Self { guest: daemon.guest("control"), threads }
    }

    /// Moves vCPU 0 of a VM from node 0 to node 1: nothing has been published to it since `before`, nor is it then.
    fn sees_nothing_published(&self, daemon: &Daemon, vm: &str, guest: &GuestEnd, before: u64) {
        daemon.change(vm, |vm| {
            pin(vm.description.vcpus[0].tid, 1);
        });
        wait_for("the move to be seen", || states(daemon, vm)[0].0 == json!(1));
        // What is published to the control VM now was decided after that.
        for node in [1, 0] {
            self.threads[0].pin(node as usize);
            let published = || self.guest.read().is_ok_and(|found| found.vcpus[0].node == node);
            wait_for("the control VM to be updated", published);
        }
        assert_eq!(guest.read().expect("untouched").generation, before, "{vm} was published to");
        assert!(guest.guest_vectors[0].read().is_err(), "{vm} is interrupted");
    }
}

/// What is published to a VM so far; its interrupts are taken.
fn published(guest: &GuestEnd) -> u64 {
    // None is as good.
    let _ = guest.guest_vectors[0].read();
    guest.read().expect("published").generation
}

#[test]
fn a_guest_learns_where_its_vcpus_are() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    let mut watch = Watch::start(&daemon.socket);
    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    assert_eq!(watch.next("attached")["vm"], "web");
    let first = watch.next("published");
    let guest = daemon.guest("web");
    let found = guest.read().expect("published");
    assert_eq!(first["generation"], format!("{:016x}", found.generation));
    assert_eq!(found.distances, [[10, 21], [21, 10]]);
    assert_eq!(
        found.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.node)).collect::<Vec<_>>(),
        [(0, 0), (1, 1)]
    );
    guest.acknowledge(found.generation).expect("the doorbell works");
    assert_eq!(watch.next("acknowledged")["generation"], first["generation"]);
    assert_eq!(get(&daemon, "/v1/vms/web").1["publication"]["driver_mode"], "fast");

    threads[1].pin(0);
    let changed = watch.next("changed");
    assert_eq!((&changed["vcpu"], &changed["from"], &changed["to"]), (&json!(1), &json!(1), &json!(0)));
    let published = watch.next("published");
    assert_eq!(published["changed_ns"], changed["time_ns"]);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 0, "stale")]);
    let found = guest.read().expect("published");
    assert_eq!(found.vcpus[1].node, 0);
    guest.acknowledge_safely(found.generation).expect("the doorbell works");
    let acknowledged = watch.next("acknowledged");
    assert_eq!(get(&daemon, "/v1/vms/web").1["publication"]["driver_mode"], "safe");
    assert_eq!(
        (&acknowledged["changed_ns"], &acknowledged["published_ns"]),
        (&published["changed_ns"], &published["time_ns"])
    );
    assert!(acknowledged["acknowledged_ns"].as_u64() >= acknowledged["published_ns"].as_u64());
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 0, "true")]);
    assert_eq!(guest.guest_vectors[0].read(), Ok(2), "an interrupt for each publication");
}

#[test]
fn what_the_driver_reports_is_shown() {
    let daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    let guest = daemon.guest("web");
    let shown = || {
        let publication = get(&daemon, "/v1/vms/web").1["publication"].take();
        json!([publication["driver_mode"], publication["driver_version"], publication["refused"]])
    };
    assert_eq!(shown(), json!([null, null, null]));
    let generation = guest.read().expect("published").generation;
    guest.announce(MODE_SAFE).expect("written");
    guest.refuse(generation, 95).expect("the doorbell works");
    let refused = json!({"generation": format!("{generation:016x}"), "errno": 95});
    wait_for("the refusal", || shown() == json!(["safe", "1.2.3", refused]));
    guest.store(offset_of!(Guest, magic), 0).expect("written");
    guest.ring().expect("the doorbell works");
    wait_for("the driver to be gone", || shown() == json!([null, null, null]));
    guest.refuse(generation, 0).expect("the doorbell works");
    guest.acknowledge(generation).expect("the doorbell works");
    wait_for("another driver", || shown() == json!(["fast", "1.2.3", null]));
    assert_eq!(post(&daemon, "/v1/vms/web/detach", "").0, 200);
    assert_eq!(shown(), json!([null, null, null]), "a driver without a channel");
}

#[test]
fn vms_and_moves_are_noticed_without_looking_at_everything() {
    let daemon = Daemon::start_looking_every(Duration::from_secs(3600));
    let threads = two_nodes(&daemon, "web");
    threads[0].pin(1);
    wait_for_states(&daemon, "web", &[(1, 0, "stale"), (1, 1, "true")]);
    let mut process = Process::start();
    daemon.add("short", describe("short", process.pid(), &[0, 1], &[process.pid()]));
    wait_for("the VM", || get(&daemon, "/v1/vms/short").0 == 200);
    process.kill();
    wait_for("it to be gone", || get(&daemon, "/v1/vms/short").0 == 404);
}

/// By BPF, if this machine lets us: its events reach the core without a thread in between.
#[test]
fn moves_are_noticed_while_nobody_asks() {
    // Moves in a VM whose guest is told nothing wake nobody: they are seen with the next resync, or with whatever comes before.
    let daemon = Daemon::start_with(None, |config| {
        (config.resync_interval, config.location) = (Duration::from_secs(2), Prefer::Auto);
    });
    let threads = two_nodes(&daemon, "web");
    let mut watch = Watch::start(&daemon.socket);
    for cpu in [1, 0, 1] {
        threads[0].pin(cpu);
        let changed = watch.next("changed");
        assert_eq!((&changed["vcpu"], &changed["to"]), (&json!(0), &json!(cpu)));
    }
}

#[test]
fn a_move_is_made_and_published() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let (status, vm) = post(&daemon, "/v1/vms/web/move", r#"{"vcpu": 0, "node": 1}"#);
    assert_eq!(
        (status, &vm["vcpus"][0]["host_node"], &vm["vcpus"][0]["pinned"]),
        (200, &json!(1), &json!(true))
    );
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(threads[0].tid)).expect("alive");
    assert!(allowed.is_set(1).expect("in range") && !allowed.is_set(0).expect("in range"));
    assert_eq!(guest.read().expect("published").vcpus[0].node, 1, "published before the move is answered");
}

#[test]
fn refusals_name_what_is_wrong() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    daemon.add("uma", describe("uma", own_pid(), &[], &[]));
    let far = VcpuThread::start();
    daemon.add("full", describe("full", own_pid(), &[0], &[far.tid]));
    daemon.change("full", |vm| vm.free_port = false);
    wait_for("all VMs", || get(&daemon, "/v1/vms").1.as_array().is_some_and(|vms| vms.len() == 3));
    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    let long = "x".repeat(5000);
    let far_too_long = format!("/v1/vms/{long}");
    for (method, path, body, status, text) in [
        ("POST", "/v1/vms/web/attach", "", 409, "web: the topology channel is attached already"),
        ("POST", "/v1/vms/uma/attach", "", 409, "uma: a UMA VM"),
        ("POST", "/v1/vms/full/attach", "", 409, "full: no free PCIe root port"),
        ("POST", "/v1/vms/full/detach", "", 409, "full: no topology channel is attached"),
        ("POST", "/v1/vms/nobody/attach", "", 404, "there is no VM `nobody`"),
        ("GET", "/v1/vms/..%2F..%2Fetc", "", 404, "there is no VM `../../etc`"),
        ("GET", "/v1/vms/%ff%fe", "", 400, "/v1/vms/%ff%fe: the name of the VM is not UTF-8"),
        ("GET", "/v1/vms/a%1b%5B2J%0ab", "", 404, r"there is no VM `a\u{1b}[2J\nb`"),
        ("GET", &far_too_long, "", 404, "xxx…"),
        (
            "POST",
            "/v1/vms/web/move",
            r#"{"vcpu": 9, "node": 0}"#,
            404,
            "no vCPU with APIC id 9; it has [0, 1]",
        ),
        (
            "POST",
            "/v1/vms/web/move",
            r#"{"vcpu": 0, "node": 7}"#,
            404,
            "the host has no node 7; it has [0, 1]",
        ),
        ("POST", "/v1/vms/web/move", r#"{"vcpu": 0}"#, 400, "missing field `node`"),
        ("POST", "/v1/vms/web/move", r#"{"vcpu": -1, "node": 0}"#, 400, "invalid value"),
        ("POST", "/v1/vms/web/move", r#"{"vcpu": 0, "node": 0, "x": 0}"#, 400, "unknown field `x`"),
        ("POST", "/v1/vms/web/move", "nonsense", 400, "no move request"),
        ("POST", "/v1/vms/web/move", &long, 400, "longer than 4096 bytes"),
        ("DELETE", "/v1/vms/web", "", 400, "DELETE is not possible"),
        ("GET", "/v2/vms", "", 404, "no such path: /v2/vms"),
    ] {
        let (found, answer) = ask(&daemon.socket, method, path, body);
        let message = answer["message"].as_str().unwrap_or_default();
        assert_eq!(found, status, "{method} {path} {body}: {message}");
        assert!(message.contains(text), "{method} {path}: {message:?} should say {text:?}");
    }
    drop(threads);
}

#[test]
fn a_vcpu_is_replugged_to_the_guest_node_of_where_it_runs() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    let replug = |vcpu: u32| post(&daemon, "/v1/vms/web/replug", &json!({ "vcpu": vcpu }).to_string());
    let refused = |vcpu, status, reason: &str| {
        let (found, answer) = replug(vcpu);
        let message = answer["message"].as_str().unwrap_or_default().to_owned();
        assert!(found == status && message.contains(reason), "{found} {message}");
    };
    refused(1, 409, "is on the right guest node already");
    refused(7, 404, "APIC id 7");
    refused(0, 409, "first vCPU");
    threads[1].pin(0);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 1, "stale")]);
    refused(1, 409, "guest node 0 has no spare slot");

    let spare = VcpuThread::start();
    let plugged = Plugged { apic_id: 5, tid: spare.tid };
    daemon.change("web", |vm| vm.spare = [plugged].into());
    let (status, answer) = replug(1);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        (&answer["vcpu"], &answer["new_vcpu"], &answer["guest_node"]),
        (&json!(1), &json!(5), &json!(0))
    );
    // The new thread is confined as the old one was.
    assert_eq!(answer["vm"]["vcpus"][1]["pinned"], json!(true), "{answer}");
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 0, "true")]);

    threads[1].pin(1);
    spare.pin(1);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (1, 0, "stale")]);
    // What is done is not said to have failed, and watchers see it.
    let mut watch = Watch::start(&daemon.socket);
    let again = VcpuThread::start();
    daemon.change("web", |vm| {
        (vm.spare, vm.silent_after_unplug) = ([Plugged { apic_id: 1, tid: again.tid }].into(), true);
    });
    let (status, answer) = replug(5);
    let expected = "web: vCPU 5 was replugged and is vCPU 1 now, but then: web: QMP: `anything` was not answered within 1 ms";
    assert_eq!((status, answer["message"].as_str()), (502, Some(expected)));
    assert_eq!(watch.next("replugged")["new_vcpu"], 1);
    wait_for("it to be silent", || get(&daemon, "/v1/vms/web").1["hypervisor"] == "silent");
    daemon.change("web", |vm| vm.silent = false);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (1, 1, "true")]);

    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    refused(1, 409, "the topology channel is attached, so nothing is replugged");
}

#[test]
fn where_an_operator_wants_it_vcpus_that_stay_astray_are_replugged() {
    let after = Duration::from_millis(700);
    let daemon = Daemon::start_with(None, |config| config.replug_after = Some(after));
    assert_eq!(get(&daemon, "/v1/daemon").1["replug_after_s"], 0);
    let (threads, attached) = (two_nodes(&daemon, "web"), two_nodes(&daemon, "attached"));
    let mut watch = Watch::start(&daemon.socket);
    let spare = VcpuThread::start();
    let plugged = Plugged { apic_id: 5, tid: spare.tid };
    for name in ["web", "attached"] {
        daemon.change(name, |vm| {
            vm.spare = [plugged].into();
            vm.description.spare_slots = [(0, 1)].into();
            vm.description.run_state = "paused".into();
        });
        daemon.backend.event(name, VmEvent::Stopped);
        wait_for("it to be paused", || get(&daemon, &format!("/v1/vms/{name}")).1["run_state"] == "paused");
    }
    assert_eq!(post(&daemon, "/v1/vms/attached/attach", "").0, 200);
    threads[1].pin(0);
    attached[1].pin(0);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 1, "stale")]);
    // A paused guest takes none.
    std::thread::sleep(2 * after);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 1, "stale")]);
    // The attached one would have its turn first.
    for name in ["attached", "web"] {
        daemon.change(name, |vm| vm.description.run_state = "running".into());
        daemon.backend.event(name, VmEvent::Resumed);
    }
    let event = watch.next("replugged");
    assert_eq!(
        (&event["vm"], &event["vcpu"], &event["new_vcpu"], &event["guest_node"]),
        (&json!("web"), &json!(1), &json!(5), &json!(0))
    );
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (0, 0, "true")]);
    // An attached one keeps its vCPUs.
    assert_eq!(get(&daemon, "/v1/vms/attached").1["vcpus"][1]["apic_id"], 1);
    assert_eq!(daemon.change("attached", |vm| vm.spare.clone()), [plugged]);
}

#[test]
fn a_vm_that_ends_is_forgotten_with_everything_of_it() {
    let mut daemon = Daemon::start();
    let mut process = Process::start();
    daemon.add("short", describe("short", process.pid(), &[0, 1], &[process.pid()]));
    wait_for("the VM", || get(&daemon, "/v1/vms/short").0 == 200);
    let mut watch = Watch::start(&daemon.socket);
    assert_eq!(post(&daemon, "/v1/vms/short/attach", "").0, 200);
    let records = || std::fs::read_dir(&daemon.config.records).expect("there").count();
    assert_eq!(records(), 1);
    // A leftover socket, as of a QEMU that was killed.
    daemon.change("short", |vm| vm.refuses = true);
    process.kill();
    assert_eq!(watch.next("gone")["vm"], "short");
    assert_eq!(get(&daemon, "/v1/vms").1, json!([]));
    wait_for("its record to be gone", || records() == 0);
    assert_eq!(get(&daemon, "/v1/vms/short").0, 404);

    // Another one takes its place.
    let next = Process::start();
    daemon.backend.end("short");
    daemon.add("short", describe("short", next.pid(), &[0, 1], &[next.pid()]));
    wait_for("the next VM", || get(&daemon, "/v1/vms/short").1["pid"] == next.pid());
    assert_eq!(get(&daemon, "/v1/vms/short").1["attached"], false);
    daemon.stop();
    assert!(watch.ends(), "the stream ends when the daemon stops");
}

#[test]
fn only_its_end_makes_a_vm_forgotten() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    daemon.change("web", |vm| vm.listed = false);
    daemon.wait_for_a_scan();
    assert_eq!(get(&daemon, "/v1/vms/web").1["attached"], true, "its socket's file is not the VM");
    daemon.change("web", |vm| vm.listed = true);
    daemon.backend.set_blind(true);
    daemon.wait_for_a_scan();
    assert_eq!(get(&daemon, "/v1/vms/web").1["attached"], true, "nothing is known of its socket");
    threads[0].pin(1);
    wait_for("it to be published", || guest.read().is_ok_and(|topology| topology.vcpus[0].node == 1));
}

#[test]
fn generations_do_not_come_back_with_another_channel() {
    let daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
        let generation = daemon.guest("web").read().expect("published").generation;
        assert!(seen.insert(generation), "{generation:x} came back");
        assert_eq!(post(&daemon, "/v1/vms/web/detach", "").0, 200);
    }
}

#[test]
fn a_thread_that_another_vm_has_now_is_watched_for_that_one() {
    let daemon = Daemon::start_looking_every(Duration::from_secs(3600));
    let threads = two_nodes(&daemon, "old");
    daemon.add("new", describe("new", own_pid(), &[0, 1], &[threads[0].tid]));
    wait_for_states(&daemon, "new", &[(0, 0, "true")]);
    threads[0].pin(1);
    wait_for_states(&daemon, "new", &[(1, 0, "stale")]);
}

#[test]
fn a_hypervisor_that_floods_events_is_asked_little() {
    let daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    for _ in 0..2000 {
        daemon.backend.event("web", VmEvent::VcpusChanged);
    }
    let pending = || daemon.change("web", |vm| vm.pending_events());
    wait_for("all events to be taken", || pending() == 0);
    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    let described = daemon.change("web", |vm| vm.described);
    assert!(described < 200, "described {described} times");
}

#[test]
fn a_vm_that_does_not_answer_holds_up_no_other() {
    let daemon = Daemon::start();
    let _threads = (two_nodes(&daemon, "stuck"), two_nodes(&daemon, "web"));
    daemon.change("stuck", |vm| vm.stuck = true);
    let socket = daemon.socket.clone();
    let pending = std::thread::spawn(move || ask(&socket, "POST", "/v1/vms/stuck/attach", ""));
    wait_for("the attach to begin", || get(&daemon, "/v1/vms/stuck").1["channel"] == "attaching");
    let (status, answer) = post(&daemon, "/v1/vms/stuck/attach", "");
    assert_eq!(status, 409, "{answer}");
    assert_eq!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    assert_eq!(
        post(&daemon, "/v1/vms/stuck/move", r#"{"vcpu": 0, "node": 1}"#).0,
        200,
        "needs no hypervisor"
    );
    daemon.change("stuck", |vm| vm.stuck = false);
    assert_eq!(pending.join().expect("answered").0, 200);
}

#[test]
fn a_lost_connection_is_shown_and_the_vm_is_still_published() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    daemon.change("web", |vm| vm.silent = true);
    daemon.backend.event("web", VmEvent::VcpusChanged);
    wait_for("the problem", || get(&daemon, "/v1/vms/web").1["problem"].is_string());
    let (status, answer) = post(&daemon, "/v1/vms/web/detach", "");
    assert_eq!((status, &answer["error"]), (502, &json!("vm")), "{answer}");
    threads[0].pin(1);
    wait_for("it to be published", || guest.read().is_ok_and(|topology| topology.vcpus[0].node == 1));
    daemon.change("web", |vm| vm.silent = false);
    wait_for("the problem to be over", || get(&daemon, "/v1/vms/web").1["problem"].is_null());
    assert_eq!(get(&daemon, "/v1/vms/web").1["attached"], true, "the channel is the same");
}

#[test]
fn a_vm_that_nobody_knows_any_more_in_mid_migration_has_left_if_that_is_told() {
    for (outcome, state) in [(true, "done"), (false, "sending")] {
        let daemon = Daemon::start();
        let _threads = two_nodes(&daemon, "web");
        daemon.change("web", |vm| vm.leaves = Some(outcome));
        let (status, answer) =
            post(&daemon, "/v1/vms/web/migrate", r#"{"destination": "tcp:elsewhere:4444"}"#);
        assert_eq!(status, 200, "{answer}");
        let told = || get(&daemon, "/v1/vms/web/migrate").1["state"].clone();
        daemon.change("web", |vm| vm.migration.status = MigrationStatus::Active);
        wait_for("it to be sent", || told() == "sending");
        // As libvirt does it, before the process has ended.
        daemon.change("web", |vm| {
            vm.refuses = true;
            // To whatever it is asked: how far the migration is may be asked before the VM is described.
            let unknown = || VmError::Libvirt { vm: "web".into(), reason: "there is no such domain".into() };
            vm.errors.extend(std::iter::repeat_with(unknown).take(1000));
        });
        daemon.backend.event("web", VmEvent::VcpusChanged);
        let lost = || get(&daemon, "/v1/vms/web").1["problem"].is_string();
        wait_for("what became of it", || told() == state && (outcome || lost()));
    }
}

#[test]
fn a_channel_of_an_earlier_daemon_is_shown_and_can_be_detached() {
    let daemon = Daemon::start();
    let thread = VcpuThread::start();
    thread.pin(0);
    let description = describe("old", own_pid(), &[0], &[thread.tid]);
    daemon.add_as("old", description, |vm| vm.foreign_channel = true);
    wait_for("the channel, by a VM that is connected", || {
        let (_, vm) = get(&daemon, "/v1/vms/old");
        vm["channel"] == "lost" && vm["hypervisor"] == "answers"
    });
    wait_for_states(&daemon, "old", &[(0, 0, "unknown")]);
    let (status, answer) = post(&daemon, "/v1/vms/old/attach", "");
    assert_eq!(status, 409, "{answer}");
    assert!(answer["message"].as_str().is_some_and(|m| m.contains("earlier vnumad is attached")), "{answer}");
    assert_eq!(post(&daemon, "/v1/vms/old/detach", "").0, 200);
    assert_eq!(post(&daemon, "/v1/vms/old/attach", "").0, 200);
}

#[test]
fn a_restarted_daemon_takes_channels_over() {
    let mut daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let first = guest.read().expect("published").generation;
    guest.acknowledge(first).expect("the doorbell works");
    guest.guest_vectors[0].read().expect("the interrupt of the first publication");
    for round in 0..3 {
        daemon.stop();
        let before = guest.read().expect("readable without a daemon").generation;
        let node = (round + 1) % 2;
        threads[0].pin(node as usize);
        daemon.restart();
        wait_for("it to be published anew", || guest.read().is_ok_and(|now| now.generation != before));
        let published = guest.read().expect("published");
        assert_eq!(published.vcpus[0].node, node);
        wait_for_states(&daemon, "web", &[(node, node, "unknown"), (1, 1, "unknown")]);
        assert!(guest.guest_vectors[0].read().is_ok(), "its interrupt was raised");
        guest.acknowledge(published.generation).expect("the doorbell works");
        wait_for_states(&daemon, "web", &[(node, node, "true"), (1, 1, "true")]);
        assert_eq!(get(&daemon, "/v1/vms/web").1["channel"], "attached");
    }
    assert_eq!(post(&daemon, "/v1/vms/web/detach", "").0, 200);
    let records = std::fs::read_dir(&daemon.config.records).expect("there").count();
    assert_eq!(records, 0, "a record stays behind");
}

/// libvirt can carry out a request of a vnumad that has ended when the next one has looked already.
#[test]
fn a_channel_that_an_earlier_daemon_wanted_is_taken_over_when_it_comes() {
    let mut daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    daemon.stop();
    let device = daemon.change("web", |vm| vm.device.take());
    daemon.restart();
    wait_for("the VM", || get(&daemon, "/v1/vms/web").1["channel"] == "none");
    threads[0].pin(1);
    // An operator who wanted it then may try again before it comes.
    daemon.change("web", |vm| vm.free_port = false);
    assert_ne!(post(&daemon, "/v1/vms/web/attach", "").0, 200);
    daemon.change("web", |vm| vm.device = device);
    daemon.backend.event("web", VmEvent::ChannelAttached);
    wait_for("it to be taken over", || get(&daemon, "/v1/vms/web").1["channel"] == "attached");
    wait_for("it to be published", || guest.read().is_ok_and(|published| published.vcpus[0].node == 1));
}

#[test]
fn a_disk_that_does_not_answer_holds_up_no_other_vm() {
    let mut daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    daemon.stop();
    // The other VM is of this process too, so its record takes that name once it is attached: the slow one is opened before.
    let record = daemon.config.records.join(format!("{}.json", own_pid())).display().to_string();
    let opened = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&opened);
    let slow = faults::inject(move |name, _| {
        (name == record && !seen.swap(true, Ordering::Relaxed)).then_some(Fault::Hang)
    });
    daemon.restart();
    wait_for("the daemon to open the record", || opened.load(Ordering::Relaxed));
    let others = two_nodes(&daemon, "db");
    assert_eq!(post(&daemon, "/v1/vms/db/attach", "").0, 200);
    let other = daemon.guest("db");
    others[0].pin(1);
    wait_for("the other to be published", || {
        other.read().is_ok_and(|published| published.vcpus[0].node == 1)
    });
    assert_ne!(get(&daemon, "/v1/vms/web").1["channel"], "attached", "its record was not read yet");
    threads[0].pin(1);
    drop(slow);
    wait_for("it to be published", || guest.read().is_ok_and(|published| published.vcpus[0].node == 1));
    assert_eq!(get(&daemon, "/v1/vms/web").1["channel"], "attached");
}

#[test]
fn a_channel_without_its_record_is_lost_and_nothing_more_is_published() {
    let mut daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    daemon.stop();
    for record in std::fs::read_dir(&daemon.config.records).expect("there").flatten() {
        let text = std::fs::read_to_string(record.path()).expect("read");
        // Vectors that are none of the hypervisor's.
        std::fs::write(record.path(), text.replace("\"guest_vectors\":[", "\"guest_vectors\":[99999999"))
            .expect("written");
    }
    let before = published(&guest);
    daemon.restart();
    wait_for("the VM", || get(&daemon, "/v1/vms/web").1["channel"] == "lost");
    wait_for_states(&daemon, "web", &[(0, 0, "unknown"), (1, 1, "unknown")]);
    Control::start(&daemon).sees_nothing_published(&daemon, "web", &guest, before);
}

#[test]
fn a_guest_that_lets_go_of_the_device_is_published_to_no_more() {
    let daemon = Daemon::start();
    let (_threads, control) = (two_nodes(&daemon, "web"), Control::start(&daemon));
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let before = published(&guest);
    let mut watch = Watch::start(&daemon.socket);
    daemon.change("web", |vm| vm.device = None);
    daemon.backend.event("web", VmEvent::ChannelDetached);
    assert_eq!(watch.next("detached")["vm"], "web");
    assert_eq!(get(&daemon, "/v1/vms/web").1["channel"], "none");
    control.sees_nothing_published(&daemon, "web", &guest, before);
}

#[test]
fn a_guest_whose_channel_is_detached_is_published_to_no_more() {
    let daemon = Daemon::start();
    let (_threads, control) = (two_nodes(&daemon, "web"), Control::start(&daemon));
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let before = published(&guest);
    assert_eq!(post(&daemon, "/v1/vms/web/detach", "").0, 200);
    control.sees_nothing_published(&daemon, "web", &guest, before);
}

#[test]
fn a_guest_that_reboots_is_published_to_again() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    threads[0].pin(1);
    wait_for_states(&daemon, "web", &[(1, 0, "stale"), (1, 1, "true")]);
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let first = guest.read().expect("published").generation;
    guest.acknowledge(first).expect("the doorbell works");
    wait_for_states(&daemon, "web", &[(1, 1, "true"), (1, 1, "true")]);
    daemon.backend.event("web", VmEvent::Rebooted);
    wait_for_states(&daemon, "web", &[(1, 1, "stale"), (1, 1, "true")]);
    wait_for("it to be published", || guest.read().is_ok_and(|found| found.generation != first));
    guest.acknowledge(guest.read().expect("published").generation).expect("the doorbell works");
    wait_for_states(&daemon, "web", &[(1, 1, "true"), (1, 1, "true")]);
}

#[test]
fn plugged_vcpus_are_published() {
    let daemon = Daemon::start();
    let threads = two_nodes(&daemon, "web");
    post(&daemon, "/v1/vms/web/attach", "");
    let guest = daemon.guest("web");
    let third = VcpuThread::start();
    third.pin(1);
    let tids = [threads[0].tid, threads[1].tid, third.tid];
    daemon.change("web", |vm| vm.description = describe("web", own_pid(), &[0, 1], &tids));
    daemon.backend.event("web", VmEvent::VcpusChanged);
    wait_for("it to be published", || guest.read().is_ok_and(|t| t.vcpus.len() == 3 && t.vcpus[2].node == 1));
}

#[test]
fn two_vms_of_one_name_are_distinguished() {
    let daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    let process = Process::start();
    daemon.add("other", describe("web", process.pid(), &[0], &[]));
    wait_for("the problem", || get(&daemon, "/v1/vms").1.as_array().is_some_and(|vms| vms.len() == 2));
    let (_, vms) = get(&daemon, "/v1/vms");
    let problem = vms[0]["problem"].as_str().unwrap_or_default().to_owned();
    assert_eq!((&vms[0]["name"], &vms[1]["name"]), (&json!("other"), &json!("web")));
    assert!(problem.contains("its name `web` is taken by the VM at"), "{problem}");
}

#[test]
fn whoever_may_read_may_not_act() {
    let daemon = Daemon::start();
    let _threads = two_nodes(&daemon, "web");
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test takes another user's id, for which it has to run as root"
    );
    // As an operator would do with a group; other users do not get past the socket's mode.
    std::fs::set_permissions(&daemon.socket, std::fs::Permissions::from_mode(0o666)).expect("changed");
    let parent = daemon.socket.parent().expect("a parent");
    std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755)).expect("changed");
    let socket = daemon.socket.clone();
    let stranger = std::thread::spawn(move || {
        // The raw system call changes this thread only.
        // SAFETY: no memory is involved; the result is checked.
        let changed = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, 65534, 65534, 65534) };
        assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
        let ask = |method, path, body| ask(&socket, method, path, body);
        let reading =
            ["/v1/vms", "/v1/vms/web", "/v1/hardware", "/v1/daemon"].map(|path| ask("GET", path, "").0);
        let acting = [
            ask("POST", "/v1/vms/web/attach", ""),
            ask("POST", "/v1/vms/web/detach", ""),
            ask("POST", "/v1/vms/web/move", r#"{"vcpu": 0, "node": 1}"#),
            ask("POST", "/v1/vms/nobody/attach", ""),
        ];
        (reading, acting)
    });
    let (reading, acting) = stranger.join().expect("no panic");
    assert_eq!(reading, [200; 4]);
    for (status, answer) in acting {
        assert_eq!((status, &answer["error"]), (403, &json!("forbidden")));
        let message = answer["message"].as_str().unwrap_or_default();
        assert!(message.contains("needs root") && message.contains("user 65534"), "{message}");
    }
    assert_eq!(get(&daemon, "/v1/vms/web").1["attached"], false);
    wait_for_states(&daemon, "web", &[(0, 0, "true"), (1, 1, "true")]);
}
