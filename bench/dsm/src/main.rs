//! How fast pages move between nodes: each protocol, its parts, and what transports and page faults cost by themselves.
//!
//! All ends are on this machine, so that a transport is measured without a network.

mod cluster;
mod faulty;
mod floor;
mod goals;
mod parts;
mod peer;
mod picture;
mod place;
mod programs;
mod protocol;
mod replay;
mod report;
mod spent;
mod transport;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};
use vnuma_bench_figures::{ending, goals::check_limits};

#[derive(Parser)]
#[command(
    name = "bench-dsm",
    about = "Remote page faults of each protocol, their floor, transports, and programs"
)]
struct Arguments {
    /// Where the report goes; the picture goes beside it
    #[arg(long, default_value = "target/bench/dsm/report.json")]
    report: PathBuf,
    /// dsm-run, for the programs; without it they are left out
    #[arg(long)]
    dsm_run: Option<PathBuf>,
    /// The programs built for MPI; without it they are left out
    #[arg(long)]
    mpi: Option<PathBuf>,
    /// Why there is no --mpi
    #[arg(long)]
    mpi_skipped: Option<String>,
    /// Page faults and round trips of each measurement
    #[arg(long, default_value_t = 4000)]
    rounds: usize,
    /// Passes over the pages for each access of the protocol
    #[arg(long, default_value_t = 8)]
    passes: usize,
    /// Runs of each program
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Bytes that each measurement of bandwidth moves at most
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
    /// How long the network side polls before it sleeps, in microseconds: measured beside no polling
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
    /// Only the rows of these transports
    #[arg(long, value_name = "TRANSPORT", value_delimiter = ',')]
    only: Vec<String>,
    /// Only messages and bytes of RDMA, on a machine whose times mean nothing: at this address, which an RDMA device has
    #[arg(long, value_name = "ADDRESS")]
    rdma: Option<Ipv4Addr>,
    /// Also report the rows of this report
    #[arg(long, value_name = "REPORT")]
    rows: Option<PathBuf>,
    /// Why there are no --rows
    #[arg(long)]
    rows_skipped: Option<String>,
    /// Only the rows of these modes, and the floor
    #[arg(long, value_name = "MODE", value_delimiter = ',')]
    modes: Vec<String>,
    /// One transport and few faults, which say only that it works
    #[arg(long)]
    smoke: bool,
    /// This process keeps its CPU from sleeping
    #[arg(long, hide = true)]
    keep_awake: bool,
    #[command(flatten)]
    seat: cluster::Seat,
}

impl Arguments {
    /// Of the short form.
    fn reduced(self) -> Self {
        Self { rounds: 100, passes: 1, repeats: 1, bytes: 1 << 20, only: vec!["tcp".to_owned()], ..self }
    }
}

fn main() -> ExitCode {
    ending::main(run)
}

fn run(arguments: Arguments) -> Result<()> {
    if arguments.keep_awake {
        return place::stay_awake();
    }
    if arguments.seat.serve()? {
        return Ok(());
    }
    let arguments = if arguments.smoke { arguments.reduced() } else { arguments };
    let mut report = report::Report::new();
    place::measured()?;
    if let Some(address) = arguments.rdma {
        return rdma(&arguments, address);
    }
    report.rdma_skipped.clone_from(&arguments.rows_skipped);
    report.wake_up_asleep_us = Some(parts::wake_up(arguments.rounds)?);
    let awake = place::Awake::begin()?;
    report.local_fault_us = Some(floor::local(arguments.rounds)?);
    report.wake_up_us = Some(parts::wake_up(arguments.rounds)?);
    let wanted = |kind: &peer::Kind| {
        arguments.only.is_empty() || arguments.only.iter().any(|only| only == kind.name())
    };
    for kind in peer::ALL.into_iter().filter(wanted) {
        faults(&arguments, kind, &mut report).with_context(|| kind.name())?;
    }
    drop(awake);
    place::anywhere()?;
    report.faulty_peers = faulty::all().context("faulty peers")?;
    if let Some(dsm_run) = &arguments.dsm_run {
        run_programs(&arguments, dsm_run, &wanted, &mut report)?;
    }
    match &arguments.mpi {
        Some(mpi) => {
            let programs = programs::mpi(mpi, arguments.repeats, &mut report.failures);
            report.programs.extend(programs);
        }
        None => report.mpi_skipped = Some(arguments.mpi_skipped.clone().unwrap_or("no --mpi".to_owned())),
    }
    report
        .machine
        .load_average
        .push(fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned());
    report.machine.begun_again = cluster::begun_again();
    report.goals = goals::all(&report);
    report.print();
    write(&arguments, &report)?;
    ensure!(report.failures.is_empty(), "{} programs failed", report.failures.len());
    // What was not asked for is not missing.
    let is_whole = arguments.only.is_empty() && arguments.modes.is_empty() && arguments.dsm_run.is_some();
    report.goals.retain(|goal| is_whole || goal.value.is_some());
    if arguments.smoke {
        return Ok(());
    }
    check_limits(&report.goals)
}

/// What programs do on each transport, and what they touched.
fn run_programs(
    arguments: &Arguments,
    dsm_run: &Path,
    wanted: &dyn Fn(&peer::Kind) -> bool,
    report: &mut report::Report,
) -> Result<()> {
    eprintln!("bench-dsm: programs");
    report.programs = programs::dsm(dsm_run, arguments.repeats, &mut report.failures);
    let without = programs::without_parts(dsm_run, arguments.repeats, &mut report.failures);
    report.programs.extend(without);
    for kind in peer::ALL.into_iter().filter(|kind| wanted(kind)) {
        if let Some(rate) = programs::hint_rate(&report.programs, kind.name()) {
            place::measured()?;
            let _awake = place::Awake::begin()?;
            report.mix.extend(protocol::mix(kind, rate, arguments.passes)?);
            place::anywhere()?;
        }
    }
    for kind in peer::ALL.into_iter().filter(|kind| wanted(kind)) {
        let recordings = replay::record(dsm_run, kind).context("recording programs")?;
        place::measured()?;
        let _awake = place::Awake::begin()?;
        match replay::measure(kind, &recordings) {
            Ok(replays) => report.replays.extend(replays),
            Err(error) => report.failures.push(format!("replaying programs, {}: {error:#}", kind.name())),
        }
        place::anywhere()?;
    }
    Ok(())
}

/// Rows of RDMA without times.
fn rdma(arguments: &Arguments, address: Ipv4Addr) -> Result<()> {
    peer::set_rdma_address(address);
    let wanted = |mode: &str| arguments.modes.is_empty() || arguments.modes.iter().any(|only| only == mode);
    let mut report = report::Report::new();
    for (mode, _) in protocol::modes().into_iter().filter(|(mode, _)| wanted(mode)) {
        let rows = protocol::measure(peer::Kind::Rdma, mode, arguments.passes).context("rdma")?;
        report.rows.extend(rows.into_iter().map(report::Row::without_times));
    }
    report.print();
    let text = serde_json::to_string_pretty(&report)?;
    fs::write(&arguments.report, text).with_context(|| arguments.report.display().to_string())
}

/// The rows of a transport, and what belongs to them.
fn faults(arguments: &Arguments, kind: peer::Kind, report: &mut report::Report) -> Result<()> {
    eprintln!("bench-dsm: {}", kind.name());
    for spin in [Duration::ZERO, Duration::from_micros(arguments.spin_us)] {
        report.rows.push(floor::remote(kind, arguments.rounds, spin)?);
        report.transports.extend(transport::measure(kind, arguments.rounds, arguments.bytes, spin)?);
    }
    let wanted = |mode: &str| arguments.modes.is_empty() || arguments.modes.iter().any(|only| only == mode);
    for (mode, _) in protocol::modes().into_iter().filter(|(mode, _)| wanted(mode)) {
        report.rows.extend(protocol::measure(kind, mode, arguments.passes)?);
    }
    let mut request = [0; floor::REQUEST];
    request[0] = peer::Ask::Page as u8;
    let stack = parts::stack(kind, &request, arguments.rounds)?.p50;
    let p50 = |quantiles: Option<report::Quantiles>| {
        quantiles.map(|quantiles| quantiles.p50).context("not measured")
    };
    let local_fault = p50(report.local_fault_us).context("a local fault")?;
    let wake_up = p50(report.wake_up_us).context("a wake-up")?;
    let of_this =
        |row: &&report::Row| row.transport == kind.name() && row.mode == "floor" && row.spin_us == 0;
    let floor = report.rows.iter().find(of_this).context("the floor was not measured")?.p50_us;
    let sum = local_fault + stack + 2.0 * wake_up;
    report.floor_parts.push(report::Parts {
        transport: kind.name(),
        floor,
        local_fault,
        stack,
        wake_up,
        sum,
    });
    Ok(())
}

fn write(arguments: &Arguments, report: &report::Report) -> Result<()> {
    if let Some(directory) = arguments.report.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    let mut value = serde_json::to_value(report)?;
    if let (Some(path), Some(rows)) = (&arguments.rows, value["rows"].as_array_mut()) {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut more: serde_json::Value =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        rows.append(
            more["rows"].as_array_mut().with_context(|| format!("{}: rows: no list", path.display()))?,
        );
    }
    let text = serde_json::to_string_pretty(&value)?;
    fs::write(&arguments.report, text).with_context(|| arguments.report.display().to_string())?;
    picture::draw(report, &arguments.report.with_extension("svg"))
}
