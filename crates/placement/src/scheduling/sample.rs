//! What is known of each vCPU at the end of a period, as plain data.

use super::machine::{Machine, Place, Reach};
use crate::world::VmId;
use vnuma_topology::{ApicId, CpuId};

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

impl Counts {
    /// Share of its memory accesses that go to other nodes than this one, 0 to 1. `None`: there were none.
    pub fn remote_share(&self, node: usize) -> Option<f64> {
        let total: u64 = self.accesses.iter().sum();
        let local = self.accesses.get(node).copied().unwrap_or(0);
        (total > 0).then(|| (total - local) as f64 / total as f64)
    }
}
