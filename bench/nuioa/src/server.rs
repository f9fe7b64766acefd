//! On the lab server: every workload under every configuration, a VM for each configuration.

use crate::{
    committed::{
        BASELINE_S, Configuration, Cycles, Form, Kind, REMOTE, SMOKE_FORM, Spot, VCPUS, WARM_UP_PLACED_S,
        WARM_UP_S, WINDOW_S, Workload, form, workload, workloads,
    },
    guest::process,
    raw::{self, Answer, Baseline, Cell, Done, Line, Ready, Request, Vcpu, Window},
    sockets, ticks,
    vm::{self, Machine},
};
use anyhow::{Context, Result, anyhow, ensure};
use lab_count::{
    counters::{CounterSet, Measured, difference},
    perf::{Counter, Event, Mode, Target},
};
use std::{
    cell::RefCell,
    fs::{self, File},
    os::fd::AsFd,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_lab_counters::{EVENT_CYCLES, Header};
use vnuma_bench_common::{
    cells::{Cells, Options, print},
    report,
    talk::Talk,
};
use vnuma_model::CpuSet;
use vnuma_scenario::{Lines, Process, Vm};

/// Of the servers' network (lab/runner/src/network.rs).
const BRIDGE: &str = "lab0";
/// A window is so much longer than its operations should need, that it is one piece as a rule.
const MARGIN: f64 = 1.1;
/// More than the last-level cache has room for.
const NEIGHBOUR_BYTES: usize = 128 << 20;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these workloads
    #[arg(long)]
    workload: Vec<String>,
    #[command(flatten)]
    form: report::Form,
    #[command(flatten)]
    options: Options,
    /// Only these configurations
    #[arg(long)]
    configuration: Vec<Configuration>,
}

/// Workloads of the short form.
const SMOKE: [&str; 3] = ["testpmd-tx-1", "nvme-user", "sockperf-rx"];

impl Arguments {
    fn workloads(&self) -> Result<Vec<&'static Workload>> {
        let of = |name: &str| workload(name).with_context(|| format!("--workload {name} is unknown"));
        match (self.form.smoke, self.workload.is_empty()) {
            (true, _) => SMOKE.into_iter().map(of).collect(),
            (_, true) => Ok(workloads(self.form.full).collect()),
            (_, false) => self.workload.iter().map(|name| of(name)).collect(),
        }
    }

    fn form(&self) -> &'static Form {
        if self.form.smoke { &SMOKE_FORM } else { form(self.form.full) }
    }

    fn wants(&self, configuration: Configuration) -> bool {
        self.configuration.is_empty() || self.configuration.contains(&configuration)
    }

    /// What is chosen by name is measured.
    fn is_reduced(&self) -> bool {
        !self.form.full && !self.form.smoke && self.configuration.is_empty() && self.workload.is_empty()
    }
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let chosen = arguments.workloads()?;
    vm::reserve_memory()?;
    // This server takes no part in the network of the cards.
    process::run("ip", &["link", "set", &sockets::card_of_bridge(BRIDGE)?, "down"])?;
    let header = lab_count::server::header()?;
    print(&Line::Server(raw::Server {
        profile: header.profile_name().to_owned(),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
    }))?;
    let devices = vm::devices()?;
    let (form, mut cells) = (arguments.form(), Cells::printed(&arguments.options)?);
    for (turn, &configuration) in form.turns.iter().enumerate().filter(|(_, one)| arguments.wants(**one)) {
        // All workloads have one VM, but for those after a cell that failed.
        let mut machine = None;
        let is_under = |workload: &&&Workload| workload.is_under(configuration, arguments.is_reduced());
        for workload in chosen.iter().filter(is_under) {
            for &spot in configuration.spots() {
                let (under, spot_name) = (configuration.name(), spot.argument());
                let name = format!("turn {turn}: {under}, {}, {spot_name}", workload.name);
                cells.measure(&name, || {
                    let mut one = match machine.take() {
                        Some(machine) => machine,
                        None => Machine::start(configuration, &devices)?,
                    };
                    let cell = Measurement { machine: &one, devices: &devices, header: &header, form }.cell(
                        configuration,
                        workload,
                        spot,
                    )?;
                    one.see_agent()?;
                    machine = Some(one);
                    Ok((Line::Cell(Box::new(cell)), format!("{} windows", form.windows)))
                })?;
            }
        }
    }
    cells.end()
}

/// The second server's part of a workload, which ends with this value.
struct Peer {
    answers: RefCell<Lines<File>>,
}

impl Peer {
    fn start(workload: &Workload) -> Result<Self> {
        let answers = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        let peer = Self { answers: RefCell::new(Lines::of(answers, "the second server")) };
        peer.ask(&Request::Start(workload.name.to_owned()))?;
        Ok(peer)
    }

    fn ask(&self, request: &Request) -> Result<Option<u64>> {
        print(&Line::Peer(request.clone()))?;
        let line = self.answers.borrow_mut().next(&format!("{request:?}"))?;
        let answer: Answer =
            serde_json::from_str(&line).with_context(|| format!("the second server said {line:?}"))?;
        answer.map_err(|error| anyhow!("the second server: {error}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Err(error) = self.ask(&Request::End) {
            eprintln!("{error:#}");
        }
    }
}

#[derive(clap::Args)]
pub struct Neighbour {
    #[arg(long)]
    cpu: u32,
}

/// Reads memory of the other node in order, so that all of it comes over the interconnect.
pub fn neighbour(arguments: &Neighbour) -> Result<()> {
    process::run("taskset", &["-cp", &arguments.cpu.to_string(), &std::process::id().to_string()])?;
    let mut memory = lab_count::load::Memory::map(NEIGHBOUR_BYTES, Some(REMOTE), false)?;
    lab_count::load::fill(&mut memory);
    loop {
        lab_count::load::stream(&mut memory);
    }
}

/// Starts a workload in the guest.
fn start(machine: &Machine, workload: &Workload, spot: Spot) -> Result<(Talk, Ready)> {
    let process = machine.vm.spawn(&[vm::PROGRAM, "guest", workload.name, "--spot", &spot.argument()])?;
    let mut talk = Talk::with(process, format!("{} in the guest", workload.name))?;
    let ready = talk.answer("a start")?;
    Ok((talk, ready))
}

/// What cells of a VM have in common.
struct Measurement<'a> {
    machine: &'a Machine,
    devices: &'a [String],
    header: &'a Header,
    form: &'a Form,
}

impl Measurement<'_> {
    fn cell(&self, configuration: Configuration, workload: &Workload, spot: Spot) -> Result<Cell> {
        let vm = &self.machine.vm;
        let kind = workload.kind;
        let early = kind.peer_begins().then(|| Peer::start(workload)).transpose()?;
        let (mut talk, ready) = start(self.machine, workload, spot)?;
        let late = (kind.has_peer() && early.is_none()).then(|| Peer::start(workload)).transpose()?;
        let peer = early.or(late);
        let peer = |request: Request| peer.as_ref().map_or(Ok(None), |peer| peer.ask(&request));
        let neighbour = matches!(kind, Kind::BesideNeighbour { .. }).then(|| start_neighbour(vm));
        let _neighbour = neighbour.transpose()?;
        vm::keep_interrupts(vm, self.devices)?;
        let counted = vm.threads.iter().map(|&tid| Counted::open(self.header, vm, tid, workload.cycles));
        let counted: Vec<Counted> = counted.collect::<Result<_>>()?;
        ensure!(counted.len() == VCPUS, "{} vCPU threads", counted.len());
        let read = || counted.iter().map(Counted::read).collect::<Result<Vec<_>>>();
        let mut run = |seconds: f64| -> Result<Done> {
            let _: String = talk.ask("go")?;
            peer(Request::Go)?;
            thread::sleep(Duration::from_secs_f64(seconds));
            let asked = peer(Request::Halt)?;
            let done: Done = talk.ask("halt")?;
            Ok(Done { operations: done.operations.or(asked), ..done })
        };
        let warm_up_s = if configuration == Configuration::NuioaAware { WARM_UP_PLACED_S } else { WARM_UP_S };
        let mut rate = run(warm_up_s)?.operations.unwrap_or(0) as f64 / warm_up_s;
        let mut windows = Vec::new();
        for _ in 0..self.form.windows {
            let (before, start) = (read()?, Instant::now());
            let Done { operations, spun } =
                window((workload.wanted, self.form.longest_window_s), &mut rate, &mut run)?;
            let (after, elapsed_ns) = (read()?, start.elapsed().as_nanos() as u64);
            let vcpus = before.iter().zip(&after).map(|(before, after)| after.since(before)).collect();
            windows.push(Window { elapsed_ns, operations, vcpus, spun });
        }
        let vcpu = counted.get(ready.cpu).context("the guest's CPU")?;
        let baseline = (workload.cycles == Cycles::All).then(|| baseline(&mut talk, vcpu)).transpose()?;
        let why = talk.ask("why")?;
        let workload = workload.name.to_owned();
        Ok(Cell { configuration, workload, spot, guest: ready, windows, why, baseline })
    }
}

/// Lets a workload run until it has done what is wanted, or has had the time for it; what it did, and how much it does in a second.
fn window(
    (wanted, longest_s): (u64, f64),
    rate: &mut f64,
    run: &mut impl FnMut(f64) -> Result<Done>,
) -> Result<Done> {
    let (mut done, mut seconds) = (0, 0.0);
    let mut spun = None;
    while seconds < longest_s && (seconds == 0.0 || done < wanted) {
        let needed = MARGIN * wanted.saturating_sub(done) as f64 / rate.max(1.0);
        let piece = needed.max(WINDOW_S).min(longest_s - seconds);
        let more = run(piece)?;
        if let Some(more) = more.spun {
            *spun.get_or_insert_default() += more;
        }
        let Some(more) = more.operations else { return Ok(Done { operations: None, spun }) };
        (done, seconds) = (done + more, seconds + piece);
        *rate = done as f64 / seconds;
    }
    Ok(Done { operations: Some(done), spun })
}

fn start_neighbour(vm: &Vm) -> Result<Process> {
    let cpu = vm::free_cpu(vm)?.to_string();
    let child = Command::new(std::env::current_exe()?).args(["neighbour", "--cpu", &cpu]).spawn();
    child.map(Process).context("the neighbour")
}

/// What happens on a vCPU that computes, and has no workload: ticks, above all.
fn baseline(talk: &mut Talk, vcpu: &Counted) -> Result<Baseline> {
    let before = vcpu.read()?;
    let _: String = talk.ask("spin")?;
    thread::sleep(Duration::from_secs_f64(BASELINE_S));
    let spun = talk.ask::<Done>("rest")?.spun.context("nothing computed")?;
    ensure!(spun.spins > 0 && spun.ticks > 0, "a thread that computes did not run: {spun:?}");
    Ok(Baseline { vcpu: vcpu.read()?.since(&before), spun })
}

/// The thread of a vCPU that is counted.
struct Counted {
    set: CounterSet,
    /// Modelled cycles of programs.
    programs: Counter,
    cpus: CpuSet,
}

/// What it has done.
struct Reading {
    measured: Measured,
    program_cycles: u64,
    server_ticks: u64,
}

impl Counted {
    fn open(header: &Header, vm: &Vm, tid: i32, cycles: Cycles) -> Result<Self> {
        let target = Target::Thread(tid);
        let mode = if cycles == Cycles::Programs { Mode::User } else { Mode::All };
        let programs =
            Counter::open(Event::Raw(EVENT_CYCLES), target, Mode::User).context("perf_event_open")?;
        let set = CounterSet::open(header, target, mode).context("perf_event_open")?;
        Ok(Self { set, programs, cpus: vm::cpus_of(vm, tid)? })
    }

    fn read(&self) -> Result<Reading> {
        let server_ticks = self.cpus.iter().map(|cpu| ticks::of_cpu(cpu as usize)).sum::<Result<_>>()?;
        Ok(Reading { program_cycles: self.programs.read()?, measured: self.set.read()?, server_ticks })
    }
}

impl Reading {
    fn since(&self, before: &Self) -> Vcpu {
        let Measured { counts, task_clock_ns, .. } = difference(&before.measured, &self.measured);
        let program_cycles = self.program_cycles.saturating_sub(before.program_cycles);
        let server_ticks = self.server_ticks - before.server_ticks;
        Vcpu { counts, program_cycles, ran_ns: task_clock_ns, server_ticks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::Spun;

    const LONGEST_S: f64 = 6.0;

    #[test]
    fn a_window_has_the_operations_that_are_wanted_if_there_is_time() {
        // What runs take, and what a window has, at so many operations a second.
        let window = |wanted, guess, speed: f64| {
            let (mut rate, mut pieces) = (guess, Vec::new());
            let mut run = |seconds| {
                pieces.push(seconds);
                let spun = Some(Spun { spins: 3, ticks: 5 });
                Ok(Done { operations: Some((seconds * speed) as u64), spun })
            };
            let done = window((wanted, LONGEST_S), &mut rate, &mut run).unwrap();
            let runs = pieces.len() as u64;
            assert_eq!(done.spun, Some(Spun { spins: 3 * runs, ticks: 5 * runs }), "that of all pieces");
            (done.operations, pieces)
        };
        assert_eq!(window(0, 50.0, 100.0), (Some((100.0 * WINDOW_S) as u64), vec![WINDOW_S]));
        assert_eq!(window(400, 100.0, 100.0), (Some(440), vec![4.0 * MARGIN]));
        let (done, pieces) = window(200, 100.0, 50.0);
        assert!(done >= Some(200) && pieces.len() == 2, "slower than its warm-up: {done:?} in {pieces:?}");
        let (done, pieces) = window(400, 10.0, 10.0);
        let most = (10.0 * LONGEST_S) as u64;
        assert_eq!((done, pieces.iter().sum::<f64>()), (Some(most), LONGEST_S));
        let nothing = Done { operations: None, spun: None };
        assert_eq!(super::window((400, LONGEST_S), &mut 1.0, &mut |_| Ok(nothing)).unwrap(), nothing);
    }
}
