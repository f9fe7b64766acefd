//! A server larger than any that was recorded.

use crate::snapshot::scratch;
use std::{fmt::Write, fs, path::Path};
use tempfile::TempDir;
use vnuma_model::CpuSet;

pub const NODES: u32 = 64;
pub const CPUS: u32 = 4096;
const CPUS_OF_CACHE: u32 = 32;

/// Numbers of nodes have gaps.
pub fn node_id(position: u32) -> u32 {
    position * 5 + 3
}

/// Every eighth node has no memory, as without a DIMM.
pub fn memory_kib(position: u32) -> u64 {
    if position % 8 == 1 { 0 } else { u64::from(position + 1) << 20 }
}

/// Every eighth node is memory without CPUs; the others share the CPUs, numbered across the nodes in turn.
pub fn cpus(position: u32) -> CpuSet {
    let with_cpus: Vec<u32> = (0..NODES).filter(|position| position % 8 != 7).collect();
    let Some(index) = with_cpus.iter().position(|&other| other == position) else { return CpuSet::new() };
    (0..CPUS).filter(|cpu| *cpu as usize % with_cpus.len() == index).collect()
}

/// Some CPUs are offline, the first of a node among them.
pub fn is_online(cpu: u32) -> bool {
    cpu % 97 != 3
}

pub fn distance(from: u32, to: u32) -> u32 {
    match (from == to, from / 8 == to / 8) {
        (true, _) => 10,
        (false, true) => 16,
        (false, false) => 32 + (from / 8).abs_diff(to / 8),
    }
}

/// Writes its `sys`.
pub fn write() -> TempDir {
    let directory = scratch();
    let system = directory.path().join("sys/devices/system");
    let (nodes, all_cpus) = (system.join("node"), system.join("cpu"));
    let online: CpuSet = (0..CPUS).filter(|&cpu| is_online(cpu)).collect();
    put(&all_cpus.join("online"), &online.to_string());
    put(&nodes.join("online"), &(0..NODES).map(node_id).collect::<CpuSet>().to_string());
    for position in 0..NODES {
        let (id, cpus) = (node_id(position), cpus(position));
        let directory = nodes.join(format!("node{id}"));
        // The kernel leaves CPUs that are offline out of a node's lists.
        let cpus: CpuSet = cpus.iter().filter(|&cpu| is_online(cpu)).collect();
        put(&directory.join("cpulist"), &cpus.to_string());
        put(&directory.join("cpumap"), &mask(&cpus));
        put(&directory.join("meminfo"), &format!("Node {id} MemTotal:  {} kB", memory_kib(position)));
        let row: Vec<String> = (0..NODES).map(|to| distance(position, to).to_string()).collect();
        put(&directory.join("distance"), &row.join(" "));
        let cpus: Vec<u32> = cpus.iter().collect();
        for sharing in cpus.chunks(CPUS_OF_CACHE as usize) {
            let sharing: CpuSet = sharing.iter().copied().collect();
            sharing.iter().for_each(|cpu| write_cpu(&all_cpus.join(format!("cpu{cpu}")), cpu, &sharing));
        }
    }
    (0..CPUS).filter(|&cpu| !is_online(cpu)).for_each(|cpu| {
        put(&all_cpus.join(format!("cpu{cpu}/online")), "0");
    });
    directory
}

fn write_cpu(directory: &Path, cpu: u32, sharing: &CpuSet) {
    // lstopo takes a CPU without this for none.
    put(&directory.join("topology/core_cpus"), &mask(&std::iter::once(cpu).collect()));
    put(&directory.join("topology/package_cpus"), &mask(sharing));
    let cache = directory.join("cache/index3");
    let (list, map) = (sharing.to_string(), mask(sharing));
    let files = [
        ("level", "3"),
        ("type", "Unified"),
        ("size", "65536K"),
        ("shared_cpu_list", &list),
        ("shared_cpu_map", &map),
    ];
    files.iter().for_each(|(name, text)| put(&cache.join(name), text));
}

fn mask(cpus: &CpuSet) -> String {
    let mut text = String::new();
    for word in (0..CPUS / 32).rev() {
        let bits =
            (0..32).filter(|bit| cpus.contains(word * 32 + bit)).fold(0u32, |bits, bit| bits | 1 << bit);
        let separator = if word == 0 { "" } else { "," };
        write!(text, "{bits:08x}{separator}").expect("memory");
    }
    text
}

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("below a directory")).expect("a directory");
    fs::write(path, format!("{text}\n")).expect("a file");
}
