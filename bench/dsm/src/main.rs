//! How fast pages move between hosts: what transports and page faults cost by themselves, before any protocol.
//!
//! Both ends are threads of one process on this machine, so that a transport is measured without a network.

mod floor;
mod peer;
mod protocol;
mod report;
mod transport;

use anyhow::{Context, Result};
use clap::Parser;
use std::{fs, path::PathBuf, time::Duration};

#[derive(Parser)]
#[command(
    name = "bench-dsm",
    about = "Latency and bandwidth of transports, and the floor of a remote page fault"
)]
struct Arguments {
    /// Where the report goes
    #[arg(long, default_value = "target/bench/dsm/report.json")]
    report: PathBuf,
    /// Page faults and round trips of each measurement
    #[arg(long, default_value_t = 4000)]
    rounds: usize,
    /// Passes over the pages for each access of the protocol
    #[arg(long, default_value_t = 4)]
    passes: usize,
    /// Bytes that each measurement of bandwidth moves at most
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
    /// How long the network side polls before it sleeps, in microseconds: measured beside no polling
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let spins = [Duration::ZERO, Duration::from_micros(arguments.spin_us)];
    let mut report = report::Report::new();
    report.local_fault_us = Some(floor::local(arguments.rounds)?);
    for kind in peer::ALL {
        for (mode, options) in protocol::modes() {
            report.rows.extend(protocol::measure(kind, mode, options, arguments.passes)?);
        }
        for spin in spins {
            report.rows.push(floor::remote(kind, arguments.rounds, spin)?);
            report.transports.extend(transport::measure(kind, arguments.rounds, arguments.bytes, spin)?);
        }
    }
    report.print();
    if let Some(directory) = arguments.report.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    let text = serde_json::to_string_pretty(&report)?;
    fs::write(&arguments.report, text).with_context(|| arguments.report.display().to_string())
}
