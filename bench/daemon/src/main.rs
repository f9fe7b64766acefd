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
mod qemu;
mod readers;
mod row;
mod rpc;
mod vms;
mod yardstick;

use anyhow::Context;
use clap::Parser;
use figures::{Row, goals};
use growth::Growth;
use readers::Clients;
use row::Plan;
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode, time::Duration};
use vnuma_bench_figures::{
    ending,
    goals::{Limit, check_limits},
    stats::load_average,
};

#[derive(Parser)]
#[command(name = "bench-daemon", about = "What vnumad costs with hundreds of VMs")]
enum Command {
    /// All rows; the last line on stdout is one JSON object
    Run {
        /// The daemon to measure
        #[arg(long)]
        vnumad: PathBuf,
        /// Longer windows, and more rows
        #[arg(long)]
        full: bool,
        /// A few VMs for some seconds, which say only that it works
        #[arg(long, conflicts_with = "full")]
        smoke: bool,
        /// One row only: BACKEND,LOCATIONS,VMS,MOVES_PER_S[,scrapers]
        #[arg(long, value_name = "ROW")]
        only: Option<String>,
        /// How the cost of a move grows with the number of VMs, and no row
        #[arg(long, conflicts_with_all = ["full", "smoke", "only"])]
        growth: bool,
        /// Seconds of each window
        #[arg(long)]
        seconds: Option<u64>,
        /// Keeps vnumad's log there
        #[arg(long, value_name = "FILE")]
        log: Option<PathBuf>,
    },
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
}

/// What is printed for xtask.
#[derive(Serialize)]
struct Report {
    source: &'static str,
    configuration: Configuration,
    /// What the system calls of a move cost by themselves, before each row and after the last one.
    yardstick_us: Vec<f64>,
    rows: Vec<Row>,
    /// `None`: not asked for.
    growth: Option<Growth>,
    goals: Vec<Limit>,
}

#[derive(Serialize)]
struct Configuration {
    full: bool,
    kernel: String,
    cpus: usize,
    vcpus_per_vm: usize,
    readers: readers::Configuration,
    rest_s: u64,
    moves_s: u64,
    load_average_before: f64,
    load_average_after: f64,
}

/// By what VMs are found and locations are learned, VMs, moves a second, and who asks meanwhile.
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
        Command::Compare { vnumad, beside } => {
            println!("{}", serde_json::to_string(&compared::measure(&vnumad, &beside)?)?);
            Ok(())
        }
        Command::Run { vnumad, full, smoke, only, growth, seconds, log } => {
            let seconds = seconds.unwrap_or(if full { 60 } else { 20 - 18 * u64::from(smoke) });
            let (only_growth, growth) = (growth, growth || only.is_none() && !smoke);
            let rows = match only {
                Some(row) => vec![parse_row(&row)?],
                None if only_growth => Vec::new(),
                None if full => FULL.into(),
                None if smoke => SMOKE.into(),
                None => REDUCED.into(),
            };
            let window = Duration::from_secs(seconds);
            let load_average_before = load_average();
            let (mut measured, mut yardstick_us) = (Vec::new(), vec![yardstick::measure()?]);
            for (number, &(backend, locations, vms, moves_per_s, clients)) in rows.iter().enumerate() {
                eprintln!(
                    "row {} of {}: {backend}, {locations}, {vms} VMs, {moves_per_s} moves a second, {clients:?}",
                    number + 1,
                    rows.len()
                );
                let plan = Plan {
                    vnumad: &vnumad,
                    backend,
                    locations,
                    vms,
                    moves_per_s,
                    clients,
                    window,
                    log: log.as_deref(),
                };
                let row = row::measure(&plan)?;
                eprintln!("{}\n{}", figures::HEADING, row.line());
                measured.push(row);
                yardstick_us.push(yardstick::measure()?);
            }
            let growth = growth.then(|| growth::measure(&vnumad, log.as_deref())).transpose()?;
            eprintln!("yardstick: {yardstick_us:.2?} us of CPU time for the system calls of a move");
            let report = Report {
                source: "measured",
                configuration: Configuration {
                    full,
                    kernel: nix::sys::utsname::uname()?.release().to_string_lossy().into_owned(),
                    cpus: std::thread::available_parallelism()?.get(),
                    vcpus_per_vm: vms::VCPUS,
                    readers: readers::CONFIGURATION,
                    rest_s: seconds,
                    moves_s: seconds,
                    load_average_before,
                    load_average_after: load_average(),
                },
                goals: if smoke { Vec::new() } else { goals(&measured, growth.as_ref(), &yardstick_us) },
                yardstick_us,
                rows: measured,
                growth,
            };
            println!("{}", serde_json::to_string(&report)?);
            check_limits(&report.goals)
        }
    }
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
