//! On the lab server: the cells of one boot, one after the other.

use crate::{
    committed::{self, MEASURED, VMS},
    full::{plan::Id, store::Measured},
    host::{self, Numad, Timers},
    raw,
    server::{Bench, Options},
    threads::Counted,
    vms::Vms,
    wakes::Wakes,
};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};
use vnuma_lab_pricing::by_name;

#[derive(clap::Args)]
pub struct Arguments {
    /// The cells, as JSON
    #[arg(long)]
    cells: PathBuf,
    /// Begin no cell after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
}

/// A line of what it prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Which cell.
    pub id: Id,
    /// What was measured.
    pub measured: Measured,
}

/// Prints a line of JSON for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let began = Instant::now();
    let path = &arguments.cells;
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let ids: Vec<Id> = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let limit = arguments.seconds.map(Duration::from_secs);
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    eprintln!("starting {} VMs", VMS.len());
    let vms = Vms::start(Counted::Programs)?;
    let wakes = Wakes::watch(vms.tids())?;
    host::divide()?;
    let timers = Timers::read()?;
    let options = Options { periods: MEASURED, sched_ext: false };
    let (kernel, boot) = (proc_line("osrelease")?, proc_line("random/boot_id")?);
    let numad = Numad::version();
    let mut failed = Vec::new();
    for group in ids.chunk_by(|one, next| one.workload == next.workload) {
        if limit.is_some_and(|limit| began.elapsed() > limit) {
            break;
        }
        let name = &group[0].workload;
        let workload = committed::workload(name).with_context(|| format!("workload {name} is unknown"))?;
        let (bench, line) = Bench::load((&vms, &wakes), workload, &timers, &profile, options)?;
        for id in group {
            if limit.is_some_and(|limit| began.elapsed() > limit) {
                break;
            }
            let started = Instant::now();
            let cell = match bench.variant(&id.policy) {
                Ok(cell) => cell,
                // The others are worth having all the same.
                Err(error) => {
                    eprintln!("{id}: {error:#}");
                    failed.push(id.to_string());
                    continue;
                }
            };
            let (profile, second_llc) = (profile.name.clone(), None);
            let server = raw::Server { profile, second_llc, kernel: kernel.clone(), numad: numad.clone() };
            let took_s = started.elapsed().as_secs_f64();
            print(&Line {
                id: id.clone(),
                measured: Measured { server, boot: boot.clone(), took_s, workload: line.clone(), cell },
            })?;
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

fn proc_line(name: &str) -> Result<String> {
    let path = format!("/proc/sys/kernel/{name}");
    Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
}
