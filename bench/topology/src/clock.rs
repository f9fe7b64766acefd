//! One clock for host and guest: the time stamp counter, which in a guest is the host's plus an offset that KVM shows.

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::arch::x86_64::_rdtsc;

/// `CLOCK_MONOTONIC` and the time stamp counter at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    pub ns: u64,
    pub tsc: u64,
}

/// Readings of which the fastest is taken: an interrupt between the two clocks makes a slow one.
const TRIES: usize = 5;

impl Moment {
    /// Now.
    pub fn now() -> Result<Self> {
        let mut best: Option<(u64, Self)> = None;
        for _ in 0..TRIES {
            // SAFETY: reading the time stamp counter has no effect; x86-64 has it.
            let before = unsafe { _rdtsc() };
            let ns = monotonic_ns()?;
            // SAFETY: as above.
            let after = unsafe { _rdtsc() };
            let (width, tsc) = (after.wrapping_sub(before), before + (after.wrapping_sub(before)) / 2);
            if best.as_ref().is_none_or(|(least, _)| width < *least) {
                best = Some((width, Self { ns, tsc }));
            }
        }
        best.map(|(_, moment)| moment).context("no reading of the clock")
    }
}

/// `CLOCK_MONOTONIC`.
pub fn monotonic_ns() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).context("CLOCK_MONOTONIC")?;
    Ok(u64::try_from(time.tv_sec())? * 1_000_000_000 + u64::try_from(time.tv_nsec())?)
}

/// How `CLOCK_MONOTONIC` of one kernel runs against its time stamp counter: a line through two moments.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    from: Moment,
    ticks_per_ns: f64,
}

impl Line {
    /// Through two moments, the second later.
    pub fn through(from: Moment, to: Moment) -> Result<Self> {
        let ns = to.ns.checked_sub(from.ns).filter(|&ns| ns > 0);
        let ticks = to.tsc.checked_sub(from.tsc).filter(|&ticks| ticks > 0);
        let (ns, ticks) = ns.zip(ticks).with_context(|| format!("{from:?} is not before {to:?}"))?;
        Ok(Self { from, ticks_per_ns: ticks as f64 / ns as f64 })
    }

    /// The time stamp counter at a time.
    pub fn tsc(&self, ns: u64) -> u64 {
        let since = ns.cast_signed().wrapping_sub(self.from.ns.cast_signed()) as f64;
        self.from.tsc.wrapping_add_signed((since * self.ticks_per_ns) as i64)
    }

    /// Nanoseconds between two readings of the time stamp counter, negative if `to` is earlier.
    pub fn between(&self, from: u64, to: u64) -> f64 {
        to.wrapping_sub(from).cast_signed() as f64 / self.ticks_per_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_through_its_moments_and_beyond() {
        let line = Line::through(Moment { ns: 1000, tsc: 50 }, Moment { ns: 2000, tsc: 2050 }).unwrap();
        assert_eq!(
            [500, 1000, 1500, 2000, 3000].map(|ns| line.tsc(ns).cast_signed()),
            [-950, 50, 1050, 2050, 4050]
        );
        assert!((line.between(50, 2050) - 1000.0).abs() < 1e-9);
        assert!((line.between(2050, 50) + 1000.0).abs() < 1e-9);
        assert!(Line::through(Moment { ns: 5, tsc: 5 }, Moment { ns: 5, tsc: 6 }).is_err());
    }

    #[test]
    fn both_clocks_go_on() {
        let first = Moment::now().unwrap();
        let second = Moment::now().unwrap();
        assert!(second.ns >= first.ns && second.tsc > first.tsc);
    }
}
