//! From what was measured to rows, and from rows to goals. Cycles are *modelled*: of a named profile.

use crate::{
    committed::{By, Cell as Wanted, JUDGED_RATE, Kind, Policy, RATES, Workload, cells, goals},
    raw::{self, Cell, Change, Line, NO_JAVA, Sample},
};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use vnuma_bench_common::{
    goals::Goal,
    judging::{percent, profiles, profiles_of_second},
    report::{Bench, Files},
    stats::{median, middle as in_the_middle},
};
use vnuma_lab_pricing::{CounterProfile, Counts, price};

/// A vCPU has followed when at most so much more of its accesses are remote than before it went.
const FOLLOWED: f64 = 0.10;

/// A workload under a policy, as a profile prices it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub profile: String,
    pub workload: Workload,
    pub kind: Kind,
    pub runtime: &'static str,
    pub policy: Policy,
    /// Of guest time, for a VM of 16 vCPUs.
    pub changes_per_minute: u32,
    /// How they come about.
    pub by: By,
    /// Whether the guest's kernel takes pages to the threads that use them.
    pub autonuma: bool,
    /// How often it was measured; this is the one in the middle.
    pub takes: u32,
    /// Modelled cycles of programs for an operation.
    pub cycles_per_op: f64,
    /// Those of kernels on the same vCPUs, under the server's profile. They have the ticks, which go by the server's clock.
    pub kernel_cycles_per_op: f64,
    /// Share of the accesses to memory that leave the node.
    pub remote_share: f64,
    /// From a change until the accesses of the vCPU that moved are as local as before, seconds of the guest: the median; null if
    /// there are no changes, or if it mostly was not before the vCPU moved again.
    pub recover_s: Option<f64>,
    /// Pages that the guest's kernel moved in the measured time.
    pub pages_migrated: u64,
    /// What was measured.
    pub commit: String,
    /// Why it does not count.
    pub does_not_count: Option<String>,
}

impl Row {
    /// Which cell it is of.
    pub fn cell(&self) -> Wanted {
        Wanted {
            workload: self.workload,
            policy: self.policy,
            rate: self.changes_per_minute,
            by: self.by,
            autonuma: self.autonuma,
            take: 0,
        }
    }

    /// Goals and ratios are about changes by hand, and without AutoNUMA nothing brings displaced memory home.
    pub fn is_judged(&self) -> bool {
        self.autonuma && self.by == By::Hand
    }
}

/// What the paper has, and what was found here: how much more is done in the same time, less 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    pub profile: String,
    pub workload: Workload,
    pub changes_per_minute: u32,
    pub of: Policy,
    pub over: Policy,
    pub found: f64,
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
    let (mut server, mut cells) = (None, Vec::<Cell>::new());
    for line in std::mem::take(&mut raw.lines) {
        match line {
            // The Java of those that had one.
            Line::Server(line) if server.is_none() || line.java != NO_JAVA => server = Some(line),
            Line::Server(_) => {}
            Line::Cell(cell) => {
                cells.retain(|before| before.which() != cell.which());
                cells.push(cell);
            }
        }
    }
    let server = server.context("no server")?;
    files.judge(&Measured { full: files.results.form.full, server, cells }, &raw)
}

impl Bench for Measured {
    type Row = Row;
    const SOURCE: &'static str = "modelled: the lab's counters, priced under the profile of each row; recover_s is measured, in seconds of the guest";
    const MACHINE: &'static str = "2n8c";

    fn price(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for profile in profiles(&self.server.profile)? {
            rows.extend(rows_of(&self.cells, &profile, |counts| Some(counts.clone()))?);
        }
        if let Some(llc) = self.server.second_llc {
            for profile in profiles_of_second(&self.server.profile, llc)? {
                rows.extend(rows_of(&self.cells, &profile, Counts::by_second)?);
            }
        }
        ensure!(!rows.is_empty(), "no cell was measured");
        Ok(rows)
    }

    fn figure(row: &Row) -> (String, f64) {
        ([row.workload.name(), row.policy.name(), &row.profile].join(", "), row.cycles_per_op)
    }

    fn goals(&self, rows: &[Row]) -> Vec<Goal> {
        judge(rows, self.full)
    }

    fn more(&self, rows: &[Row]) -> impl Serialize {
        json!({"server": self.server, "ratios": ratios(rows), "cells": self.cells})
    }

    fn table(&self, rows: &[Row]) -> String {
        table(rows) + &table_of_ratios(&ratios(rows))
    }

    fn draw(&self, rows: &[Row], path: &Path) -> Result<()> {
        crate::picture::draw(rows, &self.cells, path)
    }
}

fn rows_of(
    cells: &[Cell],
    profile: &CounterProfile,
    seen: impl Fn(&Counts) -> Option<Counts>,
) -> Result<Vec<Row>> {
    let prices = profile.prices();
    let mut rows = Vec::new();
    for cell in cells {
        let counts: Option<Vec<Counts>> = cell.vcpus.iter().map(|vcpu| seen(&vcpu.user)).collect();
        let counts =
            counts.with_context(|| format!("{}: not counted for {}", cell.workload.name(), profile.name))?;
        let cycles: f64 = counts.iter().map(|counts| price(counts, &prices).total).sum();
        let kernel: u64 =
            cell.vcpus.iter().map(|vcpu| vcpu.cycles.saturating_sub(vcpu.program_cycles.unwrap_or(0))).sum();
        let operations = cell.operations.max(1) as f64;
        rows.push(Row {
            profile: profile.name.clone(),
            workload: cell.workload,
            kind: cell.workload.kind(),
            runtime: cell.workload.runtime(),
            policy: cell.policy,
            changes_per_minute: cell.changes_per_minute,
            by: cell.by,
            autonuma: cell.autonuma,
            takes: 1,
            cycles_per_op: cycles / operations,
            kernel_cycles_per_op: kernel as f64 / operations,
            remote_share: remote_share(&counts),
            recover_s: recover_s(&cell.changes, &cell.samples),
            pages_migrated: cell.pages_migrated,
            commit: cell.commit.clone(),
            does_not_count: None,
        });
    }
    let reasons: Vec<Option<String>> =
        cells.iter().zip(&rows).map(|(cell, row)| does_not_count(&rows, cell, row)).collect();
    rows.iter_mut().zip(reasons).for_each(|(row, reason)| row.does_not_count = reason);
    Ok(middle(rows))
}

/// Of rows of the same, the one in the middle by its cycles for an operation.
fn middle(rows: Vec<Row>) -> Vec<Row> {
    let mut same: Vec<Vec<Row>> = Vec::new();
    for row in rows {
        match same.iter_mut().find(|rows| rows[0].cell() == row.cell()) {
            Some(rows) => rows.push(row),
            None => same.push(vec![row]),
        }
    }
    let one = |rows: Vec<Row>| {
        let takes = rows.len() as u32;
        Some(Row { takes, ..in_the_middle(rows, |row| row.cycles_per_op)? })
    };
    same.into_iter().filter_map(one).collect()
}

/// Share of the accesses to memory that leave the node; 0 if there are none.
fn remote_share(counts: &[Counts]) -> f64 {
    let lists = || counts.iter().flat_map(|counts| [&counts.dram_by_class, &counts.streamed_by_class]);
    let sum = |skip: usize| lists().flat_map(|list| list.iter().skip(skip)).sum::<u64>();
    sum(1) as f64 / sum(0).max(1) as f64
}

/// What is remote of a vCPU's accesses in a sample; none if it has none.
fn remote_in(sample: &Sample, vcpu: usize) -> Option<f64> {
    let [local, remote] = *sample.accesses.get(vcpu)?;
    (local + remote > 0).then(|| remote as f64 / (local + remote) as f64)
}

/// From each change until the vCPU's accesses are as local as in the sample before it, and stay so in the next one: the median.
fn recover_s(changes: &[Change], samples: &[Sample]) -> Option<f64> {
    let of = |(number, change): (usize, &Change)| {
        let next = changes[number + 1..].iter().find(|next| next.vcpu == change.vcpu);
        let until_s = next.map_or(f64::INFINITY, |next| next.at_s);
        let before = samples.iter().rev().find(|sample| sample.at_s <= change.at_s);
        let before = before.and_then(|sample| remote_in(sample, change.vcpu)).unwrap_or(0.0);
        // One that was far from its data is not as local as can be.
        let limit = before.min(0.5) + FOLLOWED;
        let after = samples.iter().filter(|sample| sample.at_s > change.at_s && sample.at_s <= until_s);
        let after: Vec<&Sample> = after.collect();
        let is_local = |sample: &&Sample| remote_in(sample, change.vcpu).is_some_and(|share| share <= limit);
        // One sample may have little more than a collection of garbage.
        let found = (0..after.len()).find(|&at| after[at..].iter().take(2).all(is_local));
        found.map_or(f64::INFINITY, |at| after[at].at_s - change.at_s)
    };
    median(changes.iter().enumerate().map(of)).filter(|seconds| seconds.is_finite())
}

/// By how much less is done in the same time than with `best`.
fn loss(row: &Row, best: &Row) -> f64 {
    1.0 - best.cycles_per_op / row.cycles_per_op
}

/// How much more is done in the same time than with `other`.
fn gain(row: &Row, other: &Row) -> f64 {
    other.cycles_per_op / row.cycles_per_op - 1.0
}

fn find<'a>(rows: &'a [Row], like: &Row, policy: Policy, rate: u32) -> Option<&'a Row> {
    let rate = if policy == Policy::Ideal { 0 } else { rate };
    let by = if rate == 0 { By::Hand } else { like.by };
    rows.iter().find(|row| {
        row.profile == like.profile
            && row.workload == like.workload
            && row.policy == policy
            && row.changes_per_minute == rate
            && row.by == by
            && row.autonuma == like.autonuma
    })
}

/// Without changes, the policies under which a program runs as it is are the same but for chance: cycles for an operation of the one
/// in the middle.
fn plain(rows: &[Row], like: &Row) -> Option<f64> {
    let policies = [Policy::Ideal, Policy::StaticVnuma, Policy::OsOnly];
    median(policies.iter().filter_map(|&policy| find(rows, like, policy, 0)).map(|row| row.cycles_per_op))
}

fn does_not_count(rows: &[Row], cell: &Cell, row: &Row) -> Option<String> {
    if cell.told == Some(false) {
        return Some("in the end the guest did not use the true node of each vCPU".to_owned());
    }
    let rate = row.changes_per_minute;
    if rate == 0 {
        return None;
    }
    let (fixed, ideal) = (find(rows, row, Policy::StaticVnuma, rate), find(rows, row, Policy::Ideal, 0));
    // Whether a workload shows anything is a matter of the judged rate.
    if rate < JUDGED_RATE && ideal.is_some() {
        return None;
    }
    match fixed.zip(ideal).map(|(fixed, ideal)| loss(fixed, ideal)) {
        None => Some("there are no rows of static-vnuma and ideal to compare it with".to_owned()),
        Some(loss) if loss < goals::LOSES => {
            Some(format!("it shows nothing: static-vnuma loses {:.1} %", loss * 100.0))
        }
        Some(_) => None,
    }
}

/// A goal about each workload that `of` gives a figure of.
fn goal(text: String, rows: &[&Row], of: impl Fn(&Row) -> Option<(f64, bool)>) -> Goal {
    let of = |row: &&Row| of(row).map(|(figure, met)| (row.workload.name().to_owned(), figure, met));
    let found: Vec<_> = rows.iter().filter(|row| row.does_not_count.is_none()).filter_map(of).collect();
    Goal::of_rows(text, rows.len(), &found)
}

fn judge(rows: &[Row], full: bool) -> Vec<Goal> {
    let mut goals = Vec::new();
    let mut names: Vec<&str> = rows.iter().map(|row| row.profile.as_str()).collect();
    names.dedup();
    for profile in names {
        goals.push(complete(rows, profile, full));
        goals.extend(goals_of(rows, profile));
    }
    goals
}

fn complete(rows: &[Row], profile: &str, full: bool) -> Goal {
    let wanted = cells(full);
    let is_there = |wanted: &&Wanted| {
        let which = Wanted { take: 0, ..**wanted };
        rows.iter().any(|row| row.profile == profile && row.cell() == which && row.takes > wanted.take)
    };
    let found = wanted.iter().filter(is_there).count();
    Goal {
        goal: format!("{profile}: every cell is measured"),
        found: format!("{found} of {}", wanted.len()),
        met: found == wanted.len(),
    }
}

fn goals_of(rows: &[Row], profile: &str) -> Vec<Goal> {
    let of = |policy: Policy, rate: u32, kind: Option<Kind>| -> Vec<&Row> {
        let wanted = |row: &&Row| {
            row.profile == profile
                && row.policy == policy
                && row.changes_per_minute == rate
                && row.is_judged()
                && kind.is_none_or(|kind| row.kind == kind)
        };
        rows.iter().filter(wanted).collect()
    };
    let by = |share: f64| format!("{:.0} %", share * 100.0);
    let rate = JUDGED_RATE;
    // Here rows that show nothing are what is looked for.
    let fixed: Vec<Row> = of(Policy::StaticVnuma, rate, None)
        .into_iter()
        .map(|row| Row { does_not_count: None, ..row.clone() })
        .collect();
    let mut found = vec![goal(
        format!("{profile}: static-vnuma loses {} or more at {rate} changes", by(goals::LOSES)),
        &fixed.iter().collect::<Vec<_>>(),
        |row| {
            let loss = loss(row, find(rows, row, Policy::Ideal, 0)?);
            Some((loss, loss >= goals::LOSES))
        },
    )];
    // The reduced form has the highest of these only.
    let is_there = |rate: &u32| *rate == JUDGED_RATE || !of(Policy::Full, *rate, None).is_empty();
    for rate in RATES.into_iter().filter(|rate| (1..=JUDGED_RATE).contains(rate)).filter(is_there) {
        found.push(goal(
            format!(
                "{profile}: full keeps {} of ideal at {rate} changes where data are new",
                by(goals::KEEPS)
            ),
            &of(Policy::Full, rate, Some(Kind::Allocating)),
            |row| {
                let kept = 1.0 - loss(row, find(rows, row, Policy::Ideal, 0)?);
                Some((kept, kept >= goals::KEEPS))
            },
        ));
        found.push(goal(
            format!(
                "{profile}: full gets back {} of what static-vnuma loses at {rate} changes where data stay",
                by(goals::RECOVERS)
            ),
            &of(Policy::Full, rate, Some(Kind::LongLived)),
            |row| {
                let ideal = find(rows, row, Policy::Ideal, 0)?;
                let lost = loss(find(rows, row, Policy::StaticVnuma, rate)?, ideal);
                let recovered = 1.0 - loss(row, ideal) / lost;
                Some((recovered, recovered >= goals::RECOVERS))
            },
        ));
    }
    found.push(goal(
        format!(
            "{profile}: without changes full takes at most {} more than the same program without it",
            by(goals::QUIET)
        ),
        &of(Policy::Full, 0, None),
        |row| {
            let more = row.cycles_per_op / plain(rows, row)? - 1.0;
            Some((more, more <= goals::QUIET))
        },
    ));
    found
}

/// Of what the paper compares, for all rows that have both.
fn ratios(rows: &[Row]) -> Vec<Ratio> {
    let counts = |row: &&Row| row.policy == Policy::Full && row.is_judged() && row.does_not_count.is_none();
    let full = rows.iter().filter(counts);
    let over = |row: &Row, over: Policy| {
        let found = gain(row, find(rows, row, over, row.changes_per_minute)?);
        Some(Ratio {
            profile: row.profile.clone(),
            workload: row.workload,
            changes_per_minute: row.changes_per_minute,
            of: row.policy,
            over,
            found,
        })
    };
    full.flat_map(|row| {
        [Policy::OsOnly, Policy::StaticVnuma].into_iter().filter_map(move |one| over(row, one))
    })
    .collect()
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<18} {:<16} {:<16} {:<13} {:>7} {:<8} {:<8} {:>10} {:>8} {:>8} {:>10} {:>9} {:>8}\n",
        "profile",
        "workload",
        "runtime",
        "policy",
        "changes",
        "by",
        "autonuma",
        "cycles/op",
        "by ideal",
        "remote",
        "recover s",
        "kernel/op",
        "migrated"
    );
    for row in rows {
        let by_ideal = find(rows, row, Policy::Ideal, 0).map(|ideal| -loss(row, ideal));
        text += &format!(
            "{:<18} {:<16} {:<16} {:<13} {:>7} {:<8} {:<8} {:>10.1} {:>8} {:>6.2} % {:>10} {:>9.1} {:>8}{}\n",
            row.profile,
            row.workload.name(),
            row.runtime,
            row.policy.name(),
            row.changes_per_minute,
            row.by.name(),
            if row.autonuma { "on" } else { "off" },
            row.cycles_per_op,
            by_ideal.map_or("-".to_owned(), percent),
            row.remote_share * 100.0,
            row.recover_s.map_or("-".to_owned(), |seconds| format!("{seconds:.1}")),
            row.kernel_cycles_per_op,
            row.pages_migrated,
            row.does_not_count.as_ref().map(|why| format!("  does not count: {why}")).unwrap_or_default(),
        );
    }
    text
}

fn table_of_ratios(ratios: &[Ratio]) -> String {
    let line = |ratio: &Ratio| {
        format!(
            "{}: {}, {} changes: {} over {}: {}\n",
            ratio.profile,
            ratio.workload.name(),
            ratio.changes_per_minute,
            ratio.of.name(),
            ratio.over.name(),
            percent(ratio.found)
        )
    };
    ratios.iter().map(line).collect()
}

#[cfg(test)]
#[path = "judge/tests.rs"]
mod tests;
