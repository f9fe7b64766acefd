//! What the place of a VM costs its workloads on passthrough devices. bench/nuioa measures on a lab server with counters, and judges
//! here.

use super::{Options, commit};
use crate::steps::{run as run_command, workspace};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::{Counters, Exec, Input, Lab, build_release_binaries, driver, end_on_signals};

const SERVER: &str = "2n6c-iommu";
/// All sets of the caches: what testpmd and drivers touch is too little for a sample of them.
const COUNTERS: &str = "broadwell-2s:full";
/// Where the server finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(2 * 3600);
/// The last one judges, too.
const PROGRAMS: [(&str, &str); 3] =
    [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-bench-nuioa", "bench-nuioa")];

/// Runs it and judges it. What the server measured before it failed is kept and can be judged by itself.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.json, "this benchmark has no --json; its report is a file");
    end_on_signals().context("signal handlers")?;
    let programs = build_release_binaries(&PROGRAMS)?;
    let directory = workspace().join("target/bench/nuioa");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let raw = directory.join("raw.jsonl");
    let measured = measure(&programs, options, &raw);
    let bench = programs.last().context("bench-nuioa")?;
    let mut judge = Command::new(bench);
    judge.arg("judge").arg("--raw").arg(&raw).arg("--directory").arg(&directory);
    judge.args(["--commit", &commit()]).args(options.full.then_some("--full"));
    let judged = run_command(&mut judge);
    measured.and(judged)
}

fn measure(programs: &[PathBuf], options: &Options, raw: &Path) -> Result<()> {
    let mut file = File::create(raw).with_context(|| raw.display().to_string())?;
    let counters: Counters = COUNTERS.parse()?;
    let module = driver::build(GUEST_KERNEL)?;
    let lab = Lab::boot_with(SERVER, Some(&counters))?;
    for (here, (_, name)) in programs.iter().zip(PROGRAMS) {
        lab.put(here, &format!("/usr/local/bin/{name}"), HANG)?;
    }
    lab.put(&module, DRIVER, HANG)?;
    let mut argv = vec!["bench-nuioa".to_owned(), "server".to_owned()];
    argv.extend(options.full.then(|| "--full".to_owned()));
    argv.extend(options.workload.iter().flat_map(|name| ["--workload".to_owned(), name.clone()]));
    argv.extend(options.configuration.iter().flat_map(|name| ["--configuration".to_owned(), name.clone()]));
    let exec = Exec { argv, ..Exec::default() };
    let status = lab.exec(&exec, Input::Null, &mut file, &mut std::io::stderr(), HANG)?;
    ensure!(status == 0, "bench-nuioa on the server: status {status}");
    Ok(())
}
