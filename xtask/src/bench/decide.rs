//! `make bench NAME=decide`: what a decision of each policy costs, with 4096 vCPUs on 64 nodes.

use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::{collections::BTreeMap, fs, path::Path, process::Command};

/// A decision may take so long.
const GOAL_MS: f64 = 1.0;
/// Policies that the goal is for: those of the paper and of vnuma.
const JUDGED: [&str; 2] = ["vprobe", "vprobe-paper"];

#[derive(Serialize)]
struct Report {
    /// How the figures came about.
    kind: &'static str,
    vcpus: u32,
    nodes: u32,
    /// Load average of the machine before and after.
    load_average: [f64; 2],
    goal_ms: f64,
    rows: Vec<Row>,
    within_goal: bool,
}

#[derive(Serialize)]
struct Row {
    policy: String,
    /// `all-move`: nothing is placed yet; `steady`: nothing changes; `changed`: all memory is elsewhere.
    case: String,
    decision_ms: f64,
    /// Bounds of criterion's 95 % confidence interval.
    decision_ms_low: f64,
    decision_ms_high: f64,
}

/// Runs it; an error when a decision takes longer than it may.
pub fn run() -> Result<()> {
    let target = workspace().join("target/bench/decide");
    let before = load_average()?;
    let status = Command::new(env!("CARGO"))
        .args(["bench", "--locked", "-p", "vnuma-placement", "--bench", "decide"])
        .env("CRITERION_HOME", target.join("criterion"))
        .current_dir(workspace())
        .status()
        .context("cargo bench")?;
    ensure!(status.success(), "the benchmark failed: {status}");
    let rows = rows(&target.join("criterion"))?;
    let judged = |row: &&Row| JUDGED.contains(&row.policy.as_str());
    let worst = rows.iter().filter(judged).map(|row| row.decision_ms).fold(0.0, f64::max);
    ensure!(rows.iter().filter(judged).count() == 3 * JUDGED.len(), "criterion left {} rows", rows.len());
    let report = Report {
        kind: "measured: wall clock on this machine",
        vcpus: 4096,
        nodes: 64,
        load_average: [before, load_average()?],
        goal_ms: GOAL_MS,
        within_goal: worst <= GOAL_MS,
        rows,
    };
    println!("{:<14} {:<10} {:>12}", "policy", "case", "ms/decision");
    for row in &report.rows {
        println!("{:<14} {:<10} {:>12.3}", row.policy, row.case, row.decision_ms);
    }
    super::write_report("decide", &report)?;
    ensure!(report.within_goal, "a decision takes {worst:.3} ms, more than {GOAL_MS} ms");
    Ok(())
}

fn load_average() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    text.split(' ').next().and_then(|load| load.parse().ok()).context("/proc/loadavg")
}

/// Criterion's estimates: a folder for each benchmark, `decide_POLICY_CASE`.
fn rows(directory: &Path) -> Result<Vec<Row>> {
    let mut rows = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let Some((policy, case)) = name.strip_prefix("decide_").and_then(|name| name.split_once('_')) else {
            continue;
        };
        let estimates = path.join("new/estimates.json");
        let text = fs::read_to_string(&estimates).with_context(|| estimates.display().to_string())?;
        let row = parse(policy, case, &text).with_context(|| estimates.display().to_string())?;
        rows.insert(name.clone(), row);
    }
    Ok(rows.into_values().collect())
}

fn parse(policy: &str, case: &str, text: &str) -> Result<Row> {
    let estimates: serde_json::Value = serde_json::from_str(text)?;
    let milliseconds = |pointer: &str| {
        let nanoseconds = estimates.pointer(pointer).and_then(serde_json::Value::as_f64);
        nanoseconds.map(|ns| ns / 1e6).with_context(|| format!("no {pointer}"))
    };
    Ok(Row {
        policy: policy.to_owned(),
        case: case.to_owned(),
        decision_ms: milliseconds("/mean/point_estimate")?,
        decision_ms_low: milliseconds("/mean/confidence_interval/lower_bound")?,
        decision_ms_high: milliseconds("/mean/confidence_interval/upper_bound")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_read_in_milliseconds() {
        let text =
            r#"{"mean":{"confidence_interval":{"lower_bound":1e6,"upper_bound":3e6},"point_estimate":2e6}}"#;
        let row = parse("vprobe", "steady", text).expect("understood");
        assert_eq!((row.decision_ms, row.decision_ms_low, row.decision_ms_high), (2.0, 1.0, 3.0));
        let error = parse("vprobe", "steady", "{}").map(drop).expect_err("empty");
        assert_eq!(error.to_string(), "no /mean/point_estimate");
    }
}
