//! Upper halves of generations.

use std::time::{SystemTime, UNIX_EPOCH};

/// Gives each channel an epoch of its own, also across restarts: a guest compares generations
/// for change only, and one that came back would hide a publication from it.
///
/// The first is the start of this process in milliseconds, which wrap around after seven weeks. A restarted
/// process begins above all those of its predecessor, which cannot plug a device every millisecond.
#[derive(Debug)]
pub(crate) struct Epochs(u32);

impl Epochs {
    /// Those of a process that starts now.
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(since.map_or(1, |since| since.as_millis() as u32))
    }

    /// The next one, never 0.
    pub(crate) fn take(&mut self) -> u32 {
        self.0 = self.0.checked_add(1).unwrap_or(1);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread::sleep, time::Duration};

    #[test]
    fn epochs_do_not_come_back_and_are_never_0() {
        let mut epochs = Epochs(u32::MAX - 2);
        assert_eq!([(); 4].map(|()| epochs.take()), [u32::MAX - 1, u32::MAX, 1, 2]);
    }

    #[test]
    fn a_restart_within_a_second_has_others() {
        let first = Epochs::now().take();
        sleep(Duration::from_millis(5));
        assert_ne!(first, Epochs::now().take());
    }
}
