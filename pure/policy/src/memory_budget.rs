//! How much memory of a VM may be moved: what it has saved up of its part of the host's rate.
//!
//! All VMs whose memory a policy may move share the host evenly, whichever policy that is.

use crate::memory_move::{LEAST, SAVED_S};

/// What a VM may move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBudget {
    saved: u64,
}

impl MemoryBudget {
    /// Time has passed for one of `sharers` of a rate, bytes a second. A VM saves up for [`SAVED_S`] seconds, and in any case for
    /// `least` bytes, as a page moves as a whole.
    pub fn earn(&mut self, (rate, sharers): (u64, usize), elapsed_ns: u64, least: u64) {
        let rate = rate / sharers.max(1) as u64;
        let earned = u128::from(rate) * u128::from(elapsed_ns) / 1_000_000_000;
        let full = rate.saturating_mul(SAVED_S).max(LEAST).max(least);
        self.saved = self.saved.saturating_add(u64::try_from(earned).unwrap_or(u64::MAX)).min(full);
    }

    /// Bytes that it may move now.
    pub fn left(&self) -> u64 {
        self.saved
    }

    /// So many are moved.
    pub fn spend(&mut self, bytes: u64) {
        self.saved = self.saved.saturating_sub(bytes);
    }
}
