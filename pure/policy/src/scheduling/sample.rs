//! What is known of each vCPU at the end of a period, as plain data.

use super::machine::{Machine, Place, Reach};
use crate::world::VmId;
use std::hint::select_unpredictable;
use vnuma_model::{ApicId, CpuId, CpuSet};

/// A vCPU of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuKey {
    /// Its VM.
    pub vm: VmId,
    /// Its APIC id there.
    pub vcpu: ApicId,
}

/// What a vCPU did in a period. Counters that were multiplexed are scaled already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Retired instructions.
    pub instructions: u64,
    /// References to the last-level cache.
    pub llc_references: u64,
    /// Of these, misses.
    pub llc_misses: u64,
    /// Accesses to the memory of each node, by position. Empty: not known.
    pub accesses: Vec<u64>,
}

/// A vCPU and its period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuSample {
    /// Which.
    pub key: VcpuKey,
    /// CPU of the host that it was seen on last.
    pub cpu: Option<CpuId>,
    /// Where a policy has confined it to. `None`: it has its operator's mask.
    pub assigned: Option<Place>,
    /// Position of its operator's mask in [`Input::reaches`].
    pub reach: usize,
    /// It has a real-time scheduling class.
    pub real_time: bool,
    /// The policy that decides is the one of its VM.
    pub managed: bool,
    /// `cpu.weight` of its control group; 100 is the kernel's default. What follows from it is in `entitled_ns`.
    pub weight: u32,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time that it was ready to run and had no CPU, nanoseconds.
    pub waited_ns: u64,
    /// Time that it was ready to run and had no quota (`cpu.max`), nanoseconds.
    pub throttled_ns: u64,
    /// CPU time that it is entitled to of what it wanted, nanoseconds.
    pub entitled_ns: u64,
    /// What was counted. `None`: there are no counters, or they were lost.
    pub counts: Option<Counts>,
}

/// A CPU and its period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSample {
    /// Which.
    pub cpu: CpuId,
    /// Time that it had nothing to do, nanoseconds.
    pub idle_ns: u64,
}

/// Everything that a decision is made of.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The host.
    pub machine: &'a Machine,
    /// Masks of operators.
    pub reaches: &'a [Reach],
    /// CPUs in rising order.
    pub cpus: &'a [CpuSample],
    /// vCPUs in rising order of their keys.
    pub vcpus: &'a [VcpuSample],
    /// Length of the period, nanoseconds.
    pub period_ns: u64,
}

impl Input<'_> {
    /// CPUs that some vCPU may use. Hosts keep CPUs for themselves, which are no room for VMs.
    pub fn usable(&self) -> CpuSet {
        let mut usable = CpuSet::new();
        self.reaches.iter().for_each(|reach| usable.add_all(reach.mask()));
        usable
    }
}

/// Whether a policy may move a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It may.
    Free,
    /// Its VM has another policy, or none.
    Unmanaged,
    /// Its operator pinned it to one CPU.
    Pinned,
    /// It is confined to isolated CPUs, or runs on one.
    Isolated,
    /// It has a real-time scheduling class.
    RealTime,
}

impl VcpuSample {
    /// Whether a policy may move it.
    pub fn standing(&self, input: &Input<'_>) -> Standing {
        let reach = &input.reaches[self.reach];
        if self.real_time {
            Standing::RealTime
        } else if reach.is_isolated() || self.cpu.is_some_and(|cpu| input.machine.is_isolated(cpu)) {
            Standing::Isolated
        } else if reach.is_one_cpu() {
            Standing::Pinned
        } else if !self.managed {
            Standing::Unmanaged
        } else {
            Standing::Free
        }
    }

    /// The node that it is on, by position: where it is confined to, else where it was seen.
    pub fn node(&self, machine: &Machine) -> Option<usize> {
        let assigned = self.assigned.map(|place| machine.node_at(place));
        assigned.or_else(|| machine.node_of(self.cpu?))
    }

    /// CPU time that is due to it, in CPUs: what it is entitled to of what it wanted.
    pub fn demand(&self, period_ns: u64) -> f64 {
        (self.entitled_ns as f64 / period_ns.max(1) as f64).min(1.0)
    }

    /// Share of the period in which it waited for a CPU.
    pub fn wait_share(&self, period_ns: u64) -> f64 {
        self.waited_ns as f64 / period_ns.max(1) as f64
    }
}

/// What the accesses of a vCPU come to. A large host has many nodes, so that they are gone through once in a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Accesses to the memory of all nodes.
    pub(super) total: u64,
    /// Those to the node with the most.
    pub(super) largest: u64,
    /// That node, by position; the first one of equal ones.
    pub(super) node: usize,
}

/// Nodes whose accesses are summed up at once.
const BLOCK: usize = 8;

impl Sums {
    #[inline]
    pub(super) fn of(accesses: &[u64]) -> Self {
        let (blocks, rest) = accesses.as_chunks::<BLOCK>();
        let (mut total, mut most) = (0, (0, 0));
        for (at, block) in blocks.iter().enumerate() {
            let mut bits = 0;
            for count in block {
                total += count;
                bits |= count;
            }
            // None is larger than all their bits. Most blocks end here.
            if bits > most.0 {
                most = larger(most, at * BLOCK, block);
            }
        }
        if !rest.is_empty() {
            most = larger(most, blocks.len() * BLOCK, rest);
            total += rest.iter().sum::<u64>();
        }
        Self { total, largest: most.0, node: most.1 }
    }
}

/// The largest count and its node, if there is a larger one than this among those of nodes that begin at `begin`.
#[inline(never)]
fn larger(mut most: (u64, usize), begin: usize, accesses: &[u64]) -> (u64, usize) {
    for (node, &count) in (begin..).zip(accesses) {
        // No pattern that a CPU could learn.
        let more = count > most.0;
        most = (select_unpredictable(more, count, most.0), select_unpredictable(more, node, most.1));
    }
    most
}

impl Counts {
    /// Share of its memory accesses that go to other nodes than this one, 0 to 1. `None`: there were none.
    pub fn remote_share(&self, node: usize) -> Option<f64> {
        remote_share(self.accesses.iter().sum(), self.at(node))
    }

    /// Its accesses to the memory of a node.
    pub(super) fn at(&self, node: usize) -> u64 {
        self.accesses.get(node).copied().unwrap_or(0)
    }
}

/// The share of accesses that are not local.
pub(super) fn remote_share(total: u64, local: u64) -> Option<f64> {
    (total > 0).then(|| (total - local) as f64 / total as f64)
}

#[cfg(test)]
mod tests {
    use super::Sums;
    use proptest::prelude::*;

    proptest! {
        /// Also of counts that no period has.
        #[test]
        fn sums_are_those_of_the_accesses(
            accesses in proptest::collection::vec((0_u64..1 << 57, 0_u32..64), 0..40),
        ) {
            let accesses: Vec<u64> = accesses.into_iter().map(|(count, shift)| count >> shift).collect();
            let sums = Sums::of(&accesses);
            prop_assert_eq!(sums.total, accesses.iter().sum::<u64>());
            prop_assert_eq!(sums.largest, accesses.iter().copied().max().unwrap_or(0));
            let first = accesses.iter().position(|&count| count == sums.largest && count > 0);
            prop_assert_eq!(sums.node, first.unwrap_or(0));
        }
    }
}
