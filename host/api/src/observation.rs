//! What the policies were given in a period, to be recorded and replayed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vnuma_model::{CpuLayout, CpuSet, HostTopology};

/// A period of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// When it ended, `CLOCK_MONOTONIC` of the host, nanoseconds.
    pub time_ns: u64,
    /// Its length, nanoseconds.
    pub period_ns: u64,
    /// Where the counts come from.
    pub source: String,
    /// Bounds between the types that the policies used, references per thousand instructions. Older recordings have none.
    #[serde(default)]
    // As a list: generators of clients know no tuples.
    #[schema(value_type = Option<[f64; 2]>)]
    pub bounds: Option<(f64, f64)>,
    /// The host, without its PCI devices and huge pages.
    pub host: HostTopology,
    /// Isolated CPUs, cores.
    pub layout: CpuLayout,
    /// CPUs, and how long each was idle, nanoseconds. None where that could not be read.
    // Likewise.
    #[schema(value_type = Vec<[u64; 2]>)]
    pub idle: Vec<(u32, u64)>,
    /// VMs whose threads were counted.
    pub vms: Vec<ObservedVm>,
}

/// A VM in a period.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ObservedVm {
    /// Its name.
    pub vm: String,
    /// The policy that it had.
    pub policy: String,
    /// Its vCPUs.
    pub vcpus: Vec<ObservedVcpu>,
}

/// A vCPU in a period.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ObservedVcpu {
    /// APIC id.
    pub vcpu: u32,
    /// CPU that it was on last.
    pub cpu: Option<u32>,
    /// CPUs that its operator lets it run on.
    pub operator: CpuSet,
    /// It has a real-time scheduling class.
    pub real_time: bool,
    /// `cpu.weight` of its control group.
    pub weight: u32,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time that it waited for one, nanoseconds.
    pub waited_ns: u64,
    /// Time that it had no quota (`cpu.max`), nanoseconds. Older recordings do not have it: there it is in `waited_ns`.
    #[serde(default)]
    pub throttled_ns: u64,
    /// CPU time that it is entitled to of what it wanted, nanoseconds; none in older recordings, for all of that.
    #[serde(default)]
    pub entitled_ns: Option<u64>,
    /// What was counted; none if nothing was.
    pub counts: Option<ObservedCounts>,
}

/// What was counted of a vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ObservedCounts {
    /// Nothing was counted: the place of the VM's pages stands in for it.
    pub assumed: bool,
    /// Retired instructions.
    pub instructions: u64,
    /// References to the last-level cache.
    pub llc_references: u64,
    /// Of these, misses.
    pub llc_misses: u64,
    /// Accesses to the memory of each node, by position in the host's nodes; empty if that is not known.
    pub accesses: Vec<u64>,
}
