//! `make bench NAME=dsm`: the user-space DSM beside what its transports and page faults cost by themselves, and programs
//! beside MPI. What it sends by RDMA is counted on a lab server.

use super::{Form, build, with_scratch};
use crate::{
    setup,
    steps::{run as run_command, workspace},
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::LabRun;

const PACKAGES: &str = "bench/dsm/host-packages.txt";

/// Runs it.
pub fn run(form: Form) -> Result<()> {
    ensure!(!form.full, "this benchmark has one form, and a short one");
    let programs = build(form.smoke, &[("vnuma-bench-dsm", "bench-dsm"), ("dsm-run", "dsm-run")])?;
    let [program, dsm_run] = &programs[..] else { bail!("a program is missing") };
    let directory = workspace().join("target/bench").join(form.folder("dsm"));
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let report = directory.join("report.json");
    let mut bench = Command::new(program);
    bench.arg("--report").arg(&report).args(form.words());
    if !form.smoke {
        bench.arg("--dsm-run").arg(dsm_run);
        match mpi(&directory) {
            Ok(programs) => bench.arg("--mpi").arg(programs),
            Err(error) => bench.arg("--mpi-skipped").arg(format!("{error:#}")),
        };
        match rdma(program, &directory) {
            Ok(rows) => bench.arg("--rows").arg(rows),
            Err(error) => bench.arg("--rows-skipped").arg(format!("{error:#}")),
        };
    }
    let _scratch = with_scratch(&mut bench)?;
    let measured = super::judged(&mut bench);
    println!("report: {}\npicture: {}", report.display(), report.with_extension("svg").display());
    measured
}

/// A lab server with RoCE in software, on a card that nobody else is on.
const SERVER: &str = "2n4c";
const RDMA: &str = "modprobe -a rdma_rxe rds_rdma
    ip link add rdma type dummy
    ip address add 10.99.0.1/24 dev rdma
    ip link set rdma up
    rdma link add rxe0 type rxe netdev rdma
    exec taskset --cpu-list 1-3 /root/bench-dsm --rdma 10.99.0.1 --modes ivy,default --passes 1 --report /root/report.json";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(600);

/// Counts what nodes send by RDMA.
fn rdma(bench: &Path, directory: &Path) -> Result<PathBuf> {
    let report = directory.join("rdma.json");
    let run = LabRun {
        profile: SERVER.to_owned(),
        puts: vec![(bench.to_owned(), "/root/bench-dsm".to_owned())],
        gets: vec![("/root/report.json".to_owned(), report.clone())],
        command: ["sh", "-ec", RDMA].map(str::to_owned).to_vec(),
        timeout: HANG,
        ..LabRun::default()
    };
    let status = run.run()?.status;
    ensure!(status == 0, "bench-dsm on a lab server: status {status}");
    Ok(report)
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
