//! What the place of a VM costs its workloads on passthrough devices.

use super::{
    Options,
    on_server::{OnServer, each},
};
use anyhow::{Result, ensure};
use std::time::Duration;
use vnuma_lab_runner::driver;

/// Where the server finds the guest driver, and for which kernel: lab-vm's default.
const DRIVER: &str = "/root/vnuma.ko";
const GUEST_KERNEL: &str = "6.12";

/// Runs it and judges it.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.json, "this benchmark has no --json; its report is a file");
    let full = options.full.then(|| "--full".to_owned());
    let chosen = each("--workload", &options.workload).chain(each("--configuration", &options.configuration));
    OnServer {
        name: "nuioa",
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
        measure: full.iter().cloned().chain(chosen).collect(),
        judge: full.into_iter().collect(),
        goes_on: false,
        hang: Duration::from_secs(2 * 3600),
    }
    .run()
}
