//! The host in the form that the BPF program reads: which node each CPU is of, by position, and which node is next.

use anyhow::{Result, ensure};
use vnuma_abi_bpf::sched::{MASK_WORDS, MAX_CPUS, MAX_NODES, Topology};
use vnuma_model::{CpuSet, HostTopology};

/// Distance that Linux assumes where the firmware gives none.
const REMOTE: u8 = 20;

/// Bytes of the map.
pub fn layout(host: &HostTopology, tickless: &CpuSet) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(size_of::<Topology>());
    fill(host, tickless)?.write(|part| bytes.extend_from_slice(part));
    Ok(bytes)
}

fn fill(host: &HostTopology, tickless: &CpuSet) -> Result<Box<Topology>> {
    let nodes = host.nodes.len();
    ensure!(nodes <= MAX_NODES, "the host has {nodes} NUMA nodes, at most {MAX_NODES} are possible");
    let mut layout = Box::new(Topology {
        nr_nodes: nodes as u32,
        reserved: 0,
        node_of: [nodes as u16; MAX_CPUS],
        tickless: [0; MASK_WORDS],
        nearest: [0; MAX_NODES * MAX_NODES],
    });
    for (position, node) in host.nodes.iter().enumerate() {
        for cpu in node.cpus.iter() {
            ensure!((cpu as usize) < MAX_CPUS, "CPU {cpu}: the highest possible number is {}", MAX_CPUS - 1);
            layout.node_of[cpu as usize] = position as u16;
        }
        let distance = |to: usize| host.distances.get(position, to).unwrap_or(REMOTE);
        let mut order: Vec<usize> = (0..nodes).collect();
        order.sort_by_key(|&to| (to != position, distance(to), to));
        for (rank, &to) in order.iter().enumerate() {
            layout.nearest[position * MAX_NODES + rank] = to as u8;
        }
    }
    for cpu in tickless.iter().filter(|&cpu| (cpu as usize) < MAX_CPUS) {
        layout.tickless[cpu as usize / 64] |= 1 << (cpu % 64);
    }
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{DistanceMatrix, HostNode};

    fn host(cpus: &[&str], distances: &[&[u8]]) -> HostTopology {
        let node = |(id, cpus): (usize, &&str)| HostNode {
            id: id as u32 * 2,
            cpus: cpus.parse().unwrap(),
            memory_total_kib: 1,
            memory_free_kib: 1,
            huge_pages: Vec::new(),
        };
        let rows = distances.iter().map(|row| row.to_vec()).collect();
        HostTopology {
            nodes: cpus.iter().enumerate().map(node).collect(),
            distances: DistanceMatrix::new(rows).unwrap(),
            caches: Vec::new(),
            pci_devices: Vec::new(),
        }
    }

    #[test]
    fn nodes_have_their_cpus_and_the_nearest_comes_first() {
        let rows: [&[u8]; 3] = [&[10, 30, 20], &[30, 10, 20], &[20, 20, 10]];
        let layout = fill(&host(&["0-1,6", "2", ""], &rows), &"1,64".parse().unwrap()).unwrap();
        assert_eq!(layout.tickless[..3], [2, 1, 0]);
        assert_eq!(layout.nr_nodes, 3);
        assert_eq!(layout.node_of[..8], [0, 0, 1, 3, 3, 3, 0, 3]);
        assert_eq!(layout.nearest[..3], [0, 2, 1]);
        assert_eq!(layout.nearest[MAX_NODES..MAX_NODES + 3], [1, 2, 0]);
        assert_eq!(layout.nearest[2 * MAX_NODES..2 * MAX_NODES + 3], [2, 0, 1]);
        let bytes = super::layout(&host(&["0-1,6", "2", ""], &rows), &CpuSet::default()).unwrap();
        assert_eq!(bytes.len(), size_of::<Topology>());
    }

    #[test]
    fn a_host_that_is_too_large_is_refused() {
        let many: Vec<String> = (0..65).map(|cpu| cpu.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let rows = vec![vec![10; 65]; 65];
        let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
        let mut large = host(&many, &rows);
        assert!(fill(&large, &CpuSet::default()).unwrap_err().to_string().contains("65 NUMA nodes"));
        large.nodes.truncate(64);
        assert_eq!(fill(&large, &CpuSet::default()).unwrap().node_of[62..66], [62, 63, 64, 64]);
    }
}
