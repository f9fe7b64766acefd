//! What was observed of processes and threads, their memory, and migrations.

use crate::HostNodeId;
use strum::Display;

/// Why a process does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum StopReason {
    /// A signal stopped it: SIGSTOP, or a terminal's.
    #[strum(to_string = "stopped by a signal (SIGSTOP); SIGCONT resumes it")]
    Signal,
    /// A debugger holds it.
    #[strum(to_string = "held by a debugger")]
    Tracer,
}

/// What a guest's driver reports of itself. All of it can be false: it is shown, and decides nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverStatus {
    /// Whether it changes the kernel's maps by CPU hotplug (safe mode) or in place. `None`: neither, or there is no driver.
    pub safe_mode: Option<bool>,
    /// Its version: major, minor, patch. `None` without a driver.
    pub version: Option<[u16; 3]>,
    /// The last generation that it refused or applied in part only, and the error number, 0 if that is none.
    pub refused: Option<(u64, i32)>,
    /// It sets the nodes of PCI devices.
    pub knows_devices: bool,
    /// PCI devices that came or went in the guest, as it counts them. A change is a reason to look.
    pub device_changes: u64,
}

/// Which vCPU that waits is taken by a CPU that has none, before the end of a period. One that has waited too long comes first in
/// all cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Steal {
    /// The one with the least pressure in the longest queue, of the CPU's own node first.
    #[default]
    ByPressure,
    /// The first one of the next CPU that has any, whatever its node.
    Blindly,
    /// As [`Self::ByPressure`], but a vCPU with a place is taken only by CPUs of that place: the policy steals nothing.
    WithinPlaces,
}

/// Accesses of a thread to memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Accesses {
    /// By node.
    ByNode(Vec<(HostNodeId, u64)>),
    /// To the node of the CPU that the thread was on, and to all others.
    LocalRemote {
        /// Accesses to the thread's own node.
        local: u64,
        /// Accesses to all other nodes.
        remote: u64,
    },
    /// Not counted.
    #[default]
    Unknown,
}

/// What a thread did in a period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Retired instructions.
    pub instructions: u64,
    /// References to the last-level cache.
    pub llc_references: u64,
    /// Of these, misses.
    pub llc_misses: u64,
    /// Accesses to memory.
    pub accesses: Accesses,
    /// Per mille of its time on a CPU in which the counters were its own. Below 1000 the counts are scaled up.
    pub permille: u32,
}

/// What was counted of a thread in a period, or why nothing was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Counted {
    /// Its counters were read.
    Counted(ThreadCounts),
    /// It was on no CPU.
    DidNotRun,
    /// It ran, and others had the counters all the time.
    Crowded,
    /// Its counters could not be opened or read, or are new.
    #[default]
    Lost,
    /// The host has no counters.
    NoCounters,
}

/// How large the page is that an address is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageKind {
    /// A page of the smallest size.
    Base,
    /// A transparent huge page.
    Huge,
    /// Of a pool (hugetlbfs), of the size that the mapping has.
    Pool,
    /// The kernel does not say.
    Unknown,
}

/// Memory that is accessed alike, as a watch has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedRegion {
    /// Its first address.
    pub start: u64,
    /// The one after its last.
    pub end: u64,
    /// Looks that found it accessed.
    pub accesses: u32,
}

/// How far a hypervisor says that a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrationStatus {
    /// There was no migration.
    #[default]
    None,
    /// It connects to the destination, or waits for devices.
    Setup,
    /// Memory is sent while the guest runs here, or its last part while it stands still.
    Active,
    /// The guest runs at the destination, and its memory follows.
    PostCopy,
    /// The guest runs at the destination, and the connection broke before all memory was there.
    PostCopyPaused,
    /// It is being cancelled.
    Cancelling,
    /// It was cancelled: the guest runs here.
    Cancelled,
    /// The guest is at the destination.
    Completed,
    /// The migration failed.
    Failed,
}

/// What a hypervisor says of its last migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationProgress {
    /// How far it is.
    pub status: MigrationStatus,
    /// What was sent, bytes.
    pub sent_bytes: u64,
    /// What is to be sent, bytes. It grows while the guest writes.
    pub left_bytes: u64,
    /// The VM's memory, bytes.
    pub total_bytes: u64,
    /// How often it has gone through the memory, the pass that is under way included.
    pub passes: u64,
    /// How long the guest stood still, or is expected to, milliseconds.
    pub downtime_ms: Option<u64>,
    /// Why it failed.
    pub problem: Option<String>,
}
