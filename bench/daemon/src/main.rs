//! What vnumad costs on a host with hundreds of VMs, and how fast it publishes: the program behind
//! `make bench NAME=daemon`.
//!
//! ```text
//!  bench-daemon ── sched_setaffinity ──▶ vCPU threads of bench-daemon qemu (one process for each VM)
//!    │  readers ──── HTTP ────▶ vnumad ◀── QMP ─┤                      ▲
//!    │                            └── channel ──┴─▶ guest thread ── notes the time ──▶ Board
//!    └◀──────────────────────────── latencies ────────────────────────────────────────┘
//! ```
//!
//! Instead of QMP it may be the real libvirt in vnumad that talks to a stand-in for libvirtd ([`libvirtd`]).
//!
//! vnumad is the real one, on this machine and not under emulation. The host's sysfs tree is made up, so that each CPU of
//! the machine is a node of its own.

mod board;
mod compared;
mod daemon;
mod figures;
mod growth;
mod guest;
mod host;
mod libvirtd;
mod moves;
mod pressure;
mod qemu;
mod readers;
mod row;
mod rpc;
mod start;
mod vms;
mod yardstick;

use anyhow::Context;
use clap::Parser;
use figures::{Measured, goals, table};
use pressure::Pressure;
use readers::Clients;
use row::Plan;
use serde_json::json;
use start::Start;
use std::{path::PathBuf, process::ExitCode, time::Duration};
use vnuma_bench_figures::{
    cells::{Cells, Options},
    ending,
    report::{Form, Results},
    stats::load_average,
};
use yardstick::Yardstick;

#[derive(Parser)]
#[command(name = "bench-daemon", about = "What vnumad costs with hundreds of VMs")]
enum Command {
    /// All rows
    Run(Arguments),
    /// What a move costs, beside another vnumad that is moved in turn; one JSON object on stdout
    Compare {
        /// The daemon to measure
        #[arg(long)]
        vnumad: PathBuf,
        /// Another one, such as that of an earlier commit
        #[arg(long, value_name = "VNUMAD")]
        beside: PathBuf,
    },
    /// Plays the QEMU of one VM
    #[command(hide = true)]
    Qemu(qemu::Arguments),
    /// Plays a client of the API that wants as much as it can get
    #[command(hide = true)]
    Press(pressure::Arguments),
}

#[derive(clap::Args)]
struct Arguments {
    /// The daemon to measure
    #[arg(long)]
    vnumad: PathBuf,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    results: Results,
    /// One row only: BACKEND,LOCATIONS,VMS,MOVES_PER_S[,scrapers]
    #[arg(long, value_name = "ROW")]
    only: Option<String>,
    /// No row, and this part only
    #[arg(long, conflicts_with_all = ["full", "only"])]
    part: Option<Part>,
    /// Seconds of each window
    #[arg(long)]
    seconds: Option<u64>,
    /// Keeps vnumad's log there
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

/// What is measured beside the rows.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// How the cost of a move grows with the number of VMs
    Growth,
    /// How fast it publishes while others want as much as they can get
    Pressure,
    /// VMs that all start while it runs
    Start,
}

/// How VMs are found, how locations are learned, the number of VMs, moves a second, and which clients send requests.
type Wanted = (&'static str, &'static str, usize, u64, Clients);

/// Of the reduced form: the rows that have the goals, a small and a large host, and polling.
const REDUCED: [Wanted; 6] = [
    ("qmp", "bpf", 100, 500, Clients::Readers),
    ("qmp", "bpf", 500, 1000, Clients::Readers),
    ("libvirt", "bpf", 500, 1000, Clients::Readers),
    ("libvirt", "bpf", 200, 500, Clients::Scrapers),
    ("qmp", "bpf", 1000, 500, Clients::Readers),
    ("qmp", "poll", 500, 1000, Clients::Readers),
];

/// Of each kind one, so small that nothing can be judged.
const SMOKE: [Wanted; 4] = [
    ("qmp", "bpf", 10, 100, Clients::Readers),
    ("libvirt", "bpf", 5, 50, Clients::Readers),
    ("qmp", "poll", 10, 100, Clients::Readers),
    ("qmp", "bpf", 5, 50, Clients::Scrapers),
];

/// Of the reference.
const FULL: [Wanted; 12] = [
    ("qmp", "bpf", 100, 500, Clients::Readers),
    ("qmp", "bpf", 250, 500, Clients::Readers),
    ("qmp", "bpf", 500, 500, Clients::Readers),
    ("qmp", "bpf", 500, 1000, Clients::Readers),
    ("qmp", "bpf", 1000, 500, Clients::Readers),
    ("qmp", "poll", 100, 500, Clients::Readers),
    ("qmp", "poll", 500, 1000, Clients::Readers),
    ("libvirt", "bpf", 100, 500, Clients::Readers),
    ("libvirt", "bpf", 500, 1000, Clients::Readers),
    ("libvirt", "poll", 500, 1000, Clients::Readers),
    ("qmp", "bpf", 200, 500, Clients::Scrapers),
    ("libvirt", "bpf", 200, 500, Clients::Scrapers),
];

fn main() -> ExitCode {
    ending::main(run)
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Qemu(arguments) => qemu::run(&arguments),
        Command::Press(arguments) => pressure::press_until_killed(&arguments),
        Command::Compare { vnumad, beside } => {
            println!("{}", serde_json::to_string(&compared::measure(&vnumad, &beside)?)?);
            Ok(())
        }
        Command::Run(arguments) => measure(arguments),
    }
}

impl Arguments {
    fn rows(&self) -> anyhow::Result<Vec<Wanted>> {
        Ok(match (&self.only, self.results.form) {
            (Some(row), _) => vec![parse_row(row)?],
            (None, _) if self.part.is_some() => Vec::new(),
            (None, Form { full: true, .. }) => FULL.into(),
            (None, Form { smoke: true, .. }) => SMOKE.into(),
            (None, _) => REDUCED.into(),
        })
    }
}

fn measure(arguments: Arguments) -> anyhow::Result<()> {
    let rows = arguments.rows()?;
    let Arguments { vnumad, options, results, only, part, seconds, log } = arguments;
    let Form { full, smoke } = results.form;
    let seconds = seconds.unwrap_or(if full { 60 } else { 20 - 19 * u64::from(smoke) });
    let (window, log, load_average_before) = (Duration::from_secs(seconds), log.as_deref(), load_average());
    let (mut cells, mut measured) = (Cells::stored(&options)?, Vec::new());
    for (backend, locations, vms, moves_per_s, clients) in rows {
        let name = format!(
            "{backend}, {locations}, {vms} VMs, {moves_per_s} moves a second, {clients:?}, windows of {seconds} s"
        );
        let vnumad = &vnumad;
        let plan = Plan { vnumad, backend, locations, vms, moves_per_s, clients, window, log };
        measured.extend(cells.measure(&name, || {
            let before = Yardstick::measure()?;
            let row = row::measure(&plan)?;
            let shown = format!("\n{}{before:.2?}", table(std::slice::from_ref(&row)));
            Ok((Measured { row, yardsticks: [before, Yardstick::measure()?] }, shown))
        })?);
    }
    let wanted = |one: Part| part.map_or(only.is_none(), |part| part == one);
    let growth = match wanted(Part::Growth) && !smoke {
        true => cells.measure("growth", || Ok((growth::measure(&vnumad, log)?, String::new())))?,
        false => None,
    };
    let sized = |name: &str| if smoke { format!("{name}, small") } else { name.to_owned() };
    let press = || Ok((pressure::measure(&vnumad, log, smoke)?, String::new()));
    let pressure = wanted(Part::Pressure).then(|| cells.measure(&sized("pressure"), press)).transpose()?;
    let pressure = pressure.flatten().unwrap_or_default();
    let mut starts = Vec::new();
    for backend in ["qmp", "libvirt"].into_iter().filter(|_| wanted(Part::Start)) {
        let name = sized(&format!("start, {backend}"));
        let start = || Ok((start::measure(&vnumad, log, backend, smoke)?, String::new()));
        starts.extend(cells.measure(&name, start)?);
    }
    let mut goals = goals(&measured, growth.as_ref());
    goals.extend(pressure.iter().flat_map(Pressure::goals));
    goals.extend(starts.iter().flat_map(Start::goals));
    goals.retain(|_| !smoke);
    let each: Vec<&Yardstick> = measured.iter().flat_map(|one| &one.yardsticks).collect();
    let rows: Vec<_> = measured.iter().map(|one| one.row.clone()).collect();
    let report = json!({
        "source": "measured",
        "commit": options.commit,
        "measured_by": cells.measured_by,
        "configuration": {
            "full": full,
            "kernel": nix::sys::utsname::uname()?.release().to_string_lossy(),
            "cpus": std::thread::available_parallelism()?,
            "vcpus_per_vm": vms::VCPUS,
            "readers": readers::CONFIGURATION,
            "rest_s": seconds,
            "moves_s": seconds,
            "load_average_before": load_average_before,
            "load_average_after": load_average(),
        },
        // Before and after each row.
        "yardstick_us": each.iter().map(|one| one.us).collect::<Vec<_>>(),
        "yardstick_ms": each.iter().map(|one| one.ms).collect::<Vec<_>>(),
        "rows": rows,
        "growth": growth,
        "pressure": pressure,
        "starts": starts,
        "goals": goals,
    });
    let judged = results.end(&report, &table(&rows), &goals);
    cells.end().and(judged)
}

fn parse_row(text: &str) -> anyhow::Result<Wanted> {
    let words: Vec<&str> = text.split(',').collect();
    let (words, clients) = match &words[..] {
        [first @ .., "scrapers"] => (first, Clients::Scrapers),
        all => (all, Clients::Readers),
    };
    let &[backend, locations, vms, rate] = words else {
        anyhow::bail!("{text}: not BACKEND,LOCATIONS,VMS,MOVES_PER_S[,scrapers]")
    };
    let one_of = |word: &str, known: [&'static str; 2]| {
        let found = known.into_iter().find(|&one| one == word);
        found.with_context(|| format!("{word}: neither {} nor {}", known[0], known[1]))
    };
    let (backend, locations) = (one_of(backend, ["qmp", "libvirt"])?, one_of(locations, ["bpf", "poll"])?);
    Ok((backend, locations, vms.parse().context("VMS")?, rate.parse().context("MOVES_PER_S")?, clients))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_four_words_or_five() {
        let row = ("libvirt", "bpf", 500, 1000, Clients::Readers);
        assert_eq!(parse_row("libvirt,bpf,500,1000").unwrap(), row);
        let scraped = ("qmp", "poll", 200, 5, Clients::Scrapers);
        assert_eq!(parse_row("qmp,poll,200,5,scrapers").unwrap(), scraped);
        for wrong in
            ["", "bpf", "qmp,bpf,1", "magic,bpf,1,1", "qmp,magic,1,1", "qmp,poll,x,1", "qmp,poll,1,1,1"]
        {
            assert!(parse_row(wrong).is_err(), "{wrong}");
        }
    }
}
