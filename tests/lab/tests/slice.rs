//! The first slice on real KVM. Each test boots a lab server of its own and plays scenarios of `lab-scenario` there.

use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vnuma_lab_runner::{LabRun, boot_retries, build_binaries, driver};

/// Only a bound against hanging for ever.
const TIMEOUT: Duration = Duration::from_secs(900);
const GUEST_KERNEL: &str = "6.12";

/// Files that a scenario needs on the server: here, there.
static FILES: LazyLock<Vec<(PathBuf, String)>> = LazyLock::new(|| {
    let programs = [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-lab-tests", "lab-scenario")];
    let built = build_binaries(&programs).expect("the programs build");
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    files.push((driver::build(GUEST_KERNEL).expect("the driver builds"), "/root/vnuma.ko".to_owned()));
    let tools = driver::tools(GUEST_KERNEL).expect("the checker builds");
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
        timeout: TIMEOUT,
        ..LabRun::default()
    };
    let output = run.run().expect("the lab runs");
    println!("lab boots retried so far: {}", boot_retries());
    assert_eq!(output.status, 0, "lab-scenario {arguments:?} failed, its output stands above");
}

#[test]
fn the_guests_kernel_follows_every_move() {
    play("4n8c", &["follow", "--rounds", "20"]);
}

#[test]
fn states_are_shown_as_they_are() {
    play("4n8c", &["states"]);
}

#[test]
fn vms_come_and_go() {
    play("2n4c", &["lifecycle"]);
}
