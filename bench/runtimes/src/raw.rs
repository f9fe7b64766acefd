//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::committed::{By, Cell as Wanted, Policy, Workload};
use serde::{Deserialize, Serialize};
use vnuma_bench_common::threads::Values;

/// A line of what the server prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// First.
    Server(Server),
    /// A workload under a policy.
    Cell(Cell),
}

/// The server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// The profile that it counts with.
    pub profile: String,
    /// Sets and ways of the second last-level cache, if one is modelled.
    pub second_llc: Option<(u32, u32)>,
    /// Its kernel.
    pub kernel: String,
    /// That of the guest.
    pub guest_kernel: String,
    /// What `java -version` says first, or [`NO_JAVA`].
    pub java: String,
}

/// No Java was brought, as no workload needs one.
pub const NO_JAVA: &str = "none";

/// A workload under a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub workload: Workload,
    /// Which.
    pub policy: Policy,
    /// Changes a minute of guest time, for a VM of 16 vCPUs.
    pub changes_per_minute: u32,
    /// How they come about.
    #[serde(default)]
    pub by: By,
    /// Whether the guest's kernel takes pages to the threads that use them.
    #[serde(default = "is_on")]
    pub autonuma: bool,
    /// Which one of those that are the same.
    #[serde(default)]
    pub take: u32,
    /// How long it was measured, seconds of the guest.
    pub window_s: f64,
    /// What the load has done.
    pub operations: u64,
    /// What each vCPU did for it.
    pub vcpus: Vec<Values>,
    /// Moves of vCPUs.
    pub changes: Vec<Change>,
    /// About one a second.
    pub samples: Vec<Sample>,
    /// Pages that the guest's kernel has moved in this time (`numa_pages_migrated`).
    pub pages_migrated: u64,
    /// At its end, does the guest use the true node of each vCPU? None: it is not attached.
    pub told: Option<bool>,
    /// What was measured. Empty in what was measured before it was told.
    #[serde(default)]
    pub commit: String,
}

impl Cell {
    /// Which of those that are compared.
    pub fn which(&self) -> Wanted {
        Wanted {
            workload: self.workload,
            policy: self.policy,
            rate: self.changes_per_minute,
            by: self.by,
            autonuma: self.autonuma,
            take: self.take,
        }
    }
}

/// As in what was measured before there was a choice.
fn is_on() -> bool {
    true
}

/// A vCPU goes to another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// When, seconds of the guest since it is measured.
    pub at_s: f64,
    /// Which.
    pub vcpu: usize,
    /// Where to.
    pub node: usize,
}

/// Accesses to memory since the sample before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its end, seconds of the guest since it is measured.
    pub at_s: f64,
    /// Of each vCPU: local ones, and remote ones.
    pub accesses: Vec<[u64; 2]>,
}
