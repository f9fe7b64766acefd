//! Looks at workers, as who starts them does.

use std::{
    thread,
    time::{Duration, Instant},
};
use vnuma_process::{Change, Workers};

pub const HANG: Duration = Duration::from_secs(600);
const HOUR: Duration = Duration::from_secs(3600);

/// The next change. One that works is silent, as if it had worked for two hours.
pub fn change(workers: &Workers) -> Change {
    let end = Instant::now() + HANG;
    loop {
        if let Some(change) = workers.look(Instant::now() + 2 * HOUR, HOUR).pop() {
            return change;
        }
        assert!(Instant::now() < end, "no change");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Looks until the only worker waits.
pub fn until_it_waits(workers: &Workers) {
    while matches!(workers.look(Instant::now() + 2 * HOUR, HOUR).pop(), Some(Change::Silent(..))) {
        assert!(matches!(change(workers), Change::Beats(_)));
    }
}
