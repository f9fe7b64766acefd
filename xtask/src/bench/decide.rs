//! `make bench NAME=decide`: what a decision of each policy costs, with 4096 vCPUs on 64 nodes, what placing a VM costs beside
//! 1000 others on 64 nodes, and what a look at the memory of a VM of 1 TiB costs.

use super::{Common, inputs, of_machine};
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path, process::Command};
use vnuma_bench_figures::{
    cells::Cells,
    goals::Limit,
    report::table,
    stats::{load_average, median},
};

/// A decision or a placement may take so many times the yardstick (bench/README.md says why).
const GOAL: f64 = 3.3;
/// Looks at a VM with a memory policy come at most so often by default, seconds (docs/vnumad.md).
const OBSERVE_S: f64 = 60.0;
/// One may take so many times its system calls.
const LOOK: f64 = 5.7;
/// What criterion runs, and of which package.
const BENCHES: [(&str, &str); 3] =
    [("decide", "vnuma-policy"), ("place", "vnuma-placement"), ("look", "vnuma-process")];
/// Cases of placing a VM. A refusal also looks for what would fit, and is not judged.
const PLACED: [&str; 4] = ["one-node", "spans", "small-device", "equations"];
/// Policies that the goal is for: those of the paper and of vnuma.
const JUDGED: [&str; 2] = ["vprobe", "vprobe-paper"];

/// Runs it.
pub fn run(common: &Common) -> Result<()> {
    common.has_one_form()?;
    let folders = ["Cargo.lock", "pure", "host/process"].map(|path| workspace().join(path));
    let run = common.run("decide", &[inputs(&folders), of_machine()].concat())?;
    let before = load_average();
    let mut cells = Cells::stored(&run.options)?;
    let mut estimates = BTreeMap::new();
    for (bench, package) in BENCHES {
        let target = run.results.directory.join("criterion").join(bench);
        let measured = cells.measure(bench, || {
            let found = measure(&target, (bench, package), common.form.smoke)?;
            let shown = format!("{} estimates", found.len());
            Ok((found, shown))
        })?;
        estimates.extend(measured.into_iter().flatten());
    }
    let measured_by = json!(cells.measured_by);
    cells.end()?;
    let mut report = report(&estimates, [before, load_average()])?;
    report["measured_by"] = measured_by;
    let figure = |path: &str| report.pointer(path).and_then(Value::as_f64);
    let goals = [
        Limit::at_most(
            "the slowest decision or placement, by the yardstick",
            figure("/worst_by_yardstick"),
            GOAL,
        ),
        Limit::at_most("a look, by its system calls", figure("/look/by_yardstick"), LOOK),
    ];
    let rows: Vec<Value> = estimates
        .iter()
        .map(|(name, [mean, low, high])| json!({"name": name, "ms": mean, "low": low, "high": high}))
        .collect();
    run.results.end(&report, &table("name ms:3 low:3 high:3", &rows), &goals)
}

/// Criterion's estimates by the name of a benchmark: milliseconds, with the bounds of the 95 % confidence interval.
type Estimates = BTreeMap<String, [f64; 3]>;

fn measure(target: &Path, (bench, package): (&str, &str), smoke: bool) -> Result<Estimates> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["bench", "--locked", "--bench", bench]);
    if smoke {
        // Built as tests are.
        cargo.args(["--workspace", "--all-features", "--profile", "dev", "--", "--quick"]);
    } else {
        cargo.args(["-p", package]);
    }
    let status =
        cargo.env("CRITERION_HOME", target).current_dir(workspace()).status().context("cargo bench")?;
    ensure!(status.success(), "the benchmark failed: {status}");
    let mut found = Estimates::new();
    for entry in fs::read_dir(target).with_context(|| target.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let estimates = path.join("new/estimates.json");
        if let Ok(text) = fs::read_to_string(&estimates) {
            found.insert(name, parse(&text).with_context(|| estimates.display().to_string())?);
        }
    }
    ensure!(!found.is_empty(), "criterion left nothing in {}", target.display());
    Ok(found)
}

/// From criterion's estimates: `decide_POLICY_CASE`, `yardstick_POLICY`, `place_CASE`, `look_CASE`.
fn report(estimates: &Estimates, load_average: [f64; 2]) -> Result<Value> {
    let of = |name: &str| estimates.get(name).copied().with_context(|| format!("criterion left no {name}"));
    let named = |prefix: &'static str| {
        estimates.iter().filter_map(move |(name, figures)| Some((name.strip_prefix(prefix)?, *figures)))
    };
    let (mut rows, mut by_yardstick, mut yardsticks) = (Vec::new(), Vec::new(), Vec::new());
    for (name, [mean, low, high]) in named("decide_") {
        let (policy, case) = name.split_once('_').with_context(|| format!("decide_{name}: no case"))?;
        let yardstick_ms = of(&format!("yardstick_{policy}"))?[0];
        yardsticks.push(yardstick_ms);
        by_yardstick.extend(JUDGED.contains(&policy).then_some(mean / yardstick_ms));
        rows.push(json!({
            "policy": policy, "case": case, "decision_ms": mean, "decision_ms_low": low, "decision_ms_high": high,
        }));
    }
    ensure!(by_yardstick.len() == 3 * JUDGED.len(), "criterion left {} judged decisions", by_yardstick.len());
    let yardstick_ms = median(yardsticks).context("no yardstick was timed")?;
    for case in PLACED {
        by_yardstick.push(of(&format!("place_{case}"))?[0] / yardstick_ms);
    }
    let placement = |(case, [mean, low, high]): (&str, [f64; 3])| json!({"case": case, "placement_ms": mean, "placement_ms_low": low, "placement_ms_high": high});
    let ([look_ms, low, high], [call_ms, ..]) = (of("look_1-tib")?, of("look_system-call")?);
    let worst = by_yardstick.into_iter().fold(0.0, f64::max);
    Ok(json!({
        "kind": "measured: wall clock on this machine",
        "vcpus": 4096,
        "nodes": 64,
        "load_average": load_average,
        "yardstick_ms": yardstick_ms,
        "worst_by_yardstick": worst,
        "goal_by_yardstick": GOAL,
        "within_goal": worst <= GOAL && look_ms / call_ms <= LOOK,
        "rows": rows,
        // With reservations, while one more is placed.
        "vms": 1000,
        "placements": named("place_").map(placement).collect::<Vec<_>>(),
        "look": {
            "look_ms": look_ms,
            "look_ms_low": low,
            "look_ms_high": high,
            // The system calls of a look by themselves, and the look by that.
            "yardstick_ms": call_ms,
            "by_yardstick": look_ms / call_ms,
            // Of a CPU, with a look a minute.
            "share": look_ms / 1000.0 / OBSERVE_S,
        },
    }))
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
