//! `make bench NAME=dsm`: the user-space DSM beside what its transports and page faults cost by themselves, and programs
//! beside MPI. What it sends by RDMA is counted on a lab server.

use super::{Common, run_here};
use crate::{setup, steps::run as run_command};
use anyhow::{Result, ensure};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use vnuma_lab_runner::LabRun;

const PACKAGES: &str = "bench/dsm/host-packages.txt";

/// Runs it.
pub fn run(common: &Common) -> Result<()> {
    common.has_one_form()?;
    run_here(common, "dsm", &[("dsm-run", "dsm-run"), ("vnuma-bench-dsm", "bench-dsm")], |built, run| {
        if common.form.smoke {
            return Ok(Vec::new());
        }
        let directory = &run.results.directory;
        let or_why = |option: &str, built: Result<PathBuf>| match built {
            Ok(path) => [option.into(), path.into()],
            Err(error) => [format!("{option}-skipped").into(), format!("{error:#}").into()],
        };
        let dsm_run = ["--dsm-run".into(), built[0].clone().into()];
        let others = [or_why("--mpi", mpi(directory)), or_why("--rows", rdma(&built[1], directory))];
        Ok(dsm_run.into_iter().chain(others.into_iter().flatten()).collect())
    })
}

/// A lab server with RoCE in software, on a card that nobody else is on.
const SERVER: &str = "2n4c";
const RDMA: &str = "modprobe -a rdma_rxe rds_rdma
    ip link add rdma type dummy
    ip address add 10.99.0.1/24 dev rdma
    ip link set rdma up
    rdma link add rxe0 type rxe netdev rdma
    exec taskset --cpu-list 1-3 /root/bench-dsm --rdma 10.99.0.1 --modes ivy,default --passes 1 --directory /root";
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
