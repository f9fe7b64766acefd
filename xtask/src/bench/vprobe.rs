//! What policies of vCPUs do for VMs on a NUMA server. bench/vprobe measures on a lab server with counters, and judges here.

mod full;

use super::commit;
use crate::steps::workspace;
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    path::Path,
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::{Counters, Exec, Input, Lab, build_release_binaries, end_on_signals};

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

/// Runs it and judges it. What the server measured before it failed is kept and can be judged by itself.
pub fn run(options: &super::Options) -> Result<()> {
    ensure!(!options.json, "this benchmark has no --json; its report is a file");
    let pieces = options.cells.is_some() || options.minutes.is_some() || !options.part.is_empty();
    ensure!(options.full || !pieces, "--part, --cells and --minutes are for --full");
    ensure!(!(options.full && options.sched_ext), "--full sets places by affinities and has no --sched-ext");
    end_on_signals().context("signal handlers")?;
    let programs = build_release_binaries(&PROGRAMS)?;
    let name = if options.sched_ext { "vprobe-sched-ext" } else { "vprobe" };
    let directory = workspace().join("target/bench").join(name);
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    if options.full {
        return full::run(options, &programs, &directory);
    }
    let raw = directory.join("raw.jsonl");
    let measured = measure(&programs, options, &raw);
    let bench = programs.last().context("bench-vprobe")?;
    let mut judge = Command::new(bench);
    judge
        .arg("judge")
        .arg("--raw")
        .arg(&raw)
        .arg("--directory")
        .arg(&directory)
        .args(["--commit", &commit()]);
    let judged = super::judged(&mut judge);
    measured.and(judged)
}

fn measure(programs: &[std::path::PathBuf], options: &super::Options, raw: &Path) -> Result<()> {
    let mut file = File::create(raw).with_context(|| raw.display().to_string())?;
    let counters: Counters = COUNTERS.parse()?;
    let lab = Lab::boot_with(SERVER, Some(&counters))?;
    put(&lab, programs)?;
    let mut argv = vec!["bench-vprobe".to_owned(), "server".to_owned()];
    argv.extend(options.workload.iter().flat_map(|name| ["--workload".to_owned(), name.clone()]));
    argv.extend(options.policy.iter().flat_map(|name| ["--policy".to_owned(), name.clone()]));
    argv.extend(options.sched_ext.then(|| "--sched-ext".to_owned()));
    let exec = Exec { argv, ..Exec::default() };
    let status = lab.exec(&exec, Input::Null, &mut file, &mut std::io::stderr(), HANG)?;
    ensure!(status == 0, "bench-vprobe on the server: status {status}");
    Ok(())
}

fn put(lab: &Lab, programs: &[std::path::PathBuf]) -> Result<()> {
    for (here, (_, name)) in programs.iter().zip(PROGRAMS) {
        lab.put(here, &format!("/usr/local/bin/{name}"), HANG)?;
    }
    Ok(())
}
