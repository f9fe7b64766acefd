//! `make bench NAME=fleet`: placements on a simulated fleet.

use super::{FormAndJson, build};
use anyhow::{Context, Result, ensure};
use std::process::{Command, Stdio};

/// VMs of the short form.
const SMOKE: [&str; 2] = ["--starts", "200"];

/// Runs it.
pub fn run(FormAndJson { form, json }: &FormAndJson) -> Result<()> {
    ensure!(!form.full, "this benchmark has one form, and a short one");
    let built = build(form.smoke, &[("vnuma-bench-fleet", "bench-fleet")])?;
    let program = |json: bool| {
        let mut command = Command::new(&built[0]);
        command.args(json.then_some("--json")).args(form.smoke.then_some(SMOKE).iter().flatten());
        command
    };
    let output = program(true).stderr(Stdio::inherit()).output().context("bench-fleet")?;
    ensure!(output.status.success(), "the simulation failed: {}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("the report")?;
    super::write_report(&form.folder("fleet"), &report)?;
    if *json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    super::judged(&mut program(false))
}
