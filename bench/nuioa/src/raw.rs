//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::committed::{Configuration, Spot};
use serde::{Deserialize, Serialize};
use vnuma_lab_pricing::Counts;

/// A line of what the server prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// First.
    Server(Server),
    /// A workload under a configuration, at one spot.
    Cell(Box<Cell>),
    /// Not a result: what the second server is to do. Its [`Answer`] comes on standard input.
    Peer(Request),
}

/// What the second server is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Join the network, and begin with its part of this workload, but do not load the guest yet.
    Start(String),
    /// Load it.
    Go,
    /// Stop loading it, and say what was done.
    Halt,
    /// End, and leave the network.
    End,
}

/// What became of that: operations, if it counts them, or what is wrong.
pub type Answer = Result<Option<u64>, String>;

/// The server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Server {
    /// The profile that it counts with.
    pub profile: String,
    /// Its kernel.
    pub kernel: String,
}

/// A workload under a configuration, at one spot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    pub configuration: Configuration,
    pub workload: String,
    pub spot: Spot,
    /// What the guest's kernel says of it.
    pub guest: Ready,
    pub windows: Vec<Window>,
    /// Why it ran where it did: who started it there, or what vnuma-guest has said of it.
    pub why: Vec<String>,
    /// While the workload was halted and a thread computed on its vCPU; none if only cycles of programs count.
    pub baseline: Option<Baseline>,
}

/// Where a workload runs in the guest, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// CPU.
    pub cpu: usize,
    /// Guest node of that CPU; 0 if the guest has no nodes.
    pub node: usize,
    /// `numa_node` of its device, if it has one.
    pub device_node: Option<i64>,
}

/// A part of a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    /// Its length, nanoseconds of the server.
    pub elapsed_ns: u64,
    /// Operations that were finished in it; none if 1000 instructions are one.
    pub operations: Option<u64>,
    /// What each vCPU did.
    pub vcpus: Vec<Vcpu>,
    /// What kept the workload's vCPU from falling idle, if all cycles count.
    pub spun: Option<Spun>,
}

/// What the thread of a vCPU did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Vcpu {
    /// Of programs or of all, as the workload is counted.
    pub counts: Counts,
    /// Modelled cycles of programs alone, under the server's profile.
    pub program_cycles: u64,
    /// On a CPU, nanoseconds of the server.
    pub ran_ns: u64,
    /// Interrupts of the timers of the server's CPUs that it may run on.
    pub server_ticks: u64,
}

/// What a guest says when it has halted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Operations, if it counts them.
    pub operations: Option<u64>,
    pub spun: Option<Spun>,
}

/// What happened on a vCPU beside its workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spun {
    /// Spins of the thread that computes when the workload waits.
    pub spins: u64,
    /// Interrupts of the vCPU's timer.
    pub ticks: u64,
}

impl std::ops::AddAssign for Spun {
    fn add_assign(&mut self, other: Self) {
        self.spins += other.spins;
        self.ticks += other.ticks;
    }
}

/// A vCPU that computes, and has no workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Baseline {
    pub vcpu: Vcpu,
    pub spun: Spun,
}
