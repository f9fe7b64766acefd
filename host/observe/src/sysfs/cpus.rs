//! What the scheduler of the host knows of its CPUs: isolated ones, cores, and how long each was idle.

use super::{SysfsError, parse, tree::Tree};
use std::path::Path;
use vnuma_model::{CpuId, CpuLayout, CpuSet, HostTopology};

/// Reads which CPUs of a host are isolated and which share a core. What the kernel does not say is taken as none.
pub fn read_cpu_layout(root: &Path, host: &HostTopology) -> Result<CpuLayout, SysfsError> {
    let tree = Tree::new(root);
    let isolated = tree.parsed(&tree.path("sys/devices/system/cpu/isolated"), str::parse::<CpuSet>)?;
    let mut layout = CpuLayout { isolated: isolated.unwrap_or_default(), cores: Vec::new() };
    let mut grouped = CpuSet::new();
    for cpu in host.nodes.iter().flat_map(|node| node.cpus.iter()) {
        if grouped.contains(cpu) {
            continue;
        }
        let topology = tree.path(&format!("sys/devices/system/cpu/cpu{cpu}/topology"));
        let siblings = tree.set(&topology.join("thread_siblings_list"), &topology.join("thread_siblings"))?;
        let core = siblings.filter(|core| core.contains(cpu) && core.len() > 1);
        if let Some(core) = core {
            core.iter().for_each(|cpu| grouped.insert(cpu));
            layout.cores.push(core);
        }
    }
    Ok(layout)
}

/// Reads how long each CPU has been idle since the boot, nanoseconds, in steps of 10 ms.
pub fn read_idle_times(root: &Path) -> Result<Vec<(CpuId, u64)>, SysfsError> {
    let tree = Tree::new(root);
    let path = tree.path("proc/stat");
    // Of a host with thousands of CPUs it is longer than other files.
    let text = tree.beginning(&path)?.ok_or(SysfsError::Missing { path })?;
    Ok(parse::idle_times(&text))
}
