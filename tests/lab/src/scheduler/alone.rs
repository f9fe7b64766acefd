//! A busy thread whose CPU no other wants has it as long, and as much in one piece, as the kernel's own scheduler lets it.

use crate::threads::{Loop, beat};
use anyhow::{Context, Result, bail};
use std::time::Duration;
use vnuma_observe::{location::monotonic_ns, scheduler::Scheduler};
use vnuma_process::procfs::{file_info, read_thread};

/// Half seconds for which it is watched, and how often before it has too little: the machine may stop the server's CPU.
const WATCHED: u32 = 10;
const SPANS: usize = 4;
/// Of the time of its CPU: so much less than with the kernel's own scheduler.
const LESS: f64 = 0.02;
/// A slice is 5 ms by default, and a switch at one in ten may be for threads of the kernel.
const MORE_SWITCHES: u64 = 500 * WATCHED as u64 / 5 / 10;

#[derive(Debug)]
struct Seen {
    /// Of the time of the server's clock.
    share: f64,
    /// Switches to another thread or to the idle one while it wanted to run.
    switches: u64,
}

fn switches(thread: &Loop) -> Result<u64> {
    let status = read_thread(thread.pid, thread.tid, "status", 1 << 16)?;
    file_info(&status, "nonvoluntary_ctxt_switches").parse().context("switches of the loop")
}

fn watch(scheduler: &Scheduler, thread: &Loop) -> Result<Seen> {
    let (began, ran, before) = (monotonic_ns(), thread.ran_ns()?, switches(thread)?);
    for _ in 0..WATCHED {
        beat(scheduler)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    let ran = thread.ran_ns()? - ran;
    let share = ran as f64 / (monotonic_ns() - began) as f64;
    Ok(Seen { share, switches: switches(thread)? - before })
}

/// One loop and two CPUs, first by the kernel's own scheduler.
pub(super) fn keeps_its_cpu(scheduler: &Scheduler) -> Result<()> {
    let thread = Loop::start_fair("2-3")?;
    let fair = watch(scheduler, &thread)?;
    thread.make_ext()?;
    let mut all = Vec::new();
    for _ in 0..SPANS {
        let seen = watch(scheduler, &thread)?;
        println!("a loop beside an idle CPU: {seen:.3?}, by the kernel's own scheduler {fair:.3?}");
        if seen.share + LESS >= fair.share && seen.switches <= fair.switches + MORE_SWITCHES {
            return Ok(());
        }
        all.push(seen);
    }
    bail!("a loop beside an idle CPU: {all:.3?}, by the kernel's own scheduler {fair:.3?}")
}
