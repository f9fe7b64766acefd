//! What vnumad costs with hundreds of VMs, and how fast it publishes, on this machine: bench/daemon measures and judges.

use super::{Common, run_here};
use anyhow::Result;

/// Runs it.
pub fn run(common: &Common) -> Result<()> {
    let programs = [("vnumad", "vnumad"), ("vnuma-bench-daemon", "bench-daemon")];
    run_here(common, "daemon", &programs, |built, _| {
        Ok(vec!["run".into(), "--vnumad".into(), built[0].clone().into()])
    })
}
