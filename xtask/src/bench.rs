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
mod scheduler;
mod topology;
mod vprobe;

use anyhow::{Context, Result, ensure};
use clap::{FromArgMatches, Subcommand};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use vnuma_bench_figures::{
    cells::{Options, Part},
    configuration::{self, Input},
    ending,
    report::{Form, Results},
};
use vnuma_lab_runner::{
    Image, Progress, RunDirectory, build_binaries, build_release_binaries, end_on_signals, run_directory,
};
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
    Daemon(Common),
    /// What a decision of each scheduling policy costs, with 4096 vCPUs on 64 nodes, placing a VM, and a look at 1 TiB
    Decide(Common),
    /// How fast pages move between nodes: each protocol, its parts, and the floor
    Dsm(Common),
    /// What placements do for a fleet of servers, compared with the rules of others, simulated
    Fleet(Common),
    /// What the lab's counters cost: boot and loops, with and without, interleaved
    Lab(Common),
    /// What memory policies do for VMs whose memory is displaced, beside AutoNUMA and others
    Memory(memory::Arguments),
    /// How long it takes until the guest of a VM that migrates is told where it is
    Migrate(Common),
    /// What the place of a VM costs its workloads on passthrough devices
    Nuioa(nuioa::Arguments),
    /// What language runtimes and allocators in a VM lose when its vCPUs move, by who is told
    Runtimes(runtimes::Arguments),
    /// What scx_vnuma does for guests as a host's scheduler, beside EEVDF and schedulers of scx
    Scheduler(scheduler::Arguments),
    /// How fast guests of each kernel are updated, and what that costs
    Topology(topology::Arguments),
    /// What scheduling policies do for VMs on a NUMA server, compared with Linux, numad and the paper's
    Vprobe(vprobe::Arguments),
}

/// What each benchmark understands.
#[derive(Clone, Copy, Default, clap::Args)]
struct Common {
    #[command(flatten)]
    form: Form,
    /// Print the report instead of a table
    #[arg(long)]
    json: bool,
    /// Measure again what was measured before
    #[arg(long)]
    anew: bool,
    #[command(flatten)]
    part: Part,
}

/// A benchmark that is run: where its report and its cells are, and what is measured.
struct Run {
    results: Results,
    options: Options,
}

impl Common {
    fn has_one_form(&self) -> Result<()> {
        ensure!(!self.form.full, "this benchmark has one form, and a short one");
        Ok(())
    }

    /// That of a name. These files and folders decide the figures. What was measured before is kept if they are what they were then; a short
    /// form always measures.
    fn run(&self, name: &str, inputs: &[Input]) -> Result<Run> {
        let Self { form, json, anew, part } = *self;
        let folder = if form.smoke { format!("{name}-smoke") } else { name.to_owned() };
        let directory = workspace().join("target/bench").join(folder);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let configuration = configuration::of(if form.smoke { &[] } else { inputs })?.hash;
        let store = directory.join(format!("{}-{configuration}.jsonl", form.name()));
        if (anew || form.smoke) && store.exists() {
            fs::remove_file(&store).with_context(|| store.display().to_string())?;
        }
        let options = Options { commit: commit(), configuration, store: Some(store), part };
        Ok(Run { results: Results { directory, form, json }, options })
    }
}

impl Run {
    fn store(&self) -> &Path {
        self.options.store.as_deref().unwrap_or(&self.results.directory)
    }

    /// For a program that measures, and finds the store there.
    fn to_measure(&self, store: &Path) -> Vec<String> {
        let Options { commit, configuration, part: Part { cells, minutes }, .. } = &self.options;
        let numbers = [("--cells", cells.map(|cells| cells as u64)), ("--minutes", *minutes)];
        let numbers = numbers.into_iter().filter_map(|(name, number)| Some((name, number?.to_string())));
        [("--commit", commit.clone()), ("--configuration-hash", configuration.clone())]
            .into_iter()
            .chain([("--store", store.display().to_string())])
            .chain(numbers)
            .flat_map(|(name, value)| [name.to_owned(), value])
            .collect()
    }

    /// For a program that writes the report.
    fn to_report(&self) -> Vec<String> {
        let Results { directory, form, json } = &self.results;
        let json = json.then(|| "--json".to_owned());
        let directory = ["--directory".to_owned(), directory.display().to_string()];
        directory.into_iter().chain(form.words()).chain(json).collect()
    }
}

/// By their own names.
fn inputs(paths: &[PathBuf]) -> Vec<Input> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    paths.iter().map(|path| Input { name: name(path), path: path.clone() }).collect()
}

/// What decides figures of this machine, besides programs: its kernel, and the CPUs that it has.
fn of_machine() -> Vec<Input> {
    inputs(&["/proc/sys/kernel/osrelease", "/sys/devices/system/cpu/online"].map(PathBuf::from))
}

/// The same of the lab's servers: all that they are made of.
fn of_lab() -> Result<Vec<Input>> {
    let image = Image::ensure(Progress::Show)?;
    // Names and versions of everything in the image; the kernels themselves, as they are entered.
    let packages = Input { name: "packages".to_owned(), path: image.tree().join("var/lib/dpkg/status") };
    let kernels = image.kernels().iter().enumerate();
    let kernels = kernels
        .map(|(number, kernel)| Input { name: format!("kernel-{number}"), path: image.vmlinux(kernel) });
    let folders = ["lab", "abi/lab-counters"]
        .map(|folder| Input { name: folder.to_owned(), path: workspace().join(folder) });
    Ok([packages].into_iter().chain(kernels).chain(folders).collect())
}

/// Builds programs and runs the last one here, with the arguments that it gets of all of them. It measures and judges.
fn run_here(
    common: &Common,
    name: &str,
    programs: &[(&str, &str)],
    arguments: impl FnOnce(&[PathBuf], &Run) -> Result<Vec<OsString>>,
) -> Result<()> {
    let built = build(common.form.smoke, programs)?;
    let run = common.run(name, &[inputs(&built), of_machine()].concat())?;
    let mut program = Command::new(built.last().context("the benchmark's program")?);
    program.args(arguments(&built, &run)?).args(run.to_measure(run.store())).args(run.to_report());
    let _scratch = with_scratch(&mut program)?;
    judged(&mut program)
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
            Self::Daemon(common) => daemon::run(common),
            Self::Decide(common) => decide::run(common),
            Self::Dsm(common) => dsm::run(common),
            Self::Fleet(common) => fleet::run(common),
            Self::Lab(common) => lab::run(common),
            Self::Memory(arguments) => memory::run(arguments),
            Self::Migrate(common) => migrate::run(common),
            Self::Nuioa(arguments) => nuioa::run(arguments),
            Self::Runtimes(arguments) => runtimes::run(arguments),
            Self::Scheduler(arguments) => scheduler::run(arguments),
            Self::Topology(arguments) => topology::run(arguments),
            Self::Vprobe(arguments) => vprobe::run(arguments),
        }
    }
}

/// Benchmarks with a short form that runs on this machine itself.
pub const SMOKE_HERE: [&str; 4] = ["daemon", "decide", "dsm", "fleet"];
/// Those whose short form boots a lab server, or two.
pub const SMOKE_IN_LAB: [&str; 8] =
    ["lab", "memory", "migrate", "nuioa", "runtimes", "scheduler", "topology", "vprobe"];

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
