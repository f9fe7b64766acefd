//! What is compared, fixed before the first figure of `vprobe`: VMs, workloads, placements, seeds, limits. A change here is a
//! change of the benchmark, and of its reference report.
//!
//! The server is half of the paper's: four CPUs for VMs on two nodes, three VMs of four vCPUs, so that three vCPUs share a
//! CPU as in *vProbe: Scheduling Virtual Machines on NUMA Systems*, section V-A.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// The server, of lab/profiles.
pub const SERVER: &str = "2n8c";

/// What of a server VMs use, and where everything is at first. Placements number the nodes of a layout from 0.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// The server's number of each node.
    pub nodes: &'static [usize],
    /// CPUs of each node that VMs run on.
    pub vm_cpus: &'static [&'static [u32]],
    /// The others: vnumad, numad and the benchmark itself.
    pub host_cpus: &'static [u32],
    /// Classes of distance that the server has, the node itself included.
    pub classes: u64,
    /// What every cell starts from.
    pub start: Placement,
    /// Node of each vCPU of vm4 in every placement: one starts on each CPU.
    pub sleepers: [usize; VCPUS],
    /// Candidates for `oracle`, of all workloads; none if each workload has its own.
    pub oracles: Option<&'static [Placement]>,
}

impl Layout {
    /// All CPUs of VMs.
    pub fn all_vm_cpus(&self) -> Vec<u32> {
        self.vm_cpus.concat()
    }

    /// Node of each vCPU of every VM.
    pub fn nodes_of<'a>(&'a self, placement: &'a Placement) -> impl Iterator<Item = &'a [usize; VCPUS]> {
        placement.vcpus.iter().chain([&self.sleepers])
    }

    /// Candidates for `oracle`, at most six.
    pub fn oracles(&self, workload: &Workload) -> &'static [Placement] {
        self.oracles.unwrap_or(workload.oracles)
    }
}

/// The server that is half of the paper's.
pub const HALF: Layout = Layout {
    nodes: &[0, 1],
    vm_cpus: &[&[1, 2], &[4, 5]],
    host_cpus: &[0, 3, 6, 7],
    classes: 2,
    start: START,
    sleepers: [0, 0, 1, 1],
    oracles: None,
};
/// vCPUs of each VM.
pub const VCPUS: usize = 4;
/// Name and memory. vm1 is judged, vm2 has the same load, vm3 has hungry loops. The vCPUs of vm4 sleep nearly all of the time:
/// no other vCPU ever sleeps, so that there would be no wake-ups to judge. All are UMA and unbound.
pub const VMS: [(&str, &str); 4] = [("vm1", "512M"), ("vm2", "512M"), ("vm3", "256M"), ("vm4", "256M")];
/// Those that never sleep: the first ones.
pub const BUSY: usize = 3;
/// VMs whose loads may use memory: the first ones.
pub const LOADED: usize = 2;

/// Length of a period in modelled time, seconds.
pub const PERIOD_S: f64 = 0.25;
/// Periods that are not judged.
pub const WARM_UP: usize = 2;
/// Periods that are.
pub const MEASURED: usize = 8;
/// The same of a static placement, in which nothing changes.
pub const MEASURED_STATIC: usize = 4;
/// How long each vCPU of vm4 sleeps at a time, modelled time, seconds. With 5 ms it had a tenth of a CPU, so that the share of
/// other vCPUs was mostly a matter of how many of vm4's they shared a CPU with.
pub const SLEEP_S: f64 = 0.02;
/// Fewer wake-ups in a row say nothing of their 99th percentile.
pub const LEAST_WAKE_UPS: usize = 100;
/// Period that vnumad and others have by default, seconds: their timers are multiplied by what the period is here by this.
pub const DEFAULT_PERIOD_S: f64 = 1.0;

/// What vnumad takes is judged as in table III of the paper: by periods of a second of modelled time, which is vnumad's default.
/// Steps of the policy are in it as far as they come after the warm-up.
pub mod overhead {
    /// Under which workload.
    pub const WORKLOAD: &str = "chase";
    /// Its cell: a policy and its period, modelled seconds.
    pub const CELL: &str = "vprobe:period-1";
    /// The same.
    pub const PERIOD: (&str, f64) = ("vprobe", super::DEFAULT_PERIOD_S);
    /// Its periods may be so much shorter or longer; else it is measured again.
    pub const TOLERANCE: f64 = 0.2;
    /// Periods that are not judged.
    pub const WARM_UP: usize = super::WARM_UP;
    /// Periods that are.
    pub const MEASURED: usize = super::MEASURED;
}

/// A program that runs on one vCPU for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Kind {
    /// Follows a chain through every line of its memory in random order
    Chase,
    /// Reads its memory in order
    Stream,
    /// Multiplies a matrix by a vector, block by block in random order
    Matrix,
    /// Follows a chain, with 16 rounds of computing after each access
    Walk,
    /// Counts down in a register
    Compute,
    /// Sleeps, and wakes up for a moment
    Sleep,
    /// Follows a chain in one half of its memory, then one in the other half, which lies on another node
    Abuse,
    /// Debian's Redis, asked for values at random over many connections
    Redis,
    /// Debian's memcached, likewise
    Memcached,
    /// Debian's sysbench, which reads its memory at random
    Sysbench,
    /// Threads: conjugate gradients
    CgLike,
    /// Threads: multigrid
    MgLike,
    /// Threads: pipelined relaxation
    LuLike,
    /// Threads: pentadiagonal systems, direction by direction
    SpLike,
    /// Threads: tridiagonal systems in blocks, direction by direction
    BtLike,
}

impl Kind {
    /// Memory, MiB.
    pub fn mib(self) -> usize {
        match self {
            Self::Chase | Self::Stream | Self::Walk => 48,
            Self::Matrix => 24,
            Self::Compute | Self::Sleep => 2,
            // Each half.
            Self::Abuse => 24,
            // Without what connections take.
            Self::Redis | Self::Memcached => 28,
            Self::Sysbench => crate::database::SYSBENCH_MIB,
            _ => crate::team::bytes(self, VCPUS).map_or(0, |bytes| bytes >> 20),
        }
    }

    /// Is it one program with a thread on each vCPU?
    pub fn is_team(self) -> bool {
        matches!(self, Self::CgLike | Self::MgLike | Self::LuLike | Self::SpLike | Self::BtLike)
    }

    /// Is it a program of Debian?
    pub fn is_of_debian(self) -> bool {
        matches!(self, Self::Redis | Self::Memcached | Self::Sysbench)
    }

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Where everything is: of vm1 and vm2 the node of each vCPU and of its memory, of vm3 the node of each vCPU. Those of vm4 are
/// always where the layout has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its name.
    pub name: &'static str,
    /// Node of each vCPU.
    pub vcpus: [[usize; VCPUS]; BUSY],
    /// Node of the memory that the vCPU's program uses.
    pub memory: [[usize; VCPUS]; LOADED],
}

/// One of this name, with the nodes of vCPUs and of their memory.
pub const fn placement(
    name: &'static str,
    vcpus: [[usize; VCPUS]; BUSY],
    memory: [[usize; VCPUS]; LOADED],
) -> Placement {
    Placement { name, vcpus, memory }
}

/// A workload: the same programs in vm1 and vm2, each on the vCPU of its position.
#[derive(Debug)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// The programs.
    pub programs: [Kind; VCPUS],
    /// Those of vm2, if they differ.
    pub vm2: Option<[Kind; VCPUS]>,
    /// Connections to the programs of each VM, all together.
    pub connections: usize,
    /// Does it use memory?
    pub memory_intensive: bool,
    /// Candidates for `oracle`, at most six.
    pub oracles: &'static [Placement],
}

/// What every cell starts from: both VMs have memory on both nodes, and 7 of the 8 vCPUs that use it are on the other node
/// than theirs, as figure 1 of the paper shows more than 80 % of remote accesses under the default scheduler. Each CPU has
/// three vCPUs.
pub const START: Placement =
    placement("start", [[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1]], [[0, 0, 1, 1], [0, 0, 1, 1]]);

/// Every vCPU with its memory.
pub const AT_HOME: Placement =
    placement("at-home", [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]], [[0, 0, 1, 1], [0, 0, 1, 1]]);
/// Every VM on one node, with its memory.
pub const BY_VM: Placement =
    placement("by-vm", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]], [[0, 0, 0, 0], [1, 1, 1, 1]]);
/// The matrices away from what thrashes the cache.
pub const BY_CACHE: Placement =
    placement("by-cache", [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]], [[0, 0, 1, 0], [0, 0, 1, 0]]);
/// One matrix on each node, with as few streams as possible.
pub const PAIRED: Placement =
    placement("paired", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]], [[0, 1, 0, 1], [0, 1, 1, 0]]);

/// All of them, in the order in which they run.
pub const WORKLOADS: [Workload; 3] = [
    in_both("chase", [Kind::Chase; VCPUS], &[AT_HOME, BY_VM]),
    in_both(
        "mix",
        [Kind::Chase, Kind::Stream, Kind::Matrix, Kind::Walk],
        &[AT_HOME, BY_VM, BY_CACHE, PAIRED],
    ),
    Workload { memory_intensive: false, ..in_both("compute", [Kind::Compute; VCPUS], &[AT_HOME]) },
];

/// One that uses memory, and is the same in vm1 and vm2.
pub const fn in_both(name: &'static str, programs: [Kind; VCPUS], oracles: &'static [Placement]) -> Workload {
    Workload { name, programs, vm2: None, connections: 0, memory_intensive: true, oracles }
}

/// The workload of a name.
pub fn workload(name: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().chain(&crate::full::committed::WORKLOADS).find(|workload| workload.name == name)
}

/// Seed of a program's random order.
pub fn seed(program: usize) -> u64 {
    0x9e37_79b9 + program as u64
}

/// Under which policy.
pub const POLICIES: [&str; 11] = [
    "linux",
    "linux-nobalance",
    "observe",
    "numad",
    "credit",
    "vcpu-p",
    "lb",
    "brm",
    "vprobe-paper",
    "vprobe",
    "oracle",
];

/// Goals of the issue.
pub mod goals {
    /// `vprobe` is at most so much behind any peer.
    pub const BEHIND_A_PEER: f64 = 0.01;
    /// Where `oracle` beats the better Linux row by more than this ...
    pub const GAP: f64 = 0.05;
    /// ... at least this share of the gap is recovered.
    pub const RECOVERED: f64 = 0.90;
    /// At best so much ahead of `credit`.
    pub const AHEAD_OF_CREDIT: f64 = 0.452;
    /// At most so much behind Linux on the load without memory.
    pub const BEHIND_LINUX: f64 = 0.02;
    /// Cycles of vnumad by those of the VMs, at most, with periods of [`overhead`](super::overhead).
    pub const OVERHEAD: f64 = 0.0002;
    /// AutoNUMA looks at so many pages at least: those of `vm1`, once.
    pub const SCANNED: u64 = 131_072;
    /// A row counts only with this share of the CPU time that `linux` gives.
    pub const CPU_SHARE: f64 = 0.95;
    /// A CPU counts as idle from this share of the time on.
    pub const IDLE: f64 = 0.02;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_vnumad_takes_is_judged_by_its_default_period() {
        let (policy, period_s) = overhead::PERIOD;
        assert_eq!(overhead::CELL, format!("{policy}:period-{period_s}"));
        assert!(POLICIES.contains(&policy) && workload(overhead::WORKLOAD).is_some());
    }

    #[test]
    fn each_cpu_has_three_busy_vcpus_and_one_that_sleeps_wherever_they_are_placed() {
        let all = WORKLOADS.iter().flat_map(|workload| workload.oracles).chain([&START]);
        for placement in all {
            let on_first =
                |nodes: &[[usize; VCPUS]]| nodes.iter().flatten().filter(|&&node| node == 0).count();
            assert_eq!(on_first(&placement.vcpus), 6, "{}", placement.name);
            let all: Vec<_> = HALF.nodes_of(placement).copied().collect();
            assert_eq!((all.len(), on_first(&all)), (VMS.len(), 8), "{}", placement.name);
        }
    }

    #[test]
    fn the_start_is_as_remote_as_the_papers_figure_1() {
        let of =
            |vm: usize| START.vcpus[vm].iter().zip(&START.memory[vm]).filter(|(at, of)| at != of).count();
        assert_eq!(of(0) + of(1), 7);
        assert!(START.memory.iter().all(|memory| memory.contains(&0) && memory.contains(&1)));
    }

    #[test]
    fn oracles_are_at_most_six_and_programs_fit_their_vm() {
        for workload in &WORKLOADS {
            assert!(workload.oracles.len() <= 6, "{}", workload.name);
            let mib: usize = workload.programs.iter().map(|program| program.mib() + 2).sum();
            assert!(mib <= 512 / 2, "{}: {mib} MiB", workload.name);
        }
    }
}
