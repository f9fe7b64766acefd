//! What policies of vCPUs do for VMs on a NUMA server. bench/vprobe measures on a lab server with counters, and judges here.

mod full;

use super::{
    Common,
    on_server::{OnServer, each},
};
use anyhow::{Context, Result};
use std::time::Duration;
use vnuma_lab_runner::{Lab, build_release_binaries, end_on_signals};

const SERVER: &str = "2n8c";
/// Priced by profiles of both caches.
const COUNTERS: &str = "broadwell-2s+vprobe-e5620";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(3 * 3600);
/// The last one judges, too.
const PROGRAMS: [(&str, &str); 4] = [
    ("vnumad", "vnumad"),
    ("vnumactl", "vnumactl"),
    ("scx_vnuma", "scx_vnuma"),
    ("vnuma-bench-vprobe", "bench-vprobe"),
];

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these workloads
    #[arg(long, value_name = "WORKLOAD")]
    workload: Vec<String>,
    /// Only these policies
    #[arg(long, value_name = "POLICY")]
    policy: Vec<String>,
    /// Set the places of vnumad's policies by scx_vnuma, not by affinities
    #[arg(long)]
    sched_ext: bool,
    /// Only these parts
    #[arg(long, value_name = "PART", requires = "full")]
    part: Vec<String>,
}

/// Runs it and judges it.
pub fn run(options: &Arguments) -> Result<()> {
    if options.common.form.full {
        end_on_signals().context("signal handlers")?;
        let programs = build_release_binaries(&PROGRAMS)?;
        return full::run(options, &programs);
    }
    let sched_ext = options.sched_ext.then(|| "--sched-ext".to_owned());
    OnServer {
        name: if options.sched_ext { "vprobe-sched-ext" } else { "vprobe" },
        common: options.common,
        server: SERVER,
        peer: None,
        counters: Some(COUNTERS),
        programs: &PROGRAMS,
        others: &[],
        files: Vec::new(),
        inputs: Vec::new(),
        measure: each("--workload", &options.workload)
            .chain(each("--policy", &options.policy))
            .chain(sched_ext)
            .collect(),
        hang: HANG,
    }
    .run()
}

fn put(lab: &Lab, programs: &[std::path::PathBuf]) -> Result<()> {
    for (here, (_, name)) in programs.iter().zip(PROGRAMS) {
        lab.put(here, &format!("/usr/local/bin/{name}"), HANG)?;
    }
    Ok(())
}
