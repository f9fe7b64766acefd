//! Whether a signal to end has come.

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signalfd::SignalFd,
};
use std::{cell::Cell, os::fd::AsFd, rc::Rc};

/// What takes long asks this again and again, and stops when a signal has come. The one by default never comes.
#[derive(Clone, Debug, Default)]
pub struct Ends {
    signals: Option<Rc<SignalFd>>,
    /// What is done now is the end.
    ending: Rc<Cell<bool>>,
}

impl Ends {
    /// By these signals. Whoever asks does not take them.
    pub fn new(signals: Rc<SignalFd>) -> Self {
        Self { signals: Some(signals), ending: Rc::default() }
    }

    /// A signal has come, and the end has not begun.
    pub fn have_come(&self) -> bool {
        let Some(signals) = self.signals.as_ref().filter(|_| !self.ending.get()) else { return false };
        let mut polled = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// The end begins: what is done from now on is not to be stopped.
    pub fn begin(&self) {
        self.ending.set(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::{
        signal::{SigSet, Signal, raise},
        signalfd::SfdFlags,
    };

    #[test]
    fn a_signal_is_seen_until_the_end_begins_and_is_left_to_be_read() {
        let signals: SigSet = [Signal::SIGURG].into_iter().collect();
        signals.thread_block().expect("blocked");
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK).expect("signalfd");
        let signals = Rc::new(signals);
        let ends = Ends::new(Rc::clone(&signals));
        assert!(!ends.have_come() && !Ends::default().have_come());
        raise(Signal::SIGURG).expect("raised");
        assert!(ends.have_come() && ends.clone().have_come());
        ends.begin();
        assert!(!ends.have_come());
        assert!(signals.read_signal().expect("read").is_some());
    }
}
