//! `make demo`: builds everything, boots the lab and runs `vnuma-demo host` there.

use crate::setup;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::time::Duration;
use vnuma_lab_runner::{LabRun, boot_retries, build_binaries, driver, end_on_signals};

const GUEST_KERNEL: &str = "6.12";
const SERVER_REPORT: &str = "/root/report.json";
/// Only a bound against hanging for ever, beyond the time that the demonstration is told to take.
const HANG_LIMIT: Duration = Duration::from_secs(600);

#[derive(clap::Args)]
pub struct Arguments {
    /// Profile of the lab server
    #[arg(long, default_value = "4n8c")]
    profile: String,
    /// Seconds of moves and allocation
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Milliseconds between two moves; with those that the balancer adds about the 20 changes a minute of XPV, section 5.4.1
    #[arg(long, default_value_t = 6000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    period_ms: u64,
    /// Seed of the moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs the demonstration and leaves `target/demo/report.json`.
pub fn run(arguments: &Arguments) -> Result<()> {
    end_on_signals().context("signal handlers")?;
    setup::packages()?;
    println!("demo: building vnuma");
    let programs = [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-demo", "vnuma-demo")];
    let built = build_binaries(&programs)?;
    let mut puts: Vec<_> =
        built.into_iter().zip(programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"))).collect();
    puts.push((driver::build(GUEST_KERNEL)?, "/root/vnuma.ko".to_owned()));
    let report = workspace().join("target/demo/report.json");
    std::fs::create_dir_all(report.parent().context("no folder")?)?;
    // A run that fails must not leave the report of an earlier one.
    if report.exists() {
        std::fs::remove_file(&report)?;
    }
    println!("demo: booting a {} server", arguments.profile);
    let command = [
        "vnuma-demo".to_owned(),
        "host".to_owned(),
        format!("--seconds={}", arguments.seconds),
        format!("--period-ms={}", arguments.period_ms),
        format!("--seed={}", arguments.seed),
        format!("--report={SERVER_REPORT}"),
    ];
    let run = LabRun {
        profile: arguments.profile.clone(),
        puts,
        gets: vec![(SERVER_REPORT.to_owned(), report.clone())],
        command: command.into(),
        env: vec![("RUST_LOG".to_owned(), "warn".to_owned())],
        timeout: HANG_LIMIT + Duration::from_secs(arguments.seconds),
        ..LabRun::default()
    };
    let output = run.run()?;
    if boot_retries() > 0 {
        println!("demo: {} lab boot retried", boot_retries());
    }
    ensure!(output.status == 0, "the demonstration failed with status {}", output.status);
    println!("\nreport: {}", report.display());
    Ok(())
}
