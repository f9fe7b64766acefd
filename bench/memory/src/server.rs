//! On the lab server: every cause under every policy, a VM for each cause.

use crate::{
    cause,
    committed::{
        CHUNK_MIB, Cause, HOST_CPUS, Means, PASSES, PERIOD_S, PERIODS, PERIODS_S, Policy, SIZED_STREAM_MIB,
        STREAM_MIB, SizeCause, cells, length_s,
    },
    policy::Running,
    raw::{self, Cell, Line, Period, Stream},
    size,
    vm::Machine,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use vnuma_bench_common::{
    cells::{Cells, Options, print},
    host::{Numad, affine, balance},
    report::Form,
};
use vnuma_lab_pricing::{CounterProfile, by_name};

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these causes
    #[arg(long)]
    cause: Vec<Cause>,
    /// Only these policies
    #[arg(long)]
    policy: Vec<Policy>,
    /// Only these changes of a guest node's size
    #[arg(long)]
    size: Vec<SizeCause>,
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    options: Options,
    /// Run a store as well as STREAM, as the full form does
    #[arg(long)]
    store_too: bool,
}

/// How much a cell has.
#[derive(Clone, Copy)]
struct Size {
    store: bool,
    periods: usize,
    /// Passes of a run of STREAM, and of that under which the dilation is measured.
    passes: usize,
    /// What STREAM maps, MiB: when a cause displaces memory, and when a guest node gets another size.
    stream_mib: [usize; 2],
    /// The shortest and the longest period, seconds of the server.
    periods_s: (f64, f64),
}

impl Arguments {
    /// What is named is measured, whatever the form has.
    fn cells(&self) -> Vec<(Cause, Policy)> {
        let Self { cause, policy, size, .. } = self;
        if self.form.smoke {
            return vec![(Cause::FirstTouch, Policy::Adaptive)];
        }
        cells(self.form.full || !policy.is_empty())
            .filter(|(one, _)| (cause.is_empty() && size.is_empty()) || cause.contains(one))
            .filter(|(_, one)| policy.is_empty() || policy.contains(one))
            .collect()
    }

    /// Who names causes or policies wants nothing else.
    fn sizes(&self) -> Vec<(SizeCause, Means)> {
        if self.form.smoke {
            return vec![(SizeCause::Shrink, Means::Balloon)];
        }
        let is_wanted = |one: &SizeCause| match self.size.is_empty() {
            true => self.cause.is_empty() && self.policy.is_empty(),
            false => self.size.contains(one),
        };
        let causes = SizeCause::ALL.iter().filter(|cause| is_wanted(cause));
        causes.flat_map(|cause| Means::ALL.iter().map(|means| (*cause, *means))).collect()
    }
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let store = arguments.form.full || arguments.store_too;
    let size = match arguments.form.smoke {
        true => Size { store, periods: 2, passes: 1, stream_mib: [32; 2], periods_s: (1.0, 2.0) },
        false => {
            let stream_mib = [STREAM_MIB, SIZED_STREAM_MIB];
            Size { store, periods: PERIODS, passes: PASSES, stream_mib, periods_s: PERIODS_S }
        }
    };
    let header = lab_count::server::header()?;
    let mut server = Server { profile: by_name(header.profile_name())?, size, period_s: None };
    affine(0, HOST_CPUS)?;
    balance(false)?;
    let (wanted, mut cells) = (arguments.cells(), Cells::printed(&arguments.options)?);
    let mut machine = None;
    for cause in Cause::ALL {
        // All policies have one VM, but for those after a cell that failed. A short form has only one.
        machine = machine.filter(|_| arguments.form.smoke);
        for (_, policy) in wanted.iter().filter(|(one, _)| *one == cause) {
            let name = format!("{}, {}", cause.name(), policy.name());
            cells.measure(&name, || server.cell(&mut machine, (cause, *policy)))?;
        }
    }
    machine = machine.filter(|_| arguments.form.smoke);
    for (cause, means) in arguments.sizes() {
        let name = format!("{}, {}", cause.name(), means.name());
        cells.measure(&name, || server.size_cell(machine.take(), cause, means))?;
    }
    cells.end()
}

/// What all cells have in common.
struct Server {
    profile: CounterProfile,
    size: Size,
    /// Once it is known.
    period_s: Option<f64>,
}

impl Server {
    /// In the VM that there is. It is another one after a cell that failed, as whatever made it fail may still be there.
    fn cell(&mut self, machine: &mut Option<Machine>, which: (Cause, Policy)) -> Result<(Line, String)> {
        let mut one = match machine.take() {
            Some(machine) => machine,
            None => {
                eprintln!("{}: starting its VM", which.0.name());
                Machine::start(which.0)?
            }
        };
        let period_s = self.period_s(&mut one)?;
        let cell = cell(&mut one, which, period_s, self.size)?;
        *machine = Some(one);
        let shown = format!("{} of {} MiB are displaced", cell.displaced >> 20, cell.resident >> 20);
        Ok((Line::Cell(Box::new(cell)), shown))
    }

    fn size_cell(
        &mut self,
        machine: Option<Machine>,
        cause: SizeCause,
        means: Means,
    ) -> Result<(Line, String)> {
        if self.period_s.is_none() {
            self.period_s(&mut Machine::sized(Means::NeverChanged)?)?;
        }
        let machine = machine.map_or_else(|| Machine::sized(means), Ok)?;
        let cell = size::cell(machine, (cause, means), self.size.passes, self.size.stream_mib[1])?;
        let shown = format!("{:?} MiB are free on the guest's nodes", cell.free_mib);
        Ok((Line::Size(cell), shown))
    }

    /// The length of a period. What the server is is printed before the first one.
    fn period_s(&mut self, machine: &mut Machine) -> Result<f64> {
        Ok(match self.period_s {
            Some(period_s) => period_s,
            None => *self.period_s.insert(introduce(machine, &self.profile, self.size)?),
        })
    }
}

/// Prints what the server is. How long its periods are.
fn introduce(machine: &mut Machine, profile: &CounterProfile, size: Size) -> Result<f64> {
    let dilation = dilation(machine, profile.clock_ghz, size)?;
    let length_s = (PERIOD_S * dilation).clamp(size.periods_s.0, size.periods_s.1);
    eprintln!("dilation {dilation:.1}, periods of {length_s:.1} s");
    print(&Line::Server(raw::Server {
        profile: profile.name.clone(),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
        numad: Numad::version(),
        dilation,
        period_s: length_s,
    }))?;
    Ok(length_s)
}

/// Time of the server by modelled time, of vCPU 0 under STREAM.
fn dilation(machine: &mut Machine, clock_ghz: f64, size: Size) -> Result<f64> {
    let _: serde_json::Value = machine.ask(&format!("stream {}", size.stream_mib[0]))?;
    let before = machine.cycles_and_time()?;
    for _ in 0..size.passes {
        machine.ask::<u64>("pass")?;
    }
    let after = machine.cycles_and_time()?;
    machine.ask::<u64>("end")?;
    let cycles = after.0.saturating_sub(before.0);
    ensure!(cycles > 0, "vCPU 0 did nothing");
    Ok(after.1.saturating_sub(before.1) as f64 / (cycles as f64 / clock_ghz))
}

/// A run of STREAM or of the store, in memory that it maps anew.
fn application(machine: &mut Machine, [name, pass]: [&str; 2], size: Size) -> Result<Stream> {
    let ranges: Vec<(u64, u64)> = machine.ask(&format!("{name} {}", size.stream_mib[0]))?;
    let nodes = machine.memory.where_are(&ranges)?;
    let passes = (0..size.passes).map(|_| machine.pass(pass)).collect::<Result<_>>()?;
    machine.ask::<u64>("end")?;
    let remote = nodes.iter().filter(|node| node.is_some_and(|node| node != 0)).count();
    Ok(Stream { remote_pages: remote as u64, pages: nodes.len() as u64, passes })
}

fn cell(machine: &mut Machine, (cause, policy): (Cause, Policy), period_s: f64, size: Size) -> Result<Cell> {
    machine.ask::<u64>("drop")?;
    cause::clear(cause)?;
    machine.bring_home()?;
    let stream = |machine: &mut _| application(machine, ["stream", "pass"], size);
    let store = |machine: &mut _| application(machine, ["store", "lookups"], size);
    let first = stream(machine)?;
    let first_store = size.store.then(|| store(machine)).transpose()?;
    let caused = cause::prepare(cause, machine)?;
    let mut running = Running::start(policy, machine.vm.pid, period_s)?;
    running.begin(&machine.memory)?;
    let periods = (0..size.periods)
        .map(|number| period(machine, &mut running, cause, (number, period_s)))
        .collect::<Result<_>>();
    let periods = periods?;
    let (pages_moved, daemon) = (running.pages_moved()?, running.daemon()?);
    let all = machine.layout(true)?;
    cause::end(cause, machine)?;
    machine.ask::<u64>("drop")?;
    let second = stream(machine)?;
    let second_store = size.store.then(|| store(machine)).transpose()?;
    let longest_hold_us = running.longest_hold_us();
    drop(running);
    Ok(Cell {
        cause,
        policy,
        period_s,
        first,
        periods,
        second,
        store: first_store.zip(second_store).map(|(first, second)| [first, second]),
        resident: all.resident,
        displaced: all.displaced,
        caused,
        pages_moved,
        longest_hold_us,
        daemon,
    })
}

fn period(
    machine: &mut Machine,
    running: &mut Running,
    cause: Cause,
    (number, period_s): (usize, f64),
) -> Result<Period> {
    let began = Instant::now();
    cause::step(cause, machine, number).with_context(|| format!("period {number} ({CHUNK_MIB} MiB)"))?;
    let displaced_after_work = machine.layout(false)?.displaced;
    let io = machine.pass("read")?;
    let worked_s = began.elapsed().as_secs_f64();
    thread::sleep(Duration::from_secs_f64(length_s(period_s, worked_s)).saturating_sub(began.elapsed()));
    running.period()?;
    let layout = machine.layout(false)?;
    Ok(Period {
        elapsed_s: began.elapsed().as_secs_f64(),
        worked_s,
        io,
        displaced_after_work,
        displaced: layout.displaced,
        resident: layout.resident,
    })
}
