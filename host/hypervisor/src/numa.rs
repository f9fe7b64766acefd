//! Guest nodes and their memory.
//!
//! QMP shows the node of a vCPU but not the memory backend of a node. Two things together do:
//!
//! - HMP `info numa` lists the nodes with the memory that each had at the start and what was
//!   plugged since. Its format has been the same since QEMU 2.
//! - At the start, QEMU puts the backends of the nodes one behind the other into the machine's
//!   RAM, in the order of the nodes (`numa_init_memdev_container` in hw/core/numa.c). Each
//!   backend's `memory-region` object shows its container and its offset there.
//!
//! So the backends sorted by offset belong to the nodes that have memory, sorted by number. It
//! is used only if numbers and sizes agree; else no node has a known backend.

use std::collections::BTreeMap;
use vnuma_model::MemoryBacking;
use vnuma_process::text::sanitize_short;

/// Most guest nodes (QEMU's `MAX_NODES`).
const MAX_NODES: usize = 128;

/// Most memory whose bytes can be counted.
const MAX_MIB: u64 = u64::MAX >> 20;

/// A node as `info numa` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// All of its memory, MiB.
    pub size_mib: u64,
    /// Memory plugged since the start, part of it, MiB.
    pub plugged_mib: u64,
}

impl NumaNode {
    /// Memory since the start, MiB.
    fn base_mib(self) -> u64 {
        self.size_mib.saturating_sub(self.plugged_mib)
    }
}

/// What HMP `info numa` prints. No nodes for a UMA VM.
pub fn parse_info_numa(text: &str) -> Result<BTreeMap<u32, NumaNode>, String> {
    let mut nodes = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        let Some((number, what)) = line.strip_prefix("node ").and_then(|rest| rest.split_once(' ')) else {
            continue;
        };
        let number: u32 = number.parse().map_err(|_| format!("`{}` names no node", sanitize_short(line)))?;
        if nodes.len() == MAX_NODES && !nodes.contains_key(&number) {
            return Err(format!("more than {MAX_NODES} nodes"));
        }
        let node: &mut NumaNode = nodes.entry(number).or_default();
        let mebibytes = |text: &str| {
            let digits = text.trim().strip_suffix(" MB");
            let size = digits.and_then(|digits| digits.parse().ok()).filter(|&mib| mib <= MAX_MIB);
            size.ok_or_else(|| format!("`{}` has no size in MB", sanitize_short(line)))
        };
        match what.split_once(':') {
            Some(("size", size)) => node.size_mib = mebibytes(size)?,
            Some(("plugged", size)) => node.plugged_mib = mebibytes(size)?,
            _ => {}
        }
    }
    Ok(nodes)
}

/// A backend and its place in the machine's RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedBackend {
    /// The backend.
    pub backing: MemoryBacking,
    /// Offset in the machine's RAM.
    pub offset: u64,
}

/// The backend of each node that has memory since the start; none at all when in doubt.
pub fn match_backends(
    nodes: &BTreeMap<u32, NumaNode>,
    mut backends: Vec<PlacedBackend>,
) -> BTreeMap<u32, MemoryBacking> {
    backends.sort_by_key(|backend| backend.offset);
    let with_memory: Vec<_> = nodes.iter().filter(|(_, node)| node.base_mib() > 0).collect();
    let sizes_agree = with_memory.len() == backends.len()
        && with_memory
            .iter()
            .zip(&backends)
            .all(|((_, node), backend)| node.base_mib() == backend.backing.size_bytes >> 20);
    if !sizes_agree {
        return BTreeMap::new();
    }
    with_memory.into_iter().zip(backends).map(|((&id, _), backend)| (id, backend.backing)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vnuma_model::NumaPolicy;

    const TWO_NODES: &str = "2 nodes\r\nnode 0 cpus: 0 1\r\nnode 0 size: 256 MB\r\nnode 0 plugged: 0 MB\r\n\
        node 1 cpus: 2 3\r\nnode 1 size: 640 MB\r\nnode 1 plugged: 128 MB\r\n";

    fn backend(id: &str, mib: u64, offset_mib: u64) -> PlacedBackend {
        let backing = MemoryBacking {
            id: id.to_owned(),
            size_bytes: mib << 20,
            policy: NumaPolicy::Default,
            host_nodes: Vec::new(),
            resident_kib: Vec::new(),
            mapping: None,
        };
        PlacedBackend { backing, offset: offset_mib << 20 }
    }

    #[test]
    fn what_hmp_prints() {
        let nodes = parse_info_numa(TWO_NODES).unwrap();
        assert_eq!(nodes[&1], NumaNode { size_mib: 640, plugged_mib: 128 });
        assert_eq!(nodes.len(), 2);
        assert!(parse_info_numa("0 nodes\r\n").unwrap().is_empty());
        assert!(parse_info_numa("node 0 size: big\r\n").unwrap_err().contains("node 0 size: big"));
        assert!(parse_info_numa("node x size: 1 MB").is_err());
        let odd = parse_info_numa("node \u{1b}[2J size: 1 MB").unwrap_err();
        assert_eq!(odd, "`node \\u{1b}[2J size: 1 MB` names no node");
        assert!(parse_info_numa(&format!("node 0 size: {} MB", u64::MAX >> 20)).is_ok());
        assert!(
            parse_info_numa(&format!("node 0 size: {} MB", 1u64 << 44))
                .unwrap_err()
                .contains("17592186044416")
        );
        let many: String = (0..200).map(|id| format!("node {id} size: 1 MB\n")).collect();
        assert!(parse_info_numa(&many).is_err());
    }

    #[test]
    fn backends_follow_the_nodes_by_offset() {
        let nodes = parse_info_numa(TWO_NODES).unwrap();
        let matched = match_backends(&nodes, vec![backend("b", 512, 256), backend("a", 256, 0)]);
        assert_eq!((matched[&0].id.as_str(), matched[&1].id.as_str()), ("a", "b"));
    }

    #[test]
    fn equal_sizes_are_told_apart_and_empty_nodes_skipped() {
        let text = "node 0 size: 0 MB\nnode 0 plugged: 0 MB\nnode 2 size: 64 MB\nnode 5 size: 64 MB\n";
        let nodes = parse_info_numa(text).unwrap();
        let matched = match_backends(&nodes, vec![backend("y", 64, 64), backend("x", 64, 0)]);
        assert_eq!(matched.get(&0), None);
        assert_eq!((matched[&2].id.as_str(), matched[&5].id.as_str()), ("x", "y"));
    }

    #[test]
    fn in_doubt_there_is_none() {
        let nodes = parse_info_numa(TWO_NODES).unwrap();
        assert!(match_backends(&nodes, vec![backend("a", 256, 0)]).is_empty());
        assert!(match_backends(&nodes, vec![backend("a", 256, 0), backend("b", 511, 256)]).is_empty());
        assert!(match_backends(&nodes, vec![backend("b", 512, 0), backend("a", 256, 512)]).is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "((node [0-9]{0,12} (size|plugged|cpus): [0-9]{0,22} MB\n)|.){0,20}") {
            if let Ok(nodes) = parse_info_numa(&text) {
                prop_assert!(match_backends(&nodes, vec![backend("a", 1, 0)]).len() <= 1);
            }
        }
    }
}
