//! Makes a [`Snapshot`] from `/proc` and `/sys` below a root, which is `/` or a copy.
//!
//! All of `/proc` is read, and programs choose part of what is there (names, paths, the number of their threads and mappings).
//! So each file is read up to a limit, what cannot be parsed is left out, and a file of a device counts only with the device
//! number that `/sys` has for it.

mod devices;
pub mod interrupts;
pub mod maps;
mod nodes;
mod processes;

use crate::{
    core::{NodeId, ProcessId, Snapshot, State},
    rules::Rules,
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};
use vnuma_process::procfs::CpuTimes;

/// Looks at the guest, again and again: rates are those from one look to the next.
#[derive(Debug)]
pub struct Observer {
    root: PathBuf,
    /// Busy and all time of each CPU, ticks.
    cpus: BTreeMap<u32, (u64, u64)>,
    /// Times of threads of the processes that were of interest.
    threads: BTreeMap<(ProcessId, i32), CpuTimes>,
    looked: Option<Duration>,
}

/// What a look gives.
#[derive(Debug, Default)]
pub struct Look {
    /// The guest.
    pub snapshot: Snapshot,
    /// Processes that could not be looked at, for lack of rights.
    pub hidden: usize,
}

impl Observer {
    /// Looks below `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), cpus: BTreeMap::new(), threads: BTreeMap::new(), looked: None }
    }

    /// Looks, at a time that is counted from any point.
    pub fn look(&mut self, rules: &Rules, state: &State, now: Duration) -> Look {
        let mut nodes = nodes::read(&self.root);
        self.measure_nodes(&mut nodes);
        let functions = devices::read(&self.root);
        let node_of = |cpu: u32| -> Option<NodeId> {
            nodes.iter().find(|(_, node)| node.cpus.contains(cpu)).map(|(id, _)| *id)
        };
        let elapsed = self.looked.and_then(|looked| now.checked_sub(looked)).filter(|time| !time.is_zero());
        let mut times = BTreeMap::new();
        let mut hidden = 0;
        let mut found = Vec::new();
        for pid in processes::list(&self.root) {
            match processes::read(&self.root, pid, rules, |id| state.placed(id).is_some()) {
                Ok(Some(process)) => found.push(process),
                Ok(None) => {}
                Err(processes::Hidden) => hidden += 1,
            }
        }
        for process in &mut found {
            let threads = processes::threads(&self.root, process.id.pid);
            let before = |tid: i32| self.threads.get(&(process.id, tid)).copied();
            let id = process.id;
            let rates = processes::rates(&threads, before, elapsed, node_of);
            processes::take(process, &threads, rates);
            times.extend(threads.iter().map(|thread| ((id, thread.tid), thread.times)));
            if state.wants_memory(id) && nodes.len() > 1 {
                process.memory_kib = maps::read_memory(&self.root, id.pid);
            }
        }
        let interrupts = interrupts::read(&self.root, &functions);
        (self.threads, self.looked) = (times, Some(now));
        let snapshot = Snapshot { nodes, devices: functions, processes: found, interrupts };
        Look { snapshot, hidden }
    }

    /// CPU time of nodes since the last look.
    fn measure_nodes(&mut self, nodes: &mut BTreeMap<NodeId, crate::core::Node>) {
        let times = nodes::cpu_times(&self.root);
        for node in nodes.values_mut() {
            let used = |cpu: u32| {
                let ((busy, all), (was_busy, was_all)) = (times.get(&cpu)?, self.cpus.get(&cpu)?);
                let (busy, all) = (busy.saturating_sub(*was_busy), all.saturating_sub(*was_all));
                (all > 0).then(|| (busy.min(all) as u128 * 1000 / all as u128) as u32)
            };
            let used: Vec<u32> = node.cpus.iter().filter_map(used).collect();
            // A CPU that has just come online has no time yet.
            node.used_permille = (!used.is_empty()).then(|| used.iter().sum());
        }
        self.cpus = times;
    }
}
