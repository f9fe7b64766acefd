//! A backend of which the daemon knows nothing but its traits: one folder, made by the recipe of docs/extending.md.

#[path = "../common/mod.rs"]
mod common;
mod toy;

use common::{
    Daemon,
    http::ask,
    vms::{VcpuThread, describe},
    wait_for,
};
use std::sync::Arc;
use toy::ToyBackend;
use vnuma_channel_model::GuestEnd;
use vnuma_daemon::BackendFactory;

#[test]
fn a_third_backend_is_served_by_what_it_says_that_it_can_do() {
    let thread = VcpuThread::start();
    thread.pin(0);
    let pid = std::process::id().cast_signed();
    let toy = ToyBackend::new(describe("web", pid, &[0, 1], &[thread.tid]));
    let (device, pinned) = (Arc::clone(&toy.device), Arc::clone(&toy.pinned));
    let factory: BackendFactory = Arc::new(move || Box::new(toy.clone()));
    let daemon = Daemon::start_with(Some(factory), |_| {});
    let get = |path: &str| ask(&daemon.socket, "GET", path, "").1;
    let post = |path: &str, body: &str| ask(&daemon.socket, "POST", path, body);

    wait_for("the VM", || get("/v1/vms/web")["vcpus"][0]["host_node"] == 0);
    assert_eq!(get("/v1/vms/web")["backend"], "toy");

    let (status, answer) = post("/v1/vms/web/attach", "");
    assert_eq!(status, 200, "{answer}");
    let guest = GuestEnd::connect(device.lock().expect("no panic").as_ref().expect("plugged"));
    let topology = guest.expect("all messages").read().expect("published");
    assert_eq!(topology.vcpus[0].node, 0);

    // It keeps pins: a move goes to its manager, and no affinity is set.
    let (status, answer) = post("/v1/vms/web/move", r#"{"vcpu": 0, "node": 1}"#);
    assert_eq!(status, 200, "{answer}");
    let asked = pinned.lock().expect("no panic").clone();
    assert_eq!(asked, [(thread.tid, "1".parse().expect("a list"))]);
    assert_eq!(get("/v1/vms/web")["vcpus"][0]["host_node"], 0, "the toy does not move it");

    // It does not migrate, and says so.
    let (_, answer) = post("/v1/vms/web/migrate", r#"{"destination": "tcp:elsewhere:4444"}"#);
    let message = answer["message"].as_str().unwrap_or_default();
    assert!(message.contains("cannot migrate it"), "{answer}");
}
