//! The guest driver by itself, on real KVM: no vnumad, a fake host publishes. What is tested stands in
//! `guest/driver/test/driver-test.sh`; this runs it on a lab server.

use std::path::Path;
use std::time::Duration;
use vnuma_lab_runner::{LabRun, driver};

/// Only a bound against hanging for ever; a soak takes an hour.
const TIMEOUT: Duration = Duration::from_secs(3 * 3600);
/// The first one in `make test`, all in a soak.
const GUEST_KERNELS: [&str; 3] = ["6.12", "6.1", "7.3"];
const STAGES: &str = "checker events hostile distances hotplug reload safe";
/// One malformed publication for each way to refuse: the header, a torn slot, the slot's counts, its map, and a
/// guest that lacks the node.
const HOSTILE: &str =
    "slots that overlap|torn generation|too many vCPUs|an APIC id twice|a node that the guest lacks";
/// Busy processes during the moves of a soak.
const LOAD_SECONDS: &str = "1800";

#[test]
fn the_driver_obeys_its_channel_and_refuses_what_is_malformed() {
    let soak = std::env::var("VNUMA_SOAK_ROUNDS").ok();
    let kernels = if soak.is_some() { &GUEST_KERNELS[..] } else { &GUEST_KERNELS[..1] };
    for kernel in kernels {
        println!("guest kernel {kernel}");
        run(kernel, soak.as_deref());
    }
}

/// On a server of its own.
fn run(kernel: &str, soak_rounds: Option<&str>) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/driver/test");
    let tools = driver::tools(kernel).expect("the checker and the fake host build");
    let files = [
        (driver::build(kernel).expect("the driver builds"), "vnuma.ko"),
        (tools.join("vnuma-check"), "vnuma-check"),
        (tools.join("vnuma-affinity"), "vnuma-affinity"),
        (tools.join("vnuma-fake-host"), "vnuma-fake-host"),
        (sources.join("driver-test.sh"), "driver-test.sh"),
        (sources.join("on-lab.sh"), "on-lab.sh"),
    ];
    let mut command = vec!["sh".to_owned(), "/root/driver/on-lab.sh".to_owned()];
    let mut env = Vec::new();
    if let Some(rounds) = soak_rounds {
        command.extend([rounds, LOAD_SECONDS, kernel].map(str::to_owned));
    } else {
        env.push(("STAGES".to_owned(), STAGES.to_owned()));
        env.push(("HOSTILE".to_owned(), HOSTILE.to_owned()));
    }
    let run = LabRun {
        profile: "2n4c".to_owned(),
        puts: files.map(|(here, name)| (here, format!("/root/driver/{name}"))).into(),
        command,
        env,
        timeout: TIMEOUT,
        ..LabRun::default()
    };
    let output = run.run().expect("the lab runs");
    assert_eq!(output.status, 0, "{kernel}: driver-test.sh found failures, its output stands above");
}
