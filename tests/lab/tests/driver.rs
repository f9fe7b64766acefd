//! The guest driver by itself, on real KVM: no vnumad, a fake host publishes. What is tested stands in
//! `guest/driver/test/driver-test.sh`; this runs it on a lab server.

use std::path::Path;
use std::time::Duration;
use vnuma_lab_runner::{LabRun, driver};

/// Only a bound against hanging for ever; a soak takes an hour.
const TIMEOUT: Duration = Duration::from_secs(3 * 3600);
const GUEST_KERNEL: &str = "6.12";
const STAGES: &str = "checker events hostile distances hotplug reload safe";
/// One malformed publication for each way to refuse: the header, a torn slot, the slot's counts, its map, and a
/// guest that lacks the node.
const HOSTILE: &str =
    "slots that overlap|torn generation|too many vCPUs|an APIC id twice|a node that the guest lacks";
/// Busy processes during the moves of a soak.
const LOAD_SECONDS: &str = "1800";

#[test]
fn the_driver_obeys_its_channel_and_refuses_what_is_malformed() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/driver/test");
    let tools = driver::tools(GUEST_KERNEL).expect("the checker and the fake host build");
    let files = [
        (driver::build(GUEST_KERNEL).expect("the driver builds"), "vnuma.ko"),
        (tools.join("vnuma-check"), "vnuma-check"),
        (tools.join("vnuma-affinity"), "vnuma-affinity"),
        (tools.join("vnuma-fake-host"), "vnuma-fake-host"),
        (sources.join("driver-test.sh"), "driver-test.sh"),
        (sources.join("on-lab.sh"), "on-lab.sh"),
    ];
    let mut command = vec!["sh".to_owned(), "/root/driver/on-lab.sh".to_owned()];
    let mut env = Vec::new();
    if let Ok(rounds) = std::env::var("VNUMA_SOAK_ROUNDS") {
        command.extend([rounds, LOAD_SECONDS.to_owned()]);
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
    assert_eq!(output.status, 0, "driver-test.sh found failures, its output stands above");
}
