//! `lab-count`: counters and modelled cycles of a command, or of a VM, in the lab's server.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lab_count::counters::{CounterSet, Measured, difference, sum};
use lab_count::load::{Chain, Memory, compute};
use lab_count::perf::{Mode, Target};
use lab_count::report::{Part, Report};
use lab_count::server;
use vnuma_abi_lab_counters::Header;

/// Exit status when counting itself failed, as env(1) and others have it.
const STATUS_FAILED: u8 = 125;

#[derive(Parser)]
#[command(
    about = "Counters and modelled cycles of a command, or of a VM, in the lab's server",
    after_help = "The report goes to standard error, so that the command's output stays what it is; with \
                  --json FILE it goes to that file as JSON.\n\nModelled cycles are those of the named machine; \
                  dilation is guest time per modelled time, how much slower the emulation is."
)]
struct Arguments {
    /// Count the vCPU threads of this VM of lab-vm instead, while the command runs or for --seconds
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// Count all threads of this process instead
    #[arg(long, value_name = "PID", conflicts_with = "vm")]
    pid: Option<i32>,
    /// How long, without a command
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: Option<u64>,
    /// Measure the server's dilation: of computing and of waiting for memory
    #[arg(long, conflicts_with_all = ["vm", "pid", "seconds", "command"])]
    dilation: bool,
    /// Count programs only, without what the kernel does for them and in its ticks; of a VM, its programs
    #[arg(long, conflicts_with = "dilation")]
    user: bool,
    /// Write the report to this file as JSON, to standard output if it is -
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// The program and its arguments
    #[arg(last = true)]
    command: Vec<String>,
}

impl Arguments {
    fn mode(&self) -> Mode {
        if self.user { Mode::User } else { Mode::All }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("lab-count: {error:#}");
            ExitCode::from(STATUS_FAILED)
        }
    }
}

fn run(arguments: &Arguments) -> Result<u8> {
    let header = server::header()?;
    if arguments.dilation {
        dilation(&header, arguments.json.as_deref())?;
        return Ok(0);
    }
    let (status, report) = match threads(arguments)? {
        Some(threads) => count_threads(&header, threads, arguments)?,
        None => count_command(&header, arguments)?,
    };
    match &arguments.json {
        Some(file) => write_json(file, &report)?,
        None => eprint!("\n{}", report.table()),
    }
    Ok(status)
}

fn write_json(file: &str, value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    if file == "-" {
        print!("{text}");
        return Ok(());
    }
    fs::write(file, text).with_context(|| file.to_owned())
}

/// Counters of events that a server without the PMU module does not have.
fn open(header: &Header, target: Target, mode: Mode) -> Result<CounterSet> {
    CounterSet::open(header, target, mode).with_context(|| format!("perf_event_open for {target:?}"))
}

fn count_command(header: &Header, arguments: &Arguments) -> Result<(u8, Report)> {
    ensure!(!arguments.command.is_empty(), "a command is missing: lab-count -- COMMAND");
    let counters = open(header, Target::Commands, arguments.mode())?;
    let start = Instant::now();
    let status = run_command(&arguments.command)?;
    let elapsed_ns = start.elapsed().as_nanos() as u64;
    // The kernel adds the counts of a child when it has ended; the parent's own are not enabled.
    Ok((status, Report::new(header, counters.read()?, elapsed_ns, Vec::new())?))
}

/// Runs the command; its status, 128 + signal if one ended it.
fn run_command(command: &[String]) -> Result<u8> {
    let status = Command::new(&command[0]).args(&command[1..]).status();
    let status = status.with_context(|| command[0].clone())?;
    let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(u8::try_from(number).unwrap_or(1))
}

/// Name and number of each thread that is to be counted; none for a command.
fn threads(arguments: &Arguments) -> Result<Option<Vec<(String, i32)>>> {
    let (pid, vcpus_only) = match (&arguments.vm, arguments.pid) {
        (Some(name), _) => {
            ensure!(!name.contains('/'), "--vm {name}: not a name");
            let path = format!("/run/lab-vm/{name}/pid");
            let text = fs::read_to_string(&path).with_context(|| format!("VM {name}: {path}"))?;
            (text.trim().parse().with_context(|| format!("{path}: {text:?} is no number"))?, true)
        }
        (None, Some(pid)) => (pid, false),
        (None, None) => return Ok(None),
    };
    let directory = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())?.flatten() {
        let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A thread may end at any time.
        let Ok(name) = fs::read_to_string(entry.path().join("comm")) else { continue };
        let name = name.trim().to_owned();
        if !vcpus_only || (name.starts_with("CPU ") && name.ends_with("/KVM")) {
            threads.push((name, tid));
        }
    }
    ensure!(!threads.is_empty(), "{directory}: no thread to count");
    threads.sort();
    Ok(Some(threads))
}

fn count_threads(
    header: &Header,
    threads: Vec<(String, i32)>,
    arguments: &Arguments,
) -> Result<(u8, Report)> {
    let mut sets = Vec::new();
    for (name, tid) in threads {
        sets.push((name, tid, open(header, Target::Thread(tid), arguments.mode())?));
    }
    let read = || -> Result<Vec<Measured>> {
        Ok(sets.iter().map(|(_, _, set)| set.read()).collect::<Result<_, _>>()?)
    };
    let before = read()?;
    let start = Instant::now();
    let status = match (arguments.command.is_empty(), arguments.seconds) {
        (false, None) => run_command(&arguments.command)?,
        (true, Some(seconds)) => {
            std::thread::sleep(Duration::from_secs(seconds));
            0
        }
        _ => bail!("--vm and --pid need either a command or --seconds"),
    };
    let elapsed_ns = start.elapsed().as_nanos() as u64;
    let measured: Vec<_> =
        before.iter().zip(&read()?).map(|(before, after)| difference(before, after)).collect();
    let total = sum(&measured);
    let parts = sets.into_iter().zip(measured).map(|((name, tid, _), measured)| Part { name, tid, measured });
    Ok((status, Report::new(header, total, elapsed_ns, parts.collect())?))
}

/// How much slower the emulation is, by what is done. Nothing follows for bandwidth.
#[derive(serde::Serialize)]
struct Dilation {
    profile: String,
    /// Guest nanoseconds per modelled nanosecond of a loop in registers.
    compute: f64,
    /// Of a chain through memory of the node that it runs on.
    memory: f64,
    /// The larger of the two: periods of timers stretched by it are long enough for both.
    stretch: f64,
}

fn dilation(header: &Header, json: Option<&str>) -> Result<()> {
    let one = |work: &mut dyn FnMut()| -> Result<f64> {
        let counters = open(header, Target::Caller, Mode::All)?;
        let (before, start) = (counters.read()?, Instant::now());
        work();
        let elapsed_ns = start.elapsed().as_nanos() as u64;
        let measured = difference(&before, &counters.read()?);
        let report = Report::new(header, measured, elapsed_ns, Vec::new())?;
        Ok(report.modelled.first().map_or(0.0, |modelled| modelled.dilation))
    };
    let compute = one(&mut || compute(200_000_000))?;
    // Twice the LLC, so that every access goes to memory.
    let bytes = header.llc_sets as usize * header.llc_ways as usize * 64 * 2;
    let mut chain = Chain::random(Memory::map(bytes, None, false).context("memory of the chain")?, 1);
    let memory = one(&mut || chain.follow(1_000_000))?;
    let profile = header.profile_name().to_owned();
    let dilation = Dilation { profile, compute, memory, stretch: compute.max(memory) };
    if let Some(file) = json {
        return write_json(file, &dilation);
    }
    println!("guest time per modelled time under profile {}:", dilation.profile);
    println!("{compute:>9.1}  computing in registers\n{memory:>9.1}  waiting for memory");
    println!("{:>9.1}  stretch the periods of all timer-driven policies by this", dilation.stretch);
    Ok(())
}
