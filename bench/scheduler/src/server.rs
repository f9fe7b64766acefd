//! On the lab server: every load under every scheduler, in turn, and again.

use crate::{
    build,
    committed::{COMPILERS, FILES, Load, RUNS, Scheduler},
    load::Running,
    raw::{Cell, Line, Outcome, Seen},
    schedulers,
};
use anyhow::{Context, Result};
use std::{thread, time::Duration};
use vnuma_bench_figures::{
    cells::{Cells, Options},
    report::Form,
};
use vnuma_scenario::output;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these loads
    #[arg(long)]
    load: Vec<Load>,
    /// Only these schedulers, beside EEVDF
    #[arg(long)]
    scheduler: Vec<Scheduler>,
    /// Why one of scx could not be built: its program, a colon, and the reason
    #[arg(long)]
    not_built: Vec<String>,
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    options: Options,
}

/// How much a cell has.
#[derive(Clone, Copy)]
struct Size {
    runs: usize,
    /// Of the time of a window.
    part: f64,
    files: usize,
}

impl Arguments {
    fn loads(&self) -> Vec<Load> {
        let is_wanted = |load: &Load| match self.form.smoke {
            true => [Load::Lock, Load::Wakes].contains(load),
            false => self.load.is_empty() || self.load.contains(load),
        };
        Load::ALL.iter().copied().filter(is_wanted).collect()
    }

    /// All are compared with EEVDF, and what differs from it with what EEVDF differs from itself.
    fn schedulers(&self) -> Vec<Scheduler> {
        use strum::VariantArray;
        let is_in_form = |one: &Scheduler| self.form.full || Scheduler::REDUCED.contains(one);
        let is_chosen = |one: &Scheduler| match (self.form.smoke, self.scheduler.is_empty()) {
            (true, _) => *one == Scheduler::Full,
            (false, true) => is_in_form(one),
            (false, false) => self.scheduler.contains(one),
        };
        let is_compared =
            |one: &Scheduler| *one == Scheduler::Eevdf || (*one == Scheduler::EevdfAgain && !self.form.smoke);
        let is_wanted = |one: &Scheduler| is_chosen(one) || is_compared(one);
        Scheduler::VARIANTS.iter().copied().filter(is_wanted).collect()
    }
}

/// Has this program, and not what it starts, run before all that a scheduler under test has: what it reads is read in time.
pub fn go_first() -> Result<()> {
    let pid = std::process::id().to_string();
    output("chrt", &["--fifo", "--reset-on-fork", "--pid", "1", &pid]).map(drop)
}

/// Prints a line of JSON for each run of a load.
pub fn run(arguments: &Arguments) -> Result<()> {
    go_first()?;
    let size = match arguments.form.smoke {
        true => Size { runs: 1, part: 0.2, files: 2 },
        false => Size { runs: RUNS, part: 1.0, files: FILES },
    };
    let schedulers = arguments.schedulers();
    let mut cells = Cells::printed(&arguments.options)?;
    // A run of all loads after the other: what a machine does for minutes does not hit all runs of one load.
    for run in 1..=size.runs {
        for load in arguments.loads() {
            let name = format!("{}, run {run}", load.name());
            cells.measure(&name, || {
                let mut order = schedulers.clone();
                let first = (run - 1) % order.len();
                order.rotate_left(first);
                let cell = cell(load, run, &order, &arguments.not_built, size)?;
                let shown = shown(&cell);
                Ok((Line::Cell(cell), shown))
            })?;
        }
    }
    cells.end()
}

/// For people.
fn shown(cell: &Cell) -> String {
    let of = |outcome: &Outcome| {
        let rate = outcome.seen.as_ref().map_or(f64::NAN, |seen| seen.ops as f64 / seen.window_s);
        format!("{} {rate:.1}", outcome.scheduler.name())
    };
    format!("operations a second: {}", cell.outcomes.iter().map(of).collect::<Vec<_>>().join(", "))
}

fn cell(load: Load, run: usize, order: &[Scheduler], not_built: &[String], size: Size) -> Result<Cell> {
    let running = Running::start(load)?;
    if load == Load::Build {
        // What a compiler reads for the first time costs the first scheduler more.
        build::watch(COMPILERS)?;
    }
    let outcome = |scheduler: &Scheduler| {
        let program = scheduler.program().map(|program| program + ":");
        let is_it = |reason: &&String| program.as_ref().is_some_and(|program| reason.starts_with(program));
        match not_built.iter().find(is_it) {
            Some(reason) => Ok(Outcome { scheduler: *scheduler, refused: Some(reason.clone()), seen: None }),
            None => outcome(&running, load, *scheduler, size).with_context(|| scheduler.name()),
        }
    };
    let outcomes = order.iter().map(outcome).collect::<Result<_>>()?;
    Ok(Cell { load, run, cpus: thread::available_parallelism()?.get(), outcomes })
}

fn outcome(running: &Running, load: Load, scheduler: Scheduler, size: Size) -> Result<Outcome> {
    let refused = |reason: String| {
        eprintln!("{}: {reason}", scheduler.name());
        Ok(Outcome { scheduler, refused: Some(reason), seen: None })
    };
    running.stand_still(true)?;
    let loaded = match schedulers::load(scheduler)? {
        Ok(loaded) => loaded,
        Err(reason) => return refused(reason),
    };
    running.stand_still(false)?;
    let seen = watch(running, load, size)?;
    match loaded.end()? {
        Ok(()) => Ok(Outcome { scheduler, refused: None, seen: Some(seen) }),
        Err(reason) => refused(reason),
    }
}

fn watch(running: &Running, load: Load, size: Size) -> Result<Seen> {
    if load == Load::Build {
        return build::watch(size.files);
    }
    let (settles, window) = load.window_s();
    thread::sleep(Duration::from_secs_f64(settles));
    running.watch(window * size.part)
}
