//! Nodes: CPUs, memory, huge pages, distances.

use super::{SysfsError, parse, tree::Tree};
use std::path::Path;
use vnuma_topology::{CpuSet, DistanceMatrix, HostNode, HugePages, LOCAL_DISTANCE};

const NODES: &str = "sys/devices/system/node";
const CPUS: &str = "sys/devices/system/cpu";

/// Largest node number, the kernel's own limit (`MAX_NUMNODES` is 1024 at most).
const MAX_NODE: u32 = 1023;

/// What the kernel gives two nodes whose distance the firmware does not tell.
const REMOTE_DISTANCE: u8 = 20;

/// Online nodes in rising order of their number, and their distances.
pub(super) fn read(tree: &Tree) -> Result<(Vec<HostNode>, DistanceMatrix), SysfsError> {
    let online = online_cpus(tree)?;
    let numbers = online_nodes(tree)?;
    if numbers.is_empty() {
        let node = whole_host(tree, online)?;
        return Ok((vec![node], matrix(tree, &[vec![LOCAL_DISTANCE]])?));
    }
    let mut nodes = Vec::with_capacity(numbers.len());
    let mut taken = CpuSet::new();
    for &id in &numbers {
        let node = read_node(tree, id, online.as_ref())?;
        let list = tree.path(&format!("{NODES}/node{id}/cpulist"));
        if let Some(cpu) = node.cpus.iter().find(|&cpu| taken.contains(cpu)) {
            let reason = format!("CPU {cpu} is on another node already");
            return Err(SysfsError::value(&list, &node.cpus.to_string(), reason));
        }
        node.cpus.iter().for_each(|cpu| taken.insert(cpu));
        nodes.push(node);
    }
    let rows = numbers.iter().map(|&id| distance_row(tree, id, &numbers)).collect::<Result<Vec<_>, _>>()?;
    Ok((nodes, matrix(tree, &rows)?))
}

/// Online CPUs. `None` where the kernel keeps no such list (and then, all are online).
fn online_cpus(tree: &Tree) -> Result<Option<CpuSet>, SysfsError> {
    tree.parsed(&tree.path(&format!("{CPUS}/online")), str::parse)
}

/// Numbers of the online nodes; empty on a kernel without NUMA.
fn online_nodes(tree: &Tree) -> Result<Vec<u32>, SysfsError> {
    let path = tree.path(&format!("{NODES}/online"));
    let numbers: Vec<u32> = match tree.parsed(&path, str::parse::<CpuSet>)? {
        Some(list) => list.iter().collect(),
        None => tree.numbered(&tree.path(NODES), "node")?,
    };
    match numbers.iter().find(|&&id| id > MAX_NODE) {
        Some(id) => Err(SysfsError::value(&path, &id.to_string(), format!("node numbers end at {MAX_NODE}"))),
        None => Ok(numbers),
    }
}

fn read_node(tree: &Tree, id: u32, online: Option<&CpuSet>) -> Result<HostNode, SysfsError> {
    let directory = format!("{NODES}/node{id}");
    let list = tree.path(&format!("{directory}/cpulist"));
    let Some(cpus) = tree.set(&list, &tree.path(&format!("{directory}/cpumap")))? else {
        return Err(SysfsError::Missing { path: list });
    };
    let cpus = cpus.iter().filter(|&cpu| online.is_none_or(|online| online.contains(cpu))).collect();
    let memory =
        tree.parsed(&tree.path(&format!("{directory}/meminfo")), parse::meminfo)?.unwrap_or_default();
    Ok(HostNode {
        id,
        cpus,
        memory_total_kib: memory.total_kib,
        memory_free_kib: memory.free_kib,
        huge_pages: huge_pages(tree, &tree.path(&format!("{directory}/hugepages")))?,
    })
}

/// The one node of a host whose kernel knows no nodes.
fn whole_host(tree: &Tree, online: Option<CpuSet>) -> Result<HostNode, SysfsError> {
    let cpus: CpuSet = match online {
        Some(cpus) => cpus,
        None => tree.numbered(&tree.path(CPUS), "cpu")?.into_iter().collect(),
    };
    let path = tree.path(&format!("{CPUS}/online"));
    match cpus.iter().max() {
        None => return Err(SysfsError::Missing { path }),
        Some(cpu) if cpu > CpuSet::MAX_CPU => {
            let reason = format!("CPU numbers end at {}", CpuSet::MAX_CPU);
            return Err(SysfsError::value(&tree.path(CPUS), &format!("cpu{cpu}"), reason));
        }
        Some(_) => {}
    }
    let memory = tree.parsed(&tree.path("proc/meminfo"), parse::meminfo)?.unwrap_or_default();
    Ok(HostNode {
        id: 0,
        cpus,
        memory_total_kib: memory.total_kib,
        memory_free_kib: memory.free_kib,
        huge_pages: huge_pages(tree, &tree.path("sys/kernel/mm/hugepages"))?,
    })
}

/// Pools in `hugepages-<size>kB` directories, smallest pages first.
fn huge_pages(tree: &Tree, directory: &Path) -> Result<Vec<HugePages>, SysfsError> {
    let mut pools = Vec::new();
    for name in tree.names(directory)? {
        let Some(size) = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB")) else {
            continue;
        };
        let pool = directory.join(&name);
        let size_kib = parse::number(size)
            .map_err(|_| SysfsError::value(&pool, size, "not the size of a huge page in kB"))?;
        let count = |file| Ok(tree.parsed(&pool.join(file), parse::number)?.unwrap_or_default());
        pools.push(HugePages { size_kib, total: count("nr_hugepages")?, free: count("free_hugepages")? });
    }
    pools.sort_unstable_by_key(|pool| pool.size_kib);
    Ok(pools)
}

/// Distances from a node to all online ones, in their order.
fn distance_row(tree: &Tree, id: u32, numbers: &[u32]) -> Result<Vec<u8>, SysfsError> {
    let path = tree.path(&format!("{NODES}/node{id}/distance"));
    let row = tree.parsed(&path, parse::distances)?.unwrap_or_else(|| {
        let distance = |&other: &u32| if other == id { LOCAL_DISTANCE } else { REMOTE_DISTANCE };
        numbers.iter().map(distance).collect()
    });
    if row.len() != numbers.len() {
        let reason = format!("{} distances for {} online nodes", row.len(), numbers.len());
        return Err(SysfsError::value(&path, &format!("{row:?}"), reason));
    }
    if let Some(small) = row.iter().find(|&&distance| distance < LOCAL_DISTANCE) {
        let reason = format!("below {LOCAL_DISTANCE}, the local distance");
        return Err(SysfsError::value(&path, &small.to_string(), reason));
    }
    Ok(row)
}

fn matrix(tree: &Tree, rows: &[Vec<u8>]) -> Result<DistanceMatrix, SysfsError> {
    DistanceMatrix::new(rows.to_vec())
        .map_err(|reason| SysfsError::value(&tree.path(NODES), &format!("{rows:?}"), reason))
}
