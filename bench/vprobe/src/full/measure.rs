//! On the lab server: the cells of one boot, one after the other.

use crate::{
    committed::{MEASURED, VMS},
    full::{committed, plan::Id, small::SmallVms, store::Measured},
    host::Numad,
    raw,
    server::{Fresh, Options},
    threads::Counted,
};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};
use vnuma_bench_common::cells::print;
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
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    let setup = ids.first().and_then(|id| committed::setup(&id.setup)).context("no cell of a known setup")?;
    let limit = arguments.seconds.map(Duration::from_secs);
    let boot = Boot {
        late: Box::new(move || limit.is_some_and(|limit| began.elapsed() > limit)),
        server: raw::Server {
            profile: profile.name.clone(),
            second_llc: None,
            kernel: proc_line("osrelease")?,
            numad: Numad::version(),
        },
        id: proc_line("random/boot_id")?,
    };
    let mut failed = Vec::new();
    if setup.small > 0 {
        eprintln!("starting {} small VMs", setup.small);
        let (vms, line) = SmallVms::start(setup.small, profile.clock_ghz)?;
        boot.cells(&ids, &line, |policy| vms.cell(policy), &mut failed)?;
    } else {
        let counted = Counted::Programs(setup.layout.classes);
        let options = Options { periods: MEASURED, sched_ext: false, smoke: false };
        let mut timers = None;
        for group in ids.chunk_by(|one, next| one.workload == next.workload) {
            if (boot.late)() {
                break;
            }
            let name = &group[0].workload;
            let workload = crate::committed::workload(name);
            let workload = workload.with_context(|| format!("workload {name} is unknown"))?;
            let fresh = Fresh::start((setup.layout, VMS.len()), counted, setup.told, &mut timers)?;
            let (bench, line) = fresh.load(workload, &profile, options)?;
            boot.cells(group, &line, |policy| bench.variant(policy), &mut failed)?;
        }
    }
    ensure!(failed.is_empty(), "cells that failed: {}", failed.join("; "));
    Ok(())
}

/// What is the same for all cells.
struct Boot {
    /// Is there no time for another cell?
    late: Box<dyn Fn() -> bool>,
    server: raw::Server,
    id: String,
}

impl Boot {
    /// Measures and prints cells while programs run.
    fn cells(
        &self,
        ids: &[Id],
        workload: &raw::Workload,
        cell: impl Fn(&str) -> Result<raw::Cell>,
        failed: &mut Vec<String>,
    ) -> Result<()> {
        for id in ids {
            if (self.late)() {
                break;
            }
            let started = Instant::now();
            match cell(&id.policy) {
                Ok(cell) => print(&Line {
                    id: id.clone(),
                    measured: Measured {
                        server: self.server.clone(),
                        boot: self.id.clone(),
                        took_s: started.elapsed().as_secs_f64(),
                        workload: workload.clone(),
                        cell,
                        commit: String::new(),
                    },
                })?,
                // The others are worth having all the same.
                Err(error) => {
                    eprintln!("{id}: {error:#}");
                    failed.push(id.to_string());
                }
            }
        }
        Ok(())
    }
}

fn proc_line(name: &str) -> Result<String> {
    let path = format!("/proc/sys/kernel/{name}");
    Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
}
