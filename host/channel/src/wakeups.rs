//! How often a guest can wake the host.

use crate::doorbell;
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
        eventfd::EventFd,
        time::TimeSpec,
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

/// Wake-ups after a publication, however often the guest signals. An honest guest needs one, and a few more if it still
/// acknowledges earlier publications or loads its driver.
pub const WAKEUPS_PER_PUBLICATION: u32 = 4;
/// When these are used up, the guest's signals are handled again after this time. So it causes two more wake-ups
/// in each such time: one when it is over, and one by a signal.
pub const PAUSE: Duration = Duration::from_secs(1);

/// Watches a doorbell that the guest may signal without end.
#[derive(Debug)]
pub(crate) struct Wakeups {
    /// Has the timer, and the doorbell while anything is left.
    epoll: Epoll,
    timer: TimerFd,
    left: u32,
}

impl Wakeups {
    pub(crate) fn new(doorbell: &EventFd) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        epoll.add(doorbell, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        epoll.add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { epoll, timer, left: WAKEUPS_PER_PUBLICATION })
    }

    /// Readable when the doorbell was signalled, as far as the budget goes.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    /// A publication follows: the budget is whole again.
    pub(crate) fn refill(&mut self, doorbell: &EventFd) -> io::Result<()> {
        // The doorbell is watched as long as there is anything left, and the timer runs when there is not.
        if std::mem::replace(&mut self.left, WAKEUPS_PER_PUBLICATION) > 0 {
            return Ok(());
        }
        self.timer.unset()?;
        self.watch(doorbell, EpollFlags::EPOLLIN)
    }

    /// Takes what made [`Self::fd`] readable, and watches on if the budget allows it. Each call counts, as a peer that clears the
    /// doorbell itself has woken the host all the same. What the guest changed before a signal that this did not take wakes the host
    /// again: look at it afterwards.
    pub(crate) fn take(&mut self, doorbell: &EventFd) -> io::Result<()> {
        if self.left == 0 {
            return match self.timer.wait() {
                Ok(()) => {
                    self.left = 1;
                    doorbell::clear(doorbell.as_fd())?;
                    self.watch(doorbell, EpollFlags::EPOLLIN)
                }
                // It has not expired.
                Err(Errno::EAGAIN) => Ok(()),
                Err(error) => Err(error.into()),
            };
        }
        doorbell::clear(doorbell.as_fd())?;
        self.left -= 1;
        if self.left > 0 {
            return Ok(());
        }
        let pause = Expiration::OneShot(TimeSpec::from_duration(PAUSE));
        self.timer.set(pause, TimerSetTimeFlags::empty())?;
        self.watch(doorbell, EpollFlags::empty())
    }

    fn watch(&self, doorbell: &EventFd, what: EpollFlags) -> io::Result<()> {
        Ok(self.epoll.modify(doorbell, &mut EpollEvent::new(what, 0))?)
    }
}
