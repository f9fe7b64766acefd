//! Memory of a VM that is moved: how much, from where to where, and why. And what a move costs.

use std::{str::FromStr, sync::Arc};
use strum::VariantNames;
use vnuma_model::{GuestNodeId, HostNodeId};

/// What moving a page of 4 KiB takes, in tenths of a local memory access: 100 accesses, or 10 us at 100 ns each. It is an
/// assumption, on the high side. `move_pages` between the nodes of a Zen 3 server with two sockets was measured at 3.31 GB/s, or
/// 1.2 us a page, with Linux 7.1 (S. Garg, "Re: [PATCH 0/7] Accelerate page migration with batch copying and hardware offload",
/// linux-mm, 8 May 2026). Before Linux 6.3 it was about four times as slow (commit "migrate_pages: batch flushing TLB"). The rest
/// is for the guest, whose vCPUs fault on these pages and flush their TLBs.
pub const PAGE_PRICE: f64 = 1000.0;
/// A page.
pub(crate) const PAGE: u64 = 4096;
/// A page, KiB.
pub(crate) const BASE_KIB: u64 = 4;
/// A tenth of a local memory access, nanoseconds.
pub(crate) const TENTH_NS: f64 = 10.0;
/// Time in which a move has to pay, nanoseconds.
pub const HORIZON_NS: u64 = 60_000_000_000;
/// How many times its price a move has to save in that time.
pub const MARGIN: f64 = 2.0;
/// Least that is moved at a time, bytes: less is not worth a walk of the page tables.
pub const LEAST: u64 = 4 << 20;
/// Seconds of its rate that a VM saves up.
pub const SAVED_S: u64 = 20;
/// Least that stays free on a node: this part of its memory, and so many KiB.
const RESERVE_PART: u64 = 16;
const RESERVE_KIB: u64 = 128 << 10;

/// Whatever a file says.
pub(crate) fn bytes_of(kib: u64) -> u64 {
    kib.saturating_mul(1024)
}

/// A node's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// All of it, KiB.
    pub total_kib: u64,
    /// Free, KiB.
    pub free_kib: u64,
}

impl NodeMemory {
    /// What stays free, KiB.
    pub fn reserve_kib(&self) -> u64 {
        (self.total_kib / RESERVE_PART).max(RESERVE_KIB)
    }

    /// What stays free of pages of this size. Nothing of a pool of huge pages, which is there to be used up.
    pub(crate) fn reserve_of(&self, page_kib: u64) -> u64 {
        if page_kib > BASE_KIB { 0 } else { self.reserve_kib() }
    }

    /// Bytes that may still come to the node.
    pub(crate) fn available(&self) -> u64 {
        self.available_of(BASE_KIB)
    }

    pub(crate) fn available_of(&self, page_kib: u64) -> u64 {
        bytes_of(self.free_kib.saturating_sub(self.reserve_of(page_kib)))
    }
}

/// Why memory is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryCause {
    /// Masks of operators keep the vCPUs from that node.
    CannotRun,
    /// The policy keeps the vCPUs elsewhere.
    Kept,
}

impl MemoryCause {
    /// For the log and for `watch`.
    pub fn text(self) -> &'static str {
        match self {
            Self::CannotRun => "its vCPUs may not run there",
            Self::Kept => "there is no room for its vCPUs there",
        }
    }
}

/// The figures of a move to vCPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryWhy {
    /// What made the policy act.
    pub cause: MemoryCause,
    /// Share of the VM's accesses that leave the node of the vCPU, before.
    pub remote_share: f64,
    /// The share that is expected after it.
    pub expected_remote_share: f64,
    /// Time that the move takes, nanoseconds of a CPU.
    pub price_ns: f64,
    /// Time that the VM's vCPUs are expected to save in each second, nanoseconds.
    pub saving_ns_per_s: f64,
    /// That is of accesses that are assumed.
    pub assumed: bool,
}

/// Memory of a VM is to be moved.
#[derive(Clone, Debug, PartialEq)]
pub struct MoveMemory {
    /// Where it is.
    pub from: HostNodeId,
    /// Where it goes.
    pub to: HostNodeId,
    /// How much, at most.
    pub bytes: u64,
    /// Size of its pages, KiB: those of a pool, or the smallest. It moves by whole ones.
    pub page_kib: u64,
    /// What has to stay free where it goes, KiB: of the pool, if it is of one.
    pub reserve_kib: u64,
    /// Only what is at these addresses: the first, and the one after the last. `None`: all memory of the VM.
    pub within: Option<(u64, u64)>,
    /// Only these parts of that, one after the other. `None`: all of it, in any order.
    pub parts: Option<Arc<[(u64, u64)]>>,
    /// Why.
    pub why: MemoryReason,
}

impl MoveMemory {
    /// Does it bring memory home?
    pub(crate) fn is_home(&self) -> bool {
        matches!(self.why, MemoryReason::Home(_))
    }
}

/// Why memory is moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryReason {
    /// Its vCPUs cannot come to it, so that it goes to them.
    Nearer(MemoryWhy),
    /// It is displaced, and comes home.
    Home(HomeWhy),
    /// An operator wants this guest node to have another home.
    Rehome(GuestNodeId),
}

/// What made a policy act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HomeCause {
    /// The period was over.
    Period,
    /// So much was displaced.
    Amount,
    /// Accesses to it cost more than the move.
    Pays,
}

impl HomeCause {
    /// For the log and for `watch`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Period => "it is displaced, and the period is over",
            Self::Amount => "more is displaced than the policy's amount",
            Self::Pays => "accesses to it cost more than the move",
        }
    }
}

/// Why memory is moved home.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HomeWhy {
    /// The policy that wants it.
    pub policy: MemoryPolicy,
    /// What made it act.
    pub cause: HomeCause,
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// What of the VM is displaced and can be moved, bytes.
    pub displaced_bytes: u64,
    /// Time that the move takes, nanoseconds of a CPU.
    pub price_ns: f64,
    /// Time that the VM's vCPUs are expected to save in each second, nanoseconds.
    pub saving_ns_per_s: f64,
    /// That is of accesses that are assumed.
    pub assumed: bool,
    /// It is known how hot it is, and the hottest comes first.
    pub hottest_first: bool,
}

/// When displaced memory comes home.
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray, VariantNames)]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryPolicy {
    /// Never.
    #[default]
    None,
    /// Every so often.
    Periodic,
    /// From an amount on.
    Amount,
    /// Whichever of both comes first.
    Both,
    /// When that pays.
    Adaptive,
}

impl MemoryPolicy {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory policy `{0}`; there are {names}", names = MemoryPolicy::VARIANTS.join(", "))]
pub struct UnknownMemoryPolicy(String);

impl FromStr for MemoryPolicy {
    type Err = UnknownMemoryPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownMemoryPolicy> {
        let known = Self::ALL.iter().copied().find(|policy| policy.name() == name);
        known.ok_or_else(|| UnknownMemoryPolicy(name.chars().take(40).flat_map(char::escape_debug).collect()))
    }
}
