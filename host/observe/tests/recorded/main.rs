//! Recorded servers: hwloc's public copies of `/sys` and `/proc` of real machines, and some that its authors made up, read
//! by our reader and by lstopo. `cargo xtask servers` fetches them and runs this.

mod compare;
mod generated;
mod lstopo;
mod snapshot;

use compare::{Files, Reason, Tally};
use lstopo::Lstopo;
use snapshot::Snapshot;
use std::{
    fs,
    path::{Path, PathBuf},
};
use vnuma_model::CpuSet;
use vnuma_observe::read_host_topology;

/// Archives of Linux servers in the release of hwloc that is fetched.
const ARCHIVES: usize = 49;

#[test]
fn recorded_servers_are_read_as_lstopo_reads_them() {
    let mut tally = Tally::default();
    for archive in snapshot::archives() {
        let snapshot = Snapshot::unpack(&archive);
        compare(&mut tally, &snapshot.name, &snapshot.root());
    }
    println!("recorded servers read as lstopo reads them: {}", tally.text());
    for (reason, differences) in &tally.explained {
        println!("  {} times {reason}", differences.len());
    }
    assert_eq!(tally.wrong, Vec::<String>::new(), "differences without a reason");
    assert_eq!(tally.servers, ARCHIVES);
    let needed: Vec<Reason> = tally.explained.into_keys().collect();
    assert_eq!(needed, Reason::ALL, "reasons that were needed");
}

/// 64 nodes and 4096 CPUs: no recorded server is that large.
#[test]
fn a_larger_server_than_was_recorded_is_read_as_lstopo_reads_it() {
    let directory = generated::write();
    let mut tally = Tally::default();
    compare(&mut tally, "generated", directory.path());
    println!("a generated server read as lstopo reads it: {}", tally.text());
    assert_eq!(tally.wrong, Vec::<String>::new());
    assert!(tally.explained.is_empty(), "{:?}", tally.explained);

    // Both could be wrong in the same way.
    let host = read_host_topology(directory.path()).expect("it was read before");
    assert_eq!(host.nodes.len(), generated::NODES as usize);
    for (node, position) in host.nodes.iter().zip(0..) {
        let cpus: CpuSet =
            generated::cpus(position).iter().filter(|&cpu| generated::is_online(cpu)).collect();
        let expected = (generated::node_id(position), cpus, generated::memory_kib(position));
        assert_eq!((node.id, node.cpus.clone(), node.memory_total_kib), expected);
    }
    let row: Vec<u32> = (0..generated::NODES).map(|to| generated::distance(9, to)).collect();
    assert_eq!(host.distances.rows()[9].iter().copied().map(u32::from).collect::<Vec<_>>(), row);
    let caches: usize = host.caches.iter().map(|cache| cache.cpus.len()).sum();
    assert_eq!(caches, (0..generated::CPUS).filter(|&cpu| generated::is_online(cpu)).count());
}

fn compare(tally: &mut Tally, name: &str, root: &Path) {
    match read_host_topology(root) {
        Ok(ours) => tally.add(name, &ours, &Lstopo::ask(root), &files(root)),
        Err(error) => tally.wrong.push(format!("{name}: {error}")),
    }
}

/// Reads without our reader what decides whether a difference has a reason.
fn files(root: &Path) -> Files {
    let system = root.join("sys/devices/system");
    let mask = |path: &Path| {
        let text = fs::read_to_string(path).ok()?;
        Some(lstopo::mask(text.trim_end_matches(['\n', '\0'])))
    };
    let node_masks = numbered(&system.join("node"), "node");
    let node_masks = node_masks.filter_map(|(id, path)| Some((id, mask(&path.join("cpumap"))?))).collect();
    let contradicts = |(_, cache): (u32, PathBuf)| {
        let list = fs::read_to_string(cache.join("shared_cpu_list")).unwrap_or_default();
        let list = list.trim_end_matches(['\n', '\0']).parse::<CpuSet>().ok();
        list.zip(mask(&cache.join("shared_cpu_map"))).is_some_and(|(list, mask)| list != mask)
    };
    let contradictory = numbered(&system.join("cpu"), "cpu")
        .filter(|(_, path)| numbered(&path.join("cache"), "index").any(contradicts))
        .map(|(cpu, _)| cpu)
        .collect();
    Files { node_masks, contradictory }
}

/// Entries `PREFIX<number>` of a directory.
fn numbered(directory: &Path, prefix: &'static str) -> impl Iterator<Item = (u32, PathBuf)> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    })
}
