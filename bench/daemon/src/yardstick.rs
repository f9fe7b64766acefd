//! What a move must cost whoever publishes it: the system calls that it cannot do without, in a loop of their own. The cost of a move is
//! judged by it, so that a slow machine is slow for both.
//!
//! A thread is woken by an event, takes it, rings the guest, is woken by the acknowledgement, and takes that: two times `epoll_wait`
//! and `read` of an eventfd, and a `write` between them, as often a second as vCPUs move.

use anyhow::{Context, anyhow};
use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::EventFd,
    },
    time::{ClockId, clock_gettime},
};
use std::{thread, time::Duration};

const ROUNDS: u32 = 3000;
const PER_SECOND: u32 = 1000;

/// CPU time of a round, microseconds.
pub fn measure() -> anyhow::Result<f64> {
    let [moved, ring, acknowledged] = [EventFd::new()?, EventFd::new()?, EventFd::new()?];
    let waiting = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    for event in [&moved, &acknowledged] {
        waiting.add(event, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
    }
    thread::scope(|scope| {
        let core = scope.spawn(|| -> nix::Result<f64> {
            let before = cpu_ns()?;
            for _ in 0..ROUNDS {
                let mut events = [EpollEvent::empty()];
                waiting.wait(&mut events, EpollTimeout::NONE)?;
                moved.read()?;
                ring.write(1)?;
                waiting.wait(&mut events, EpollTimeout::NONE)?;
                acknowledged.read()?;
            }
            Ok(cpu_ns()? - before)
        });
        for _ in 0..ROUNDS {
            thread::sleep(Duration::from_secs(1) / PER_SECOND);
            moved.write(1)?;
            // It plays the guest as well.
            ring.read()?;
            acknowledged.write(1)?;
        }
        let ns = core.join().map_err(|_| anyhow!("the thread panicked"))?.context("the yardstick")?;
        Ok(ns / 1e3 / f64::from(ROUNDS))
    })
}

/// Of this thread.
fn cpu_ns() -> nix::Result<f64> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(time.tv_sec() as f64 * 1e9 + time.tv_nsec() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_takes_time_of_a_cpu_but_not_all_of_it() {
        let us = measure().expect("measured");
        assert!(us > 0.0 && us < 1e6 / f64::from(PER_SECOND), "{us} us");
    }
}
