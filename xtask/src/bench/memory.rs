//! What memory policies do for VMs whose memory is displaced.

use super::{
    Options,
    on_server::{OnServer, each},
};
use anyhow::{Result, ensure};
use std::time::Duration;

/// Runs it and judges it.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.json, "this benchmark has no --json; its report is a file");
    let full = options.full.then(|| "--full".to_owned());
    // Two of the causes change a guest node's size, and have other rows.
    let (sizes, causes): (Vec<String>, Vec<String>) =
        options.cause.iter().cloned().partition(|cause| ["grow", "shrink"].contains(&cause.as_str()));
    let chosen =
        each("--cause", &causes).chain(each("--size", &sizes)).chain(each("--policy", &options.policy));
    OnServer {
        name: "memory",
        server: "2n8c",
        peer: None,
        counters: "broadwell-2s",
        programs: &[("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-bench-memory", "bench-memory")],
        files: Vec::new(),
        measure: full.iter().cloned().chain(chosen).collect(),
        judge: full.into_iter().collect(),
        goes_on: false,
        hang: Duration::from_secs(3 * 3600),
    }
    .run()
}
