//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::committed::{Load, Scheduler};
use serde::{Deserialize, Serialize};

/// A line of what the servers print.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// A run of a load, by all schedulers.
    Cell(Cell),
    /// What an event costs.
    Cost(Cost),
}

/// A run of a load, by all schedulers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub load: Load,
    /// Which, from 1.
    pub run: usize,
    /// CPUs of the server that are online.
    pub cpus: usize,
    /// In the order in which they were measured.
    pub outcomes: Vec<Outcome>,
}

/// A load under a scheduler.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Which.
    pub scheduler: Scheduler,
    /// Why it did not schedule, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// None if it was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<Seen>,
}

/// What was seen in a window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Its length.
    pub window_s: f64,
    /// Operations of all guests, or files that were compiled.
    pub ops: u64,
    /// CPU time of each group, seconds.
    pub used_s: Vec<f64>,
    /// The most that a group was behind what it was entitled to at a moment, ms of CPU time; none if that cannot be said.
    #[serde(default)]
    pub lag_max_ms: Option<f64>,
    /// Wake-ups, and the 99th percentile of what they waited for a CPU, us.
    pub wakes: usize,
    /// See there.
    #[serde(default)]
    pub wake_p99_us: Option<f64>,
    /// The longest, also of those that were not over when the window ended, us.
    #[serde(default)]
    pub wake_max_us: Option<f64>,
    /// Directed yields that were asked for, and granted.
    pub yields_tried: u64,
    /// See there.
    pub yields: u64,
}

/// What an event costs a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Which.
    pub scheduler: Scheduler,
    /// CPUs that are online, and that the scheduler has queues for.
    pub cpus: usize,
    /// See there.
    pub possible: usize,
    /// CPUs in the topology that the scheduler was given.
    pub topology: usize,
    /// In each window: nanoseconds of a run of its BPF programs, and how often they ran.
    pub windows: Vec<(f64, u64)>,
}
