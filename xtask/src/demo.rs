//! `make demo`: builds everything, boots the lab and runs `vnuma-demo host` there.

use crate::setup;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::time::Duration;
use vnuma_lab_runner::{LabRun, boot_retries, build_binaries, driver, end_on_signals};

const GUEST_KERNEL: &str = "6.12";
const SERVER_LOG: &str = "/root/vnumad.log";
const SERVER_REPORT: &str = "/root/report.json";
/// Only a limit for tests that hang, beyond the time that the demonstration is asked to take.
const HANG_LIMIT: Duration = Duration::from_secs(600);

#[derive(clap::Args)]
pub struct Arguments {
    /// Profile of the lab server
    #[arg(long, default_value = "4n8c")]
    profile: String,
    /// Seconds of moves and allocation
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Milliseconds between two moves. With 6000, and what the balancer adds, a vCPU changed its node 12 to 16 times a
    /// minute; XPV, section 5.4.1, has 20
    #[arg(long, default_value_t = 6000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    period_ms: u64,
    /// Seed of the moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The attached guest may miss at most half of what the other one misses. Counted are stays of vCPUs on a
/// node, and whether the guest allocated there at last. The share of local pages depends on how soon a guest gets a CPU, and so on
/// what else the machine does.
const MISSED_LESS: f64 = 2.0;
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
    for field in [&report["changes"], &report["updates"]] {
        ensure!(field.as_u64().is_some_and(|count| count > 0), "no changes or no updates: {report}");
    }
    Ok(())
}

fn read_report() -> Result<serde_json::Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(report_path())?)?)
}

/// Share of the stays of a VM that its guest did not follow.
fn missed_share(report: &serde_json::Value, vm: &str) -> Result<f64> {
    let count = |field: &str| {
        report[vm][field].as_u64().with_context(|| format!("the report has no {vm}.{field}: {report}"))
    };
    let (stays, followed) = (count("stays")?, count("stays_followed")?);
    ensure!(stays > 0, "{vm}: no stay was long enough to be judged");
    Ok(stays.saturating_sub(followed) as f64 / stays as f64)
}

/// What the demonstration claims.
fn judge(report: &serde_json::Value) -> Result<()> {
    let (dynamic, static_) = (missed_share(report, "dynamic")?, missed_share(report, "static")?);
    ensure!(static_ > 0.0, "the guest without a channel missed nothing: its vCPUs have not moved");
    ensure!(
        dynamic * MISSED_LESS <= static_,
        "the attached guest missed {:.0} % of the stays, the other {:.0} %: expected half of that at most",
        dynamic * 100.0,
        static_ * 100.0
    );
    Ok(())
}

fn report_path() -> PathBuf {
    workspace().join("target/demo/report.json")
}

/// vnumad's log, from the server.
fn log_path() -> PathBuf {
    workspace().join("target/demo/vnumad.log")
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
    let log = log_path();
    // A run that fails must not leave what an earlier one wrote.
    for path in [&report, &log] {
        if path.exists() {
            std::fs::remove_file(path)?;
        }
    }
    println!("demo: booting a {} server", arguments.profile);
    let command = [
        "vnuma-demo".to_owned(),
        "host".to_owned(),
        format!("--seconds={}", arguments.seconds),
        format!("--period-ms={}", arguments.period_ms),
        format!("--seed={}", arguments.seed),
        format!("--report={SERVER_REPORT}"),
        format!("--log={SERVER_LOG}"),
    ];
    let run = LabRun {
        profile: arguments.profile.clone(),
        puts,
        // The log first: a run that fails has no report.
        gets: vec![(SERVER_LOG.to_owned(), log.clone()), (SERVER_REPORT.to_owned(), report.clone())],
        command: command.into(),
        env: vec![("RUST_LOG".to_owned(), "info".to_owned())],
        timeout: HANG_LIMIT + Duration::from_secs(arguments.seconds),
        ..LabRun::default()
    };
    let named = || format!("vnumad's log is {}", log.display());
    let output = run.run().with_context(named)?;
    if boot_retries() > 0 {
        println!("demo: {} lab boot retried", boot_retries());
    }
    ensure!(output.status == 0, "the demonstration failed with status {}; {}", output.status, named());
    println!("\nreport: {}", report.display());
    judge(&read_report()?).with_context(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_claim_is_relative_to_the_guest_without_a_channel() {
        let report = |dynamic: u64, static_: u64| {
            json!({
                "dynamic": {"stays": 20, "stays_followed": dynamic},
                "static": {"stays": 20, "stays_followed": static_},
            })
        };
        assert!(judge(&report(20, 8)).is_ok());
        assert!(judge(&report(17, 8)).is_ok());
        for bad in [report(12, 8), report(20, 20), report(8, 8), json!({})] {
            assert!(judge(&bad).is_err(), "{bad}");
        }
    }
}
