//! On the lab server: the cells of one boot, one after the other.

use crate::{
    committed::{MEASURED, VMS},
    full::{
        committed,
        plan::Id,
        small::SmallVms,
        store::{Line, Measured},
    },
    host::Numad,
    raw,
    server::{Fresh, Options},
    threads::Counted,
};
use anyhow::{Context, Result};
use std::{fs, path::PathBuf, time::Instant};
use vnuma_bench_common::cells::{self, Cells};
use vnuma_lab_pricing::by_name;

#[derive(clap::Args)]
pub struct Arguments {
    /// The cells, as JSON
    #[arg(long)]
    list: PathBuf,
    #[command(flatten)]
    options: cells::Options,
}

/// Prints a line for each cell.
pub fn run(arguments: &Arguments) -> Result<()> {
    let path = &arguments.list;
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let ids: Vec<Id> = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let header = lab_count::server::header()?;
    let profile = by_name(header.profile_name())?;
    let setup = ids.first().and_then(|id| committed::setup(&id.setup)).context("no cell of a known setup")?;
    let mut boot = Boot {
        cells: Cells::printed(&arguments.options)?,
        commit: &arguments.options.commit,
        server: raw::Server {
            profile: profile.name.clone(),
            second_llc: None,
            kernel: proc_line("osrelease")?,
            numad: Numad::version(),
        },
        id: proc_line("random/boot_id")?,
    };
    if setup.small > 0 {
        eprintln!("starting {} small VMs", setup.small);
        let (vms, line) = SmallVms::start(setup.small, profile.clock_ghz)?;
        boot.cells(&ids, &line, |policy| vms.cell(policy))?;
    } else {
        let counted = Counted::Programs(setup.layout.classes);
        let options = Options { periods: MEASURED, sched_ext: false, smoke: false };
        let mut timers = None;
        for group in ids.chunk_by(|one, next| one.workload == next.workload) {
            if boot.cells.is_over() {
                break;
            }
            let name = &group[0].workload;
            let workload = crate::committed::workload(name);
            let workload = workload.with_context(|| format!("workload {name} is unknown"))?;
            let fresh = Fresh::start((setup.layout, VMS.len()), counted, setup.told, &mut timers)?;
            let (bench, line) = fresh.load(workload, &profile, options)?;
            boot.cells(group, &line, |policy| bench.variant(policy))?;
        }
    }
    boot.cells.end()
}

/// What is the same for all cells.
struct Boot<'a> {
    cells: Cells,
    commit: &'a str,
    server: raw::Server,
    id: String,
}

impl Boot<'_> {
    /// Measures and prints cells while programs run.
    fn cells(
        &mut self,
        ids: &[Id],
        workload: &raw::Workload,
        cell: impl Fn(&str) -> Result<raw::Cell>,
    ) -> Result<()> {
        for id in ids {
            self.cells.measure(&id.to_string(), || {
                let started = Instant::now();
                let cell = cell(&id.policy)?;
                let measured = Measured {
                    server: self.server.clone(),
                    boot: self.id.clone(),
                    took_s: started.elapsed().as_secs_f64(),
                    workload: workload.clone(),
                    cell,
                    commit: self.commit.to_owned(),
                };
                Ok((Line { id: id.clone(), measured }, String::new()))
            })?;
        }
        Ok(())
    }
}

fn proc_line(name: &str) -> Result<String> {
    let path = format!("/proc/sys/kernel/{name}");
    Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
}
