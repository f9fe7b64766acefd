//! What the place of a VM costs its workloads on passthrough devices.

use super::{
    Form,
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
    form: Form,
    /// Only these workloads
    #[arg(long, value_name = "WORKLOAD")]
    workload: Vec<String>,
    /// Only these configurations
    #[arg(long, value_name = "CONFIGURATION")]
    configuration: Vec<String>,
}

/// Runs it and judges it.
pub fn run(Arguments { form, workload, configuration }: &Arguments) -> Result<()> {
    OnServer {
        name: "nuioa",
        form: *form,
        server: "2n6c-iommu",
        peer: Some("2n4c"),
        // All sets of the caches: what testpmd and drivers touch is too little for a sample of them.
        counters: "broadwell-2s:full",
        programs: &[
            ("vnumad", "vnumad"),
            ("vnumactl", "vnumactl"),
            ("vnuma-guest", "vnuma-guest"),
            ("vnuma-bench-nuioa", "bench-nuioa"),
        ],
        files: vec![(driver::build(GUEST_KERNEL)?, DRIVER)],
        measure: each("--workload", workload).chain(each("--configuration", configuration)).collect(),
        judge: Vec::new(),
        goes_on: false,
        hang: Duration::from_secs(2 * 3600),
    }
    .run()
}
