//! What boots the lab. One server at a time: two cores carry one well, more would only wait for each other.

mod driver;
mod dsm;
mod packages;
mod slice;

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use vnuma_lab_runner::{Lab, LabError, LabRun, Output, boot_retries};

/// Only a limit for tests that hang; a soak takes an hour and more.
const TIMEOUT: Duration = Duration::from_secs(3600);
const SOAK_TIMEOUT: Duration = Duration::from_secs(3 * 3600);

/// Status of a job that the emulated processor has ended, and no fault of the project (`lab-scenario`).
const EMULATOR_FAULT: i32 = 75;
/// Jobs that were run once more for that reason.
static RUN_AGAIN: AtomicUsize = AtomicUsize::new(0);

/// What cargo has built: in the folder of programs that `cargo xtask` names, or built now by these words, as the last executable.
fn built(name: &str, words: &[&str]) -> PathBuf {
    if let Some(folder) = std::env::var_os("VNUMA_PROGRAMS") {
        let path = PathBuf::from(folder).join(name);
        return path.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(words).arg("--message-format=json").stderr(Stdio::inherit());
    let output = cargo.output().expect("cargo starts");
    assert!(output.status.success(), "cargo {words:?}: {}", output.status);
    let messages = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<serde_json::Value>();
    let path =
        messages.filter_map(Result::ok).filter_map(|one| Some(one["executable"].as_str()?.into())).last();
    path.expect("an executable")
}

/// How many rounds a soak has; none in `make test`.
fn soak_rounds() -> Option<String> {
    std::env::var("VNUMA_SOAK_ROUNDS").ok()
}

/// Which third of what is played by turns it is; none if all of it is.
fn third() -> Option<usize> {
    let text = std::env::var("VNUMA_THIRD").ok()?;
    Some(text.parse().ok().filter(|third| *third < 3).unwrap_or_else(|| panic!("VNUMA_THIRD: {text:?}")))
}

/// Seconds that a soak of what changes at random takes; none if that is as long as by default.
fn soak_seconds() -> Option<String> {
    std::env::var("VNUMA_SOAK_SECONDS").ok()
}

/// How often a soak kills vnumad; none if that is as often as by default.
fn soak_kills() -> Option<String> {
    std::env::var("VNUMA_SOAK_KILLS").ok()
}

/// Seed of what is random in a soak.
fn soak_seed() -> String {
    std::env::var("VNUMA_SOAK_SEED").unwrap_or_else(|_| "1".to_owned())
}

/// A command for the server.
#[derive(Clone, Default)]
struct Job {
    command: Vec<String>,
    env: Vec<(String, String)>,
    /// Files that it needs: here, there.
    files: Vec<(PathBuf, String)>,
}

/// Whether the emulator has ended it, and nothing else can.
fn emulator_fault(result: &Result<Output, LabError>) -> bool {
    match result {
        Ok(output) => output.status == EMULATOR_FAULT,
        Err(error) => error.emulator_fault(),
    }
}

/// How often a job is run at most. One that writes registers of devices after page faults was seen to be ended twice, by two faults.
const MOST_RUNS: u32 = 3;

/// Runs jobs on a server, one after the other; after one that fails the next gets a new server. A job that the emulated processor has
/// ended, and nothing else can, is run again.
fn run(profile: &str, jobs: &[Job]) {
    let (mut lab, mut there, mut failed) = (None, HashSet::new(), Vec::new());
    for job in jobs {
        let name = job.command.join(" ");
        let mut runs = 1;
        loop {
            println!("{name}, on a server {profile}");
            let server = lab.take().map_or_else(|| Lab::boot(profile), Ok).expect("the lab boots");
            let run = LabRun {
                puts: job.files.iter().filter(|(_, path)| there.insert(path.clone())).cloned().collect(),
                command: job.command.clone(),
                env: job.env.clone(),
                timeout: if soak_rounds().or(soak_seconds()).or(soak_kills()).is_some() {
                    SOAK_TIMEOUT
                } else {
                    TIMEOUT
                },
                ..LabRun::default()
            };
            let result = run.run_in(&server);
            let problem = match &result {
                Ok(output) if output.status == 0 => {
                    lab = Some(server);
                    break;
                }
                Ok(output) => format!("{name}: status {}", output.status),
                Err(error) => format!("{name}: {error}"),
            };
            there.clear();
            if runs == MOST_RUNS || !emulator_fault(&result) {
                failed.push(problem);
                break;
            }
            RUN_AGAIN.fetch_add(1, SeqCst);
            println!(
                "{problem}\n{name}: the emulated processor has ended it; it is run again ({runs} of {MOST_RUNS} runs were made)"
            );
            runs += 1;
        }
    }
    println!("jobs run again so far: {}", RUN_AGAIN.load(SeqCst));
    println!("lab boots retried so far: {}", boot_retries());
    // In the standard output as well, of which the end is shown again after all tests.
    failed.iter().for_each(|problem| println!("failed: {problem}"));
    assert!(failed.is_empty(), "what failed, its output stands above:\n{}", failed.join("\n"));
}
