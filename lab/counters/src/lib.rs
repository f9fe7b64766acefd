//! Gives QEMU the counters of the lab: builds the plugin in `plugin/`, makes the region that it counts in, and tells
//! the arguments.

#![forbid(unsafe_code)]

mod plugin;
mod region;

pub use plugin::{PluginError, build};
pub use region::{Machine, RegionError, Sampling, region};

use std::path::Path;

/// The arguments that add the counters to a server: the plugin, and the region as BAR 2 of a PCI device.
///
/// They stand after those of the nodes' memory, so that the region is not the first block of RAM.
pub fn qemu_arguments(plugin: &Path, region: &Path, region_size: usize) -> Vec<String> {
    let plugin = format!("{},region={}", escaped(plugin), escaped(region));
    let memory =
        format!("memory-backend-file,id=counters,mem-path={},size={region_size},share=on", escaped(region));
    let device = "ivshmem-plain,bus=pcie.0,memdev=counters".to_owned();
    vec!["-plugin".into(), plugin, "-object".into(), memory, "-device".into(), device]
}

/// In QEMU's option syntax a comma within a value is doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
