//! `cargo xtask bench [NAME]`: benchmarks, each with a report in `target/bench/NAME/report.json`.

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

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use std::process::Command;
use vnuma_bench_figures::{ending, goals};

use crate::steps::workspace;

/// A benchmark: its name, what it measures, and the function that does.
type Bench = (&'static str, &'static str, fn(&Options) -> Result<()>);

const BENCHES: [Bench; 11] = [
    (
        "daemon",
        "what vnumad costs with hundreds of VMs, and how fast it publishes, on this machine",
        daemon::run,
    ),
    (
        "decide",
        "what a decision of each scheduling policy costs, with 4096 vCPUs on 64 nodes, placing a VM, and a look at 1 TiB",
        |options| {
            options.refuse()?;
            decide::run()
        },
    ),
    ("dsm", "how fast pages move between nodes: each protocol, its parts, and the floor", |options| {
        options.refuse()?;
        dsm::run()
    }),
    (
        "fleet",
        "what placements do for a fleet of servers, compared with the rules of others, simulated",
        fleet::run,
    ),
    ("lab", "what the lab's counters cost: boot and loops, with and without, interleaved", |options| {
        options.refuse()?;
        lab::run()
    }),
    (
        "memory",
        "what memory policies do for VMs whose memory is displaced, beside AutoNUMA and others",
        memory::run,
    ),
    ("migrate", "how long it takes until the guest of a VM that migrates is told where it is", migrate::run),
    ("nuioa", "what the place of a VM costs its workloads on passthrough devices", nuioa::run),
    (
        "runtimes",
        "what language runtimes and allocators in a VM lose when its vCPUs move, by who is told",
        runtimes::run,
    ),
    ("topology", "how fast guests of each kernel are updated, and what that costs", topology::run),
    (
        "vprobe",
        "what scheduling policies do for VMs on a NUMA server, compared with Linux, numad and the paper's",
        vprobe::run,
    ),
];

#[derive(clap::Args)]
pub struct Arguments {
    /// Which one; without it the list is printed
    name: Option<String>,
    #[command(flatten)]
    options: Options,
}

/// How a benchmark is run that has more than one form.
#[derive(clap::Args)]
pub struct Options {
    /// The full form, which takes longer
    #[arg(long)]
    full: bool,
    /// Print the report instead of a table
    #[arg(long)]
    json: bool,
    /// topology: only these guest kernels, and nothing that needs no kernel of its own
    #[arg(long, value_name = "KERNEL")]
    kernel: Vec<String>,
    /// vprobe, nuioa, runtimes: only these workloads
    #[arg(long, value_name = "WORKLOAD")]
    workload: Vec<String>,
    /// nuioa: only these configurations
    #[arg(long, value_name = "CONFIGURATION")]
    configuration: Vec<String>,
    /// memory: only these causes
    #[arg(long, value_name = "CAUSE")]
    cause: Vec<String>,
    /// vprobe, memory, runtimes: only these policies
    #[arg(long, value_name = "POLICY")]
    policy: Vec<String>,
    /// runtimes: only so many changes a minute, for a VM of 16 vCPUs
    #[arg(long, value_name = "N")]
    changes: Vec<u32>,
    /// runtimes: only changes by hand, or by a balancer
    #[arg(long, value_name = "MOVER")]
    by: Vec<String>,
    /// runtimes: only with the guest's AutoNUMA on, or off
    #[arg(long, value_name = "SWITCH")]
    autonuma: Vec<String>,
    /// vprobe: set the places of vnumad's policies by scx_vnuma, not by affinities
    #[arg(long)]
    sched_ext: bool,
    /// vprobe --full: only these parts
    #[arg(long, value_name = "PART")]
    part: Vec<String>,
    /// vprobe, runtimes, with --full: at most so many cells now; the next run goes on
    #[arg(long, value_name = "N")]
    cells: Option<usize>,
    /// vprobe, runtimes, with --full: begin no cell after so many minutes; the next run goes on
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u64>,
}

impl Options {
    /// For one that has one form only.
    fn refuse(&self) -> Result<()> {
        ensure!(!self.full && !self.json, "this benchmark has neither --full nor --json");
        Ok(())
    }

    /// What only one benchmark has.
    fn refuse_parts(&self, name: &str) -> Result<()> {
        let parts = [
            (&["topology"][..], "--kernel", &self.kernel),
            (&["vprobe", "nuioa", "runtimes"][..], "--workload", &self.workload),
            (&["nuioa"], "--configuration", &self.configuration),
            (&["memory"], "--cause", &self.cause),
            (&["vprobe", "memory", "runtimes"], "--policy", &self.policy),
            (&["runtimes"], "--by", &self.by),
            (&["runtimes"], "--autonuma", &self.autonuma),
            (&["vprobe"], "--part", &self.part),
        ];
        let pieces = [("--cells", self.cells.is_some()), ("--minutes", self.minutes.is_some())];
        let has_pieces = ["vprobe", "runtimes"].contains(&name);
        if let Some((option, _)) = pieces.iter().find(|(_, given)| *given && !(has_pieces && self.full)) {
            bail!("only vprobe and runtimes have {option}, with --full");
        }
        match parts.iter().find(|(of, _, chosen)| !of.contains(&name) && !chosen.is_empty()) {
            Some((of, option, _)) => bail!("only {} has {option}", of.join(" and ")),
            None if !self.changes.is_empty() && name != "runtimes" => bail!("only runtimes has --changes"),
            None if self.sched_ext && name != "vprobe" => bail!("only vprobe has --sched-ext"),
            None => Ok(()),
        }
    }
}

/// Runs a benchmark, or lists them.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Some(name) = &arguments.name else {
        for (name, about, _) in BENCHES {
            println!("{name:<12} {about}");
        }
        return Ok(());
    };
    match BENCHES.iter().find(|(known, _, _)| known == name) {
        Some((_, _, bench)) => {
            arguments.options.refuse_parts(name)?;
            bench(&arguments.options)
        }
        None => {
            let known = BENCHES.map(|(name, _, _)| name).join(", ");
            bail!("benchmark {name:?} is unknown; there are: {known}")
        }
    }
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

/// Runs a program that measures or judges. What it ends with says whether goals are missed.
fn judged(program: &mut Command) -> Result<()> {
    let name = program.get_program().to_string_lossy().into_owned();
    let status = program.current_dir(workspace()).status().with_context(|| name.clone())?;
    ending::of(&name, status)
}

/// The goals of a report, each with a `name`, a `value` that is null if it was not measured, and `met`.
fn check_goals(report: &Value) -> Result<()> {
    let goals = report["goals"].as_array().context("a report without goals")?;
    let outcome = |goal: &Value| goal["met"].as_bool().filter(|_| !goal["value"].is_null());
    goals::check(goals.iter().map(|goal| (goal["name"].as_str().unwrap_or_default(), outcome(goal))))
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
