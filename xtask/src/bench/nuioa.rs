//! What the place of a VM costs its workloads on passthrough devices.

use super::{
    Common, inputs,
    on_server::{OnServer, each},
};
use anyhow::Result;
use std::time::Duration;
use vnuma_lab_runner::driver;

/// Where the server finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these workloads
    #[arg(long, value_name = "WORKLOAD")]
    workload: Vec<String>,
    /// Only these configurations
    #[arg(long, value_name = "CONFIGURATION")]
    configuration: Vec<String>,
}

/// Runs it and judges it.
pub fn run(Arguments { common, workload, configuration }: &Arguments) -> Result<()> {
    let driver = driver::build(GUEST_KERNEL)?;
    OnServer {
        name: "nuioa",
        common: *common,
        server: "2n6c-iommu",
        peer: Some("2n4c"),
        // All sets of the caches are modelled: testpmd and drivers touch too little memory for a sample of the sets.
        counters: Some("broadwell-2s:full"),
        programs: &[
            ("vnumad", "vnumad"),
            ("vnumactl", "vnumactl"),
            ("vnuma-guest", "vnuma-guest"),
            ("vnuma-bench-nuioa", "bench-nuioa"),
        ],
        others: &[],
        files: vec![(driver.clone(), DRIVER)],
        inputs: inputs(&[driver]),
        measure: each("--workload", workload).chain(each("--configuration", configuration)).collect(),
        hang: Duration::from_secs(2 * 3600),
    }
    .run()
}
