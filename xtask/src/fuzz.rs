//! `cargo xtask fuzz`: runs the fuzz targets one after another, a line of a table each.
//!
//! ```text
//!  fuzz/corpus/TARGET        committed seeds, only read ──┐
//!                                                         ├─▶ libFuzzer ─▶ target/fuzz/crashes/TARGET-*
//!  target/fuzz/corpus/TARGET finds, kept across runs ◀────┘               target/fuzz/log/TARGET.log
//! ```
//!
//! The targets in Rust are one program, built with the counters of LLVM's coverage, which a stable compiler has behind
//! `-C` options. The environment says which target it is. What the guest has in C has targets in C.

use crate::steps::{run, workspace};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    io::{BufRead, BufReader, IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Seconds of each target by default.
const SECONDS: u64 = 60;

/// The variable that says otherwise, for `make soak` as well.
const SECONDS_VARIABLE: &str = "VNUMA_FUZZ_SECONDS";

/// A target in C, which `make fuzz` builds in its folder.
struct CTarget {
    name: &'static str,
    about: &'static str,
    folder: &'static str,
    program: &'static str,
}

const C_TARGETS: [CTarget; 2] = [
    CTarget {
        name: "driver-channel",
        about: "the topology channel, as the guest's driver reads it",
        folder: "guest/driver",
        program: "test/channel-fuzz",
    },
    CTarget {
        name: "runtime-page",
        about: "what libvnuma and vnuma-run read: the page of /dev/vnuma, sysfs, programs",
        folder: "guest/runtime",
        program: "build/vnuma-fuzz",
    },
];

impl CTarget {
    fn named(name: &str) -> Option<&'static Self> {
        C_TARGETS.iter().find(|target| target.name == name)
    }

    fn path(&self) -> PathBuf {
        Path::new(self.folder).join(self.program)
    }
}

/// What `-Zsanitizer` would add, and what a stable compiler takes as well: counters at the edges of the program's
/// control flow, and calls at its comparisons.
const COVERAGE: [&str; 7] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
];
/// Named, so that what is built for the host (build scripts, macros) goes without counters.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Of one input, in seconds; only a bound against hanging for ever.
const INPUT_LIMIT_SECONDS: u64 = 25;
/// Of the process, in MiB.
const MEMORY_LIMIT_MIB: u64 = 2048;
/// Lines of a log that are shown when a target fails.
const SHOWN_LINES: usize = 25;

#[derive(clap::Args)]
pub struct Arguments {
    /// Which targets, of those that --list shows; without any, all of them
    #[arg(value_name = "TARGET", value_parser = parse_target)]
    targets: Vec<String>,
    /// Seconds of each target [default: $VNUMA_FUZZ_SECONDS, or 60]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: Option<u64>,
    /// List the targets
    #[arg(long)]
    list: bool,
    /// Add to fuzz/corpus/TARGET the fewest finds of earlier runs that cover what it does not
    #[arg(long, requires = "targets", conflicts_with = "list")]
    keep: bool,
}

fn parse_target(name: &str) -> Result<String, String> {
    let known = all().map_err(|error| format!("{error:#}"))?;
    if known.iter().any(|known| known == name) {
        return Ok(name.to_owned());
    }
    Err(format!("there is no such target; there are: {}", known.join(", ")))
}

/// All targets. Each has a folder of seeds, as a test of vnuma-fuzz makes sure; this program does not depend on that
/// crate, because it installs what building that takes.
fn all() -> Result<Vec<String>> {
    let folder = seeds();
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

fn seeds() -> PathBuf {
    workspace().join("fuzz/corpus")
}

/// Runs, lists, or keeps finds.
pub fn main(arguments: &Arguments) -> Result<()> {
    crate::setup::packages()?;
    if arguments.list {
        run(Command::new("cargo").args([
            "run",
            "--quiet",
            "--locked",
            "--package",
            "vnuma-fuzz",
            "--",
            "--list",
        ]))?;
        for CTarget { name, about, .. } in C_TARGETS {
            println!("{name:<16} {about}");
        }
        return Ok(());
    }
    let names = if arguments.targets.is_empty() { all()? } else { arguments.targets.clone() };
    if arguments.keep {
        let programs = Programs::build(&names)?;
        return names.iter().try_for_each(|name| keep(&programs, name));
    }
    let seconds = arguments.seconds.map_or_else(default_seconds, Ok)?;
    fuzz(&names, seconds)
}

fn default_seconds() -> Result<u64> {
    let Ok(text) = std::env::var(SECONDS_VARIABLE) else { return Ok(SECONDS) };
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.with_context(|| format!("{SECONDS_VARIABLE}={text:?}: not a number of seconds from 1 to 86400"))
}

fn fuzz(names: &[String], seconds: u64) -> Result<()> {
    let programs = Programs::build(names)?;
    println!("{}", Row::HEADING);
    let mut broken = Vec::new();
    for name in names {
        if let Err(error) = run_target(&programs, name, seconds) {
            println!("{name} FAILED: {error:#}");
            broken.push(name.as_str());
        }
    }
    ensure!(
        broken.is_empty(),
        "{} of {} fuzz targets failed: {}",
        broken.len(),
        names.len(),
        broken.join(", ")
    );
    Ok(())
}

/// What is built, each only if it is needed.
struct Programs {
    rust: PathBuf,
}

impl Programs {
    fn build(names: &[String]) -> Result<Self> {
        let directory = workspace().join("target/fuzz/build");
        let programs = Self { rust: directory.join(TRIPLE).join("fuzz/vnuma-fuzz") };
        for target in names.iter().filter_map(|name| CTarget::named(name)) {
            run(Command::new("make").args(["--silent", "-C", target.folder, "fuzz"]))?;
        }
        if names.iter().any(|name| CTarget::named(name).is_none()) {
            println!("fuzz: building the targets with coverage (once, some minutes)");
            let mut command = Command::new("cargo");
            command.args(["build", "--quiet", "--locked", "--package", "vnuma-fuzz", "--profile", "fuzz"]);
            command.args(["--target", TRIPLE, "--target-dir"]).arg(directory);
            // clang is there for the BPF program, with the headers of C++; a g++ need not be.
            command.env("CXX", "clang++-19").env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\x1f"));
            run(&mut command)?;
        }
        Ok(programs)
    }

    fn command(&self, name: &str) -> Command {
        let program =
            CTarget::named(name).map_or_else(|| self.rust.clone(), |target| workspace().join(target.path()));
        let mut command = Command::new(program);
        command.env("VNUMA_FUZZ_TARGET", name).env("RUST_BACKTRACE", "1").current_dir(workspace());
        // libFuzzer reads these variables; here arguments say the same.
        command.env_remove("ASAN_OPTIONS").env_remove("UBSAN_OPTIONS");
        command
    }
}

/// A line of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Row {
    executions: u64,
    coverage: u64,
    features: u64,
    inputs: u64,
    size: String,
}

impl Row {
    const HEADING: &str =
        "TARGET             EXECUTIONS  SECONDS   PER SECOND  COVERAGE  FEATURES  CORPUS       SIZE";

    /// Takes what a line of libFuzzer says; behind the number stands a tab:
    /// `#8192 pulse  cov: 455 ft: 800 corp: 30/1234b lim: 80 exec/s: 4096 rss: 60Mb` and
    /// `stat::number_of_executed_units: 12345`
    fn take(&mut self, line: &str) -> bool {
        if let Some(count) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = count.trim().parse().unwrap_or(self.executions);
            return true;
        }
        let Some((count, rest)) = line.strip_prefix('#').and_then(|line| line.split_once('\t')) else {
            return false;
        };
        self.executions = count.parse().unwrap_or(self.executions);
        let mut words = rest.split_whitespace();
        while let Some(word) = words.next() {
            let value = match word {
                "cov:" | "ft:" | "corp:" => words.next().unwrap_or_default(),
                _ => continue,
            };
            match (word, value.split_once('/')) {
                ("cov:", _) => self.coverage = value.parse().unwrap_or(self.coverage),
                ("ft:", _) => self.features = value.parse().unwrap_or(self.features),
                (_, Some((inputs, size))) => {
                    self.inputs = inputs.parse().unwrap_or(self.inputs);
                    size.clone_into(&mut self.size);
                }
                _ => {}
            }
        }
        true
    }

    fn text(&self, name: &str, seconds: u64) -> String {
        let Self { executions, coverage, features, inputs, size } = self;
        let rate = executions / seconds.max(1);
        format!(
            "{name:<16} {executions:>12} {seconds:>8} {rate:>12} {coverage:>9} {features:>9} {inputs:>7} {size:>10}"
        )
    }
}

/// Directories of a target's finds and of its committed seeds.
fn corpora(name: &str) -> Result<(PathBuf, PathBuf)> {
    let finds = workspace().join("target/fuzz/corpus").join(name);
    fs::create_dir_all(&finds).with_context(|| finds.display().to_string())?;
    Ok((finds, seeds().join(name)))
}

fn run_target(programs: &Programs, name: &str, seconds: u64) -> Result<()> {
    let (finds, seeds) = corpora(name)?;
    let crashes = workspace().join("target/fuzz/crashes");
    let logs = workspace().join("target/fuzz/log");
    for directory in [&crashes, &logs] {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    let log_path = logs.join(format!("{name}.log"));
    let mut log = fs::File::create(&log_path).with_context(|| log_path.display().to_string())?;
    let mut command = programs.command(name);
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    command.arg(format!("-timeout={INPUT_LIMIT_SECONDS}")).arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"));
    command.arg(format!("-artifact_prefix={}/{name}-", crashes.display()));
    command.arg(&finds).arg(&seeds).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let start = std::time::Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let stderr = child.stderr.take().context("no standard error")?;
    let (mut row, live) = (Row::default(), std::io::stdout().is_terminal());
    for line in BufReader::new(stderr).split(b'\n') {
        let line = line?;
        log.write_all(&line).and_then(|()| log.write_all(b"\n"))?;
        if row.take(&String::from_utf8_lossy(&line)) && live {
            print!("\r{}", row.text(name, start.elapsed().as_secs()));
            std::io::stdout().flush()?;
        }
    }
    let status = child.wait()?;
    println!("{}{}", if live { "\r" } else { "" }, row.text(name, start.elapsed().as_secs()));
    if !status.success() {
        bail!("{status}\n{}", explain(name, &log_path)?);
    }
    // A target that nothing guides would look as if it had found nothing.
    ensure!(
        row.coverage > 0 && row.executions > 0,
        "no coverage or no executions: see {}",
        log_path.display()
    );
    Ok(())
}

/// The end of a target's log, and how to feed the input again.
fn explain(name: &str, log: &Path) -> Result<String> {
    let bytes = fs::read(log).with_context(|| log.display().to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    // What the target said is above libFuzzer's own words and its stack.
    let panic =
        lines.iter().position(|line| line.contains("panicked at") || line.starts_with("==")).unwrap_or(0);
    let shown = lines[panic..].iter().take(SHOWN_LINES).copied().collect::<Vec<_>>().join("\n");
    let input =
        lines.iter().find_map(|line| line.split_once("Test unit written to ")).map(|(_, path)| path.trim());
    Ok(match (input, CTarget::named(name)) {
        (Some(input), Some(target)) => {
            format!("{shown}\n\nthe input: {input}\nto feed it again: {} {input}", target.path().display())
        }
        (Some(input), None) => {
            format!(
                "{shown}\n\nthe input: {input}\nto feed it again: cargo run -p vnuma-fuzz -- {name} {input}"
            )
        }
        (None, _) => format!("{shown}\n\nall of it: {}", log.display()),
    })
}

fn keep(programs: &Programs, name: &str) -> Result<()> {
    let (finds, seeds) = corpora(name)?;
    fs::create_dir_all(&seeds).with_context(|| seeds.display().to_string())?;
    let mut command = programs.command(name);
    crate::steps::run_quiet(command.arg("-merge=1").arg(&seeds).arg(&finds))?;
    println!("{name}: {} files", fs::read_dir(&seeds)?.count());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_libfuzzer_become_a_row() {
        let mut row = Row::default();
        assert!(!row.take("INFO: Seed: 12"));
        assert!(row.take("#8192\tpulse  cov: 455 ft: 800 corp: 30/1234b lim: 80 exec/s: 4096 rss: 60Mb"));
        assert!(row.take(
            "#9000\tNEW    cov: 456 ft: 801 corp: 31/12Kb lim: 80 exec/s: 4096 rss: 60Mb L: 3/4 MS: 1 x"
        ));
        assert!(row.take("stat::number_of_executed_units: 9001"));
        let expected =
            Row { executions: 9001, coverage: 456, features: 801, inputs: 31, size: "12Kb".into() };
        assert_eq!(row, expected);
        let line = row.text("config", 3);
        assert_eq!(line.len(), Row::HEADING.len(), "\n{}\n{line}", Row::HEADING);
    }
}
