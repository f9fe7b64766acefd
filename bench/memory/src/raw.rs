//! What was measured, before anything is concluded: a line of JSON each, so that a run that is cut off leaves what it has.

use crate::committed::{Cause, Means, Policy, SizeCause};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vnuma_lab_pricing::Counts;

/// A line of what the server prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// First.
    Server(Server),
    /// A cause under a policy.
    Cell(Box<Cell>),
    /// A guest node that got another size.
    Size(SizeCell),
}

/// The server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Server {
    /// The profile that it counts with.
    pub profile: String,
    /// Its kernel.
    pub kernel: String,
    /// Version of numad, or why it is not there.
    pub numad: String,
    /// Nanoseconds of the server by modelled ones, measured under STREAM.
    pub dilation: f64,
    /// Length of a period, seconds of the server.
    pub period_s: f64,
}

/// A cause under a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub cause: Cause,
    /// Which.
    pub policy: Policy,
    /// Length of its periods, seconds of the server.
    pub period_s: f64,
    /// STREAM before the I/O load.
    pub first: Stream,
    /// The I/O load.
    pub periods: Vec<Period>,
    /// STREAM after it, while the policy goes on.
    pub second: Stream,
    /// A store before the I/O load and after it; none in the reduced form.
    #[serde(default)]
    pub store: Option<[Stream; 2]>,
    /// What of the VM was there at the end of the last period, and what of it displaced, all pages; bytes.
    pub resident: u64,
    /// See there.
    pub displaced: u64,
    /// What the cause did on the way, such as memory that came back to the host, bytes.
    pub caused: BTreeMap<String, u64>,
    /// Pages of 4 KiB that the policy has moved in the periods.
    pub pages_moved: u64,
    /// The longest that a page was held, microseconds of the server; none if that is not known.
    pub longest_hold_us: Option<u64>,
    /// Modelled cycles of vnumad's threads in the periods, by name; none if it does not run.
    pub daemon: Option<BTreeMap<String, u64>>,
}

/// A guest node that got another size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SizeCell {
    /// Which.
    pub cause: SizeCause,
    /// By what.
    pub means: Means,
    /// What is free on each node of the guest before STREAM begins, MiB.
    pub free_mib: [u64; 2],
    /// STREAM after that.
    pub stream: Stream,
}

/// A run of STREAM, or of the store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stream {
    /// Pages of its memory that are not at home when it begins, and all.
    pub remote_pages: u64,
    /// See there.
    pub pages: u64,
    /// Its passes.
    pub passes: Vec<Pass>,
}

/// A program's work, as the thread of its vCPU was counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Operations.
    pub operations: u64,
    /// What programs did for them.
    pub counts: Counts,
}

/// A period of the I/O load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Period {
    /// Its length, seconds of the server.
    pub elapsed_s: f64,
    /// What its work took, seconds of the server.
    pub worked_s: f64,
    /// Reading everything that the load has, with the vCPU at home.
    pub io: Pass,
    /// What is displaced and what is there just after the load's work, a sample; bytes.
    pub displaced_after_work: u64,
    /// What is displaced at its end.
    pub displaced: u64,
    /// What is there at its end.
    pub resident: u64,
}
