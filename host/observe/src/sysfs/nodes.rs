//! Nodes: CPUs, memory, huge pages, distances.

use super::{SysfsError, parse, tree::Tree};
use std::{collections::BTreeMap, path::Path};
use vnuma_model::{CpuSet, DistanceMatrix, HostNode, HugePages, LOCAL_DISTANCE};

const NODES: &str = "sys/devices/system/node";
const CPUS: &str = "sys/devices/system/cpu";

/// Largest node number, the kernel's own limit (`MAX_NUMNODES` is 1024 at most).
const MAX_NODE: u32 = 1023;

/// The kernel's distance of two nodes if the firmware gives none.
const REMOTE_DISTANCE: u8 = 20;

/// Online nodes in rising order of their number, and their distances.
pub(super) fn read(tree: &Tree) -> Result<(Vec<HostNode>, DistanceMatrix), SysfsError> {
    let online = online_cpus(tree)?;
    let numbers = online_nodes(tree)?;
    if numbers.is_empty() {
        let node = whole_host(tree, online)?;
        return Ok((vec![node], matrix(tree, &[vec![LOCAL_DISTANCE]])?));
    }
    let read = |&id: &u32| read_node(tree, id, online.as_ref());
    let mut nodes = numbers.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    one_node_for_each_cpu(tree, &mut nodes)?;
    let possible = tree.parsed(&tree.path(&format!("{NODES}/possible")), str::parse::<CpuSet>)?;
    let row = |&id: &u32| distance_row(tree, id, &numbers, possible.as_ref());
    let rows = numbers.iter().map(row).collect::<Result<Vec<_>, _>>()?;
    Ok((nodes, matrix(tree, &rows)?))
}

/// Online CPUs, by the kernel's list or, where it is older than that, by each CPU's own word; a CPU that cannot be
/// taken offline has none. `None` where the kernel lists no CPU (and then, all are online).
fn online_cpus(tree: &Tree) -> Result<Option<CpuSet>, SysfsError> {
    let listed = tree.parsed(&tree.path(&format!("{CPUS}/online")), str::parse)?;
    if listed.is_some() {
        return Ok(listed);
    }
    let directory = tree.path(CPUS);
    let numbers = tree.numbered(&directory, "cpu")?;
    let mut online = CpuSet::new();
    for &cpu in &numbers {
        if cpu > CpuSet::MAX_CPU {
            let reason = format!("CPU numbers end at {}", CpuSet::MAX_CPU);
            return Err(SysfsError::value(&directory, &format!("cpu{cpu}"), reason));
        }
        if tree.parsed(&directory.join(format!("cpu{cpu}/online")), parse::online)? != Some(false) {
            online.insert(cpu);
        }
    }
    Ok((!numbers.is_empty()).then_some(online))
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

/// All and free memory of each online node, KiB; nothing on a kernel without NUMA.
pub(super) fn read_memory(tree: &Tree) -> Result<Vec<(u32, u64, u64)>, SysfsError> {
    let read = |id: u32| {
        let path = tree.path(&format!("{NODES}/node{id}/meminfo"));
        let memory = tree.parsed(&path, parse::meminfo)?.unwrap_or_default();
        Ok((id, memory.total_kib, memory.free_kib))
    };
    online_nodes(tree)?.into_iter().map(read).collect()
}

/// Pools of huge pages of each online node.
pub(super) fn read_pools(tree: &Tree) -> Result<Vec<(u32, HugePages)>, SysfsError> {
    let mut pools = Vec::new();
    for id in online_nodes(tree)? {
        let of_node = huge_pages(tree, &tree.path(&format!("{NODES}/node{id}/hugepages")))?;
        pools.extend(of_node.into_iter().map(|pool| (id, pool)));
    }
    Ok(pools)
}

/// Of a CPU that several nodes list (`numa=fake` and faulty firmware do that), the kernel links its own directory to the
/// one that it takes it for. Without a link it is taken to be on the first.
fn one_node_for_each_cpu(tree: &Tree, nodes: &mut [HostNode]) -> Result<(), SysfsError> {
    let mut listed = BTreeMap::<u32, Vec<u32>>::new();
    for node in nodes.iter() {
        node.cpus.iter().for_each(|cpu| listed.entry(cpu).or_default().push(node.id));
    }
    listed.retain(|_, ids| ids.len() > 1);
    let mut homes = BTreeMap::new();
    for (cpu, ids) in listed {
        let linked = tree.numbered(&tree.path(&format!("{CPUS}/cpu{cpu}")), "node")?;
        homes.insert(cpu, *ids.iter().find(|id| linked.contains(id)).unwrap_or(&ids[0]));
    }
    for node in nodes.iter_mut().filter(|_| !homes.is_empty()) {
        let id = node.id;
        node.cpus = node.cpus.iter().filter(|cpu| homes.get(cpu).is_none_or(|&home| home == id)).collect();
    }
    Ok(())
}

/// The one node of a host whose kernel knows no nodes.
fn whole_host(tree: &Tree, online: Option<CpuSet>) -> Result<HostNode, SysfsError> {
    let cpus = online.unwrap_or_default();
    if cpus.is_empty() {
        return Err(SysfsError::Missing { path: tree.path(&format!("{CPUS}/online")) });
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
fn distance_row(
    tree: &Tree,
    id: u32,
    numbers: &[u32],
    possible: Option<&CpuSet>,
) -> Result<Vec<u8>, SysfsError> {
    let path = tree.path(&format!("{NODES}/node{id}/distance"));
    let untold = |&other: &u32| if other == id { LOCAL_DISTANCE } else { REMOTE_DISTANCE };
    // A kernel whose firmware has no table of distances writes zeros, where it does not invent some.
    let row = tree.parsed(&path, parse::distances)?.filter(|row| row.iter().any(|&distance| distance != 0));
    let Some(row) = row else { return Ok(numbers.iter().map(untold).collect()) };
    let row = match possible {
        // A node went offline while this was copied: the row has distances to all possible nodes.
        Some(possible) if row.len() != numbers.len() && row.len() == possible.len() => {
            let told = possible.iter().zip(row).filter(|(other, _)| numbers.contains(other));
            told.map(|(_, distance)| distance).collect()
        }
        _ => row,
    };
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
