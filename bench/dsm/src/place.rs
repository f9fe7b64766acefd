//! Which CPUs stand for which host: the first for the one whose faults are measured, the second for all others. Whether two
//! threads share a CPU decides what it costs to wake one of them, so it is not left to chance.

use anyhow::Result;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use std::sync::OnceLock;

/// What this process was allowed when it began.
static ALLOWED: OnceLock<CpuSet> = OnceLock::new();

fn allowed() -> Result<CpuSet> {
    let now = sched_getaffinity(Pid::from_raw(0))?;
    Ok(*ALLOWED.get_or_init(|| now))
}

fn only(number: usize) -> Result<()> {
    let allowed = allowed()?;
    let cpus: Vec<_> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let mut one = CpuSet::new();
    one.set(cpus[number.min(cpus.len() - 1)])?;
    Ok(sched_setaffinity(Pid::from_raw(0), &one)?)
}

/// The calling thread, and all that it starts, is on the host that is measured. To be called first by the main thread.
pub fn measured() -> Result<()> {
    only(0)
}

/// The calling thread, and all that it starts, is on another host.
pub fn elsewhere() -> Result<()> {
    only(1)
}

/// It runs anywhere again.
pub fn anywhere() -> Result<()> {
    Ok(sched_setaffinity(Pid::from_raw(0), &allowed()?)?)
}
