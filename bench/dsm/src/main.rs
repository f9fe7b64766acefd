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

use anyhow::{Context, Result};
use clap::Parser;
use report::Faults;
use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};
use vnuma_bench_figures::{
    cells::{Cells, Options},
    ending,
    goals::Limit,
    report::Results,
};

#[derive(Parser)]
#[command(
    name = "bench-dsm",
    about = "Remote page faults of each protocol, their floor, transports, and programs"
)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    results: Results,
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

    /// A report with the rows of `--rows` besides.
    fn with_rows(&self, report: &report::Report) -> Result<serde_json::Value> {
        let mut value = serde_json::to_value(report)?;
        if let (Some(path), Some(rows)) = (&self.rows, value["rows"].as_array_mut()) {
            let at = || path.display().to_string();
            let text = fs::read_to_string(path).with_context(at)?;
            let mut more: serde_json::Value = serde_json::from_str(&text).with_context(at)?;
            rows.append(more["rows"].as_array_mut().with_context(|| format!("{}: rows: no list", at()))?);
        }
        Ok(value)
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
    let arguments = if arguments.results.form.smoke { arguments.reduced() } else { arguments };
    let mut report = report::Report::new();
    place::measured()?;
    if let Some(address) = arguments.rdma {
        return rdma(&arguments, address);
    }
    let mut cells = Cells::stored(&arguments.options)?;
    report.commit.clone_from(&arguments.options.commit);
    report.rdma_skipped.clone_from(&arguments.rows_skipped);
    let local = cells.measure("wake-ups and local faults", || {
        let asleep = parts::wake_up(arguments.rounds)?;
        let _awake = place::Awake::begin()?;
        let figures = [asleep, floor::local(arguments.rounds)?, parts::wake_up(arguments.rounds)?];
        Ok((figures, String::new()))
    })?;
    [report.wake_up_asleep_us, report.local_fault_us, report.wake_up_us] =
        local.map_or([None; 3], |local| local.map(Some));
    let wanted = |kind: &peer::Kind| {
        arguments.only.is_empty() || arguments.only.iter().any(|only| only == kind.name())
    };
    for kind in peer::ALL.into_iter().filter(wanted) {
        let found = cells.measure(&format!("{}, faults", kind.name()), || {
            place::measured()?;
            let _awake = place::Awake::begin()?;
            Ok((faults(&arguments, kind, &report)?, String::new()))
        })?;
        if let Some(Faults { rows, transports, parts }) = found {
            report.rows.extend(rows);
            report.transports.extend(transports);
            report.floor_parts.push(parts);
        }
    }
    place::anywhere()?;
    let answers =
        cells.measure("faulty peers", || Ok((faulty::all().context("faulty peers")?, String::new())))?;
    report.faulty_peers = answers.unwrap_or_default();
    if let Some(dsm_run) = &arguments.dsm_run {
        run_programs(&arguments, dsm_run, &wanted, &mut report, &mut cells)?;
    }
    match &arguments.mpi {
        Some(mpi) => report.programs.extend(programs::mpi(mpi, arguments.repeats, &mut cells)?),
        None => report.mpi_skipped = Some(arguments.mpi_skipped.clone().unwrap_or("no --mpi".to_owned())),
    }
    report
        .machine
        .load_average
        .push(fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned());
    report.machine.begun_again = cluster::begun_again();
    report.failures.clone_from(&cells.failed);
    report.measured_by.clone_from(&cells.measured_by);
    report.goals = goals::all(&report);
    let results = &arguments.results;
    let judged = if results.form.smoke { Vec::new() } else { report.goals.clone() };
    // What was not asked for is not missing.
    let is_whole = arguments.only.is_empty() && arguments.modes.is_empty() && arguments.dsm_run.is_some();
    let judged: Vec<_> = judged.into_iter().filter(|goal| is_whole || goal.value.is_some()).collect();
    picture::draw(&report, &results.directory.join("report.svg"))?;
    let ended = results.end(&arguments.with_rows(&report)?, &report.tables()?, &judged);
    cells.end().and(ended)
}

/// What programs do on each transport, and what they touched.
fn run_programs(
    arguments: &Arguments,
    dsm_run: &Path,
    wanted: &dyn Fn(&peer::Kind) -> bool,
    report: &mut report::Report,
    cells: &mut Cells,
) -> Result<()> {
    report.programs = programs::dsm(dsm_run, arguments.repeats, cells)?;
    report.programs.extend(programs::without_parts(dsm_run, arguments.repeats, cells)?);
    for kind in peer::ALL.into_iter().filter(|kind| wanted(kind)) {
        if let Some(rate) = programs::hint_rate(&report.programs, kind.name()) {
            let mix = cells.measure(&format!("{}, mix", kind.name()), || {
                place::measured()?;
                let _awake = place::Awake::begin()?;
                Ok((protocol::mix(kind, rate, arguments.passes)?, String::new()))
            })?;
            report.mix.extend(mix.into_iter().flatten());
            place::anywhere()?;
        }
    }
    for kind in peer::ALL.into_iter().filter(|kind| wanted(kind)) {
        let replays = cells.measure(&format!("{}, replays", kind.name()), || {
            place::anywhere()?;
            let recordings = replay::record(dsm_run, kind).context("recording programs")?;
            place::measured()?;
            let _awake = place::Awake::begin()?;
            Ok((replay::measure(kind, &recordings)?, String::new()))
        })?;
        report.replays.extend(replays.into_iter().flatten());
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
    arguments.results.end::<Limit>(&report, &report.tables()?, &[])
}

/// The rows of a transport, and what belongs to them.
fn faults(arguments: &Arguments, kind: peer::Kind, report: &report::Report) -> Result<Faults> {
    let (mut rows, mut transports) = (Vec::new(), Vec::new());
    for spin in [Duration::ZERO, Duration::from_micros(arguments.spin_us)] {
        rows.push(floor::remote(kind, arguments.rounds, spin)?);
        transports.extend(transport::measure(kind, arguments.rounds, arguments.bytes, spin)?);
    }
    // The first one does not poll.
    let floor = rows[0].p50_us;
    let wanted = |mode: &str| arguments.modes.is_empty() || arguments.modes.iter().any(|only| only == mode);
    for (mode, _) in protocol::modes().into_iter().filter(|(mode, _)| wanted(mode)) {
        rows.extend(protocol::measure(kind, mode, arguments.passes)?);
    }
    let mut request = [0; floor::REQUEST];
    request[0] = peer::Ask::Page as u8;
    let stack = parts::stack(kind, &request, arguments.rounds)?.p50;
    let p50 = |quantiles: Option<report::Quantiles>| {
        quantiles.map(|quantiles| quantiles.p50).context("not measured")
    };
    let local_fault = p50(report.local_fault_us).context("a local fault")?;
    let wake_up = p50(report.wake_up_us).context("a wake-up")?;
    let sum = local_fault + stack + 2.0 * wake_up;
    let parts = report::Parts { transport: kind.name(), floor, local_fault, stack, wake_up, sum };
    Ok(Faults { rows, transports, parts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Arguments::command().debug_assert();
    }
}
