//! From what was measured to rows, and from rows to goals. Cycles are *modelled*: of a named profile. Where pages are is *measured*.

use crate::{
    committed::{Cause, Means, PAPER_PERIOD_S, Policy, SizeCause, cells, goals, length_s},
    raw::{self, Cell, Line, Pass, Period, SizeCell, Stream},
};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use vnuma_bench_common::{
    goals::Goal,
    judging::{percent, profiles},
    report::{Bench, Files},
    stats::median,
};
use vnuma_lab_pricing::{CounterProfile, by_name, price};

/// The first application, which every cell has.
const STREAM: &str = "stream";
/// A period that took so much longer than it should says nothing of policies that work by the clock.
const LATE: f64 = 1.5;
/// So many periods may be that late.
const LATE_PERIODS: usize = 2;

/// A cause under a policy, as a profile prices it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub profile: String,
    pub workload: &'static str,
    pub cause: Cause,
    pub policy: Policy,
    /// What of the VM's memory is displaced at the end of the last period.
    pub displaced_share: f64,
    /// Mean of the ends of the periods, and the most just after the load's work.
    pub displaced_share_mean: f64,
    pub displaced_share_most: f64,
    /// Share of STREAM's accesses to memory that leave the node, in the second run; of the first one.
    pub remote_share: f64,
    pub remote_share_first_run: f64,
    /// Pages of the second run's memory that are not at home when it begins, of so many.
    pub remote_allocations: u64,
    pub allocations: u64,
    /// Modelled cycles of an operation of STREAM in the second run, and in the first: medians of their passes.
    pub cycles_per_op: f64,
    pub cycles_per_op_first_run: f64,
    /// Modelled cycles of programs for each line that the I/O load reads.
    pub io_cycles_per_op: f64,
    pub pages_moved: u64,
    /// That, for each page that the load displaced, by a sample.
    pub moved_per_displaced: f64,
    /// Of the server, which is emulated: an upper bound.
    pub longest_hold_ms: Option<f64>,
    /// Modelled cycles of vnumad's threads by those of a CPU in the time that the periods stand for; none if it does not run.
    pub overhead_share: Option<f64>,
    /// Why it does not count.
    pub does_not_count: Option<String>,
}

/// A guest node that got another size, as a profile prices it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeRow {
    pub profile: String,
    pub workload: &'static str,
    pub cause: SizeCause,
    pub means: Means,
    /// What is free on each node of the guest before STREAM begins, MiB.
    pub free_mib: [u64; 2],
    /// Share of STREAM's accesses to memory that leave the node.
    pub remote_share: f64,
    /// Modelled cycles of an operation of STREAM: the median of its passes.
    pub cycles_per_op: f64,
    /// What that is more than in a VM that was never changed; none if that was not measured.
    pub to_never_changed: Option<f64>,
}

/// What was measured.
struct Measured {
    full: bool,
    server: raw::Server,
    cells: Vec<Cell>,
    size_cells: Vec<SizeCell>,
    sizes: Vec<SizeRow>,
}

/// Reads what was measured, and judges it.
pub fn run(files: &Files) -> Result<()> {
    let mut raw = files.read()?;
    let (mut server, mut cells, mut size_cells) = (None, Vec::new(), Vec::new());
    for line in std::mem::take(&mut raw.lines) {
        match line {
            Line::Server(line) => server = Some(line),
            Line::Cell(cell) => cells.push(*cell),
            Line::Size(cell) => size_cells.push(cell),
        }
    }
    let server: raw::Server = server.context("no server")?;
    let mut sizes = Vec::new();
    for profile in profiles(&server.profile)? {
        sizes.extend(sizes_of(&size_cells, &profile)?);
    }
    files.judge(&Measured { full: files.results.form.full, server, cells, size_cells, sizes }, &raw)
}

impl Bench for Measured {
    type Row = Row;
    const SOURCE: &'static str = "cycles are modelled: the lab's counters, priced under the profile of each row; where pages are is measured";
    const MACHINE: &'static str = "2n8c";

    fn price(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for profile in profiles(&self.server.profile)? {
            rows.extend(rows_of(&self.cells, &self.server, &profile)?);
        }
        ensure!(!rows.is_empty() || !self.sizes.is_empty(), "no cell was measured");
        Ok(rows)
    }

    fn figure(row: &Row) -> (String, f64) {
        let name = [row.workload, row.cause.name(), row.policy.name(), &row.profile].join(", ");
        (name, row.cycles_per_op)
    }

    fn goals(&self, rows: &[Row]) -> Vec<Goal> {
        judge(rows, self.full).into_iter().chain(judge_sizes(&self.sizes)).collect()
    }

    fn more(&self, _: &[Row]) -> impl Serialize {
        let Self { server, cells, size_cells, sizes, .. } = self;
        json!({"server": server, "sizes": sizes, "cells": cells, "size_cells": size_cells})
    }

    fn table(&self, rows: &[Row]) -> String {
        table(rows) + &size_table(&self.sizes)
    }

    fn draw(&self, _: &[Row], path: &Path) -> Result<()> {
        crate::picture::draw(&self.cells, path)
    }
}

/// Cycles of an operation; none if nothing was done.
fn cycles_per_op(passes: &[Pass], profile: &CounterProfile) -> Option<f64> {
    let prices = profile.prices();
    let operations: u64 = passes.iter().map(|pass| pass.operations).sum();
    let cycles: f64 = passes.iter().map(|pass| price(&pass.counts, &prices).total).sum();
    (operations > 0).then(|| cycles / operations as f64)
}

/// The median of the passes of a run.
fn stream(run: &Stream, profile: &CounterProfile) -> Option<f64> {
    median(run.passes.iter().filter_map(|pass| cycles_per_op(std::slice::from_ref(pass), profile)))
}

/// Share of the accesses to memory that leave the node; 0 if there are none.
fn remote_share(run: &Stream) -> f64 {
    let lists =
        || run.passes.iter().flat_map(|pass| [&pass.counts.dram_by_class, &pass.counts.streamed_by_class]);
    let sum = |skip: usize| lists().flat_map(|list| list.iter().skip(skip)).sum::<u64>();
    sum(1) as f64 / sum(0).max(1) as f64
}

/// The applications of a cell, each with its run before the I/O load and the one after it.
fn runs(cell: &Cell) -> impl Iterator<Item = (&'static str, &Stream, &Stream)> {
    let store = cell.store.iter().map(|[first, second]| ("store", first, second));
    std::iter::once((STREAM, &cell.first, &cell.second)).chain(store)
}

fn rows_of(cells: &[Cell], server: &raw::Server, profile: &CounterProfile) -> Result<Vec<Row>> {
    // Of vnumad the counts are not known, only what the server's own profile makes of them.
    let clock_ghz = by_name(&server.profile)?.clock_ghz;
    let mut rows = Vec::new();
    for (cell, (workload, first, second)) in
        cells.iter().flat_map(|cell| runs(cell).map(move |run| (cell, run)))
    {
        let name = format!("{}, {}, {workload}", cell.cause.name(), cell.policy.name());
        let share = |displaced: u64, resident: u64| displaced as f64 / resident.max(1) as f64;
        let io: Vec<Pass> = cell.periods.iter().map(|period| period.io.clone()).collect();
        let ends: Vec<f64> =
            cell.periods.iter().map(|period| share(period.displaced, period.resident)).collect();
        let after_work =
            cell.periods.iter().map(|period| share(period.displaced_after_work, period.resident));
        let spent: Option<u64> = cell.daemon.as_ref().map(|threads| threads.values().sum());
        let stands_for_s = cell.periods.len() as f64 * PAPER_PERIOD_S;
        rows.push(Row {
            profile: profile.name.clone(),
            workload,
            cause: cell.cause,
            policy: cell.policy,
            displaced_share: share(cell.displaced, cell.resident),
            displaced_share_mean: ends.iter().sum::<f64>() / ends.len().max(1) as f64,
            displaced_share_most: after_work.fold(0.0, f64::max),
            remote_share: remote_share(second),
            remote_share_first_run: remote_share(first),
            remote_allocations: second.remote_pages,
            allocations: second.pages,
            cycles_per_op: stream(second, profile).with_context(|| format!("{name}: the second run"))?,
            cycles_per_op_first_run: stream(first, profile)
                .with_context(|| format!("{name}: the first run"))?,
            io_cycles_per_op: cycles_per_op(&io, profile).with_context(|| format!("{name}: the I/O load"))?,
            pages_moved: cell.pages_moved,
            moved_per_displaced: moved_per_displaced(cell),
            longest_hold_ms: cell.longest_hold_us.map(|us| us as f64 / 1000.0),
            overhead_share: spent.map(|cycles| cycles as f64 / (stands_for_s * clock_ghz * 1e9)),
            does_not_count: does_not_count(cells, cell),
        });
    }
    Ok(rows)
}

/// Pages that were moved by those that each period's work displaced.
fn moved_per_displaced(cell: &Cell) -> f64 {
    let (mut before, mut bytes) = (0, 0_u64);
    for period in &cell.periods {
        bytes += period.displaced_after_work.saturating_sub(before);
        before = period.displaced;
    }
    (cell.pages_moved * 4096) as f64 / bytes.max(1) as f64
}

fn sizes_of(cells: &[SizeCell], profile: &CounterProfile) -> Result<Vec<SizeRow>> {
    let cycles = |cell: &SizeCell| {
        let name = || format!("{}, {}: STREAM", cell.cause.name(), cell.means.name());
        stream(&cell.stream, profile).with_context(name)
    };
    let row = |cell: &SizeCell| -> Result<SizeRow> {
        let unchanged = cells.iter().find(|one| one.cause == cell.cause && one.means == Means::NeverChanged);
        let cycles_per_op = cycles(cell)?;
        Ok(SizeRow {
            profile: profile.name.clone(),
            workload: STREAM,
            cause: cell.cause,
            means: cell.means,
            free_mib: cell.free_mib,
            remote_share: remote_share(&cell.stream),
            cycles_per_op,
            to_never_changed: unchanged
                .map(cycles)
                .transpose()?
                .map(|unchanged| cycles_per_op / unchanged - 1.0),
        })
    };
    cells.iter().map(row).collect()
}

fn judge_sizes(rows: &[SizeRow]) -> Vec<Goal> {
    let mut names: Vec<&str> = rows.iter().map(|row| row.profile.as_str()).collect();
    names.dedup();
    let goal = |profile: &str| {
        let found: Vec<(SizeCause, f64)> = rows
            .iter()
            .filter(|row| row.profile == profile && row.means == Means::VirtioMem)
            .filter_map(|row| Some((row.cause, row.to_never_changed?)))
            .collect();
        let shown: Vec<String> =
            found.iter().map(|(cause, more)| format!("{} {:.2} %", cause.name(), more * 100.0)).collect();
        Goal {
            goal: format!(
                "{profile}: STREAM after a change by virtio-mem is within {:.1} % of a VM that was never changed",
                goals::SIZED * 100.0
            ),
            found: shown.join(", "),
            met: found.len() == SizeCause::ALL.len()
                && found.iter().all(|(_, more)| more.abs() <= goals::SIZED),
        }
    };
    names.into_iter().map(goal).collect()
}

fn does_not_count(cells: &[Cell], cell: &Cell) -> Option<String> {
    let none = cells.iter().find(|one| one.cause == cell.cause && one.policy == Policy::None);
    let displaced = none.map(|none| none.displaced as f64 / none.resident.max(1) as f64);
    let late = |period: &&Period| period.elapsed_s > LATE * length_s(cell.period_s, period.worked_s);
    let late = cell.periods.iter().filter(late).count();
    match displaced {
        None => Some("there is no row of none to compare it with".to_owned()),
        Some(share) if share < goals::DISPLACES => {
            Some(format!("the cause is no cause: under none {:.1} % are displaced in the end", share * 100.0))
        }
        _ if late > LATE_PERIODS => {
            Some(format!("{late} of {} periods took more than {LATE} of their time", cell.periods.len()))
        }
        _ => None,
    }
}

fn find<'a>(rows: &'a [Row], like: &Row, policy: Policy) -> Option<&'a Row> {
    let of =
        |row: &&Row| row.profile == like.profile && row.workload == like.workload && row.cause == like.cause;
    rows.iter().filter(of).find(|row| row.policy == policy)
}

/// A goal about all rows that `of` gives a figure of: what each has beyond its limit.
fn goal(text: String, rows: &[&Row], of: impl Fn(&Row) -> Option<(f64, bool)>) -> Goal {
    let name = |row: &Row| match row.workload {
        STREAM => row.cause.name().to_owned(),
        other => format!("{} ({other})", row.cause.name()),
    };
    let counts = rows.iter().filter(|row| row.does_not_count.is_none());
    let found: Vec<_> =
        counts.filter_map(|row| of(row).map(|(figure, met)| (name(row), figure, met))).collect();
    Goal::of_rows(text, rows.len(), &found)
}

fn judge(rows: &[Row], full: bool) -> Vec<Goal> {
    let mut goals = Vec::new();
    let mut names: Vec<&str> = rows.iter().map(|row| row.profile.as_str()).collect();
    names.dedup();
    for profile in names {
        let of = |policy: Policy| -> Vec<&Row> {
            rows.iter().filter(|row| row.profile == profile && row.policy == policy).collect()
        };
        goals.push(complete(rows, profile, full));
        let adaptive = of(Policy::Adaptive);
        goals.extend(goals_of(rows, profile, &of(Policy::None), &adaptive));
        // The reduced form has other policies that move, and peers, for one cause.
        let has_others = |row: &&&Row| full || row.cause == Policy::MORE.0;
        let compared: Vec<&Row> = adaptive.iter().filter(has_others).copied().collect();
        goals.extend(goals_beside_others(rows, profile, &compared));
    }
    goals
}

fn complete(rows: &[Row], profile: &str, full: bool) -> Goal {
    let there = |(cause, policy): &(Cause, Policy)| {
        rows.iter().any(|row| row.profile == profile && row.cause == *cause && row.policy == *policy)
    };
    let (found, wanted) = (cells(full).filter(there).count(), cells(full).count());
    Goal {
        goal: format!("{profile}: every cell is measured"),
        found: format!("{found} of {wanted}"),
        met: found == wanted,
    }
}

fn at_most(share: f64, limit: f64) -> (f64, bool) {
    (share, share <= limit)
}

fn by(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Rows of what is of the cell, not of an application.
fn of_cells<'a>(rows: &[&'a Row]) -> Vec<&'a Row> {
    rows.iter().copied().filter(|row| row.workload == STREAM).collect()
}

fn goals_of(rows: &[Row], profile: &str, none: &[&Row], adaptive: &[&Row]) -> Vec<Goal> {
    let (none, each) = (&of_cells(none)[..], &of_cells(adaptive)[..]);
    vec![
        goal(
            format!("{profile}: under none {} or more are displaced in the end", by(goals::DISPLACES)),
            none,
            |row| Some((row.displaced_share, row.displaced_share >= goals::DISPLACES)),
        ),
        goal(
            format!("{profile}: under adaptive at most {} are displaced in the end", by(goals::DISPLACED)),
            each,
            |row| Some(at_most(row.displaced_share, goals::DISPLACED)),
        ),
        goal(
            format!("{profile}: under adaptive the second run takes at most {} more", by(goals::SECOND_RUN)),
            adaptive,
            |row| Some(at_most(row.cycles_per_op / row.cycles_per_op_first_run - 1.0, goals::SECOND_RUN)),
        ),
        goal(
            format!(
                "{profile}: under adaptive the I/O load takes at most {} more than under none",
                by(goals::IO)
            ),
            each,
            |row| {
                let none = find(rows, row, Policy::None)?;
                Some(at_most(row.io_cycles_per_op / none.io_cycles_per_op - 1.0, goals::IO))
            },
        ),
        goal(format!("{profile}: vnumad takes at most {} of a CPU", by(goals::OVERHEAD)), each, |row| {
            row.overhead_share.map(|share| at_most(share, goals::OVERHEAD))
        }),
    ]
}

/// Those that need rows of other policies of the same cause.
fn goals_beside_others(rows: &[Row], profile: &str, adaptive: &[&Row]) -> Vec<Goal> {
    vec![
        goal(
            format!(
                "{profile}: adaptive moves at most {} more pages than both, of those that are displaced (by both's)",
                by(goals::MOVES)
            ),
            &of_cells(adaptive),
            |row| {
                let both = find(rows, row, Policy::Both)?;
                Some(at_most(row.moved_per_displaced / both.moved_per_displaced - 1.0, goals::MOVES))
            },
        ),
        goal(
            format!(
                "{profile}: no peer's second run takes less than that under adaptive (the best peer's by it)"
            ),
            adaptive,
            |row| {
                let peers = [Policy::AutonumaHost, Policy::Numad, Policy::Migratepages, Policy::Damon];
                let best = peers.iter().filter_map(|peer| find(rows, row, *peer));
                let best = best.filter(|row| row.does_not_count.is_none()).map(behind).reduce(f64::min)?;
                // Figures of one place differ by less than a hundredth from run to run.
                Some((best - behind(row), behind(row) <= best + goals::SECOND_RUN))
            },
        ),
    ]
}

/// What the second run takes more than the first.
fn behind(row: &Row) -> f64 {
    row.cycles_per_op / row.cycles_per_op_first_run - 1.0
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<18} {:<8} {:<12} {:<14} {:>9} {:>9} {:>9} {:>13} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9}\n",
        "profile",
        "workload",
        "cause",
        "policy",
        "displaced",
        "mean",
        "remote",
        "remote allocs",
        "cycles/op",
        "to 1st",
        "I/O",
        "moved",
        "hold ms",
        "overhead"
    );
    for row in rows {
        let optional = |figure: Option<f64>, by: f64, digits: usize| {
            figure.map_or("-".to_owned(), |figure| format!("{:.digits$}", figure * by))
        };
        text += &format!(
            "{:<18} {:<8} {:<12} {:<14} {:>7.2} % {:>7.2} % {:>7.2} % {:>13} {:>9.2} {:>8} {:>8.2} {:>8} {:>8} {:>7} %{}\n",
            row.profile,
            row.workload,
            row.cause.name(),
            row.policy.name(),
            row.displaced_share * 100.0,
            row.displaced_share_mean * 100.0,
            row.remote_share * 100.0,
            format!("{} of {}", row.remote_allocations, row.allocations),
            row.cycles_per_op,
            percent(behind(row)),
            row.io_cycles_per_op,
            row.pages_moved,
            optional(row.longest_hold_ms, 1.0, 1),
            optional(row.overhead_share, 100.0, 4),
            row.does_not_count.as_ref().map(|why| format!("  does not count: {why}")).unwrap_or_default(),
        );
    }
    text
}

fn size_table(rows: &[SizeRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "{:<18} {:<8} {:<14} {:>16} {:>9} {:>9} {:>9}\n",
        "profile", "cause", "means", "free on 0, 1", "remote", "cycles/op", "to never"
    );
    for row in rows {
        text += &format!(
            "{:<18} {:<8} {:<14} {:>16} {:>7.2} % {:>9.2} {:>9}\n",
            row.profile,
            row.cause.name(),
            row.means.name(),
            format!("{}, {} MiB", row.free_mib[0], row.free_mib[1]),
            row.remote_share * 100.0,
            row.cycles_per_op,
            row.to_never_changed.map_or("-".to_owned(), percent),
        );
    }
    text
}

#[cfg(test)]
#[path = "judge/tests.rs"]
mod tests;
