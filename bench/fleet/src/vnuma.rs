//! vnuma's own code: `vnuma_placement::place` on a whole description of each server.

use crate::{
    server::{Amount, CARDS, FUNCTIONS, Model, Server, Strategy, UNITS_PER_CPU},
    workload::Vm,
};
use std::collections::BTreeMap;
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology, PciDevice};
use vnuma_placement::{
    BASE_PAGE_BYTES, Capacity, Claim, LEAST_UNIT_BYTES, Locality, Promise, Request, place,
};

/// vnuma.
pub struct Vnuma {
    locality: Locality,
    hosts: BTreeMap<usize, HostTopology>,
    /// What VMs have of each server.
    claims: BTreeMap<usize, BTreeMap<usize, Claim>>,
}

impl Vnuma {
    /// A VM with devices is near them, or refused.
    pub fn required() -> Self {
        Self { locality: Locality::Required, hosts: BTreeMap::new(), claims: BTreeMap::new() }
    }

    /// A VM whose devices' node has nothing left is near that node.
    pub fn preferred() -> Self {
        Self { locality: Locality::Preferred, ..Self::required() }
    }
}

fn address(card: usize, function: usize) -> String {
    format!("0000:{:02x}:{:02x}.{}", 0x40 + card, function / 8, function % 8)
}

fn host(model: Model) -> HostTopology {
    let cpus = model.cpus_per_node();
    let own = |node: usize| (node as u32 * cpus..(node as u32 + 1) * cpus).collect::<CpuSet>();
    let node = |node: usize| {
        let memory_kib = u64::from(cpus) * UNITS_PER_CPU * (LEAST_UNIT_BYTES >> 10);
        HostNode {
            id: node as u32,
            cpus: own(node),
            memory_total_kib: memory_kib,
            memory_free_kib: memory_kib,
            huge_pages: Vec::new(),
        }
    };
    let device = |card: usize| {
        let node = Some(model.node_of_card(card) as u32);
        let function = move |function| PciDevice {
            address: address(card, function),
            class: 0x02_00_00,
            vendor: 0x8086,
            device: 0x154c,
            node,
            iommu_group: Some((card * FUNCTIONS + function) as u32),
        };
        (0..FUNCTIONS).map(function)
    };
    let nodes = 0..model.nodes();
    let row = |from: usize| (0..model.nodes()).map(|to| model.distance(from, to)).collect();
    HostTopology {
        nodes: nodes.clone().map(node).collect(),
        distances: DistanceMatrix::new(nodes.clone().map(row).collect()).unwrap_or_default(),
        caches: nodes.map(|node| CacheGroup { level: 3, size_kib: 1 << 15, cpus: own(node) }).collect(),
        pci_devices: (0..CARDS).flat_map(device).collect(),
    }
}

impl Strategy for Vnuma {
    fn place(&mut self, number: usize, server: &Server, id: usize, vm: &Vm) -> Option<Vec<Amount>> {
        let host = self.hosts.entry(number).or_insert_with(|| host(server.model));
        let claims = self.claims.entry(number).or_default();
        let taken = |address: &String| claims.values().any(|claim| claim.devices.contains(address));
        let function =
            |&card: &usize| (0..FUNCTIONS).map(|at| address(card, at)).find(|address| !taken(address));
        let request = Request {
            name: format!("vm{id}"),
            vcpus: vm.vcpus,
            memory_bytes: vm.units * LEAST_UNIT_BYTES,
            page_bytes: BASE_PAGE_BYTES,
            devices: vm.cards.iter().map(function).collect::<Option<_>>()?,
            locality: self.locality,
        };
        // Two CPUs n and n + 1 share a core.
        let pair = |core: u32| [2 * core, 2 * core + 1].into_iter().collect::<CpuSet>();
        let layout =
            CpuLayout { cores: (0..server.model.cpus() / 2).map(pair).collect(), ..CpuLayout::default() };
        let all: Vec<Claim> = claims.values().cloned().collect();
        let placement = place(&Capacity::new(host, &layout, &all), &request).ok()?.placement;
        let mut given = vec![Amount::default(); server.free.len()];
        let mut memory = Vec::new();
        for node in &placement.guest_nodes {
            let units = node.memory_bytes / LEAST_UNIT_BYTES;
            given[node.home as usize] = Amount { cpus: node.vcpus.len() as u32, units };
            memory.push(Promise { node: node.home, page_bytes: BASE_PAGE_BYTES, bytes: node.memory_bytes });
        }
        let (owner, cpus, devices) = (request.name, placement.cpus(), request.devices);
        claims.insert(id, Claim { owner, cpus, floating: Vec::new(), memory, devices });
        Some(given)
    }

    fn stopped(&mut self, number: usize, id: usize) {
        if let Some(claims) = self.claims.get_mut(&number) {
            claims.remove(&id);
        }
    }
}
