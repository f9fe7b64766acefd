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
mod turn;

use crate::{
    core::{NodeId, Process, Snapshot, State},
    rules::Rules,
};
use processes::Seen;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use turn::{Known, Time, Turn, Users};
use vnuma_process::procfs::CpuTimes;

/// Looks at the guest, again and again: rates are those from one look to the next.
#[derive(Debug)]
pub struct Observer {
    root: PathBuf,
    /// Busy and all time of each CPU, ticks.
    cpus: BTreeMap<u32, (u64, u64)>,
    /// Processes by number.
    known: BTreeMap<i32, Known>,
    users: Users,
    looks: u64,
    time: Time,
}

/// What a look gives.
#[derive(Debug, Default)]
pub struct Look {
    /// The guest.
    pub snapshot: Snapshot,
    /// Processes that could not be looked at, for lack of rights.
    pub hidden: usize,
    /// Processes for which there was no time. They are taken to be as they were.
    pub late: usize,
    /// Users of such processes that take more time than they have.
    pub busy_users: BTreeSet<u32>,
}

impl Observer {
    /// Looks below `root`.
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            cpus: BTreeMap::new(),
            known: BTreeMap::new(),
            users: Users::default(),
            looks: 0,
            time: Time::default(),
        }
    }

    /// Looks, at a time that is counted from any point.
    pub fn look(&mut self, rules: &Rules, state: &State, now: Duration) -> Look {
        let mut nodes = nodes::read(&self.root);
        self.measure_nodes(&mut nodes);
        let functions = devices::read(&self.root);
        let node_of = |cpu: u32| -> Option<NodeId> {
            nodes.iter().find(|(_, node)| node.cpus.contains(cpu)).map(|(id, _)| *id)
        };
        let mut look = Look::default();
        self.looks += 1;
        self.users.begin();
        let several = nodes.len() > 1;
        let end = Instant::now() + self.time.look;
        for pid in self.turns() {
            let turn = Turn::new(end, self.time);
            let placed = |id| state.placed(id).is_some();
            let seen = match processes::read(&self.root, pid, rules, &self.users, turn, placed) {
                Seen::Found(mut process, user, whole) => {
                    let threads = self.complete(&mut process, turn, now, node_of);
                    let whole = whole && !turn.is_over();
                    // It may take all the time: what else is known counts all the same.
                    if several && state.wants_memory(process.id) {
                        process.memory_kib = maps::read_memory(&self.root, process.id.pid, turn);
                    }
                    Some((user, threads, Some(*process), whole))
                }
                Seen::Other(user, whole) => Some((user, BTreeMap::new(), None, whole)),
                Seen::Unread => {
                    look.late += 1;
                    continue;
                }
                Seen::Hidden => {
                    look.hidden += 1;
                    None
                }
                Seen::Nothing => None,
            };
            let Some((user, threads, process, whole)) = seen else {
                self.known.remove(&pid);
                continue;
            };
            self.users.took(user, turn, now);
            look.late += usize::from(!whole);
            let same = |known: &Process| process.as_ref().is_none_or(|process| process.id == known.id);
            let stays =
                !whole && self.known.get(&pid).and_then(|known| known.process.as_ref()).is_some_and(same);
            match self.known.get_mut(&pid).filter(|_| stays) {
                Some(known) => known.take_part(self.looks, now, threads, process),
                None => drop(self.known.insert(pid, Known { look: self.looks, at: now, threads, process })),
            }
        }
        look.busy_users.clone_from(self.users.spent());
        let processes = self.known.values().filter_map(|known| known.process.clone()).collect();
        let interrupts = interrupts::read(&self.root, &functions);
        look.snapshot = Snapshot { nodes, devices: functions, processes, interrupts };
        look
    }

    /// Numbers of all processes, those first that were looked at longest ago. What is known of others is forgotten.
    fn turns(&mut self) -> Vec<i32> {
        let mut pids = processes::list(&self.root);
        self.known.retain(|pid, _| pids.binary_search(pid).is_ok());
        pids.sort_by_key(|pid| self.known.get(pid).map_or(0, |known| known.look));
        pids
    }

    /// Reads what changes from look to look.
    fn complete(
        &self,
        process: &mut Process,
        turn: Turn,
        now: Duration,
        node_of: impl Fn(u32) -> Option<NodeId>,
    ) -> BTreeMap<i32, CpuTimes> {
        let same = |known: &&Known| known.process.as_ref().is_some_and(|before| before.id == process.id);
        let known = self.known.get(&process.id.pid).filter(same);
        let threads = processes::threads(&self.root, process.id.pid, turn);
        let elapsed = known.and_then(|known| now.checked_sub(known.at)).filter(|time| !time.is_zero());
        let before = |tid: i32| known.and_then(|known| known.threads.get(&tid).copied());
        let rates = processes::rates(&threads, before, elapsed, node_of);
        processes::take(process, &threads, rates);
        threads.iter().map(|thread| (thread.tid, thread.times)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Their mappings take longer to read than they have.
    #[test]
    fn processes_with_endless_mappings_keep_no_other_from_being_looked_at() {
        const GREEDY: i32 = 4;
        let root = tempfile::tempdir().expect("a directory");
        let at = |path: &str| root.path().join(path);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().expect("inside")).expect("made");
            fs::write(at(path), text).expect("written");
        };
        let numbers: Vec<String> = (4..=52).map(|field| (field % 7).to_string()).collect();
        let stat = format!("7 (x) S {}", numbers.join(" "));
        write(
            "endless",
            &"7f00-7f10 r--p 00000000 fe:00 123                 /usr/lib/libx.so\n".repeat(300_000),
        );
        for pid in 1..=GREEDY + 1 {
            write(&format!("proc/{pid}/stat"), &stat);
            write(&format!("proc/{pid}/status"), "Uid:\t0\t0\t0\t0\nCpus_allowed_list:\t0-3\n");
            fs::create_dir_all(at(&format!("proc/{pid}/fd"))).expect("made");
            if pid <= GREEDY {
                fs::hard_link(at("endless"), at(&format!("proc/{pid}/maps"))).expect("linked");
            }
        }
        let maps = "7f00-7f10 r-xp 00000000 fe:00 123                 /usr/lib/libibverbs.so.1\n";
        write(&format!("proc/{}/maps", GREEDY + 1), maps);
        let (mut observer, rules, state) = (Observer::new(root.path()), Rules::default(), State::default());
        observer.time = Time { look: Duration::from_millis(10), process: Duration::from_millis(5) };
        let mut looks = (0..20).map(|number| observer.look(&rules, &state, Duration::from_secs(5 * number)));
        let first = looks.next().expect("a look");
        assert!(first.late > 1, "{} processes have to wait", first.late);
        let found = looks.find(|look| !look.snapshot.processes.is_empty()).expect("the other one is found");
        assert_eq!(found.snapshot.processes[0].id.pid, GREEDY + 1);
        assert!(found.late > 0, "the others are still too slow");
    }
}
