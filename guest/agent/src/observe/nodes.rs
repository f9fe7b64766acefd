//! Nodes: CPUs, memory, and what CPUs have done.

use crate::{
    core::{Node, NodeId},
    files,
};
use std::{collections::BTreeMap, path::Path};
use vnuma_model::CpuSet;

/// The kernel's own limit.
const MAX_NODE: u32 = 1023;
/// `/proc/stat` has a line for each CPU, and one with a number for each interrupt, which is not of interest.
const STAT_LIMIT: u64 = 4 << 20;
const STAT_LINE: usize = 512;

/// Online nodes. There is none where the kernel has no NUMA.
pub(super) fn read(root: &Path) -> BTreeMap<NodeId, Node> {
    let directory = root.join("sys/devices/system/node");
    let list =
        |path: &Path| files::text(path).and_then(|text| text.parse::<CpuSet>().ok()).unwrap_or_default();
    let online = list(&directory.join("online"));
    let node = |id: NodeId| {
        let directory = directory.join(format!("node{id}"));
        let memory = files::text(&directory.join("meminfo")).unwrap_or_default();
        let (total_kib, free_kib) = memory_of(&memory);
        (id, Node { cpus: list(&directory.join("cpulist")), used_permille: None, free_kib, total_kib })
    };
    online.iter().filter(|id| *id <= MAX_NODE).map(node).collect()
}

/// All memory of a node, and what is free or is a cache that was not used lately, KiB.
pub(super) fn memory_of(meminfo: &str) -> (u64, u64) {
    let field = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|line| {
            let mut words = line.split_ascii_whitespace().skip(2);
            (words.next()? == name).then(|| words.next()?.parse().ok()).flatten()
        });
        line.unwrap_or(0)
    };
    let free = ["MemFree:", "Inactive(file):", "SReclaimable:"].map(field);
    (field("MemTotal:"), free.into_iter().fold(0, u64::saturating_add))
}

/// Busy and all time of each CPU since boot, ticks. Time that the host has taken is busy: it is not there to be used.
pub(super) fn cpu_times(root: &Path) -> BTreeMap<u32, (u64, u64)> {
    let mut times = BTreeMap::new();
    let mut each = |line: &[u8]| {
        times.extend(str::from_utf8(line).ok().and_then(cpu_time));
    };
    // Without it nothing is known of any CPU.
    let _ = files::lines(&root.join("proc/stat"), STAT_LIMIT, STAT_LINE, &mut each);
    times
}

/// A line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. Guests' time is part of user time.
fn cpu_time(line: &str) -> Option<(u32, (u64, u64))> {
    let mut words = line.split_ascii_whitespace();
    let cpu = words.next()?.strip_prefix("cpu")?.parse().ok().filter(|cpu| *cpu <= CpuSet::MAX_CPU)?;
    let fields: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let all = fields.iter().fold(0_u64, |sum, field| sum.saturating_add(*field));
    let idle = fields.get(3)?.saturating_add(fields.get(4).copied().unwrap_or(0));
    Some((cpu, (all.saturating_sub(idle), all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_cpus_and_memory_of_nodes() {
        assert_eq!(cpu_time("cpu12 1 2 3 40 5 6 7 8 9 10"), Some((12, (27, 72))));
        assert_eq!(cpu_time("cpu0 1 2 3 4"), Some((0, (6, 10))));
        for none in ["cpu 1 2 3 4 5", "cpu0", "cpu0 1 2 3", "cpu99999 1 2 3 4", "intr 1 2 3 4 5", ""] {
            assert_eq!(cpu_time(none), None, "{none}");
        }
        let most = format!("cpu0 {0} {0} {0} {0}", u64::MAX);
        assert_eq!(cpu_time(&most), Some((0, (0, u64::MAX))));
        let text = "Node 1 MemTotal:  1000 kB\nNode 1 MemFree:   10 kB\nNode 1 Inactive(file): 5 kB\n\
                    Node 1 SReclaimable: 3 kB\nNode 1 MemUsed: 7 kB\n";
        assert_eq!(memory_of(text), (1000, 18));
        assert_eq!(memory_of("Node 1 MemTotal: x"), (0, 0));
    }
}
