//! `make bench NAME=decide`: what a decision of each policy costs, with 4096 vCPUs on 64 nodes, what placing a VM costs beside
//! 1000 others on 64 nodes, and what a look at the memory of a VM of 1 TiB costs.

use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::{collections::BTreeMap, fs, path::Path, process::Command};
use vnuma_bench_figures::goals;

/// A decision may take so long.
const GOAL_MS: f64 = 1.0;
/// Looks at a VM with a memory policy come at most so often by default, seconds (docs/vnumad.md).
const OBSERVE_S: f64 = 60.0;
/// They may take this share of a CPU.
const LOOK_SHARE: f64 = 0.001;
/// Cases of placing a VM. A refusal also looks for what would fit, and is not judged.
const PLACED: [&str; 4] = ["one-node", "spans", "small-device", "equations"];
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
    /// VMs with reservations while one more is placed.
    vms: u32,
    placements: Vec<Placement>,
    look: Look,
    within_goal: bool,
}

/// A look at 8192 pages of a VM of 1 TiB.
#[derive(Serialize)]
struct Look {
    look_ms: f64,
    /// Bounds of criterion's 95 % confidence interval.
    look_ms_low: f64,
    look_ms_high: f64,
    /// Of a CPU, with a look a minute.
    share: f64,
    share_goal: f64,
}

#[derive(Serialize)]
struct Placement {
    /// `one-node`, `spans`: without devices; `small-device`, `equations`: with one; `refused`: more than there is.
    case: String,
    placement_ms: f64,
    /// Bounds of criterion's 95 % confidence interval.
    placement_ms_low: f64,
    placement_ms_high: f64,
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

/// Runs it.
pub fn run() -> Result<()> {
    let target = workspace().join("target/bench/decide/criterion");
    let before = load_average()?;
    for (package, bench) in
        [("vnuma-policy", "decide"), ("vnuma-placement", "place"), ("vnuma-process", "look")]
    {
        let status = Command::new(env!("CARGO"))
            .args(["bench", "--locked", "-p", package, "--bench", bench])
            .env("CRITERION_HOME", &target)
            .current_dir(workspace())
            .status()
            .context("cargo bench")?;
        ensure!(status.success(), "the benchmark failed: {status}");
    }
    let (rows, placements) = rows(&target)?;
    let look = look(&target)?;
    let judged = |row: &&Row| JUDGED.contains(&row.policy.as_str());
    let placed = |row: &&Placement| PLACED.contains(&row.case.as_str());
    let decisions = rows.iter().filter(judged).map(|row| row.decision_ms);
    let worst =
        decisions.chain(placements.iter().filter(placed).map(|row| row.placement_ms)).fold(0.0, f64::max);
    let complete = rows.iter().filter(judged).count() == 3 * JUDGED.len()
        && placements.iter().filter(placed).count() == PLACED.len();
    ensure!(complete, "criterion left {} and {} rows", rows.len(), placements.len());
    let report = Report {
        kind: "measured: wall clock on this machine",
        vcpus: 4096,
        nodes: 64,
        load_average: [before, load_average()?],
        goal_ms: GOAL_MS,
        within_goal: worst <= GOAL_MS && look.share <= LOOK_SHARE,
        rows,
        vms: 1000,
        placements,
        look,
    };
    println!("{:<14} {:<12} {:>12}", "policy", "case", "ms/decision");
    for row in &report.rows {
        println!("{:<14} {:<12} {:>12.3}", row.policy, row.case, row.decision_ms);
    }
    for row in &report.placements {
        println!("{:<14} {:<12} {:>12.3}", "place", row.case, row.placement_ms);
    }
    let Look { look_ms, share, .. } = report.look;
    println!(
        "{:<14} {:<12} {look_ms:>12.3}   {:.4} % of a CPU with a look a minute",
        "look",
        "1-tib",
        share * 100.0
    );
    super::write_report("decide", &report)?;
    let decision = format!("a decision takes at most {GOAL_MS} ms: {worst:.3} ms");
    let look = format!("looks once a minute take at most {LOOK_SHARE} of a CPU: {look_ms:.3} ms each");
    goals::check([(&*decision, Some(worst <= GOAL_MS)), (&*look, Some(share <= LOOK_SHARE))])
}

/// Criterion's estimates of the look.
fn look(directory: &Path) -> Result<Look> {
    let path = directory.join("look_1-tib/new/estimates.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let [look_ms, look_ms_low, look_ms_high] = parse(&text).with_context(|| path.display().to_string())?;
    let share = look_ms / 1000.0 / OBSERVE_S;
    Ok(Look { look_ms, look_ms_low, look_ms_high, share, share_goal: LOOK_SHARE })
}

fn load_average() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    text.split(' ').next().and_then(|load| load.parse().ok()).context("/proc/loadavg")
}

/// Criterion's estimates: a folder for each benchmark, `decide_POLICY_CASE` or `place_CASE`.
fn rows(directory: &Path) -> Result<(Vec<Row>, Vec<Placement>)> {
    let mut rows = BTreeMap::new();
    let mut placements = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let decision = name.strip_prefix("decide_").and_then(|name| name.split_once('_'));
        let case = name.strip_prefix("place_");
        if decision.is_none() && case.is_none() {
            continue;
        }
        let estimates = path.join("new/estimates.json");
        let text = fs::read_to_string(&estimates).with_context(|| estimates.display().to_string())?;
        let [mean, low, high] = parse(&text).with_context(|| estimates.display().to_string())?;
        if let Some((policy, case)) = decision {
            let (policy, case) = (policy.to_owned(), case.to_owned());
            let row = Row { policy, case, decision_ms: mean, decision_ms_low: low, decision_ms_high: high };
            rows.insert(name.clone(), row);
        } else if let Some(case) = case {
            let case = case.to_owned();
            let row = Placement { case, placement_ms: mean, placement_ms_low: low, placement_ms_high: high };
            placements.insert(name.clone(), row);
        }
    }
    Ok((rows.into_values().collect(), placements.into_values().collect()))
}

/// Milliseconds: the mean, and its bounds.
fn parse(text: &str) -> Result<[f64; 3]> {
    let estimates: serde_json::Value = serde_json::from_str(text)?;
    let milliseconds = |pointer: &str| {
        let nanoseconds = estimates.pointer(pointer).and_then(serde_json::Value::as_f64);
        nanoseconds.map(|ns| ns / 1e6).with_context(|| format!("no {pointer}"))
    };
    Ok([
        milliseconds("/mean/point_estimate")?,
        milliseconds("/mean/confidence_interval/lower_bound")?,
        milliseconds("/mean/confidence_interval/upper_bound")?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_read_in_milliseconds() {
        let text =
            r#"{"mean":{"confidence_interval":{"lower_bound":1e6,"upper_bound":3e6},"point_estimate":2e6}}"#;
        assert_eq!(parse(text).expect("understood"), [2.0, 1.0, 3.0]);
        let error = parse("{}").map(drop).expect_err("empty");
        assert_eq!(error.to_string(), "no /mean/point_estimate");
    }
}
