//! On the lab server: every cause under every policy, a VM for each cause.

use crate::{
    cause,
    committed::{
        CHUNK_MIB, Cause, HOST_CPUS, Means, PASSES, PERIOD_S, PERIODS, PERIODS_S, Policy, STREAM_MIB,
        SizeCause, cells,
    },
    policy::Running,
    raw::{self, Cell, Line, Period, Stream},
    size,
    vm::Machine,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    io::Write,
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_common::host::{Numad, affine, balance};
use vnuma_lab_pricing::{CounterProfile, by_name};

/// Passes of STREAM under which the dilation is measured.
const DILATION_PASSES: usize = 3;

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
    /// All policies for each cause
    #[arg(long)]
    full: bool,
    /// Run a store as well as STREAM, as the full form does
    #[arg(long)]
    store: bool,
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { cause, policy, size, full, store } = arguments;
    // What is named is measured, whatever the form has.
    let all = *full || !policy.is_empty();
    let store = *full || *store;
    let wanted: Vec<(Cause, Policy)> = cells(all)
        .filter(|(one, _)| (cause.is_empty() && size.is_empty()) || cause.contains(one))
        .filter(|(_, one)| policy.is_empty() || policy.contains(one))
        .collect();
    // Who names causes or policies wants nothing else.
    let sizes = SizeCause::ALL.into_iter().filter(|one| match size.is_empty() {
        true => cause.is_empty() && policy.is_empty(),
        false => size.contains(one),
    });
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    affine(0, HOST_CPUS)?;
    balance(false)?;
    let (mut period_s, mut failed) = (None, Vec::new());
    for cause in Cause::ALL {
        let policies: Vec<Policy> =
            wanted.iter().filter(|(one, _)| *one == cause).map(|(_, policy)| *policy).collect();
        if policies.is_empty() {
            continue;
        }
        eprintln!("{}: starting its VM", cause.name());
        let mut machine = Machine::start(cause).with_context(|| cause.name().to_owned())?;
        let period_s = match period_s {
            Some(period_s) => period_s,
            None => {
                let length_s = introduce(&mut machine, &profile)?;
                *period_s.insert(length_s)
            }
        };
        for policy in policies {
            let name = format!("{}, {}", cause.name(), policy.name());
            let began = Instant::now();
            // The others are worth having all the same.
            match cell(&mut machine, (cause, policy), period_s, store).with_context(|| name.clone()) {
                Ok(cell) => {
                    eprintln!(
                        "{name}: {} s, {} of {} MiB are displaced",
                        began.elapsed().as_secs(),
                        cell.displaced >> 20,
                        cell.resident >> 20
                    );
                    print(&Line::Cell(cell))?;
                }
                Err(error) => {
                    eprintln!("{error:#}");
                    failed.push(name);
                }
            }
        }
    }
    let sizes: Vec<_> = sizes.collect();
    if period_s.is_none() && !sizes.is_empty() {
        introduce(&mut Machine::sized(Means::NeverChanged)?, &profile)?;
    }
    for (cause, means) in sizes.into_iter().flat_map(|cause| Means::ALL.map(|means| (cause, means))) {
        let name = format!("{}, {}", cause.name(), means.name());
        match size::cell(cause, means).with_context(|| name.clone()) {
            Ok(cell) => {
                eprintln!("{name}: {:?} MiB are free on the guest's nodes", cell.free_mib);
                print(&Line::Size(cell))?;
            }
            Err(error) => {
                eprintln!("{error:#}");
                failed.push(name);
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

/// Prints what the server is. How long its periods are.
fn introduce(machine: &mut Machine, profile: &CounterProfile) -> Result<f64> {
    let dilation = dilation(machine, profile.clock_ghz)?;
    let length_s = (PERIOD_S * dilation).clamp(PERIODS_S.0, PERIODS_S.1);
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
fn dilation(machine: &mut Machine, clock_ghz: f64) -> Result<f64> {
    let _: serde_json::Value = machine.ask(&format!("stream {STREAM_MIB}"))?;
    let before = machine.cycles_and_time()?;
    for _ in 0..DILATION_PASSES {
        machine.ask::<u64>("pass")?;
    }
    let after = machine.cycles_and_time()?;
    machine.ask::<u64>("end")?;
    let cycles = after.0.saturating_sub(before.0);
    ensure!(cycles > 0, "vCPU 0 did nothing");
    Ok(after.1.saturating_sub(before.1) as f64 / (cycles as f64 / clock_ghz))
}

/// A run of STREAM or of the store, in memory that it maps anew.
fn application(machine: &mut Machine, name: &str, pass: &str) -> Result<Stream> {
    let ranges: Vec<(u64, u64)> = machine.ask(&format!("{name} {STREAM_MIB}"))?;
    let nodes = machine.memory.where_are(&ranges)?;
    let passes = (0..PASSES).map(|_| machine.pass(pass)).collect::<Result<_>>()?;
    machine.ask::<u64>("end")?;
    let remote = nodes.iter().filter(|node| node.is_some_and(|node| node != 0)).count();
    Ok(Stream { remote_pages: remote as u64, pages: nodes.len() as u64, passes })
}

fn stream(machine: &mut Machine) -> Result<Stream> {
    application(machine, "stream", "pass")
}

fn store(machine: &mut Machine) -> Result<Stream> {
    application(machine, "store", "lookups")
}

fn cell(
    machine: &mut Machine,
    (cause, policy): (Cause, Policy),
    period_s: f64,
    with_store: bool,
) -> Result<Cell> {
    machine.ask::<u64>("drop")?;
    cause::clear(cause)?;
    machine.bring_home()?;
    let first = stream(machine)?;
    let first_store = with_store.then(|| store(machine)).transpose()?;
    let caused = cause::prepare(cause, machine)?;
    let mut running = Running::start(policy, machine.vm.pid, period_s)?;
    running.begin(&machine.memory)?;
    let periods = (0..PERIODS)
        .map(|number| period(machine, &mut running, cause, (number, period_s)))
        .collect::<Result<_>>();
    let periods = periods?;
    let (pages_moved, daemon) = (running.pages_moved()?, running.daemon()?);
    let all = machine.layout(true)?;
    cause::end(cause, machine)?;
    machine.ask::<u64>("drop")?;
    let second = stream(machine)?;
    let second_store = with_store.then(|| store(machine)).transpose()?;
    let longest_hold_us = running.longest_hold_us();
    drop(running);
    Ok(Cell {
        cause,
        policy,
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
    (number, length_s): (usize, f64),
) -> Result<Period> {
    let began = Instant::now();
    cause::step(cause, machine, number).with_context(|| format!("period {number} ({CHUNK_MIB} MiB)"))?;
    let displaced_after_work = machine.layout(false)?.displaced;
    let io = machine.pass("read")?;
    let worked_s = began.elapsed().as_secs_f64();
    thread::sleep(Duration::from_secs_f64(length_s).saturating_sub(began.elapsed()));
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
