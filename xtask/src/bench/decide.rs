//! `make bench NAME=decide`: what a decision of each policy costs, with 4096 vCPUs on 64 nodes, what placing a VM costs beside
//! 1000 others on 64 nodes, and what a look at the memory of a VM of 1 TiB costs.

use super::Form;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::{collections::BTreeMap, fs, path::Path, process::Command};
use vnuma_bench_figures::{
    goals::{Limit, check_limits},
    stats::{load_average, median},
};
use vnuma_scenario::waiting;

/// A decision or a placement may take so many times the yardstick (bench/README.md says why).
const GOAL: f64 = 3.3;
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
    /// What a decision must compute, in a loop of its own: the median of those that were timed beside each policy.
    yardstick_ms: f64,
    /// By the yardstick: the slowest decision or placement that is judged, and the goal.
    worst_by_yardstick: f64,
    goal_by_yardstick: f64,
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

impl Report {
    fn print(&self) {
        println!("{:<14} {:<12} {:>12}", "policy", "case", "ms/decision");
        for row in &self.rows {
            println!("{:<14} {:<12} {:>12.3}", row.policy, row.case, row.decision_ms);
        }
        for row in &self.placements {
            println!("{:<14} {:<12} {:>12.3}", "place", row.case, row.placement_ms);
        }
        println!("{:<14} {:<12} {:>12.3}", "yardstick", "arithmetic", self.yardstick_ms);
        let Look { look_ms, share, .. } = &self.look;
        println!(
            "{:<14} {:<12} {look_ms:>12.3}   {:.4} % of a CPU with a look a minute",
            "look",
            "1-tib",
            share * 100.0
        );
    }
}

/// Runs it.
pub fn run(form: Form) -> Result<()> {
    ensure!(!form.full, "this benchmark has one form, and a short one");
    let target = workspace().join("target/bench").join(form.folder("decide")).join("criterion");
    let before = load_average();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["bench", "--locked"]);
    if form.smoke {
        // Built as tests are.
        cargo.args(["--workspace", "--all-features", "--profile", "dev"]);
    } else {
        cargo.args(["-p", "vnuma-policy", "-p", "vnuma-placement", "-p", "vnuma-process"]);
    }
    cargo.args(["--bench", "decide", "--bench", "place", "--bench", "look"]);
    cargo.args(form.smoke.then_some(["--", "--quick"]).iter().flatten());
    let _waiting = waiting("cargo bench");
    let status =
        cargo.env("CRITERION_HOME", &target).current_dir(workspace()).status().context("cargo bench")?;
    ensure!(status.success(), "the benchmark failed: {status}");
    let (rows, placements) = rows(&target)?;
    let look = look(&target)?;
    let yardstick = |policy: &str| Ok(estimates(&target.join(format!("yardstick_{policy}")))?[0]);
    let yardsticks = rows.iter().map(|row| yardstick(&row.policy)).collect::<Result<Vec<_>>>()?;
    let yardstick_ms = median(yardsticks.iter().copied()).context("no yardstick was timed")?;
    let judged = |row: &&Row| JUDGED.contains(&row.policy.as_str());
    let placed = |row: &&Placement| PLACED.contains(&row.case.as_str());
    let decisions = rows.iter().zip(&yardsticks).filter(|(row, _)| judged(row));
    let decisions = decisions.map(|(row, yardstick_ms)| row.decision_ms / yardstick_ms);
    let places = placements.iter().filter(placed).map(|row| row.placement_ms / yardstick_ms);
    let worst_by_yardstick = decisions.chain(places).fold(0.0, f64::max);
    let complete = rows.iter().filter(judged).count() == 3 * JUDGED.len()
        && placements.iter().filter(placed).count() == PLACED.len();
    ensure!(complete, "criterion left {} and {} rows", rows.len(), placements.len());
    let report = Report {
        kind: "measured: wall clock on this machine",
        vcpus: 4096,
        nodes: 64,
        load_average: [before, load_average()],
        yardstick_ms,
        worst_by_yardstick,
        goal_by_yardstick: GOAL,
        within_goal: worst_by_yardstick <= GOAL && look.share <= LOOK_SHARE,
        rows,
        vms: 1000,
        placements,
        look,
    };
    report.print();
    super::write_report(&form.folder("decide"), &report)?;
    if form.smoke {
        return Ok(());
    }
    let goals = [
        Limit::at_most("the slowest decision or placement, by the yardstick", Some(worst_by_yardstick), GOAL),
        Limit::at_most("looks once a minute, of a CPU", Some(report.look.share), LOOK_SHARE),
    ];
    goals.iter().for_each(|goal| println!("{goal}"));
    check_limits(&goals)
}

/// Criterion's estimates of a benchmark, milliseconds.
fn estimates(directory: &Path) -> Result<[f64; 3]> {
    let path = directory.join("new/estimates.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    parse(&text).with_context(|| path.display().to_string())
}

/// Criterion's estimates of the look.
fn look(directory: &Path) -> Result<Look> {
    let [look_ms, look_ms_low, look_ms_high] = estimates(&directory.join("look_1-tib"))?;
    let share = look_ms / 1000.0 / OBSERVE_S;
    Ok(Look { look_ms, look_ms_low, look_ms_high, share, share_goal: LOOK_SHARE })
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
        let [mean, low, high] = estimates(&path)?;
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
