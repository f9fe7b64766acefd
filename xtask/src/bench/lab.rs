//! What the lab's counters cost. Servers without and with counters take turns, so that what else the machine does
//! hits both; the figure of each side is its best run, which that disturbs least.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vnuma_bench_figures::goals::{Limit, check_limits};

use super::{
    Form, build,
    peer::{boot, sh},
};
use vnuma_lab_runner::{Counters, Lab, end_on_signals};

/// Servers of each kind.
const ROUNDS: usize = 2;
/// Runs of each loop on each server.
const RUNS: usize = 3;
const COUNTERS: &str = "broadwell-2s";
const MACHINE: &str = "2n4c";
/// At most so much slower.
const LIMIT: f64 = 2.5;

/// Loops in assembly, and a shell that forks.
const LOOPS: [(&str, &str); 4] = [
    ("compute", "lab-load compute --uncounted --times 300000000"),
    ("chase", "lab-load chase --uncounted --mib 128 --node 1 --times 2000000"),
    ("stream", "lab-load stream --uncounted --mib 128 --node 1 --times 4"),
    ("fork", "sh -c 'i=0; while [ $i -lt 200 ]; do /bin/true; i=$((i+1)); done'"),
];

#[derive(Serialize)]
struct Report {
    /// How the figures came about: times of this machine, which do not carry over to another.
    kind: &'static str,
    machine: &'static str,
    counters: &'static str,
    limit: f64,
    costs: BTreeMap<&'static str, Cost>,
    /// What lab-count --dilation says, modelled time against guest time.
    dilation: Vec<serde_json::Value>,
    worst_ratio: f64,
    within_limit: bool,
}

#[derive(Default, Serialize)]
struct Cost {
    without_s: Vec<f64>,
    with_s: Vec<f64>,
    /// Best with counters by best without.
    ratio: f64,
}

/// Runs it.
pub fn run(form: Form) -> Result<()> {
    ensure!(!form.full, "this benchmark has one form, and a short one");
    let (rounds, runs) = if form.smoke { (1, 1) } else { (ROUNDS, RUNS) };
    end_on_signals().context("signal handlers")?;
    let counters: Counters = COUNTERS.parse()?;
    let load = build(true, &[("lab-count", "lab-load")])?.pop().context("lab-load")?;
    let load = [(load, "/run/lab/bin/lab-load".to_owned())];
    let mut costs: BTreeMap<&'static str, Cost> = BTreeMap::new();
    let mut dilation = Vec::new();
    for round in 1..=rounds {
        for with in [false, true] {
            println!("round {round} of {rounds}, {} counters", if with { "with" } else { "without" });
            let lab = boot(MACHINE, with.then_some(&counters), &load)?;
            let mut note = |name, seconds| {
                let cost = costs.entry(name).or_default();
                if with { &mut cost.with_s } else { &mut cost.without_s }.push(seconds);
            };
            note("boot", lab.boot_time().as_secs_f64());
            for (name, command) in LOOPS {
                for _ in 0..runs {
                    note(name, timed(&lab, command)?);
                }
            }
            if with {
                let text = sh(&lab, "lab-count --dilation --json -")?;
                dilation.push(serde_json::from_str(&text).context("lab-count --dilation")?);
            }
        }
    }
    finish(form, costs, dilation)
}

/// Seconds that a command took. lab-load reports those of the loop alone.
fn timed(lab: &Lab, command: &str) -> Result<f64> {
    let start = Instant::now();
    let text = sh(lab, &format!("taskset -c 0 {command}"))?;
    let elapsed = start.elapsed().as_secs_f64();
    let output: Option<serde_json::Value> = serde_json::from_str(&text).ok();
    let own = output.and_then(|output| output["elapsed_ns"].as_f64());
    Ok(own.map_or(elapsed, |ns| ns / 1e9))
}

fn finish(
    form: Form,
    mut costs: BTreeMap<&'static str, Cost>,
    dilation: Vec<serde_json::Value>,
) -> Result<()> {
    let best = |seconds: &[f64]| seconds.iter().copied().fold(f64::MAX, f64::min);
    println!("{:<10} {:>10} {:>10} {:>7}", "", "without s", "with s", "ratio");
    for (name, cost) in &mut costs {
        let (without, with) = (best(&cost.without_s), best(&cost.with_s));
        cost.ratio = with / without;
        println!("{name:<10} {without:>10.2} {with:>10.2} {:>7.2}", cost.ratio);
    }
    let worst_ratio = costs.values().map(|cost| cost.ratio).fold(0.0, f64::max);
    let report = Report {
        kind: "measured on this machine, best of the runs of each side",
        machine: MACHINE,
        counters: COUNTERS,
        limit: LIMIT,
        costs,
        dilation,
        worst_ratio,
        within_limit: worst_ratio <= LIMIT,
    };
    super::write_report(&form.folder("lab"), &report)?;
    if form.smoke {
        return Ok(());
    }
    let goal = Limit::at_most("times that the counters cost", Some(worst_ratio), LIMIT);
    println!("{goal}");
    check_limits(&[goal])
}
