//! Where the pages of VMs lie, for policies of hosts whose counters do not say which node an access goes to, and for those that
//! move memory. Counting walks the page tables of a process, so it is done in a thread of its own, and seldom. A process that does
//! not answer in time is left to a thread that waits for it, and others are counted.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tracing::debug;
use vnuma_hypervisor::resident::{GuestMapping, MappingPolicy, read_guest_mappings, sum_pages};
use vnuma_model::HostNodeId;
use vnuma_observe::{location::monotonic_ns, read_node_memory};
use vnuma_policy::world::{MemoryRange, MemoryReading, VmId};
use vnuma_process::{Groups, Jobs, Looker, Next, Worker, procfs};

/// Least time between two passes over all VMs. It is longer where a pass takes long: at most one part in [`PART`] of the time.
const PAUSE: Duration = Duration::from_secs(10);
const PART: u32 = 50;
/// How long counting may take: of a VM of some TiB in small pages it takes seconds.
const LIMIT: Duration = Duration::from_secs(20);

type Pages = Vec<(HostNodeId, u64)>;
/// All and free memory of each node, KiB.
type Nodes = Vec<(HostNodeId, u64, u64)>;

/// What the last passes have counted.
#[derive(Debug, Default)]
struct Known {
    vms: HashMap<VmId, (Pages, Option<Arc<MemoryReading>>)>,
    nodes: Nodes,
}

#[derive(Debug)]
enum Order {
    Watch(VmId, i32),
    Unwatch(VmId),
}

/// A thread that counts pages of the VMs that it is given.
#[derive(Debug)]
pub(super) struct PageReader {
    worker: Worker<Order>,
    known: Arc<Mutex<Known>>,
}

impl PageReader {
    /// `moves`: memory may be moved, so that it is looked at where it may go.
    pub(super) fn start(groups: &Groups, root: PathBuf, moves: bool) -> io::Result<Self> {
        let known = Arc::new(Mutex::new(Known::default()));
        let (shown, all) = (Arc::clone(&known), groups.clone());
        let worker = groups.host.start("pages", move |orders: Jobs<Order>| {
            let looker = Looker::new(&all, orders.heartbeat(), LIMIT, || ());
            Task { root, moves, known: shown, vms: HashMap::new(), looker }.run(&orders);
        })?;
        Ok(Self { worker, known })
    }

    /// Counts the pages of this process of a VM, now and then at intervals.
    pub(super) fn watch(&self, vm: VmId, pid: i32) {
        self.worker.order(Order::Watch(vm, pid));
    }

    pub(super) fn unwatch(&self, vm: VmId) {
        self.worker.order(Order::Unwatch(vm));
    }

    /// What was counted last, KiB by node, and where it may go; nothing yet, or nothing any more, if it is empty.
    pub(super) fn of(&self, vm: VmId) -> (Pages, Option<Arc<MemoryReading>>) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).vms.get(&vm).cloned().unwrap_or_default()
    }

    /// All and free memory of each node, KiB; nothing if memory is not moved.
    pub(super) fn nodes(&self) -> Nodes {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).nodes.clone()
    }
}

struct Task {
    root: PathBuf,
    moves: bool,
    known: Arc<Mutex<Known>>,
    vms: HashMap<VmId, i32>,
    looker: Looker<()>,
}

impl Task {
    fn run(&mut self, orders: &Jobs<Order>) {
        let mut pass_at = Instant::now() + PAUSE;
        loop {
            match orders.wait((!self.vms.is_empty()).then_some(pass_at)) {
                Next::Job(Order::Watch(vm, pid)) => {
                    if self.vms.insert(vm, pid) != Some(pid) {
                        self.read_nodes();
                        self.read(vm, pid);
                    }
                }
                Next::Job(Order::Unwatch(vm)) => {
                    self.vms.remove(&vm);
                    self.note(|known| drop(known.vms.remove(&vm)));
                }
                Next::Nothing => {
                    let begun = Instant::now();
                    self.read_nodes();
                    let all: Vec<_> = self.vms.iter().map(|(vm, pid)| (*vm, *pid)).collect();
                    all.into_iter().for_each(|(vm, pid)| self.read(vm, pid));
                    pass_at = Instant::now() + PAUSE.max(begun.elapsed() * PART);
                }
                Next::End => return,
            }
        }
    }

    fn note(&self, note: impl FnOnce(&mut Known)) {
        note(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn read_nodes(&self) {
        if self.moves {
            // Nothing is moved while it cannot be read.
            let nodes = read_node_memory(&self.root).unwrap_or_default();
            self.note(|known| known.nodes = nodes);
        }
    }

    fn read(&mut self, vm: VmId, pid: i32) {
        let moves = self.moves;
        let found = self.looker.look((vm, pid), move |()| count(pid, moves)).unwrap_or_else(|error| {
            debug!(vm, %error, "pages of a VM are not counted");
            None
        });
        self.note(|known| match found {
            Some(found) => drop(known.vms.insert(vm, found)),
            None => drop(known.vms.remove(&vm)),
        });
    }
}

/// Pages of a process, and where they may go, if memory may be moved.
fn count(pid: i32, moves: bool) -> Option<(Pages, Option<Arc<MemoryReading>>)> {
    let read_ns = monotonic_ns();
    let mappings = read_guest_mappings(pid).ok()?;
    let allowed = moves.then(|| procfs::read_allowed_nodes(pid).ok()).flatten();
    let allowed = allowed.map(|nodes| nodes.iter().collect());
    let memory = allowed.map(|allowed| Arc::new(memory(&mappings, allowed, read_ns)));
    Some((sum_pages(&mappings), memory))
}

/// Where the memory of these mappings may go.
fn memory(mappings: &[GuestMapping], allowed: Vec<HostNodeId>, read_ns: u64) -> MemoryReading {
    // It moves memory in small pages, and leaves those of a pool.
    let policy_of = |mapping: &GuestMapping| match mapping.page_kib {
        ..=4 => mapping.policy.clone(),
        _ => MappingPolicy::Fixed,
    };
    let policies: BTreeSet<MappingPolicy> = mappings.iter().map(policy_of).collect();
    let (mut parts, mut fixed) = (Vec::new(), Vec::new());
    for policy in policies {
        let kib = sum_pages(mappings.iter().filter(|mapping| policy_of(mapping) == policy));
        match policy {
            MappingPolicy::Any => parts.push(MemoryRange { targets: None, kib }),
            MappingPolicy::Nodes(nodes) => parts.push(MemoryRange { targets: Some(nodes), kib }),
            MappingPolicy::Fixed => fixed = kib,
        }
    }
    MemoryReading { read_ns, parts, fixed, allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_may_go_to_the_same_nodes_are_one_part() {
        let mapping = |policy: &MappingPolicy, node: u32, kib: u64| GuestMapping {
            start: 0,
            policy: policy.clone(),
            page_kib: 4,
            pages: vec![(node, kib)],
        };
        let (bound, any) = (MappingPolicy::Nodes(vec![1]), MappingPolicy::Any);
        let mappings = [
            mapping(&any, 0, 1),
            mapping(&bound, 1, 2),
            mapping(&MappingPolicy::Fixed, 0, 4),
            mapping(&any, 0, 8),
            mapping(&bound, 0, 16),
            GuestMapping { page_kib: 2048, ..mapping(&any, 1, 2048) },
        ];
        let range = |targets, kib| MemoryRange { targets, kib };
        let expected = MemoryReading {
            read_ns: 7,
            parts: vec![range(None, vec![(0, 9)]), range(Some(vec![1]), vec![(0, 16), (1, 2)])],
            fixed: vec![(0, 4), (1, 2048)],
            allowed: vec![0, 1],
        };
        assert_eq!(memory(&mappings, vec![0, 1], 7), expected);
    }
}
