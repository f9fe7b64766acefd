//! The least CPU time that a move can cost, and the least time that a publication can take, each measured by a loop of its own.
//! vnumad's figures are compared with these, so that a slow machine does not fail it.
//!
//! Cost: a thread is woken by an event, takes it, rings the guest, is woken by the acknowledgement, and takes that: two times `epoll_wait`
//! and `read` of an eventfd, and a `write` between them, as often a second as vCPUs move.
//!
//! Time: a thread sleeps until it is to look for moves, as vnumad does in a busy time, and wakes a guest, which takes that.

use anyhow::{Context, anyhow};
use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::EventFd,
    },
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};
use std::{
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_figures::stats::Samples;

const ROUNDS: u32 = 1500;
const PER_SECOND: u32 = 1000;
/// Publications, and how long a thread sleeps before each.
const PUBLICATIONS: usize = 300;
const LOOK: Duration = Duration::from_millis(4);

/// What was timed at one moment.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Yardstick {
    /// CPU time of the system calls of a move, microseconds.
    pub us: f64,
    /// Time of a publication, milliseconds: 99th percentile.
    pub ms: f64,
}

impl Yardstick {
    /// Times both, one after the other.
    pub fn measure() -> anyhow::Result<Self> {
        Ok(Self { us: cost_us()?, ms: publication_ms()? })
    }
}

fn publication_ms() -> anyhow::Result<f64> {
    let [ring, taken] = [EventFd::new()?, EventFd::new()?];
    thread::scope(|scope| {
        let guest = scope.spawn(|| -> nix::Result<Vec<Instant>> {
            let take = |_| {
                ring.read()?;
                let now = Instant::now();
                taken.write(1)?;
                Ok(now)
            };
            (0..PUBLICATIONS).map(take).collect()
        });
        let mut begun = Vec::with_capacity(PUBLICATIONS);
        for _ in 0..PUBLICATIONS {
            begun.push(Instant::now());
            thread::sleep(LOOK);
            ring.write(1)?;
            taken.read()?;
        }
        let ended = guest.join().map_err(|_| anyhow!("the thread panicked"))?.context("the yardstick")?;
        let took = ended.iter().zip(&begun).map(|(ended, begun)| (*ended - *begun).as_secs_f64() * 1e3);
        took.collect::<Samples>().percentile(99).context("nothing was timed")
    })
}

fn cost_us() -> anyhow::Result<f64> {
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
    fn a_round_takes_time_of_a_cpu_but_not_all_of_it_and_a_publication_more_than_it_sleeps() {
        let Yardstick { us, ms } = Yardstick::measure().expect("measured");
        assert!(us > 0.0 && us < 1e6 / f64::from(PER_SECOND), "{us} us");
        assert!(ms > LOOK.as_secs_f64() * 1e3, "{ms} ms");
    }
}
