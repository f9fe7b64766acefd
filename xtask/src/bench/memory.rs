//! What memory policies do for VMs whose memory is displaced.

use super::{
    Common,
    on_server::{OnServer, each},
};
use anyhow::Result;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these causes
    #[arg(long, value_name = "CAUSE")]
    cause: Vec<String>,
    /// Only these policies
    #[arg(long, value_name = "POLICY")]
    policy: Vec<String>,
}

/// Runs it and judges it.
pub fn run(Arguments { common, cause, policy }: &Arguments) -> Result<()> {
    // Two of the causes change a guest node's size, and have other rows.
    let (sizes, causes): (Vec<String>, Vec<String>) =
        cause.iter().cloned().partition(|cause| ["grow", "shrink"].contains(&cause.as_str()));
    OnServer {
        name: "memory",
        common: *common,
        server: "2n8c",
        peer: None,
        counters: Some("broadwell-2s"),
        programs: &[("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-bench-memory", "bench-memory")],
        others: &[],
        files: Vec::new(),
        inputs: Vec::new(),
        measure: each("--cause", &causes)
            .chain(each("--size", &sizes))
            .chain(each("--policy", policy))
            .collect(),
        hang: Duration::from_secs(3 * 3600),
    }
    .run()
}
