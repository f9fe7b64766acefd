//! Limits of CPU time (`cpu.max`): a new one counts at once.

use crate::threads::{Group, Loop, beat};
use anyhow::{Result, ensure};
use std::time::Duration;
use vnuma_observe::{location::monotonic_ns, scheduler::Scheduler};
use vnuma_scenario::{HANG_LIMIT, wait_for};

/// A thread waits for its limit if it has not run for so long: a limit's period is 100 ms by default.
const STANDS: Duration = Duration::from_millis(400);
const LOOK: Duration = Duration::from_millis(20);

fn ran(threads: &[Loop]) -> Result<Vec<u64>> {
    threads.iter().map(Loop::ran_ns).collect()
}

/// Waits until none of the threads runs.
fn wait_until_they_stand(scheduler: &Scheduler, threads: &[Loop]) -> Result<()> {
    let mut last = (ran(threads)?, monotonic_ns());
    wait_for("the threads to wait for their limit", HANG_LIMIT, || {
        beat(scheduler)?;
        std::thread::sleep(LOOK);
        let now = (ran(threads)?, monotonic_ns());
        let stand = now.1 - last.1 > STANDS.as_nanos() as u64;
        if now.0 != last.0 {
            last = now;
        }
        Ok(stand)
    })
}

/// Until each of them runs again, nanoseconds.
fn wait_until_they_run(scheduler: &Scheduler, threads: &[Loop]) -> Result<u64> {
    let (began, before) = (monotonic_ns(), ran(threads)?);
    wait_for("the threads to run", HANG_LIMIT, || {
        beat(scheduler)?;
        std::thread::sleep(LOOK);
        Ok(ran(threads)?.iter().zip(&before).all(|(now, before)| now > before))
    })?;
    Ok(monotonic_ns() - began)
}

/// Threads that wait for seconds, as they have had the time of several periods in one tick, run at once when their limit is raised.
pub(super) fn counts_at_once(scheduler: &Scheduler) -> Result<()> {
    let group = Group::new("scx-raised", "cpu.max", "max 1000000")?;
    let loops = ["1", "2", "3"].map(Loop::start).into_iter().collect::<Result<Vec<_>>>()?;
    loops.iter().try_for_each(|thread| group.take(thread))?;
    let limit = || {
        group.write("cpu.max", "1000 1000000")?;
        wait_until_they_stand(scheduler, &loops)
    };
    limit()?;
    let by_itself = wait_until_they_run(scheduler, &loops)?;
    group.write("cpu.max", "max 1000000")?;
    wait_until_they_run(scheduler, &loops)?;
    limit()?;
    group.write("cpu.max", "max 1000000")?;
    let raised = wait_until_they_run(scheduler, &loops)?;
    println!(
        "threads that wait for a limit run after {} ms, and {} ms after that was raised",
        by_itself / 1_000_000,
        raised / 1_000_000
    );
    ensure!(raised < by_itself / 4, "a raised limit counts after {raised} ns, else after {by_itself} ns");
    Ok(())
}
