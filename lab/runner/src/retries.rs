//! Boots that were tried again.

use std::sync::atomic::{AtomicUsize, Ordering};

static BOOT_RETRIES: AtomicUsize = AtomicUsize::new(0);

/// How many boots of this process were tried again because the first try failed.
pub fn boot_retries() -> usize {
    BOOT_RETRIES.load(Ordering::Relaxed)
}

/// Counts and prints a boot that is tried again.
pub(crate) fn note(what: &str, reason: &str, tail: &str) {
    BOOT_RETRIES.fetch_add(1, Ordering::Relaxed);
    eprintln!("lab: {what} did not boot ({reason}); trying once more\n{tail}");
}
