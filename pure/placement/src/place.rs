//! A request and what is free: a placement and its arithmetic, or what is lacking.

use crate::{
    MAX_GUEST_NODES,
    capacity::{Capacity, unit_bytes},
    cpus,
    explain::{Explanation, NodeFigures},
    placement::{DevicePlan, GuestNodePlan, Placement, VcpuPin},
    refusal::{Fits, Lack, PlaceError, Refusal, Resource},
    request::{Locality, Request},
    rule::{Division, Home, Task},
};
use vnuma_model::{DistanceMatrix, HostNode, HostTopology};
use vnuma_policy::{Homes, distances};

/// A placement, and how it came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Where the VM goes.
    pub placement: Placement,
    /// Why.
    pub explanation: Explanation,
}

/// Decides where a VM goes. Nothing is taken: that is a reservation's task.
pub fn place(capacity: &Capacity, request: &Request) -> Result<Placed, PlaceError> {
    request.check(capacity)?;
    match attempt(capacity, request) {
        Ok(placed) => Ok(placed),
        Err(lacks) => {
            let would_fit = would_fit(capacity, request);
            Err(PlaceError::Refused(Refusal { lacks, would_fit }))
        }
    }
}

fn attempt(capacity: &Capacity, request: &Request) -> Result<Placed, Vec<Lack>> {
    let unit_bytes = unit_bytes(request.page_bytes);
    let task = Task::new(capacity, request, unit_bytes);
    let homes = task.homes(request);
    let division =
        if homes.is_empty() { task.without_devices() } else { task.with_devices(&homes, request.locality) };
    let division = division.ok_or_else(|| lacks(&task, request, &homes, unit_bytes))?;
    if division.parts.len() > MAX_GUEST_NODES {
        let (needed, there) = (division.parts.len() as u64, MAX_GUEST_NODES as u64);
        let page_bytes = request.page_bytes;
        return Err(vec![Lack { node: None, resource: Resource::GuestNodes, needed, there, page_bytes }]);
    }
    let placement = placement(&task, request, &homes, &division, unit_bytes);
    let explanation = explanation(&task, &division, &placement, unit_bytes);
    Ok(Placed { placement, explanation })
}

fn placement(
    task: &Task<'_>,
    request: &Request,
    homes: &[Home],
    division: &Division,
    unit_bytes: u64,
) -> Placement {
    let mut next = 0;
    // Parts of memory only are last: vCPU 0 boots, and is on guest node 0.
    let parts = &division.parts;
    let mut guest_nodes = Vec::new();
    for (id, part) in parts.iter().enumerate() {
        let node = &task.capacity.nodes[part.node];
        let cpus = cpus::pick(&node.cores, part.vcpus);
        let vcpus = (next..).zip(cpus).map(|(vcpu, cpu)| VcpuPin { vcpu, cpu }).collect();
        next += part.vcpus;
        let memory_bytes = part.units * unit_bytes;
        guest_nodes.push(GuestNodePlan { id: id as u32, home: node.id, memory_bytes, vcpus });
    }
    let device = |address: &String| {
        let host_node = task.capacity.device(address).and_then(|device| device.node);
        let at = host_node.and_then(|id| task.capacity.position(id));
        let home = homes.iter().find(|home| home.devices.contains(address)).map(|home| home.at);
        let distance = |from: usize, to: usize| (from != to, task.capacity.distance(from, to));
        // Its home node or, if that has no vCPU of this VM, the nearest one that has.
        let guest_node = home.and_then(|home| {
            let nodes = (0..parts.len()).filter(|&id| parts[id].vcpus > 0);
            nodes.min_by_key(|&id| (distance(home, parts[id].node), id))
        });
        let local = guest_node.zip(at).is_some_and(|(id, at)| task.is_local(at, parts[id].node));
        let guest_node = guest_node.map(|id| id as u32);
        DevicePlan { address: address.clone(), host_node, guest_node, local }
    };
    Placement {
        name: request.name.clone(),
        page_bytes: request.page_bytes,
        distances: guest_distances(task, &guest_nodes),
        guest_nodes,
        devices: request.devices.iter().map(device).collect(),
    }
}

/// Those that the guest is told later when it is attached.
fn guest_distances(task: &Task<'_>, guest_nodes: &[GuestNodePlan]) -> DistanceMatrix {
    let at: Vec<usize> = guest_nodes.iter().filter_map(|node| task.capacity.position(node.home)).collect();
    let row = |from: usize| {
        at.iter().map(|&to| u8::try_from(task.capacity.distance(from, to)).unwrap_or(u8::MAX)).collect()
    };
    let host = HostTopology {
        nodes: guest_nodes.iter().map(|node| HostNode { id: node.home, ..HostNode::default() }).collect(),
        distances: DistanceMatrix::new(at.iter().map(|&from| row(from)).collect()).unwrap_or_default(),
        ..HostTopology::default()
    };
    let ids: Vec<u32> = guest_nodes.iter().map(|node| node.id).collect();
    let homes: Homes = guest_nodes.iter().map(|node| (node.id, node.home)).collect();
    distances(&host, &ids, &homes)
}

fn explanation(task: &Task<'_>, division: &Division, placement: &Placement, unit_bytes: u64) -> Explanation {
    let figures = |(at, node): (usize, &crate::NodeCapacity)| {
        let part = division.parts.iter().find(|part| part.node == at);
        NodeFigures {
            node: node.id,
            free_cpus: node.free_cpus,
            free_cores: node.free_cores,
            free_memory_bytes: task.rooms[at].units * unit_bytes,
            counted: task.rooms[at].both(),
            vcpus: part.map_or(0, |part| part.vcpus),
            memory_bytes: part.map_or(0, |part| part.units * unit_bytes),
        }
    };
    let remote = placement.devices.iter().filter(|device| !device.local).filter_map(|device| {
        let at = device.host_node.and_then(|id| task.capacity.position(id))?;
        let home = division.shares.iter().find(|share| share.devices.contains(&device.address))?;
        let served = placement.guest_nodes.iter().any(|node| node.home == home.node);
        Some(task.remote(&device.address, at, home.node, served, division.rule))
    });
    Explanation {
        rule: division.rule,
        vcpus: task.vcpus,
        units: task.units,
        unit_bytes,
        free_cpus: division.free.0,
        free_units: division.free.1,
        memory_of_all: division.memory_of_all,
        homes: division.shares.clone(),
        nodes: task.capacity.nodes.iter().enumerate().map(figures).collect(),
        remote: remote.collect(),
    }
}

/// What made it impossible.
fn lacks(task: &Task<'_>, request: &Request, homes: &[Home], unit_bytes: u64) -> Vec<Lack> {
    let page_bytes = request.page_bytes;
    let mut lacks = Vec::new();
    for at in task.full(homes) {
        let (node, room) = (Some(task.capacity.nodes[at].id), task.rooms[at]);
        let one = |resource, needed| Lack { node, resource, needed, there: 0, page_bytes };
        lacks.extend((room.cpus == 0).then(|| one(Resource::Cpus, 1)));
        lacks.extend((room.units == 0).then(|| one(Resource::Memory, unit_bytes)));
    }
    let with_memory = task.rooms.iter().filter(|room| room.units > 0);
    let cpus: u64 = with_memory.map(|room| u64::from(room.cpus)).sum();
    let units: u64 = task.rooms.iter().map(|room| room.units).sum();
    let host = |resource, needed, there| Lack { node: None, resource, needed, there, page_bytes };
    if cpus < u64::from(task.vcpus) {
        lacks.push(host(Resource::Cpus, task.vcpus.into(), cpus));
    }
    if units < task.units {
        lacks.push(host(Resource::Memory, request.memory_bytes, units * unit_bytes));
    }
    if lacks.is_empty() {
        // Fewest nodes with vCPUs: those of devices, and the largest.
        let mut nodes = task.served(homes);
        let mut others: Vec<usize> =
            (0..task.rooms.len()).filter(|at| task.rooms[*at].both() && !nodes.contains(at)).collect();
        others.sort_by_key(|&at| std::cmp::Reverse(task.rooms[at].cpus));
        let mut sum: u32 = nodes.iter().map(|&at| task.rooms[at].cpus).sum();
        for at in others {
            if sum < task.vcpus {
                sum += task.rooms[at].cpus;
                nodes.push(at);
            }
        }
        lacks.push(host(Resource::Units, nodes.len() as u64, task.units));
    }
    lacks
}

/// Smaller VMs, other pages and less locality, each tried.
fn would_fit(capacity: &Capacity, request: &Request) -> Vec<Fits> {
    let unit = unit_bytes(request.page_bytes);
    let task = Task::new(capacity, request, unit);
    let units: u64 = task.rooms.iter().map(|room| room.units).sum();
    let cpus: u32 = task.rooms.iter().filter(|room| room.units > 0).map(|room| room.cpus).sum();
    let (vcpus, memory_bytes) = (request.vcpus.min(cpus), request.memory_bytes.min(units * unit));
    let smaller = Request { vcpus, memory_bytes, ..request.clone() };
    let other_pages = capacity.page_sizes().into_iter().filter(|&size| size != request.page_bytes);
    let mut tries: Vec<Request> =
        other_pages.map(|page_bytes| Request { page_bytes, ..request.clone() }).collect();
    tries.push(smaller.clone());
    if !request.devices.is_empty() && request.locality == Locality::Required {
        let locality = Locality::Preferred;
        tries.extend([request, &smaller].map(|request| Request { locality, ..request.clone() }));
    }
    let fits = |tried: &Request| tried.check(capacity).is_ok() && attempt(capacity, tried).is_ok();
    let mut found: Vec<Fits> = Vec::new();
    for tried in tries.iter().filter(|tried| fits(tried)) {
        let fits = Fits {
            vcpus: tried.vcpus,
            memory_bytes: tried.memory_bytes,
            page_bytes: tried.page_bytes,
            remote: tried.locality != request.locality,
        };
        let whole = |fits: &Fits| (fits.vcpus, fits.memory_bytes) == (request.vcpus, request.memory_bytes);
        // A smaller VM with less locality says nothing new if all of it fits with less locality.
        if !(fits.remote && found.iter().any(|before| before.remote && whole(before))) {
            found.push(fits);
        }
    }
    found
}
