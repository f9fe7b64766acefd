//! Threads that take no signals.
//!
//! The kernel delivers a signal for a process to any thread that does not block it. A thread that waits for events would
//! be woken by it, its system calls would fail with `EINTR`, and a handler would run on it. Signals belong to the thread
//! that asked for them, so every other thread blocks all of them.

use nix::sys::signal::{SigSet, SigmaskHow};
use std::{
    io,
    thread::{Builder, JoinHandle},
};

/// Starts a thread that blocks all signals from its first instruction on. A new thread inherits the mask of the one that
/// starts it, so that one blocks them too for that moment; signals that arrive meanwhile are delivered afterwards.
pub fn spawn_worker<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let _blocked = BlockedSignals::all()?;
    Builder::new().name(name.to_owned()).spawn(work)
}

/// The signal mask of this thread from before, which is restored when this is dropped.
struct BlockedSignals {
    before: SigSet,
}

impl BlockedSignals {
    fn all() -> io::Result<Self> {
        Ok(Self { before: SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)? })
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // Restoring a mask that the kernel gave cannot fail.
        let _ = self.before.thread_set_mask();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::Signal;

    /// Signals that this thread blocks.
    fn blocked() -> SigSet {
        SigSet::thread_get_mask().unwrap()
    }

    #[test]
    fn a_worker_blocks_all_signals_and_its_parent_those_it_blocked_before() {
        let mut before = SigSet::empty();
        before.add(Signal::SIGUSR2);
        before.thread_set_mask().unwrap();
        let worker =
            spawn_worker("test-worker", || (blocked(), std::thread::current().name().map(str::to_owned)));
        let (mask, name) = worker.unwrap().join().unwrap();
        // These two cannot be blocked.
        for signal in Signal::iterator().filter(|signal| !matches!(signal, Signal::SIGKILL | Signal::SIGSTOP))
        {
            assert!(mask.contains(signal), "{signal} is not blocked");
        }
        assert_eq!(name.as_deref(), Some("test-worker"));
        assert_eq!(blocked(), before);
    }

    #[test]
    fn the_mask_is_restored_when_no_thread_can_be_started() {
        let before = blocked();
        assert!(std::panic::catch_unwind(|| spawn_worker("a\0b", || ())).is_err());
        assert_eq!(blocked(), before);
    }
}
