//! On the lab server: every workload under every configuration, a VM for each configuration.

use crate::{
    committed::{
        CONFIGURATIONS, Configuration, Cycles, REGULAR_S, Spot, VCPUS, WARM_UP_S, WINDOW_S, WINDOWS,
        Workload, workload, workloads,
    },
    raw::{self, Cell, Line, Ready, Vcpu, Window},
    vm::{self, Machine},
};
use anyhow::{Context, Result, ensure};
use lab_count::{
    counters::{CounterSet, Measured, difference},
    perf::{Counter, Event, Mode, Target},
};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, ChildStdout},
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_lab_counters::{EVENT_CYCLES, Header};
use vnuma_scenario::Process;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these workloads
    #[arg(long)]
    workload: Vec<String>,
    /// Those of the full form, too
    #[arg(long)]
    full: bool,
    /// Only these configurations
    #[arg(long)]
    configuration: Vec<Configuration>,
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let of = |name: &String| workload(name).with_context(|| format!("--workload {name} is unknown"));
    let chosen: Vec<&Workload> = match arguments.workload.is_empty() {
        true => workloads(arguments.full).collect(),
        false => arguments.workload.iter().map(of).collect::<Result<_>>()?,
    };
    let header = lab_count::server::header()?;
    print(&Line::Server(raw::Server {
        profile: header.profile_name().to_owned(),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
    }))?;
    let devices = vm::devices()?;
    let wanted =
        |one: &Configuration| arguments.configuration.is_empty() || arguments.configuration.contains(one);
    let mut failed = Vec::new();
    for configuration in CONFIGURATIONS.into_iter().filter(wanted) {
        let name = configuration.name();
        eprintln!("{name}: starting its VM");
        let machine = Machine::start(configuration, &devices).with_context(|| name.to_owned())?;
        for workload in &chosen {
            for &spot in configuration.spots() {
                let measured = measure(&machine, configuration, workload, spot, &header);
                // The others are worth having all the same.
                match measured.with_context(|| format!("{name}, {}, {}", workload.name, spot.argument())) {
                    Ok(cell) => print(&Line::Cell(cell))?,
                    Err(error) => {
                        eprintln!("{error:#}");
                        failed.push(format!("{name}, {}", workload.name));
                    }
                }
            }
        }
    }
    ensure!(failed.is_empty(), "cells that failed: {}", failed.join("; "));
    Ok(())
}

fn print(line: &Line) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

/// The workload in the guest.
struct Talk {
    _process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Talk {
    fn start(machine: &Machine, workload: &Workload, spot: Spot) -> Result<(Self, Ready)> {
        let mut process =
            machine.vm.spawn(&[vm::PROGRAM, "guest", workload.name, "--spot", &spot.argument()])?;
        let input = process.0.stdin.take().context("standard input")?;
        let output = BufReader::new(process.0.stdout.take().context("standard output")?);
        let mut talk = Self { _process: process, input, output };
        let ready = talk.answer()?;
        Ok((talk, ready))
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("the workload said {line:?}"))
    }

    /// Says something to which nothing is to be answered.
    fn say(&mut self, word: &str) -> Result<()> {
        writeln!(self.input, "{word}").and_then(|()| self.input.flush()).context("the workload")?;
        self.answer::<String>().map(drop)
    }

    fn go(&mut self) -> Result<()> {
        self.say("go")
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        writeln!(self.input, "halt").and_then(|()| self.input.flush()).context("the workload")?;
        self.answer()
    }
}

fn measure(
    machine: &Machine,
    configuration: Configuration,
    workload: &Workload,
    spot: Spot,
    header: &Header,
) -> Result<Cell> {
    let (mut talk, ready) = Talk::start(machine, workload, spot)?;
    let counted = machine.vm.threads.iter().map(|&tid| Counted::open(header, tid, workload.cycles));
    let counted: Vec<Counted> = counted.collect::<Result<_>>()?;
    ensure!(counted.len() == VCPUS, "{} vCPU threads", counted.len());
    let read = || counted.iter().map(Counted::read).collect::<Result<Vec<_>>>();
    talk.go()?;
    thread::sleep(Duration::from_secs_f64(WARM_UP_S));
    talk.halt()?;
    let mut windows = Vec::new();
    for _ in 0..WINDOWS {
        let (before, start) = (read()?, Instant::now());
        talk.go()?;
        thread::sleep(Duration::from_secs_f64(WINDOW_S));
        let operations = talk.halt()?;
        let (after, elapsed_ns) = (read()?, start.elapsed().as_nanos() as u64);
        let vcpus = before.iter().zip(&after).map(|(before, after)| after.since(before)).collect();
        let regular = match workload.cycles {
            Cycles::Programs => None,
            Cycles::All => Some(regular(&mut talk, counted.get(ready.cpu).context("the guest's CPU")?)?),
        };
        windows.push(Window { elapsed_ns, operations, vcpus, regular });
    }
    Ok(Cell { configuration, workload: workload.name.to_owned(), spot, guest: ready, windows })
}

/// Modelled cycles of kernels in a second of a vCPU on which a program computes: ticks, above all.
fn regular(talk: &mut Talk, vcpu: &Counted) -> Result<f64> {
    talk.say("spin")?;
    let before = vcpu.read()?;
    thread::sleep(Duration::from_secs_f64(REGULAR_S));
    let after = vcpu.read()?;
    talk.say("rest")?;
    let Vcpu { kernel_cycles, ran_ns, .. } = after.since(&before);
    ensure!(ran_ns > 0, "a program that computes did not run");
    Ok(kernel_cycles as f64 / ran_ns as f64 * 1e9)
}

/// The thread of a vCPU that is counted.
struct Counted {
    set: CounterSet,
    /// Modelled cycles of programs and kernels, and of programs.
    cycles: [Counter; 2],
}

/// What it has done.
struct Reading {
    measured: Measured,
    kernel_cycles: u64,
}

impl Counted {
    fn open(header: &Header, tid: i32, cycles: Cycles) -> Result<Self> {
        let target = Target::Thread(tid);
        let mode = if cycles == Cycles::Programs { Mode::User } else { Mode::All };
        let total = |mode| Counter::open(Event::Raw(EVENT_CYCLES), target, mode).context("perf_event_open");
        let set = CounterSet::open(header, target, mode).context("perf_event_open")?;
        Ok(Self { set, cycles: [total(Mode::All)?, total(Mode::User)?] })
    }

    fn read(&self) -> Result<Reading> {
        let [all, programs] = [self.cycles[0].read()?, self.cycles[1].read()?];
        Ok(Reading { measured: self.set.read()?, kernel_cycles: all.saturating_sub(programs) })
    }
}

impl Reading {
    fn since(&self, before: &Self) -> Vcpu {
        let Measured { counts, task_clock_ns, .. } = difference(&before.measured, &self.measured);
        let kernel_cycles = self.kernel_cycles.saturating_sub(before.kernel_cycles);
        Vcpu { counts, kernel_cycles, ran_ns: task_clock_ns }
    }
}
