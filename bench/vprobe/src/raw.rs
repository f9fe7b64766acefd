//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::threads::Values;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A line of what the server prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// First.
    Server(Server),
    /// Before the cells of a workload.
    Workload(Workload),
    /// A workload under a policy.
    Cell(Cell),
}

/// The server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Server {
    /// The profile that it counts with.
    pub profile: String,
    /// Sets and ways of the second last-level cache, if one is modelled.
    #[serde(default)]
    pub second_llc: Option<(u32, u32)>,
    /// Its kernel.
    pub kernel: String,
    /// Version of numad, or why it is not there.
    pub numad: String,
}

/// What holds for all cells of a workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// Nanoseconds of the server by modelled ones, measured under this load.
    pub dilation: f64,
    /// Length of a period, seconds of the server.
    pub period_s: f64,
    /// By which timers of others are multiplied.
    pub factor: f64,
    /// By which each timer was, limits of whose it is included.
    #[serde(default)]
    pub stretched: BTreeMap<String, f64>,
}

/// A workload under a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub workload: String,
    /// Under which policy; candidates of `oracle` have their name after a colon.
    pub policy: String,
    /// Periods that are not judged, at the beginning.
    pub warm_up: usize,
    /// All periods.
    pub periods: Vec<Period>,
    /// Further ones that are not among them, as the machine stopped the server.
    #[serde(default)]
    pub left_out: usize,
    /// Pages of which AutoNUMA has looked for the next user, each time.
    #[serde(default)]
    pub pages_scanned: u64,
    /// Pages that the kernel's balancing has moved.
    pub pages_moved: u64,
    /// Steps of vnumad's policy in all VMs.
    pub steps: u64,
    /// By what vnumad set places: `affinity` or `sched_ext`; none if it does not run.
    #[serde(default)]
    pub means: Option<String>,
    /// The same in each VM.
    #[serde(default)]
    pub vm_steps: Vec<u64>,
    /// By VM: steps in others that it was the reason for, as vnumad's log says.
    #[serde(default)]
    pub because_of: BTreeMap<String, u64>,
    /// Times that it was repeated: as the machine had stopped the server too often, or as vCPUs had too little CPU time.
    pub repeated: u32,
}

/// A period.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Period {
    /// Its length, seconds of the server.
    pub elapsed_s: f64,
    /// vCPUs of each VM.
    pub vms: Vec<Vec<Vcpu>>,
    /// Share of the time that CPUs of VMs were idle.
    pub idle_share: f64,
    /// Modelled cycles of vnumad's threads by name; none if it does not run.
    pub daemon: Option<BTreeMap<String, u64>>,
    /// How long these were on CPUs, nanoseconds of the server.
    #[serde(default)]
    pub daemon_ns: Option<u64>,
    /// Time that vnumad's BPF programs took in other threads than its own, nanoseconds of the server, if that was taken.
    #[serde(default)]
    pub programs_ns: Option<u64>,
    /// How often they ran.
    #[serde(default)]
    pub program_runs: Option<u64>,
    /// How long a vCPU waited for a CPU, each time that one was woken, microseconds of the server.
    #[serde(default)]
    pub wakes_us: Vec<u32>,
}

/// A vCPU's period.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Vcpu {
    /// What its thread did.
    pub values: Values,
    /// Operations that its program finished.
    pub operations: u64,
    /// CPU that it was on at the end.
    pub cpu: u32,
}

impl Period {
    /// Time that all vCPUs had on a CPU, by what so many CPUs have in the period.
    pub fn used_share(&self, cpus: usize) -> f64 {
        let ran_ns: u64 = self.vms.iter().flatten().map(|vcpu| vcpu.values.ran_ns).sum();
        ran_ns as f64 / 1e9 / (self.elapsed_s * cpus as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_all_vcpus_is_compared_with_that_of_the_cpus() {
        let vcpu = |ran_ns| Vcpu { values: Values { ran_ns, ..Values::default() }, operations: 0, cpu: 0 };
        let period = |ran_ns: [u64; 3]| Period {
            elapsed_s: 4.0,
            vms: vec![vec![vcpu(ran_ns[0])], vec![vcpu(ran_ns[1]), vcpu(ran_ns[2])]],
            idle_share: 0.0,
            daemon: None,
            daemon_ns: None,
            programs_ns: None,
            program_runs: None,
            wakes_us: Vec::new(),
        };
        assert!((period([4_000_000_000, 3_000_000_000, 1_000_000_000]).used_share(2) - 1.0).abs() < 1e-9);
        assert!((period([6_000_000_000, 6_000_000_000, 2_400_000_000]).used_share(2) - 1.8).abs() < 1e-9);
        assert!((period([0, 0, 0]).used_share(2)).abs() < 1e-9);
    }
}
