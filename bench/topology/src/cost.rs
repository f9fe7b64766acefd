//! What it costs a program to see that nothing has changed, against the cheapest way to ask for its CPU.

use crate::clock::monotonic_ns;
use crate::guest::Device;
use anyhow::{Context, Result};
use std::hint::black_box;

/// Rounds of both, by turns; the best of each counts, as whatever else runs only makes them slower.
const ROUNDS: usize = 20;
const CALLS: u32 = 200_000;

/// Prints `{"generation_read_ns": _, "sched_getcpu_ns": _}`.
pub fn run() -> Result<()> {
    let device = Device::open()?;
    let mut best = [f64::MAX; 2];
    for _ in 0..ROUNDS {
        best[0] = best[0].min(timed(|| {
            black_box(device.generation());
        })?);
        best[1] = best[1].min(timed(|| {
            // SAFETY: sched_getcpu takes nothing and only reads.
            black_box(unsafe { libc::sched_getcpu() });
        })?);
    }
    println!("{}", serde_json::json!({"generation_read_ns": best[0], "sched_getcpu_ns": best[1]}));
    Ok(())
}

/// Nanoseconds of one call.
fn timed(call: impl Fn()) -> Result<f64> {
    let start = monotonic_ns()?;
    for _ in 0..CALLS {
        call();
    }
    let elapsed = monotonic_ns()?.checked_sub(start).context("the clock went back")?;
    Ok(elapsed as f64 / f64::from(CALLS))
}
