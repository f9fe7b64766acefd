//! Groups of CPUs that share a last-level cache.

use super::{SysfsError, parse, tree::Tree};
use std::path::{Path, PathBuf};
use vnuma_model::{CacheGroup, CpuSet, HostNode};

/// One group for each last-level cache, in order of its first CPU. A virtual machine or an
/// odd CPU may not list its caches: then there is no group for it.
pub(super) fn read(tree: &Tree, nodes: &[HostNode]) -> Result<Vec<CacheGroup>, SysfsError> {
    let online: CpuSet = nodes.iter().flat_map(|node| node.cpus.iter()).collect();
    let mut grouped = CpuSet::new();
    let mut groups = Vec::new();
    for cpu in online.iter() {
        // CPUs that share the last cache share all of the group: no need to ask each.
        if grouped.contains(cpu) {
            continue;
        }
        let Some(last) = last_level(tree, cpu)? else { continue };
        let group = read_group(tree, cpu, &last, &online)?;
        group.cpus.iter().for_each(|cpu| grouped.insert(cpu));
        groups.push(group);
    }
    Ok(groups)
}

/// A cache of a CPU.
struct Cache {
    level: u32,
    directory: PathBuf,
}

/// The CPU's cache of the highest level that holds data.
fn last_level(tree: &Tree, cpu: u32) -> Result<Option<Cache>, SysfsError> {
    let directory = tree.path(&format!("sys/devices/system/cpu/cpu{cpu}/cache"));
    let mut last: Option<Cache> = None;
    for index in tree.numbered(&directory, "index")? {
        let directory = directory.join(format!("index{index}"));
        let path = directory.join("level");
        let Some(level) = tree.parsed(&path, parse::number)? else { continue };
        let level = u32::try_from(level)
            .ok()
            .filter(|level| (1..=4).contains(level))
            .ok_or_else(|| SysfsError::value(&path, &level.to_string(), "cache levels are 1 to 4"))?;
        let kind = tree.text(&directory.join("type"))?;
        let holds_data = kind.is_none_or(|kind| matches!(kind.trim(), "Unified" | "Data"));
        if holds_data && last.as_ref().is_none_or(|last| level > last.level) {
            last = Some(Cache { level, directory });
        }
    }
    Ok(last)
}

fn read_group(tree: &Tree, cpu: u32, cache: &Cache, online: &CpuSet) -> Result<CacheGroup, SysfsError> {
    let mut cpus = shared_by(tree, cpu, &cache.directory)?;
    cpus = cpus.iter().filter(|&cpu| online.contains(cpu)).collect();
    // Of CPUs just plugged, neither file has been seen to name the CPU itself.
    cpus.insert(cpu);
    let size = tree.parsed(&cache.directory.join("size"), parse::cache_size_kib)?;
    Ok(CacheGroup { level: cache.level, size_kib: size.unwrap_or_default(), cpus })
}

/// Who shares a cache of `cpu`, by the first file that makes sense.
fn shared_by(tree: &Tree, cpu: u32, cache: &Path) -> Result<CpuSet, SysfsError> {
    let list = tree.parsed(&cache.join("shared_cpu_list"), str::parse::<CpuSet>)?.unwrap_or_default();
    if list.contains(cpu) {
        return Ok(list);
    }
    // Older kernels have the mask only.
    let map = tree.parsed(&cache.join("shared_cpu_map"), parse::cpu_map)?.unwrap_or_default();
    if map.contains(cpu) {
        return Ok(map);
    }
    if !list.is_empty() || !map.is_empty() {
        return Ok(if list.is_empty() { map } else { list });
    }
    // The L3 of an Itanium can have an empty list of CPUs; it belongs to a core.
    let core = tree.path(&format!("sys/devices/system/cpu/cpu{cpu}/topology"));
    let siblings = tree.set(&core.join("thread_siblings_list"), &core.join("thread_siblings"))?;
    Ok(siblings.unwrap_or_default())
}
