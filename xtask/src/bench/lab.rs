//! What the lab's counters cost. Servers without and with counters take turns, so that what else the machine does
//! hits both; the figure of each side is its best run, which that disturbs least.

use super::{
    Common, build, inputs, of_lab, of_machine,
    peer::{boot, sh},
};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{collections::BTreeMap, path::PathBuf, time::Instant};
use vnuma_bench_figures::{cells::Cells, goals::Limit, report::Results};
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

#[derive(Default, Serialize)]
struct Cost {
    without_s: Vec<f64>,
    with_s: Vec<f64>,
    /// Best with counters by best without.
    ratio: f64,
}

/// Runs it.
pub fn run(common: &Common) -> Result<()> {
    common.has_one_form()?;
    let (rounds, runs) = if common.form.smoke { (1, 1) } else { (ROUNDS, RUNS) };
    end_on_signals().context("signal handlers")?;
    let counters: Counters = COUNTERS.parse()?;
    let load = build(true, &[("lab-count", "lab-load")])?;
    let run = common.run("lab", &[inputs(&load), of_lab()?, of_machine()].concat())?;
    let load = [(load[0].clone(), "/run/lab/bin/lab-load".to_owned())];
    let (mut cells, mut costs) = (Cells::stored(&run.options)?, BTreeMap::<&'static str, Cost>::new());
    let mut dilation = Vec::new();
    for round in 1..=rounds {
        for with in [false, true] {
            let name =
                format!("round {round} of {rounds}, {} counters", if with { "with" } else { "without" });
            let measured = cells.measure(&name, || {
                let server = server(with.then_some(&counters), &load, runs)?;
                Ok((server, String::new()))
            })?;
            let Some(Server { boot_s, loops_s, dilation: of_this }) = measured else { continue };
            dilation.extend(of_this);
            let loops = LOOPS.iter().zip(loops_s).map(|((name, _), seconds)| (*name, seconds));
            for (name, seconds) in [("boot", vec![boot_s])].into_iter().chain(loops) {
                let cost = costs.entry(name).or_default();
                if with { &mut cost.with_s } else { &mut cost.without_s }.extend(seconds);
            }
        }
    }
    finish(&run.results, cells, costs, dilation)
}

/// What a server took.
#[derive(Serialize, Deserialize)]
struct Server {
    boot_s: f64,
    /// Of each of [`LOOPS`].
    loops_s: Vec<Vec<f64>>,
    dilation: Option<serde_json::Value>,
}

fn server(counters: Option<&Counters>, load: &[(PathBuf, String)], runs: usize) -> Result<Server> {
    let lab = boot(MACHINE, counters, load)?;
    let times = |(_, command): &(&str, &str)| (0..runs).map(|_| timed(&lab, command)).collect();
    let loops_s = LOOPS.iter().map(times).collect::<Result<_>>()?;
    let dilation = counters.map(|_| sh(&lab, "lab-count --dilation --json -")).transpose()?;
    let dilation = dilation.map(|text| serde_json::from_str(&text).context("lab-count --dilation"));
    Ok(Server { boot_s: lab.boot_time().as_secs_f64(), loops_s, dilation: dilation.transpose()? })
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
    results: &Results,
    cells: Cells,
    mut costs: BTreeMap<&'static str, Cost>,
    dilation: Vec<serde_json::Value>,
) -> Result<()> {
    let best = |seconds: &[f64]| seconds.iter().copied().reduce(f64::min).unwrap_or(f64::NAN);
    let mut table = format!("{:<10} {:>10} {:>10} {:>7}\n", "", "without s", "with s", "ratio");
    for (name, cost) in &mut costs {
        let (without, with) = (best(&cost.without_s), best(&cost.with_s));
        cost.ratio = with / without;
        table += &format!("{name:<10} {without:>10.2} {with:>10.2} {:>7.2}\n", cost.ratio);
    }
    let worst_ratio = costs.values().map(|cost| cost.ratio).fold(0.0, f64::max);
    let whole = costs.len() > LOOPS.len() && costs.values().all(|cost| cost.ratio.is_finite());
    let report = json!({
        // Times of this machine, which do not carry over to another.
        "kind": "measured on this machine, best of the runs of each side",
        "machine": MACHINE,
        "counters": COUNTERS,
        "limit": LIMIT,
        "costs": costs,
        "dilation": dilation,
        "worst_ratio": worst_ratio,
        "within_limit": worst_ratio <= LIMIT,
        "measured_by": cells.measured_by,
    });
    let goal = Limit::at_most("times that the counters cost", whole.then_some(worst_ratio), LIMIT);
    let judged = results.end(&report, &table, &[goal]);
    cells.end().and(judged)
}
