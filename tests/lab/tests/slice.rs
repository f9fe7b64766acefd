//! The first slice on real KVM. Each test boots a lab server of its own and plays scenarios of `lab-scenario` there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vnuma_lab_runner::{LabRun, boot_retries, build_binaries, driver};

/// Only a bound against hanging for ever.
const TIMEOUT: Duration = Duration::from_secs(900);
const SOAK_TIMEOUT: Duration = Duration::from_secs(3 * 3600);
const GUEST_KERNELS: [&str; 3] = ["6.1", "6.12", "7.3"];

/// Files that a scenario needs on the server: here, there.
static FILES: LazyLock<Vec<(PathBuf, String)>> = LazyLock::new(|| {
    let programs = [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-lab-tests", "lab-scenario")];
    let built = build_binaries(&programs).expect("the programs build");
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    for kernel in GUEST_KERNELS {
        files.push((driver::build(kernel).expect("the driver builds"), format!("/root/vnuma-{kernel}.ko")));
    }
    // Guests differ in nothing but the kernel.
    let tools = driver::tools(GUEST_KERNELS[0]).expect("the checker builds");
    files.push((tools.join("vnuma-check"), "/root/vnuma-check".to_owned()));
    files
});

/// Two cores carry one server well; more at once would only wait for each other.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Plays a scenario on a new server.
fn play(profile: &str, arguments: &[&str]) {
    let _turn = one_at_a_time();
    let command = [&["lab-scenario"], arguments].concat().into_iter().map(str::to_owned).collect();
    let run = LabRun {
        profile: profile.to_owned(),
        puts: FILES.clone(),
        command,
        env: vec![("RUST_LOG".to_owned(), "info".to_owned())],
        timeout: if std::env::var("VNUMA_SOAK_ROUNDS").is_ok() { SOAK_TIMEOUT } else { TIMEOUT },
        ..LabRun::default()
    };
    let output = run.run().expect("the lab runs");
    println!("lab boots retried so far: {}", boot_retries());
    assert_eq!(output.status, 0, "lab-scenario {arguments:?} failed, its output stands above");
}

#[test]
fn the_guests_kernel_follows_every_move() {
    let rounds = std::env::var("VNUMA_SOAK_ROUNDS").unwrap_or_else(|_| "3".to_owned());
    let kernels = GUEST_KERNELS.iter().flat_map(|kernel| ["--kernel", kernel]);
    play("4n8c", &["follow", "--rounds", &rounds].into_iter().chain(kernels).collect::<Vec<_>>());
}

#[test]
fn states_are_shown_as_they_are() {
    play("4n8c", &["states"]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn vms_are_taken_as_they_are() {
    play("4n8c", &["shapes"]);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_hostile_guest_hurts_itself_alone() {
    play("2n4c", &["hostile"]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn a_guest_without_the_driver_follows_by_replugged_vcpus() {
    play("2n4c", &["replug"]);
}

#[test]
fn vms_come_and_go() {
    play("2n4c", &["lifecycle"]);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn a_hypervisor_that_stands_still_is_named_and_its_vm_observed() {
    play("2n4c", &["stopped"]);
}

#[test]
fn a_killed_vnumad_is_taken_over() {
    let kills = if std::env::var("VNUMA_SOAK_ROUNDS").is_ok() { "200" } else { "20" };
    play("2n4c", &["kills", "--kills", kills]);
}

#[test]
fn migrations_between_nodes_are_told_by_the_kernel() {
    let _turn = one_at_a_time();
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "vnuma-monitor", "--example", "vcpu-watch"])
        .status()
        .expect("cargo starts");
    assert!(status.success(), "the example vcpu-watch does not build");
    let example = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../debug/examples/vcpu-watch");
    let there = "/usr/local/bin/vcpu-watch";
    let run = LabRun {
        puts: vec![(example, there.to_owned())],
        command: [there, "--self-test"].map(str::to_owned).into(),
        ..LabRun::default()
    };
    assert_eq!(run.run().expect("the lab runs").status, 0, "the self-test failed, its output stands above");
}
