//! The host, for people.

use crate::table::{Table, list, or_dash, plain, size};
use vnuma_model::{HostNode, HostTopology};

/// All of it.
pub fn text(host: &HostTopology) -> String {
    let mut text = nodes(host);
    text += "\nDistances\n";
    text += &distances(host);
    if !host.caches.is_empty() {
        text += "\nLast-level caches\n";
        let mut table = Table::new("LEVEL  >SIZE  CPUS  >NODE");
        for cache in &host.caches {
            let node = or_dash(host.node_of_cpus(&cache.cpus));
            table.row([format!("L{}", cache.level), size(cache.size_kib), cache.cpus.to_string(), node]);
        }
        text += &table.text(2);
    }
    if !host.pci_devices.is_empty() {
        text += "\nPCI devices\n";
        let mut table = Table::new("ADDRESS  CLASS  ID  >NODE");
        for device in &host.pci_devices {
            let id = format!("{:04x}:{:04x}", device.vendor, device.device);
            table.row([plain(&device.address), format!("{:06x}", device.class), id, or_dash(device.node)]);
        }
        text += &table.text(2);
    }
    text
}

fn nodes(host: &HostTopology) -> String {
    let mut table = Table::new(">NODE  CPUS  >MEMORY  >FREE  HUGE PAGES (FREE/TOTAL)");
    for node in &host.nodes {
        let cpus = if node.cpus.is_empty() { "-".to_owned() } else { node.cpus.to_string() };
        let (total, free) = (size(node.memory_total_kib), size(node.memory_free_kib));
        table.row([node.id.to_string(), cpus, total, free, huge_pages(node)]);
    }
    table.text(0)
}

fn huge_pages(node: &HostNode) -> String {
    let pools = node.huge_pages.iter().filter(|pool| pool.total > 0);
    list(pools.map(|pool| format!("{} x {}/{}", size(pool.size_kib), pool.free, pool.total)))
}

fn distances(host: &HostTopology) -> String {
    let ids: Vec<String> = host.nodes.iter().map(|node| node.id.to_string()).collect();
    let mut table =
        Table::new(&format!(">NODE{}", ids.iter().map(|id| format!("  >{id}")).collect::<String>()));
    for (id, row) in ids.iter().zip(host.distances.rows()) {
        table.row([id.clone()].into_iter().chain(row.iter().map(u8::to_string)).collect::<Vec<_>>());
    }
    table.text(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{CacheGroup, DistanceMatrix, HugePages, PciDevice};

    #[test]
    fn a_host_reads_well() {
        let node = |id: u32, cpus: &str, huge_pages| HostNode {
            id,
            cpus: cpus.parse().expect("CPUs"),
            memory_total_kib: 2 << 20,
            memory_free_kib: 1 << 20,
            huge_pages,
        };
        let host = HostTopology {
            nodes: vec![
                node(0, "0-1", vec![HugePages { size_kib: 2048, total: 4, free: 3 }]),
                node(2, "", vec![]),
            ],
            distances: DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square"),
            caches: vec![CacheGroup { level: 3, size_kib: 16384, cpus: "0-1".parse().expect("CPUs") }],
            pci_devices: vec![PciDevice {
                address: "0000:00:1f.2".into(),
                class: 0x01_06_01,
                vendor: 0x8086,
                device: 0x2922,
                node: None,
                iommu_group: None,
            }],
        };
        let expected = "\
NODE  CPUS    MEMORY      FREE  HUGE PAGES (FREE/TOTAL)
   0  0-1   2048 MiB  1024 MiB  2048 KiB x 3/4
   2  -     2048 MiB  1024 MiB  -

Distances
  NODE   0   2
     0  10  21
     2  21  10

Last-level caches
  LEVEL    SIZE  CPUS  NODE
  L3     16 MiB  0-1      0

PCI devices
  ADDRESS       CLASS   ID         NODE
  0000:00:1f.2  010601  8086:2922     -
";
        assert_eq!(text(&host), expected);
    }
}
