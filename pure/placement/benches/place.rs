//! What placing a VM costs on a large host: 1000 VMs with reservations on 64 nodes with 64 CPUs each.
//!
//! `cargo xtask bench decide` runs it and compares it with the goal.

#![expect(missing_docs, reason = "criterion's macros make functions without")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::{hint::black_box, time::Duration};
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology, PciDevice};
use vnuma_placement::{
    BASE_PAGE_BYTES, Locality, Request,
    reservation::{Book, Ground, LIFETIME_NS},
};

const NODES: u32 = 64;
const CPUS_PER_NODE: u32 = 64;
const VMS: u32 = 1000;
const GIB: u64 = 1 << 30;

fn address(node: u32, function: u32) -> String {
    format!("{node:04x}:01:{:02x}.{}", function / 8, function % 8)
}

fn host() -> HostTopology {
    let range = |first: u32, count: u32| (first..first + count).collect::<CpuSet>();
    let node = |id| HostNode {
        id,
        cpus: range(id * CPUS_PER_NODE, CPUS_PER_NODE),
        memory_total_kib: 256 << 20,
        memory_free_kib: 256 << 20,
        ..HostNode::default()
    };
    // Sockets of four nodes.
    let distance = |from: u32, to: u32| match from == to {
        true => 10,
        false if from / 4 == to / 4 => 12,
        false => 32,
    };
    let device = |at: u32| PciDevice {
        address: address(at / 16, at % 16),
        class: 0x02_00_00,
        vendor: 0x8086,
        device: 0x154c,
        node: Some(at / 16),
        iommu_group: Some(at),
    };
    HostTopology {
        nodes: (0..NODES).map(node).collect(),
        distances: DistanceMatrix::new(
            (0..NODES).map(|from| (0..NODES).map(|to| distance(from, to)).collect()).collect(),
        )
        .expect("square"),
        caches: (0..NODES * 4)
            .map(|at| CacheGroup { level: 3, size_kib: 1 << 15, cpus: range(at * 16, 16) })
            .collect(),
        pci_devices: (0..NODES * 16).map(device).collect(),
    }
}

fn request(name: String, vcpus: u32, gib: u64, devices: Vec<String>) -> Request {
    let (page_bytes, locality) = (BASE_PAGE_BYTES, Locality::Required);
    Request { name, vcpus, memory_bytes: gib * GIB, page_bytes, devices, locality }
}

fn place(criterion: &mut Criterion) {
    let host = host();
    let pair = |core: u32| [2 * core, 2 * core + 1].into_iter().collect::<CpuSet>();
    let layout =
        CpuLayout { cores: (0..NODES * CPUS_PER_NODE / 2).map(pair).collect(), ..CpuLayout::default() };
    let ground = Ground { host: &host, layout: &layout, others: &[] };
    let mut book = Book::default();
    for vm in 0..VMS {
        // Each fifth has a device.
        let devices = if vm % 5 == 0 { vec![address(vm % NODES, vm / NODES)] } else { Vec::new() };
        let request = request(format!("vm{vm}"), 2, 4, devices);
        book.reserve(ground, |_, _| 0, &request, 0, LIFETIME_NS).expect("room for all");
    }
    let device = || vec![address(7, 15)];
    let cases = [
        ("one-node", request("new".into(), 4, 16, Vec::new())),
        ("spans", request("new".into(), 256, 512, Vec::new())),
        ("small-device", request("new".into(), 4, 16, device())),
        ("equations", request("new".into(), 256, 512, device())),
        ("refused", request("new".into(), 4096, 512, device())),
    ];
    for (case, request) in cases {
        let reserve = |mut book: Book| {
            let result = book.reserve(ground, |_, _| 0, black_box(&request), 1, LIFETIME_NS);
            (result.is_ok(), book)
        };
        assert_eq!(reserve(book.clone()).0, case != "refused", "{case}");
        criterion.bench_function(&format!("place/{case}"), |bencher| {
            bencher.iter_batched(|| book.clone(), reserve, BatchSize::LargeInput);
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = place
}
criterion_main!(benches);
