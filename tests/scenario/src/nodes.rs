//! The nodes of the host.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use vnuma_model::CpuSet;

/// Node of each CPU of the host.
pub struct Nodes(Vec<(u32, CpuSet)>);

impl Nodes {
    /// From node numbers and their CPUs.
    pub fn new(nodes: Vec<(u32, CpuSet)>) -> Self {
        Self(nodes)
    }

    /// Reads the kernel's lists.
    pub fn read() -> Result<Self> {
        let directory = "/sys/devices/system/node";
        let online = fs::read_to_string(format!("{directory}/online")).context("online nodes")?;
        let nodes: CpuSet = online.parse().context("online nodes")?;
        let read = |node: u32| {
            let path = format!("{directory}/node{node}/cpulist");
            let list = fs::read_to_string(&path).with_context(|| path.clone())?;
            Ok((node, list.parse::<CpuSet>().context(path)?))
        };
        Ok(Self(nodes.iter().map(read).collect::<Result<_>>()?))
    }

    /// The node of a CPU.
    pub fn of_cpu(&self, cpu: u32) -> Option<u32> {
        self.0.iter().find(|(_, cpus)| cpus.contains(cpu)).map(|(node, _)| *node)
    }

    /// Nodes that have CPUs, with them.
    pub fn with_cpus(&self) -> impl Iterator<Item = &(u32, CpuSet)> {
        self.0.iter().filter(|(_, cpus)| !cpus.is_empty())
    }

    /// CPUs of a node.
    pub fn cpus(&self, node: u32) -> Option<&CpuSet> {
        self.0.iter().find(|(id, _)| *id == node).map(|(_, cpus)| cpus)
    }
}

/// Nodes that have CPUs and memory, as lab-vm takes them for the homes of guest nodes, with their CPUs. `root` is `/`, or a
/// copy of its `sys`.
pub fn home_nodes(root: &Path) -> Result<Vec<(u32, CpuSet)>> {
    let list = |name: &str| {
        let path = root.join("sys/devices/system/node").join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        text.parse::<CpuSet>().with_context(|| path.display().to_string())
    };
    let (online, memory) = (list("online")?, list("has_memory")?);
    let mut homes = Vec::new();
    for node in online.iter().filter(|node| memory.contains(*node)) {
        let cpus = list(&format!("node{node}/cpulist"))?;
        if !cpus.is_empty() {
            homes.push((node, cpus));
        }
    }
    Ok(homes)
}
