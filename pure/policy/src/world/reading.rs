//! What one period showed of the host's vCPUs, as it was read, and what the schedulers make of it.
//!
//! ```text
//!   Accesses counted by node           ──▶ taken as they are
//!   local and remote accesses          ──▶ remote ones are spread over the other nodes as its pages are
//!   LLC misses only                    ──▶ spread over all nodes as its pages are
//!   nothing, as there is no PMU        ──▶ an assumed rate, spread as its pages are
//! ```
//!
//! Pages of a vCPU are those of its guest node, from which its guest's kernel allocates, and in a UMA VM those of the VM.

use crate::scheduling::{Counts, CpuSample, Machine, entitlement::CpuGroup};
use std::sync::Arc;
use vnuma_model::{Accesses, ApicId, Counted, CpuId, CpuLayout, CpuSet, HostNodeId, VmId};

/// A vCPU's period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuReading {
    /// Its APIC id.
    pub vcpu: ApicId,
    /// Its thread.
    pub tid: i32,
    /// CPU that it was on last.
    pub cpu: Option<CpuId>,
    /// CPUs that it may run on, online or not. `None`: they could not be read.
    pub allowed: Option<CpuSet>,
    /// It has a real-time scheduling class.
    pub real_time: bool,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time that it was ready to run and had no CPU or no quota, nanoseconds.
    pub waited_ns: u64,
    /// Position of its control group among those of the host. `None`: it is in none, or that is not known.
    pub group: Option<usize>,
    /// What was counted.
    pub counted: Counted,
}

/// A VM's period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmReading {
    /// The VM.
    pub vm: VmId,
    /// Its process.
    pub pid: i32,
    /// Where its pages lie, KiB by node. Empty: not known.
    pub pages: Vec<(HostNodeId, u64)>,
    /// Where its memory may go. `None`: not known, or nobody may move it.
    pub memory: Option<Arc<MemoryReading>>,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuReading>,
}

/// The memory of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// When it was looked at, of the clock that the world has.
    pub read_ns: u64,
    /// What may be moved: the nodes that its policy names (`None`: it may go anywhere), and where it lies, KiB.
    pub parts: Vec<MemoryRange>,
    /// What stays where it is, KiB.
    pub fixed: Vec<(HostNodeId, u64)>,
    /// Nodes that its cpuset lets it have memory of.
    pub allowed: Vec<HostNodeId>,
}

/// Memory of a VM that may go to the same nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryRange {
    /// Nodes that its policy names. `None`: it has none, and may go anywhere.
    pub targets: Option<Vec<HostNodeId>>,
    /// Where it lies, KiB.
    pub kib: Vec<(HostNodeId, u64)>,
}

/// A period of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostReading {
    /// When reading began, of the clock that the world has.
    pub began_ns: u64,
    /// Length of the period, nanoseconds.
    pub period_ns: u64,
    /// Where the counts come from, for operators.
    pub source: &'static str,
    /// Isolated CPUs, cores.
    pub layout: Arc<CpuLayout>,
    /// CPUs in rising order. Empty: how long they were idle could not be read.
    pub cpus: Vec<CpuSample>,
    /// Control groups that vCPUs are in, and those that these are in, which come before them.
    pub groups: Arc<Vec<CpuGroup>>,
    /// All and free memory of each node, KiB. Empty: not known, or nothing may be moved.
    pub memory: Vec<(HostNodeId, u64, u64)>,
    /// VMs.
    pub vms: Vec<VmReading>,
}

/// Without counters a vCPU is taken to retire so many instructions in a nanosecond on a CPU, with so many references to the
/// last-level cache in a thousand of them, half of which miss: it counts as LLC-FI (3 to 20 references), so that the place
/// of the VM's pages decides.
const ASSUMED_INSTRUCTIONS_PER_NS: u64 = 1;
const ASSUMED_REFERENCES_PER_THOUSAND: u64 = 10;
const ASSUMED_MISSES_PER_THOUSAND: u64 = 5;

impl VcpuReading {
    /// Are its figures assumed, not counted?
    pub fn is_assumed(&self) -> bool {
        self.counted == Counted::NoCounters
    }

    /// The counts in the form of the schedulers. `node` is the position of the node that it was on, `home` the node of its guest node's
    /// memory, if its VM has several guest nodes, and `pages` are its VM's.
    pub fn counts(
        &self,
        machine: &Machine,
        node: Option<usize>,
        home: Option<HostNodeId>,
        pages: &[(HostNodeId, u64)],
    ) -> Option<Counts> {
        let of_vm = || by_position(machine, pages);
        let home = home.filter(|home| machine.position(*home).is_some());
        let pages = || home.map_or_else(of_vm, |home| by_position(machine, &[(home, 1)]));
        match &self.counted {
            Counted::Counted(counted) => Some(Counts {
                instructions: counted.instructions,
                llc_references: counted.llc_references,
                llc_misses: counted.llc_misses,
                accesses: match &counted.accesses {
                    Accesses::ByNode(list) => by_position(machine, list),
                    Accesses::LocalRemote { local, remote } => {
                        local_and_remote(machine, node, (*local, *remote), [&pages(), &of_vm()])
                    }
                    Accesses::Unknown => spread(counted.llc_misses, &pages()),
                },
            }),
            // Nothing is new.
            Counted::DidNotRun => Some(Counts::default()),
            Counted::Crowded | Counted::Lost => None,
            Counted::NoCounters => {
                let instructions = self.ran_ns.saturating_mul(ASSUMED_INSTRUCTIONS_PER_NS);
                let llc_misses = (instructions / 1000).saturating_mul(ASSUMED_MISSES_PER_THOUSAND);
                let pages = pages();
                let known = pages.iter().any(|&pages| pages > 0);
                known.then(|| Counts {
                    instructions,
                    llc_references: (instructions / 1000).saturating_mul(ASSUMED_REFERENCES_PER_THOUSAND),
                    llc_misses,
                    accesses: spread(llc_misses, &pages),
                })
            }
        }
    }
}

/// Nodes that the host does not have any more are left out.
pub(crate) fn by_position(machine: &Machine, list: &[(HostNodeId, u64)]) -> Vec<u64> {
    let mut counts = vec![0_u64; machine.nodes.len()];
    for &(node, count) in list {
        if let Some(position) = machine.position(node) {
            counts[position] = counts[position].saturating_add(count);
        }
    }
    counts
}

/// Splits a count in the proportion of the pages. Empty where no page is known.
fn spread(count: u64, pages: &[u64]) -> Vec<u64> {
    let total: u128 = pages.iter().map(|&pages| u128::from(pages)).sum();
    if total == 0 {
        return Vec::new();
    }
    let share = |&pages: &u64| (u128::from(count) * u128::from(pages) / total) as u64;
    pages.iter().map(share).collect()
}

/// Remote accesses go where its pages are; if these are all local, where its VM's are; to all other nodes alike where that is
/// not known.
fn local_and_remote(
    machine: &Machine,
    node: Option<usize>,
    (local, remote): (u64, u64),
    pages: [&[u64]; 2],
) -> Vec<u64> {
    let Some(node) = node else { return Vec::new() };
    let elsewhere = |pages: &[u64]| {
        let weigh = |(at, &pages)| if at == node { 0 } else { pages };
        pages.iter().enumerate().map(weigh).collect::<Vec<u64>>()
    };
    let known = pages.map(elsewhere).into_iter().find(|pages| pages.iter().any(|&pages| pages > 0));
    let alike = || elsewhere(&vec![1; machine.nodes.len()]);
    let mut accesses = spread(remote, &known.unwrap_or_else(alike));
    accesses.resize(machine.nodes.len(), 0);
    accesses[node] = local;
    accesses
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{HostNode, HostTopology, ThreadCounts};

    /// Nodes 0, 2 and 8, with two CPUs each.
    fn machine() -> Machine {
        let node = |id: u32| HostNode { id, cpus: [id, id + 1].into_iter().collect(), ..HostNode::default() };
        let host = HostTopology { nodes: vec![node(0), node(2), node(8)], ..HostTopology::default() };
        Machine::new(&host, &CpuLayout::default())
    }

    fn counted(accesses: Accesses) -> VcpuReading {
        let (instructions, llc_references, llc_misses) = (1000, 30, 20);
        let counts = ThreadCounts { instructions, llc_references, llc_misses, accesses, permille: 1000 };
        let counted = Counted::Counted(counts);
        VcpuReading { ran_ns: 2_000_000, counted, ..VcpuReading::default() }
    }

    fn accesses(reading: &VcpuReading, node: Option<usize>, pages: &[(u32, u64)]) -> Vec<u64> {
        reading.counts(&machine(), node, None, pages).expect("counted").accesses
    }

    #[test]
    fn each_source_says_where_accesses_go() {
        let by_node = counted(Accesses::ByNode(vec![(8, 5), (0, 1), (77, 3)]));
        assert_eq!(accesses(&by_node, None, &[(2, 9)]), [1, 0, 5], "a node that is gone does not count");
        let local_remote = counted(Accesses::LocalRemote { local: 4, remote: 12 });
        assert_eq!(accesses(&local_remote, Some(0), &[(0, 9), (2, 10), (8, 30)]), [4, 3, 9]);
        assert_eq!(accesses(&local_remote, Some(0), &[(0, 9)]), [4, 6, 6], "its pages are all local");
        assert_eq!(accesses(&local_remote, None, &[(0, 9)]), [] as [u64; 0], "where it was is not known");
        let misses = counted(Accesses::Unknown);
        assert_eq!(accesses(&misses, Some(0), &[(0, 1), (8, 3)]), [5, 0, 15]);
        assert_eq!(accesses(&misses, Some(0), &[]), [] as [u64; 0]);
    }

    #[test]
    fn a_vcpu_of_a_guest_node_uses_the_memory_of_that_node() {
        let accesses = |counts: Accesses, node, home| {
            let pages = [(0, 50), (2, 30), (8, 20)];
            counted(counts).counts(&machine(), Some(node), Some(home), &pages).expect("counted").accesses
        };
        assert_eq!(accesses(Accesses::Unknown, 0, 8), [0, 0, 20]);
        assert_eq!(accesses(Accesses::Unknown, 0, 77), [10, 6, 4], "a home that is gone is none");
        let local_remote = || Accesses::LocalRemote { local: 4, remote: 10 };
        assert_eq!(accesses(local_remote(), 0, 8), [4, 0, 10]);
        assert_eq!(
            accesses(local_remote(), 0, 0),
            [4, 6, 4],
            "at home it uses other guest nodes' memory, too"
        );
        let by_node = Accesses::ByNode(vec![(0, 3)]);
        assert_eq!(accesses(by_node, 0, 8), [3, 0, 0], "what is counted is not assumed");
        let assumed = VcpuReading { counted: Counted::NoCounters, ..counted(Accesses::Unknown) };
        let counts = assumed.counts(&machine(), Some(0), Some(8), &[(0, 1)]).expect("assumed");
        assert_eq!((counts.remote_share(0), counts.remote_share(2)), (Some(1.0), Some(0.0)));
    }

    #[test]
    fn without_counters_the_place_of_pages_stands_in_for_them() {
        let reading = VcpuReading { counted: Counted::NoCounters, ..counted(Accesses::Unknown) };
        let counts = reading.counts(&machine(), Some(0), None, &[(2, 100)]).expect("assumed");
        assert_eq!((counts.instructions, counts.llc_misses), (2_000_000, 10_000));
        assert_eq!((counts.remote_share(0), counts.remote_share(1)), (Some(1.0), Some(0.0)));
        assert!(reading.is_assumed() && !counted(Accesses::Unknown).is_assumed());
        assert_eq!(reading.counts(&machine(), Some(0), None, &[]), None, "nothing is known of it");
    }

    #[test]
    fn gaps_are_no_counts() {
        for (gap, counts) in
            [(Counted::DidNotRun, Some(Counts::default())), (Counted::Crowded, None), (Counted::Lost, None)]
        {
            let reading = VcpuReading { counted: gap, ..VcpuReading::default() };
            assert_eq!(reading.counts(&machine(), Some(0), None, &[(0, 1)]), counts);
        }
    }
}
