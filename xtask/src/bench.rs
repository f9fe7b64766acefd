//! `cargo xtask bench [NAME]`: benchmarks, each with a report in `target/bench/NAME/report.json`. That of a short form is in
//! `target/bench/NAME-smoke`.

mod daemon;
mod decide;
mod dsm;
mod fleet;
mod lab;
mod memory;
mod migrate;
mod nuioa;
mod on_server;
mod peer;
mod runtimes;
mod topology;
mod vprobe;

use anyhow::{Context, Result};
use clap::{FromArgMatches, Subcommand};
use serde::Serialize;
use serde_json::Value;
use std::{path::PathBuf, process::Command};
use vnuma_bench_figures::{
    ending,
    goals::{Limit, check_limits},
};
use vnuma_lab_runner::{RunDirectory, build_binaries, build_release_binaries, end_on_signals, run_directory};
use vnuma_scenario::waiting;

use crate::steps::workspace;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    /// Which one; without it the list is printed
    #[command(subcommand)]
    which: Option<Which>,
    /// The short form of each, one after the other
    #[arg(long)]
    smoke: bool,
}

#[derive(Subcommand)]
enum Which {
    /// What vnumad costs with hundreds of VMs, and how fast it publishes, on this machine
    Daemon(FormAndJson),
    /// What a decision of each scheduling policy costs, with 4096 vCPUs on 64 nodes, placing a VM, and a look at 1 TiB
    Decide(Form),
    /// How fast pages move between nodes: each protocol, its parts, and the floor
    Dsm(Form),
    /// What placements do for a fleet of servers, compared with the rules of others, simulated
    Fleet(FormAndJson),
    /// What the lab's counters cost: boot and loops, with and without, interleaved
    Lab(Form),
    /// What memory policies do for VMs whose memory is displaced, beside AutoNUMA and others
    Memory(memory::Arguments),
    /// How long it takes until the guest of a VM that migrates is told where it is
    Migrate(Form),
    /// What the place of a VM costs its workloads on passthrough devices
    Nuioa(nuioa::Arguments),
    /// What language runtimes and allocators in a VM lose when its vCPUs move, by who is told
    Runtimes(runtimes::Arguments),
    /// How fast guests of each kernel are updated, and what that costs
    Topology(topology::Arguments),
    /// What scheduling policies do for VMs on a NUMA server, compared with Linux, numad and the paper's
    Vprobe(vprobe::Arguments),
}

/// How much is measured.
#[derive(Clone, Copy, Default, clap::Args)]
struct Form {
    /// The full form, which takes longer
    #[arg(long, conflicts_with = "smoke")]
    full: bool,
    /// A form of at most two minutes, of which nothing is judged but that figures come out
    #[arg(long)]
    smoke: bool,
}

#[derive(clap::Args)]
struct FormAndJson {
    #[command(flatten)]
    form: Form,
    /// Print the report instead of a table
    #[arg(long)]
    json: bool,
}

impl Form {
    /// For a program that has both.
    fn words(self) -> Vec<String> {
        let words = [(self.full, "--full"), (self.smoke, "--smoke")];
        words.into_iter().filter(|(chosen, _)| *chosen).map(|(_, word)| word.to_owned()).collect()
    }

    fn name(self) -> &'static str {
        match self {
            Self { full: true, .. } => "full",
            Self { smoke: true, .. } => "smoke",
            _ => "reduced",
        }
    }

    /// The folder of the report: a short form leaves that of others alone.
    fn folder(self, name: &str) -> String {
        if self.smoke { format!("{name}-smoke") } else { name.to_owned() }
    }
}

/// Runs a benchmark, or lists them.
pub fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.which {
        Some(which) => which.run(),
        None if arguments.smoke => SMOKE_HERE.into_iter().chain(SMOKE_IN_LAB).try_for_each(smoke),
        None => {
            for bench in list().get_subcommands() {
                println!("{:<12} {}", bench.get_name(), bench.get_about().cloned().unwrap_or_default());
            }
            Ok(())
        }
    }
}

fn list() -> clap::Command {
    Which::augment_subcommands(clap::Command::new("bench"))
}

impl Which {
    fn run(&self) -> Result<()> {
        match self {
            Self::Daemon(arguments) => daemon::run(arguments),
            Self::Decide(form) => decide::run(*form),
            Self::Dsm(form) => dsm::run(*form),
            Self::Fleet(arguments) => fleet::run(arguments),
            Self::Lab(form) => lab::run(*form),
            Self::Memory(arguments) => memory::run(arguments),
            Self::Migrate(form) => migrate::run(*form),
            Self::Nuioa(arguments) => nuioa::run(arguments),
            Self::Runtimes(arguments) => runtimes::run(arguments),
            Self::Topology(arguments) => topology::run(arguments),
            Self::Vprobe(arguments) => vprobe::run(arguments),
        }
    }
}

/// Benchmarks with a short form that runs on this machine itself.
pub const SMOKE_HERE: [&str; 4] = ["daemon", "decide", "dsm", "fleet"];
/// Those whose short form boots a lab server, or two.
pub const SMOKE_IN_LAB: [&str; 7] = ["lab", "memory", "migrate", "nuioa", "runtimes", "topology", "vprobe"];

/// The short form of a benchmark.
pub fn smoke(name: &str) -> Result<()> {
    println!("short form of {name}");
    let matches = list().try_get_matches_from(["bench", name, "--smoke"])?;
    Which::from_arg_matches(&matches)?.run()
}

/// The commit that is measured, if this is a checkout.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(workspace()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".to_owned() };
    let clean = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| text.is_empty());
    if clean { commit } else { commit + " with changes" }
}

/// Builds programs, of packages: as users have them, or for a short form as tests do.
fn build(smoke: bool, programs: &[(&str, &str)]) -> Result<Vec<PathBuf>> {
    let _waiting = waiting("cargo to build the programs");
    Ok(if smoke { build_binaries(programs) } else { build_release_binaries(programs) }?)
}

/// Has a program keep its temporary files where they are removed at an interrupt, too.
fn with_scratch(program: &mut Command) -> Result<RunDirectory> {
    end_on_signals().context("signal handlers")?;
    let directory = run_directory()?;
    program.env("TMPDIR", directory.path());
    Ok(directory)
}

/// Runs a program that measures or judges. What it ends with says whether goals are missed.
fn judged(program: &mut Command) -> Result<()> {
    let name = program.get_program().to_string_lossy().into_owned();
    let status = program.current_dir(workspace()).status().with_context(|| name.clone())?;
    ending::of(&name, status)
}

/// Prints the goals of a report, and checks them.
fn check_goals(report: &Value) -> Result<()> {
    let goals: Vec<Limit> = serde_json::from_value(report["goals"].clone()).context("goals of the report")?;
    goals.iter().for_each(|goal| println!("{goal}"));
    check_limits(&goals)
}

/// Writes a report and says where.
fn write_report(name: &str, report: &impl Serialize) -> Result<()> {
    let directory = workspace().join("target/bench").join(name);
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let path = directory.join("report.json");
    let text = serde_json::to_string_pretty(report)? + "\n";
    std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    // Not among what may be read by a program.
    eprintln!("report: {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_benchmark_has_a_short_form() {
        let mut names: Vec<&str> = SMOKE_HERE.into_iter().chain(SMOKE_IN_LAB).collect();
        names.sort_unstable();
        let list = list();
        let known: Vec<&str> = list.get_subcommands().map(clap::Command::get_name).collect();
        assert_eq!(names, known);
        for name in names {
            let matches = list.clone().try_get_matches_from(["bench", name, "--smoke"]);
            assert!(matches.is_ok_and(|matches| Which::from_arg_matches(&matches).is_ok()), "{name}");
        }
    }
}
