//! What is wanted of rows. A figure is as exact as two cells of EEVDF agree: a goal that is finer than that is not resolved here, and never
//! met.

use super::{COST, Figure, Row};
use crate::committed::{Load, RUNS, Scheduler, goals};
use serde::Serialize;
use std::fmt;
use vnuma_bench_figures::goals::Wanted;

/// What is to be said of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All runs keep it, and what they are off by chance would not hide the contrary.
    Met,
    /// No run keeps it, and not by chance.
    Missed,
    /// The machine is not quiet enough for it.
    NotResolvedHere,
    /// A figure is not there.
    NotMeasured,
}

/// A goal, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    pub goal: String,
    pub found: String,
    pub verdict: Verdict,
}

impl Wanted for Judged {
    fn name(&self) -> &str {
        &self.goal
    }

    fn met(&self) -> Option<bool> {
        match self.verdict {
            Verdict::Met => Some(true),
            Verdict::Missed => Some(false),
            Verdict::NotResolvedHere | Verdict::NotMeasured => None,
        }
    }
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { goal, found, verdict } = self;
        let word = match verdict {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
            Verdict::NotResolvedHere => "not resolved here",
            Verdict::NotMeasured => "UNKNOWN",
        };
        write!(f, "{word:<17} {goal}: {found}")
    }
}

/// A limit of a figure that is 1 under EEVDF.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

/// By the least and the most of the runs, and by how far EEVDF is from itself.
pub fn verdict(limit: Limit, [low, high]: [f64; 2], spread: f64) -> Verdict {
    // What is to be at most so much is turned around 1.
    let (limit, [worst, best]) = match limit {
        Limit::AtLeast(limit) => (limit, [low, high]),
        Limit::AtMost(limit) => (2.0 - limit, [2.0 - high, 2.0 - low]),
    };
    if worst >= limit && spread <= 1.0 - limit {
        Verdict::Met
    } else if best < limit && best < 1.0 - spread {
        Verdict::Missed
    } else {
        Verdict::NotResolvedHere
    }
}

/// Goals of both modes of scx_vnuma.
pub fn of(rows: &[Row]) -> Vec<Judged> {
    let of = |scheduler: Scheduler| {
        let loads = Load::ALL.iter().map(move |load| ops(rows, *load, scheduler));
        let shares = Load::ALL.iter().filter(|load| load.shares().is_some());
        let shares = shares.map(move |load| share(rows, *load, scheduler));
        loads.chain(shares).chain([wake(rows, scheduler), cost(rows, scheduler)])
    };
    Scheduler::JUDGED.into_iter().flat_map(of).collect()
}

fn row(rows: &[Row], load: Load, scheduler: Scheduler) -> Option<&Row> {
    rows.iter().find(|row| row.load == load.name() && row.scheduler == scheduler.name())
}

fn ops(rows: &[Row], load: Load, scheduler: Scheduler) -> Judged {
    let least = if load == Load::Lock { goals::LOCK_OPS } else { goals::OPS };
    let goal =
        format!("{}, {}: operations by those under EEVDF, at least {least}", load.name(), scheduler.name());
    let figure = |scheduler| row(rows, load, scheduler).and_then(|row| row.ops);
    by_eevdf(goal, Limit::AtLeast(least), figure(scheduler), figure(Scheduler::EevdfAgain))
}

fn wake(rows: &[Row], scheduler: Scheduler) -> Judged {
    let goal = format!(
        "{}, {}: 99th percentile of wake-ups by that under EEVDF, at most {}",
        Load::Wakes.name(),
        scheduler.name(),
        goals::WAKE
    );
    let figure = |scheduler| row(rows, Load::Wakes, scheduler).and_then(|row| row.wake);
    by_eevdf(goal, Limit::AtMost(goals::WAKE), figure(scheduler), figure(Scheduler::EevdfAgain))
}

/// A figure that is 1 under EEVDF, of so many runs as goals are judged by.
fn by_eevdf(goal: String, limit: Limit, figure: Option<Figure>, again: Option<Figure>) -> Judged {
    let Some((figure, again)) = figure.zip(again) else { return not_measured(goal) };
    let spread = again.off();
    let Figure { median, low, high, runs } = figure;
    let found =
        format!("{median:.3} ({low:.3} to {high:.3}, {runs} runs), EEVDF is up to {spread:.3} off itself");
    let verdict = match figure.runs.min(again.runs) < RUNS {
        true => Verdict::NotResolvedHere,
        false => verdict(limit, [low, high], spread),
    };
    Judged { goal, found, verdict }
}

fn not_measured(goal: String) -> Judged {
    Judged { goal, found: "not measured".to_owned(), verdict: Verdict::NotMeasured }
}

/// Within what is wanted, or within EEVDF's own error. Two errors of EEVDF say how exact an error is.
fn share(rows: &[Row], load: Load, scheduler: Scheduler) -> Judged {
    let least = if load == Load::Loop { goals::ALONE } else { goals::SHARE };
    let goal = format!(
        "{}, {}: the largest error of a share, at most {least} or that under EEVDF",
        load.name(),
        scheduler.name()
    );
    let error = |scheduler| row(rows, load, scheduler).and_then(|row| row.share_error);
    let (Some(found), Some(own), Some(again)) =
        (error(scheduler), error(Scheduler::Eevdf), error(Scheduler::EevdfAgain))
    else {
        return not_measured(goal);
    };
    let (limit, spread) = (least.max(own).max(again), (own - again).abs());
    let verdict = match found <= limit {
        true if spread <= least => Verdict::Met,
        false if found > limit + spread => Verdict::Missed,
        _ => Verdict::NotResolvedHere,
    };
    Judged { goal, found: format!("{found:.4}, under EEVDF {own:.4} and {again:.4}"), verdict }
}

/// The server with 8 CPUs says how exact a cost is.
fn cost(rows: &[Row], scheduler: Scheduler) -> Judged {
    let goal = format!(
        "{}: cost of an event with room for 256 CPUs by that with 8, at most {}",
        scheduler.name(),
        goals::COST
    );
    let mut of: Vec<&Row> =
        rows.iter().filter(|row| row.load == COST && row.scheduler == scheduler.name()).collect();
    of.sort_by_key(|row| row.cpus);
    let figures: Vec<Figure> = of.iter().filter_map(|row| row.run_ns).collect();
    let [few, many] = figures[..] else { return not_measured(goal) };
    let by = |ns: f64| ns / few.median;
    let spread = Figure { low: by(few.low), high: by(few.high), ..few }.off();
    let (low, high) = (by(many.low), by(many.high));
    let verdict = match few.runs.min(many.runs) < RUNS {
        true => Verdict::NotResolvedHere,
        false => verdict(Limit::AtMost(goals::COST), [low, high], spread),
    };
    let found = format!(
        "{:.3} ({low:.3} to {high:.3}, {:.0} by {:.0} ns), a window is up to {spread:.3} off",
        by(many.median),
        many.median,
        few.median
    );
    Judged { goal, found, verdict }
}
