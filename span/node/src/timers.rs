//! Times at which pages are looked at again.

use crate::NodeError;
use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

/// A hold time is shorter than the milliseconds of poll, hence a descriptor.
#[derive(Debug)]
pub(crate) struct Timers {
    fd: TimerFd,
    /// Time in nanoseconds, and page.
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    /// What the descriptor is set to.
    armed: Option<u64>,
}

impl Timers {
    pub fn new() -> Result<Self, NodeError> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let fd =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(NodeError::system("timerfd_create"))?;
        Ok(Self { fd, queue: BinaryHeap::new(), armed: None })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn set(&mut self, page: u64, at_ns: u64) {
        self.queue.push(Reverse((at_ns, page)));
    }

    /// The next page whose time has come.
    pub fn due(&mut self, now_ns: u64) -> Option<u64> {
        let Reverse((at, page)) = *self.queue.peek()?;
        if at > now_ns {
            return None;
        }
        self.queue.pop();
        Some(page)
    }

    /// Sets the descriptor to the earliest time, before the thread sleeps.
    pub fn arm(&mut self, now_ns: u64) -> Result<(), NodeError> {
        let next = self.queue.peek().map(|Reverse((at, _))| *at);
        if next == self.armed {
            return Ok(());
        }
        self.armed = next;
        let outcome = match next {
            None => self.fd.unset(),
            Some(at) => {
                // 0 would switch it off.
                let left = Duration::from_nanos(at.saturating_sub(now_ns).max(1));
                let once = Expiration::OneShot(TimeSpec::from_duration(left));
                self.fd.set(once, TimerSetTimeFlags::empty())
            }
        };
        outcome.map_err(NodeError::system("timerfd_settime"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_in_the_order_of_their_times() {
        let mut timers = Timers::new().expect("timerfd");
        for (page, at) in [(1, 30), (2, 10), (3, 20)] {
            timers.set(page, at);
        }
        timers.arm(0).expect("set");
        assert_eq!(
            [timers.due(9), timers.due(25), timers.due(25), timers.due(25)],
            [None, Some(2), Some(3), None]
        );
        assert_eq!(timers.due(30), Some(1));
        timers.arm(30).expect("unset");
        assert_eq!(timers.armed, None);
    }
}
