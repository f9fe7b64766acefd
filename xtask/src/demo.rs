//! `make demo`: builds everything, boots the lab and runs `vnuma-demo host` there.

use crate::setup;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
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

/// Share of local pages that the demonstration claims.
const CLAIMED_LOCAL_SHARE: f64 = 0.97;
/// What a short run must reach even on a machine that is busy elsewhere: a guest that waits for a CPU takes its
/// topology over late, and no test may depend on how long that is. A guest that is not told stays below 0.5.
const CHECKED_LOCAL_SHARE: f64 = 0.90;
const CHECKED_SECONDS: u64 = 20;

impl Arguments {
    /// As `make demo` has them, but for the time.
    pub fn lasting(seconds: u64) -> Self {
        Self { profile: "4n8c".to_owned(), seconds, period_ms: 6000, seed: 1 }
    }
}

/// A short run whose report must say what the demonstration claims.
pub fn check() -> Result<()> {
    run(&Arguments::lasting(CHECKED_SECONDS))?;
    let report = read_report()?;
    let (dynamic, static_) = (local_share(&report, "dynamic")?, local_share(&report, "static")?);
    ensure!(dynamic >= CHECKED_LOCAL_SHARE, "dynamic.local_share is {dynamic}, below {CHECKED_LOCAL_SHARE}");
    ensure!(static_ < dynamic, "static.local_share is {static_}, not below dynamic.local_share, {dynamic}");
    for field in [&report["changes"], &report["updates"]] {
        ensure!(field.as_u64().is_some_and(|count| count > 0), "no changes or no updates: {report}");
    }
    Ok(())
}

fn read_report() -> Result<serde_json::Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(report_path())?)?)
}

fn local_share(report: &serde_json::Value, vm: &str) -> Result<f64> {
    report[vm]["local_share"].as_f64().with_context(|| format!("the report has no {vm}.local_share"))
}

fn report_path() -> PathBuf {
    workspace().join("target/demo/report.json")
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
    let report = report_path();
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
    let share = local_share(&read_report()?, "dynamic")?;
    if share < CLAIMED_LOCAL_SHARE {
        println!(
            "demo: WARNING: {share:.4} of the pages were local, {CLAIMED_LOCAL_SHARE} are expected. Guests that wait for a CPU \
             follow late: is the machine busy with something else?"
        );
    }
    Ok(())
}
