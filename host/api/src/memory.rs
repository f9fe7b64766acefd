//! Where the memory of a VM is.

use crate::{MemoryMoves, Pluggable};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of a request for another memory policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryPolicyRequest {
    /// Its name.
    pub policy: String,
}

/// Where the memory of a VM is, as a sample of its pages shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct VmMemory {
    /// The VM.
    pub vm: String,
    /// When displaced memory comes home: `none`, `periodic`, `amount`, `both` or `adaptive`.
    pub policy: String,
    /// When its pages were looked at, `CLOCK_MONOTONIC` of the host, nanoseconds; none if they were not.
    pub observed_ns: Option<u64>,
    /// How long ago that is, milliseconds.
    pub age_ms: Option<u64>,
    /// CPU time that it took, microseconds.
    pub cost_us: u64,
    /// Guest nodes in rising order.
    pub nodes: Vec<GuestNodeMemory>,
    /// It has memory that no process maps (guest_memfd), and that is in none of the figures.
    pub unmapped: bool,
    /// Its memory, if a policy has moved some of it.
    pub moves: Option<MemoryMoves>,
    /// Memory that could not be moved is not tried before so many milliseconds are over.
    pub rests_ms: Option<u64>,
    /// Why its pages could not be looked at the last time.
    pub problem: Option<String>,
    /// How it is known how hot displaced memory is; none if that is switched off, or the policy is another one than `adaptive`.
    pub hotness: Option<HotnessWatch>,
}

/// How it is known how often memory is accessed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct HotnessWatch {
    /// How long ago it was watched last, milliseconds; none if it was not, or could not be.
    pub age_ms: Option<u64>,
    /// For how long, milliseconds.
    pub watched_ms: Option<u64>,
    /// CPU time of the kernel's thread that watched, microseconds; 0 if the kernel does not say it.
    pub cost_us: u64,
    /// Regions that the kernel told apart.
    pub regions: u64,
    /// Why it could not be watched the last time.
    pub problem: Option<String>,
}

/// How hot displaced memory is that can be moved, by the looks of the last watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Hotness {
    /// At least half of the looks found it accessed.
    pub hot: Bytes,
    /// Fewer did.
    pub warm: Bytes,
    /// None did.
    pub cold: Bytes,
}

/// Bytes, and the interval that they are in with a confidence of 95 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Bytes {
    /// Most likely.
    pub bytes: u64,
    /// At least.
    pub low: u64,
    /// At most.
    pub high: u64,
}

/// The memory of a guest node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GuestNodeMemory {
    /// Its number.
    pub id: u32,
    /// Host node that it should be on, if that can be said.
    pub home: Option<u32>,
    /// All of it, bytes.
    pub memory_bytes: u64,
    /// Pages that were looked at; 0 if its place in QEMU's process is not known.
    pub samples: u64,
    /// All pages were looked at, so that the figures are exact.
    pub exact: bool,
    /// What of it is there.
    pub resident: Bytes,
    /// What of it is on other host nodes than its home; none without a home.
    pub displaced: Option<Bytes>,
    /// What of it is in swap.
    pub swapped: Bytes,
    /// What of it is locked (`mlock`), which keeps no page on its node.
    pub locked: Bytes,
    /// What can be plugged of it while the VM runs, and was; none without a virtio-mem device. What is plugged is in the other
    /// figures, too.
    pub pluggable: Option<Pluggable>,
    /// What is where.
    pub places: Vec<MemoryPlace>,
    /// What of the displaced memory cannot be moved, by reason.
    pub unmovable: Vec<Unmovable>,
    /// How hot that is which can, if it was watched.
    pub hotness: Option<Hotness>,
}

/// Memory on a host node in pages of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MemoryPlace {
    /// The host node.
    pub node: u32,
    /// Size of the pages: `4K`, `huge` (transparent huge pages), `pool` (hugetlbfs, of [`page_kib`](Self::page_kib)), or
    /// `unknown`.
    pub pages: String,
    /// Their size, KiB, if that is known.
    pub page_kib: Option<u64>,
    /// How much.
    pub size: Bytes,
}

/// Displaced memory that cannot be moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Unmovable {
    /// `vfio`, `pool`, `bound`, `cpuset`, `no-memory` and `vprobe` keep all of it, `ksm` and `shared` single pages.
    pub reason: String,
    /// How much.
    pub size: Bytes,
}
