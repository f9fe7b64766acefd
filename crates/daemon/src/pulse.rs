//! A clock whose tick is one wake-up. The runtime's own timers wake twice for a time that is more than some milliseconds
//! away, and a daemon that looks at something twice a second should cost no more than that.

use crate::readiness::readable;
use nix::{
    errno::Errno,
    sys::{
        time::TimeSpec,
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};
use std::{
    future::pending,
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};
use tokio::io::unix::AsyncFd;

/// A clock that ticks until it is dropped.
#[derive(Debug)]
pub(crate) struct Pulse {
    timer: TimerFd,
    ready: AsyncFd<OwnedFd>,
}

impl Pulse {
    /// Ticks at once, and then with this period.
    pub(crate) fn start(period: Duration) -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let (first, period) = (TimeSpec::new(0, 1), TimeSpec::from_duration(period));
        let expiration = Expiration::IntervalDelayed(first, period);
        timer.set(expiration, TimerSetTimeFlags::empty())?;
        let ready = readable(timer.as_fd())?;
        Ok(Self { timer, ready })
    }

    /// The next tick; those that nobody waited for are one.
    pub(crate) async fn tick(&self) {
        loop {
            let Ok(mut guard) = self.ready.readable().await else { return pending().await };
            // Only then, for a tick that comes in between not to be lost.
            guard.clear_ready();
            if self.timer.wait() != Err(Errno::EAGAIN) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[tokio::test]
    async fn it_ticks_at_once_and_then_with_its_period() {
        let period = Duration::from_millis(30);
        let (pulse, started) = (Pulse::start(period).expect("a timer"), Instant::now());
        pulse.tick().await;
        for _ in 0..3 {
            pulse.tick().await;
        }
        assert!(started.elapsed() >= 2 * period, "{:?} for three periods", started.elapsed());
    }
}
