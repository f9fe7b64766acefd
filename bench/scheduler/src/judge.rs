//! From what was measured to rows, and from rows to goals.

mod goals;
#[cfg(test)]
mod tests;

use crate::{
    committed::{CPUS, Load, Scheduler},
    load::entitled_to,
    raw::{Cell, Cost, Line, Outcome, Seen},
};
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use vnuma_bench_figures::{
    cells::Raw,
    report::{Files, table},
    stats::Samples,
};

/// What people are shown of a row, and with how many digits.
const COLUMNS: &str = "load scheduler vms vcpus cpus ops_by_eevdf:3 used_share:3 share_error:4 lag_max_ms:0 wake_p99_by_eevdf:2 wake_max_ms:1 \
                       yields yields_tried run_ns_per_event:0";
/// The load of rows that have what an event costs.
pub const COST: &str = "cost";

/// A figure of several runs: the median, the least and the most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    pub runs: usize,
}

impl Figure {
    fn of(runs: impl IntoIterator<Item = f64>) -> Option<Self> {
        let runs: Samples = runs.into_iter().collect();
        let [low, high] = runs.interval()?;
        Some(Self { median: runs.median()?, low, high, runs: runs.count() })
    }

    /// How far a run is from 1.
    fn off(&self) -> f64 {
        (self.low - 1.0).abs().max((self.high - 1.0).abs())
    }
}

/// A load under a scheduler, or what an event costs it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub load: &'static str,
    pub scheduler: &'static str,
    pub vms: usize,
    pub vcpus: usize,
    /// Those that the scheduler has queues for.
    pub cpus: usize,
    /// Operations, by those under EEVDF in the same run: the median.
    pub ops_by_eevdf: Option<f64>,
    /// The part of all CPU time that the load had, in all runs together.
    pub used_share: Option<f64>,
    /// The most that a group's part of all CPU time differs from what it is entitled to, in all runs together.
    pub share_error: Option<f64>,
    /// The most that a group was behind what it is entitled to, ms of CPU time.
    pub lag_max_ms: Option<f64>,
    /// The 99th percentile of what wake-ups waited, by that under EEVDF in the same run: the median.
    pub wake_p99_by_eevdf: Option<f64>,
    /// The longest wait of all runs, ms.
    pub wake_max_ms: Option<f64>,
    /// Directed yields that were granted in all runs.
    pub yields: Option<u64>,
    pub yields_tried: Option<u64>,
    /// Nanoseconds of a run of a BPF program: the median.
    pub run_ns_per_event: Option<f64>,
    /// Of the figure that the row has, the median, the least and the most.
    pub ops: Option<Figure>,
    pub wake: Option<Figure>,
    pub run_ns: Option<Figure>,
    /// Wake-ups that were seen, and how long all windows were.
    pub wakes: usize,
    pub window_s: f64,
    /// In how many runs of how many the scheduler did not schedule, and why at first.
    pub refused: Option<String>,
}

/// Reads what was measured, writes the report, and ends as the goals say.
pub fn run(files: &Files) -> Result<()> {
    let raw: Raw<Line> = files.read()?;
    let (cells, costs) = split(&raw.lines);
    let rows = rows(&cells, &costs);
    let smoke = files.results.form.smoke;
    let goals = if smoke { Vec::new() } else { goals::of(&rows) };
    let report = json!({
        "source": "measured in the lab (TCG): two CPUs of this machine emulate those of the server",
        "pause_exits": "none: the emulated processor has no PAUSE exits, so yields come from paravirtual kicks",
        "commit": files.commit,
        "machine": "2n8c, 2n8c-256",
        "form": files.results.form.name(),
        "measured_by": raw.measured_by,
        "again": raw.again,
        "goals": goals,
        "rows": rows,
    });
    let missing: Vec<String> = rows.iter().filter(|row| row.refused.is_none()).filter_map(missing).collect();
    let judged = files.results.end(&report, &shown(&rows), &goals);
    ensure!(!rows.is_empty() && missing.is_empty(), "no figure came out: {}", missing.join("; "));
    judged
}

/// For people: rows, and below them why some have no figures.
fn shown(rows: &[Row]) -> String {
    let refused = rows.iter().filter_map(|row| Some((row, row.refused.as_ref()?)));
    let line =
        |(row, refused): (&Row, &String)| format!("refused: {}, {}: {refused}\n", row.load, row.scheduler);
    table(COLUMNS, rows) + &refused.map(line).collect::<String>()
}

/// The name of a row that has no figure.
fn missing(row: &Row) -> Option<String> {
    let figure = if row.load == COST { row.run_ns_per_event } else { row.ops_by_eevdf };
    let is_there = figure.is_some_and(f64::is_finite);
    (!is_there).then(|| format!("{}, {}", row.load, row.scheduler))
}

fn split(lines: &[Line]) -> (Vec<&Cell>, Vec<&Cost>) {
    let (mut cells, mut costs) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            Line::Cell(cell) => cells.push(cell),
            Line::Cost(cost) => costs.push(cost),
        }
    }
    (cells, costs)
}

/// One for each load and scheduler, and one for each cost.
fn rows(cells: &[&Cell], costs: &[&Cost]) -> Vec<Row> {
    let mut outcomes = BTreeMap::<(Load, Scheduler), Vec<(&Cell, &Outcome)>>::new();
    for cell in cells {
        for outcome in &cell.outcomes {
            outcomes.entry((cell.load, outcome.scheduler)).or_default().push((cell, outcome));
        }
    }
    let loads = outcomes.iter().map(|((load, scheduler), runs)| of_load(*load, *scheduler, runs));
    let mut costs: Vec<Row> = costs.iter().map(|cost| of_cost(cost)).collect();
    costs.sort_by_key(|row| (row.scheduler, row.cpus));
    loads.chain(costs).collect()
}

fn of_load(load: Load, scheduler: Scheduler, runs: &[(&Cell, &Outcome)]) -> Row {
    let seen: Vec<&Seen> = runs.iter().filter_map(|(_, outcome)| outcome.seen.as_ref()).collect();
    let by_eevdf = |figure: fn(&Seen) -> Option<f64>| {
        let of = |(cell, outcome): &(&Cell, &Outcome)| {
            let own = cell.outcomes.iter().find(|one| one.scheduler == Scheduler::Eevdf)?;
            let own = figure(own.seen.as_ref()?).filter(|own| *own > 0.0)?;
            Some(figure(outcome.seen.as_ref()?)? / own)
        };
        Figure::of(runs.iter().filter_map(of))
    };
    let ops = by_eevdf(|seen| Some(seen.ops as f64 / seen.window_s));
    let wake = by_eevdf(|seen| seen.wake_p99_us);
    let sum = |number: fn(&Seen) -> u64| (!seen.is_empty()).then(|| seen.iter().copied().map(number).sum());
    let (vms, vcpus) = load.size();
    let window_s: f64 = seen.iter().map(|seen| seen.window_s).sum();
    let used_s: f64 = seen.iter().flat_map(|seen| &seen.used_s).sum();
    let wake_max_us = seen.iter().filter_map(|seen| seen.wake_max_us).reduce(f64::max);
    Row {
        load: load.name(),
        scheduler: scheduler.name(),
        vms,
        vcpus,
        cpus: CPUS,
        ops_by_eevdf: ops.map(|figure| figure.median),
        used_share: (!seen.is_empty()).then(|| used_s / (window_s * CPUS as f64)),
        share_error: share_error(load, &seen),
        lag_max_ms: seen.iter().filter_map(|seen| seen.lag_max_ms).reduce(f64::max),
        wake_p99_by_eevdf: wake.map(|figure| figure.median),
        wake_max_ms: wake_max_us.map(|us| us / 1e3),
        yields: sum(|seen| seen.yields),
        yields_tried: sum(|seen| seen.yields_tried),
        ops,
        wake,
        wakes: seen.iter().map(|seen| seen.wakes).sum(),
        window_s,
        refused: refused(runs.iter().map(|(_, outcome)| *outcome)),
        ..Row::default()
    }
}

/// In how many of these, and why at first; none if it scheduled in all.
fn refused<'a>(outcomes: impl ExactSizeIterator<Item = &'a Outcome>) -> Option<String> {
    let all = outcomes.len();
    let reasons: Vec<&String> = outcomes.filter_map(|outcome| outcome.refused.as_ref()).collect();
    Some(format!("{} of {all} runs: {}", reasons.len(), reasons.first()?))
}

/// Of all runs together; none for loads whose threads sleep.
fn share_error(load: Load, seen: &[&Seen]) -> Option<f64> {
    let cpus = load.shares()? as f64;
    let time: f64 = seen.iter().map(|seen| seen.window_s).sum();
    let of = |(group, entitled): (usize, f64)| {
        let used: Option<Vec<f64>> = seen.iter().map(|seen| seen.used_s.get(group).copied()).collect();
        Some((used?.iter().sum::<f64>() / (time * cpus) - entitled / cpus).abs())
    };
    let errors: Option<Vec<f64>> = entitled_to(load)?.into_iter().enumerate().map(of).collect();
    errors?.into_iter().reduce(f64::max).filter(|error| error.is_finite())
}

fn of_cost(cost: &Cost) -> Row {
    let of = crate::committed::COST;
    let run_ns = Figure::of(cost.windows.iter().map(|(ns, _)| *ns));
    Row {
        load: COST,
        scheduler: cost.scheduler.name(),
        vms: of.iter().map(|guests| guests.vms).sum(),
        vcpus: of.iter().map(|guests| guests.vms * guests.vcpus).sum(),
        cpus: cost.possible,
        run_ns_per_event: run_ns.map(|figure| figure.median),
        run_ns,
        ..Row::default()
    }
}
