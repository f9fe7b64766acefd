//! `make bench NAME=dsm`: the user-space DSM beside what its transports and page faults cost by themselves, and programs
//! beside MPI.

use crate::{
    setup,
    steps::{run as run_command, workspace},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const PACKAGES: &str = "bench/dsm/host-packages.txt";

/// Builds the benchmark with optimization, and runs it. Nothing fails because the machine is slow: goals that were missed are
/// said.
pub fn run() -> Result<()> {
    let mut build = Command::new(env!("CARGO"));
    run_command(build.args(["build", "--release", "--locked", "-p", "vnuma-bench-dsm", "-p", "dsm-run"]))?;
    let directory = workspace().join("target/bench/dsm");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let report = directory.join("report.json");
    let built = |name: &str| workspace().join("target/release").join(name);
    let mut bench = Command::new(built("bench-dsm"));
    bench.arg("--report").arg(&report).arg("--dsm-run").arg(built("dsm-run"));
    match mpi(&directory) {
        Ok(programs) => bench.arg("--mpi").arg(programs),
        Err(error) => bench.arg("--mpi-skipped").arg(format!("{error:#}")),
    };
    let status = bench.current_dir(workspace()).status().context("bench-dsm")?;
    ensure!(status.success(), "bench-dsm: {status}");
    println!("report: {}\npicture: {}", report.display(), report.with_extension("svg").display());
    Ok(())
}

/// Builds the programs that are written for MPI.
fn mpi(directory: &Path) -> Result<PathBuf> {
    setup::install(&[PACKAGES])?;
    let programs = directory.join("mpi-programs");
    let mut compile = Command::new("mpicc");
    compile
        .args(["-O2", "-std=gnu11", "-Wall", "-Wextra", "-o"])
        .arg(&programs)
        .arg("bench/dsm/mpi/programs.c");
    run_command(&mut compile)?;
    Ok(programs)
}
