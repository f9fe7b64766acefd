//! Pins that are asked for before the page is there.
//!
//! Where several hosts write a page, it can be gone again by the time that a thread which has fetched it runs. Then it would have
//! to be fetched again, and again without an end. So the pin is asked for first, and is taken in the moment in which the page
//! allows the access.

use crate::state::{Access, Locked, TooMany};
use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// A pin that was asked for, and whether it was taken.
pub(crate) type Asked = Arc<OnceLock<Result<(), TooMany>>>;

/// Those of a region.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    /// So that pages for which no thread waits cost no lock.
    count: AtomicUsize,
    pins: Mutex<Vec<(u64, Access, Asked)>>,
}

impl Awaited {
    /// Asks for a pin of a locked page.
    pub(crate) fn ask(&self, locked: &Locked<'_>, access: Access) -> Asked {
        let asked = Asked::default();
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        pins.push((locked.page, access, Arc::clone(&asked)));
        self.count.store(pins.len(), Ordering::Release);
        asked
    }

    /// Takes those that the state of a locked page allows now.
    pub(crate) fn take(&self, locked: &Locked<'_>) {
        // The page's lock orders this after an `ask` for the same page.
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        pins.retain(|(page, access, asked)| {
            let now = *page == locked.page && locked.state.allows(*access);
            if now {
                // No other thread sets it.
                let _ = asked.set(locked.pin());
            }
            !now
        });
        self.count.store(pins.len(), Ordering::Release);
    }
}
