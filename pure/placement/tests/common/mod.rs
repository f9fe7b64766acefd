//! Hosts for the tests.
#![allow(dead_code, reason = "each test uses some")]

use vnuma_model::{
    CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology, HugePages, PciDevice,
};
use vnuma_placement::{BASE_PAGE_BYTES, Capacity, Claim, Locality, Promise, Request};

/// 2 MiB.
pub const MIB2: u64 = 2 << 20;
/// 1 GiB.
pub const GIB: u64 = 1 << 30;

/// A device `0000:NN:00.0` on a node.
pub fn device(number: u32, node: Option<u32>) -> PciDevice {
    let (class, vendor, device) = (0x02_00_00, 0x8086, 0x10c9);
    PciDevice { address: address(number), class, vendor, device, node, iommu_group: Some(number) }
}

/// Address of a device.
pub fn address(number: u32) -> String {
    format!("0000:{number:02x}:00.0")
}

/// A node: CPUs, free memory in MiB, free huge pages of 2 MiB.
pub struct Node(pub &'static str, pub u64, pub u64);

/// A host with devices, one cache for each node, and distances of 21.
pub fn host(nodes: &[Node], devices: &[PciDevice]) -> HostTopology {
    let set = |text: &str| text.parse::<CpuSet>().expect("CPUs");
    let node = |(id, Node(cpus, mib, huge)): (usize, &Node)| HostNode {
        id: id as u32,
        cpus: set(cpus),
        memory_total_kib: mib << 10,
        memory_free_kib: mib << 10,
        huge_pages: vec![HugePages { size_kib: 2048, total: *huge, free: *huge }],
    };
    let count = nodes.len();
    let row = |from| (0..count).map(|to| if from == to { 10 } else { 21 }).collect();
    HostTopology {
        nodes: nodes.iter().enumerate().map(node).collect(),
        distances: DistanceMatrix::new((0..count).map(row).collect()).expect("square"),
        caches: nodes
            .iter()
            .map(|node| CacheGroup { level: 3, size_kib: 1 << 15, cpus: set(node.0) })
            .collect(),
        pci_devices: devices.to_vec(),
    }
}

/// The server of the paper (table I): two nodes with 8 cores and 64 GB each, the devices on node 0.
pub fn paper() -> HostTopology {
    let devices = [device(1, Some(0)), device(2, Some(0)), device(3, Some(1))];
    host(&[Node("0-7", 64 << 10, 0), Node("8-15", 64 << 10, 0)], &devices)
}

/// What is free of a host.
pub fn free(host: &HostTopology, claims: &[Claim]) -> Capacity {
    Capacity::new(host, &CpuLayout::default(), claims)
}

/// A VM with ordinary pages.
pub fn vm(vcpus: u32, memory_bytes: u64, devices: &[u32]) -> Request {
    Request {
        name: "a".into(),
        vcpus,
        memory_bytes,
        page_bytes: BASE_PAGE_BYTES,
        devices: devices.iter().map(|number| address(*number)).collect(),
        locality: Locality::Required,
    }
}

/// Somebody who has CPUs.
pub fn claim(cpus: &str) -> Claim {
    Claim { owner: "other".into(), cpus: cpus.parse().expect("CPUs"), ..Claim::default() }
}

/// Somebody who was promised memory of ordinary pages.
pub fn promise(node: u32, bytes: u64) -> Claim {
    let promise = Promise { node, page_bytes: BASE_PAGE_BYTES, bytes };
    Claim { owner: "other".into(), memory: vec![promise], ..Claim::default() }
}
