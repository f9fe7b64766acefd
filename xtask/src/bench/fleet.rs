//! `make bench NAME=fleet`: placements on a simulated fleet.

use super::Options;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Runs it.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.full, "this benchmark has no --full");
    let program = |json: bool| {
        let mut command = Command::new(env!("CARGO"));
        command.args(["run", "--release", "--locked", "--quiet", "-p", "vnuma-bench-fleet", "--"]);
        command.args(json.then_some("--json")).current_dir(workspace());
        command
    };
    let output = program(true).stderr(std::process::Stdio::inherit()).output().context("cargo run")?;
    ensure!(output.status.success(), "the simulation failed: {}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("the report")?;
    super::write_report("fleet", &report)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    let status = program(false).status().context("cargo run")?;
    ensure!(status.success(), "the simulation failed: {status}");
    Ok(())
}
