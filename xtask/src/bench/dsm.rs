//! `make bench NAME=dsm`: the user-space DSM beside what its transports and page faults cost by themselves.

use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Builds the benchmark with optimization, and runs it.
pub fn run() -> Result<()> {
    let report = workspace().join("target/bench/dsm/report.json");
    let status = Command::new(env!("CARGO"))
        .args(["run", "--release", "--locked", "-p", "vnuma-bench-dsm", "--", "--report"])
        .arg(&report)
        .current_dir(workspace())
        .status()
        .context("cargo run")?;
    ensure!(status.success(), "bench-dsm: {status}");
    println!("report: {}", report.display());
    Ok(())
}
