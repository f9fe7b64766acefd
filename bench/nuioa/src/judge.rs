//! From what was measured to rows, and from rows to goals. Everything is *modelled*: cycles of a named profile.

use crate::{
    committed::{CONFIGURATIONS, Configuration, Workload, goals, workload, workloads},
    raw::{self, Cell, Line},
};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use vnuma_bench_common::{
    goals::Goal,
    judging::{percent, profiles},
    report::{Bench, Files},
};
use vnuma_lab_pricing::CounterProfile;

mod figures;

use figures::{Figures, common_instructions};

/// A workload under a configuration, as a profile prices it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub profile: String,
    pub configuration: Configuration,
    pub workload: String,
    /// Modelled cycles of an operation: the median of the windows, and the mean of where the guest may start it.
    pub cycles_per_op: f64,
    /// The least and the most of a window by that median, the widest of where the guest may start it.
    pub windows_low: f64,
    pub windows_high: f64,
    /// The fewest operations of a window.
    pub window_operations: u64,
    /// The least share of a window of the writes to registers that the workload's vCPU made. With less than nearly all the workload ran
    /// elsewhere, and the row's figures are not its own.
    pub kept_share: f64,
    /// Its own, and the standard error of that by it. A workload by the kernel has those of all configurations in `cycles_per_op`.
    pub instructions_per_op: f64,
    pub instructions_error: f64,
    /// Share of the accesses to memory that leave the node.
    pub remote_dram_share: Option<f64>,
    /// Share of the accesses to devices' registers that do.
    pub remote_mmio_share: Option<f64>,
    /// Accesses to registers, of an operation.
    pub mmio_reads_per_op: f64,
    pub mmio_writes_per_op: f64,
    /// CPU time of the workload's vCPU, by the time that passed.
    pub cpu_share: f64,
    /// Why it ran where it did, in each turn: who started it there, or what vnuma-guest has said of it.
    pub why: Vec<String>,
}

/// What was measured.
struct Measured {
    full: bool,
    server: raw::Server,
    cells: Vec<Cell>,
}

/// Reads what was measured, and judges it.
pub fn run(files: &Files) -> Result<()> {
    let mut raw = files.read()?;
    let (mut server, mut cells) = (None, Vec::new());
    for line in std::mem::take(&mut raw.lines) {
        match line {
            Line::Server(line) => server = Some(line),
            Line::Cell(cell) => cells.push(*cell),
            Line::Peer(_) => {}
        }
    }
    let server = server.context("what the server printed does not begin with what it is")?;
    files.judge(&Measured { full: files.results.form.full, server, cells }, &raw)
}

impl Bench for Measured {
    type Row = Row;
    const SOURCE: &'static str = "modelled: the lab's counters, priced under the profile of each row";
    const MACHINE: &'static str = "2n6c-iommu";

    fn price(&self) -> Result<Vec<Row>> {
        let all = profiles(&self.server.profile)?;
        let rows: Vec<Row> = all.iter().flat_map(|profile| rows_of(&self.cells, profile)).collect();
        ensure!(!rows.is_empty(), "no cell was measured");
        Ok(rows)
    }

    fn figure(row: &Row) -> (String, f64) {
        ([&row.workload, row.configuration.name(), &row.profile].join(", "), row.cycles_per_op)
    }

    fn goals(&self, rows: &[Row]) -> Vec<Goal> {
        judge(rows, workloads(self.full).count())
    }

    fn more(&self, _: &[Row]) -> impl Serialize {
        json!({
            "server": self.server,
            "transfers": "not in the figures: the emulator shows no transfers of devices",
        })
    }

    fn table(&self, rows: &[Row]) -> String {
        table(rows)
    }

    fn draw(&self, rows: &[Row], path: &Path) -> Result<()> {
        crate::picture::draw(rows, path)
    }
}

fn rows_of(cells: &[Cell], profile: &CounterProfile) -> Vec<Row> {
    let mut rows = Vec::new();
    for workload in workloads(true) {
        let all: Vec<&Cell> = cells.iter().filter(|cell| cell.workload == workload.name).collect();
        let common = common_instructions(&all, profile);
        for &configuration in CONFIGURATIONS {
            let spots = configuration.spots().iter().filter_map(|spot| {
                // Those of all turns.
                let of = |cell: &&&Cell| cell.configuration == configuration && cell.spot == *spot;
                Figures::of(&all.iter().filter(of).copied().collect::<Vec<_>>(), profile, common)
            });
            let spots: Vec<_> = spots.collect();
            // A figure of half of the spots would be another one.
            if !spots.is_empty() && spots.len() == configuration.spots().len() {
                let own = all.iter().filter(|cell| cell.configuration == configuration);
                let why = own.flat_map(|cell| cell.why.clone()).collect();
                rows.push(Row { why, ..row(profile, configuration, workload, &spots) });
            }
        }
    }
    rows
}

fn row(
    profile: &CounterProfile,
    configuration: Configuration,
    workload: &Workload,
    spots: &[Figures],
) -> Row {
    let mean = |of: fn(&Figures) -> f64| spots.iter().map(of).sum::<f64>() / spots.len() as f64;
    let share = |far: f64, all: f64| (all > 0.0).then(|| far / all);
    Row {
        profile: profile.name.clone(),
        configuration,
        workload: workload.name.to_owned(),
        cycles_per_op: mean(|spot| spot.cycles_per_op),
        windows_low: spots.iter().map(|spot| spot.low).fold(f64::INFINITY, f64::min),
        windows_high: spots.iter().map(|spot| spot.high).fold(0.0, f64::max),
        window_operations: spots.iter().map(|spot| spot.fewest).min().unwrap_or_default(),
        kept_share: spots.iter().map(|spot| spot.kept).fold(1.0, f64::min),
        instructions_per_op: mean(|spot| spot.instructions),
        instructions_error: mean(|spot| spot.error),
        remote_dram_share: share(mean(|spot| spot.dram.0), mean(|spot| spot.dram.1)),
        remote_mmio_share: share(mean(|spot| spot.mmio.0), mean(|spot| spot.mmio.1)),
        mmio_reads_per_op: mean(|spot| spot.reads),
        mmio_writes_per_op: mean(|spot| spot.writes),
        cpu_share: mean(|spot| spot.cpu_share),
        why: Vec::new(),
    }
}

/// The row of `home` that a row is compared with.
fn home_of<'a>(rows: &'a [Row], row: &Row) -> Option<&'a Row> {
    rows.iter().find(|home| {
        home.configuration == Configuration::Home
            && home.profile == row.profile
            && home.workload == row.workload
    })
}

/// What an operation takes more than under `home`.
fn behind(rows: &[Row], row: &Row) -> Option<f64> {
    Some(row.cycles_per_op / home_of(rows, row)?.cycles_per_op - 1.0)
}

/// Goals, under each profile, of so many workloads.
fn judge(rows: &[Row], wanted: usize) -> Vec<Goal> {
    let mut goals = Vec::new();
    let mut profiles: Vec<&str> = rows.iter().map(|row| row.profile.as_str()).collect();
    profiles.dedup();
    for profile in profiles {
        let of: Vec<&Row> = rows.iter().filter(|row| row.profile == profile).collect();
        let shows = shows(rows, &of, profile);
        let shown = shows.met;
        goals.push(shows);
        goals.push(aware(rows, &of, profile, shown.then_some(wanted)));
    }
    goals
}

/// Does the place of a VM matter to enough workloads?
fn shows(rows: &[Row], of: &[&Row], profile: &str) -> Goal {
    let mut found = Vec::new();
    for workload in workloads(true) {
        let farthest = of
            .iter()
            .filter(|row| row.workload == workload.name)
            .filter(|row| matches!(row.configuration, Configuration::Remote | Configuration::Vnuma))
            .filter_map(|row| behind(rows, row))
            .fold(f64::NEG_INFINITY, f64::max);
        if farthest >= goals::SHOWS {
            found.push(format!("{} {}", workload.name, percent(farthest)));
        }
    }
    Goal {
        goal: format!(
            "{profile}: remote or vnuma is {:.0} % or more behind home on {} workloads, else the benchmark shows nothing",
            goals::SHOWS * 100.0,
            goals::SHOWING
        ),
        met: found.len() >= goals::SHOWING,
        found: format!("on {}: {}", found.len(), found.join(", ")),
    }
}

/// Is `nuioa-aware` near enough to `home` on so many rows? None: the benchmark shows nothing.
fn aware(rows: &[Row], of: &[&Row], profile: &str, wanted: Option<usize>) -> Goal {
    let (mut far, mut found) = (Vec::new(), 0);
    let mut worst = f64::NEG_INFINITY;
    for row in of.iter().filter(|row| row.configuration == Configuration::NuioaAware) {
        let Some(home) = home_of(rows, row) else { continue };
        let behind = row.cycles_per_op / home.cycles_per_op - 1.0;
        let io = workload(&row.workload).is_none_or(|workload| workload.io);
        let limit = if io { goals::AWARE } else { goals::WITHOUT_IO };
        found += 1;
        if row.kept_share < goals::KEPT || home.kept_share < goals::KEPT {
            far.push(format!("{} ran elsewhere", row.workload));
            continue;
        }
        worst = worst.max(behind);
        if behind > limit {
            far.push(format!("{} {}", row.workload, percent(behind)));
        }
        let (more, error) = more_instructions(row, home);
        if more - goals::ERRORS * error > limit {
            far.push(format!("{} {} instructions", row.workload, percent(more)));
        }
    }
    let text = match wanted {
        None => "nothing is claimed, as the benchmark shows nothing".to_owned(),
        Some(wanted) if found < wanted => format!("{found} of {wanted} workloads were measured"),
        Some(_) if far.is_empty() => format!("at most {}", percent(worst)),
        Some(_) => far.join(", "),
    };
    Goal {
        goal: format!(
            "{profile}: nuioa-aware is within {:.0} % of home on every workload, and within {:.0} % without I/O",
            goals::AWARE * 100.0,
            goals::WITHOUT_IO * 100.0
        ),
        found: text,
        met: wanted.is_some_and(|wanted| found >= wanted) && far.is_empty(),
    }
}

/// How many more instructions an operation has than at home, and the standard error of that.
fn more_instructions(row: &Row, home: &Row) -> (f64, f64) {
    let error = row.instructions_error.hypot(home.instructions_error);
    (row.instructions_per_op / home.instructions_per_op - 1.0, error)
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<20} {:<22} {:<12} {:>12} {:>9} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8}  {:<14}  instructions\n",
        "profile",
        "workload",
        "config",
        "cycles/op",
        "to home",
        "DRAM far",
        "MMIO far",
        "writes",
        "reads",
        "CPU",
        "ops",
        "windows"
    );
    for row in rows {
        let share =
            |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0));
        text += &format!(
            "{:<20} {:<22} {:<12} {:>12.1} {:>9} {:>8} {:>8} {:>8.3} {:>7.3} {:>7.3} {:>8}  {:.3} to {:.3}  {:.0} ± {:.1} %\n",
            row.profile,
            row.workload,
            row.configuration.name(),
            row.cycles_per_op,
            match row.kept_share >= goals::KEPT {
                true => behind(rows, row).map_or("-".to_owned(), percent),
                false => "elsewhere".to_owned(),
            },
            share(row.remote_dram_share),
            share(row.remote_mmio_share),
            row.mmio_writes_per_op,
            row.mmio_reads_per_op,
            row.cpu_share,
            row.window_operations,
            row.windows_low,
            row.windows_high,
            row.instructions_per_op,
            row.instructions_error * 100.0,
        );
        text += &shown_reasons(row);
    }
    text
}

/// Why a workload ran where vnuma-guest put it. All of it if it did not stay there.
fn shown_reasons(row: &Row) -> String {
    let left = row.kept_share < goals::KEPT;
    if row.configuration != Configuration::NuioaAware && !left {
        return String::new();
    }
    let all = row.why.iter().filter(|line| left || !line.starts_with("interrupt "));
    all.map(|line| format!("{:20} {line}\n", "")).collect()
}

#[cfg(test)]
#[path = "judge/tests.rs"]
mod tests;
