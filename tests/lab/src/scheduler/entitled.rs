//! Threads of little weight beside threads of much: they have no more than their share, and none of them waits for long.

use crate::threads::{Group, Loop, beat};
use anyhow::{Result, bail};
use std::time::Duration;
use vnuma_observe::{location::monotonic_ns, scheduler::Scheduler};
use vnuma_scenario::output;

/// CPUs that are used, and loops of each weight on each of them.
const CPUS: [&str; 3] = ["1", "2", "3"];
const HEAVY: usize = 2;
const LIGHT: usize = 8;
/// Seconds until all have had a turn, and those in which shares are measured.
const SETTLES: u64 = 5;
const WATCHED: u64 = 15;
/// How often they are watched before it is wrong: the machine may stop the server's CPU while a light one has it.
const SPANS: usize = 4;
/// Of the time of all: the share of the light ones is a thousandth.
const MOST: f64 = 0.01;
/// One with the least priority beside so many of the usual one, on one CPU.
const OTHERS: usize = 20;
const CPU: &str = "3";
const SECONDS: u64 = 20;
const LOOK: Duration = Duration::from_millis(50);
/// It waits for a second, and for the end of a turn that is late.
const MOST_WAIT: Duration = Duration::from_secs(4);

fn pause(scheduler: &Scheduler, seconds: u64) -> Result<()> {
    for _ in 0..2 * seconds {
        beat(scheduler)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// Loops on each CPU, in a group of this weight. The kernel's own scheduler has them first.
fn loops(group: &Group, each: usize) -> Result<Vec<Loop>> {
    let mut all = Vec::new();
    for cpu in CPUS {
        for _ in 0..each {
            let thread = Loop::start_fair(cpu)?;
            group.take(&thread)?;
            all.push(thread);
        }
    }
    Ok(all)
}

fn ran(threads: &[Loop]) -> Result<Vec<u64>> {
    threads.iter().map(Loop::ran_ns).collect()
}

#[derive(Debug)]
struct Seen {
    /// What the light ones have of the time of all.
    light: f64,
    /// Light ones that did not run at all.
    stood: usize,
}

fn watch(scheduler: &Scheduler, heavy: &[Loop], light: &[Loop]) -> Result<Seen> {
    pause(scheduler, SETTLES)?;
    let before = (ran(heavy)?, ran(light)?);
    pause(scheduler, WATCHED)?;
    let time = |now: Vec<u64>, before: &[u64]| -> Vec<u64> {
        now.iter().zip(before).map(|(now, before)| now - before).collect()
    };
    let (heavy, light) = (time(ran(heavy)?, &before.0), time(ran(light)?, &before.1));
    let sum = |times: &[u64]| times.iter().sum::<u64>() as f64;
    let stood = light.iter().filter(|time| **time == 0).count();
    Ok(Seen { light: sum(&light) / (sum(&heavy) + sum(&light)), stood })
}

/// Heavy ones have nearly all. Each light one runs all the same.
pub(super) fn stay_within_their_share(scheduler: &Scheduler) -> Result<()> {
    let (heavy, light) =
        (Group::new("scx-10000", "cpu.weight", "10000")?, Group::new("scx-1", "cpu.weight", "1")?);
    let (many, few) = (loops(&light, LIGHT)?, loops(&heavy, HEAVY)?);
    let own = watch(scheduler, &few, &many)?;
    few.iter().chain(&many).try_for_each(Loop::make_ext)?;
    let mut all = Vec::new();
    for _ in 0..SPANS {
        let seen = watch(scheduler, &few, &many)?;
        println!(
            "{} loops of weight 1 beside {} of weight 10000, for {WATCHED} s: {seen:.4?}, by the kernel's own scheduler {own:.4?}",
            many.len(),
            few.len()
        );
        if seen.light <= MOST + own.light && seen.stood == 0 {
            return Ok(());
        }
        all.push(seen);
    }
    bail!("{} loops of weight 1: {all:.4?}, by the kernel's own scheduler {own:.4?}", many.len())
}

/// The longest that the thread with the least priority waits beside many others.
pub(super) fn wait_for_a_bounded_time(scheduler: &Scheduler) -> Result<()> {
    let others = (0..OTHERS).map(|_| Loop::start(CPU)).collect::<Result<Vec<_>>>()?;
    let thread = Loop::start(CPU)?;
    output("renice", &["-n", "19", "-p", &thread.pid.to_string()])?;
    let mut all = Vec::new();
    for _ in 0..SPANS {
        let (turns, longest) = watch_waits(scheduler, &thread)?;
        println!(
            "a loop of nice 19 beside {} of nice 0 on one CPU: {turns} turns in {SECONDS} s, the longest wait {longest:?}",
            others.len()
        );
        if longest <= MOST_WAIT {
            return Ok(());
        }
        all.push(longest);
    }
    bail!("it waited for {all:?}, at most {MOST_WAIT:?} is right")
}

/// How often it ran, and the longest time in which it did not.
fn watch_waits(scheduler: &Scheduler, thread: &Loop) -> Result<(usize, Duration)> {
    let (began, mut last, mut longest) = (monotonic_ns(), (thread.ran_ns()?, monotonic_ns()), 0);
    let mut turns = 0;
    while monotonic_ns() - began < SECONDS * 1_000_000_000 {
        beat(scheduler)?;
        std::thread::sleep(LOOK);
        let now = (thread.ran_ns()?, monotonic_ns());
        longest = longest.max(now.1 - last.1);
        if now.0 != last.0 {
            last = now;
            turns += 1;
        }
    }
    Ok((turns, Duration::from_nanos(longest)))
}
