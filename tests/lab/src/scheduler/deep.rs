//! Control groups far below the root. An event costs the scheduler as much as in one beside it, by the kernel's statistics of BPF programs.
//! And however deep a thread is, what holds for the group at the top holds for it.

use super::TOLERANCE;
use anyhow::{Context, Result, ensure};
use vnuma_observe::scheduler::Scheduler;
use vnuma_scenario::{Process, output};
use vnuma_scheduled::{Group, Loop, Programs, expect_share, start, stop};

/// How far.
const LEVELS: usize = 14;
/// Farther than groups are told from each other.
const TOO_DEEP: usize = 20;
/// Times that two processes wake each other.
const TURNS: &str = "10000";
/// How often it is measured, in turn. The least counts: the machine may stop the server's CPU.
const ROUNDS: usize = 6;
/// An event costs at most so many times as much.
const MOST: f64 = 1.25;
const SPANS: usize = 3;

/// Nanoseconds of an event while two processes of this group wake each other.
fn cost(process: &Process, group: &Group) -> Result<f64> {
    let before = Programs::read(process.0.id())?;
    let group = group.path().display();
    let command = format!("echo $$ > {group}/cgroup.procs && exec perf bench sched pipe -l {TURNS}");
    output("sh", &["-c", &command])?;
    Programs::read(process.0.id())?.ns_per_run(before).context("no program ran")
}

/// Weights and limits hold for all that is below a group, however deep.
pub(super) fn counts_in_the_groups_above(scheduler: &Scheduler) -> Result<()> {
    let groups = Group::chain("scx-deep", TOO_DEEP)?;
    let (lowest, highest) = (&groups[0], &groups[TOO_DEEP - 1]);
    let beside = Group::new("scx-high", "cpu.weight", "300")?;
    let loops = [Loop::start("3")?, Loop::start("3")?];
    lowest.take(&loops[0])?;
    beside.take(&loops[1])?;
    let all = [&loops[0], &loops[1]];
    let what = format!("weight 100 beside 300, {TOO_DEEP} levels below the root");
    expect_share(&what, Some(scheduler), &all, (0.25, TOLERANCE))?;
    highest.write("cpu.max", "10000 100000")?;
    let what = format!("a limit of a tenth, {TOO_DEEP} levels below the root");
    expect_share(&what, Some(scheduler), &all, (0.1, TOLERANCE))?;
    drop(loops);
    Ok(())
}

pub(super) fn costs_no_more() -> Result<()> {
    let high = Group::new("scx-high", "cpu.weight", "100")?;
    let groups = Group::chain("scx-deep", LEVELS)?;
    let lowest = groups.first().context("the lowest group")?;
    Programs::take_time(true)?;
    let (process, _scheduler) = start(&["--full"])?;
    let mut all = Vec::new();
    for _ in 0..SPANS {
        let (high, deep) = least(&process, [&high, lowest])?;
        println!(
            "an event costs {high:.0} ns in a group beside the root, {deep:.0} ns {LEVELS} levels below it"
        );
        all.push(deep / high);
        if deep <= MOST * high {
            break;
        }
    }
    Programs::take_time(false)?;
    stop(process)?;
    let right = all.iter().any(|cost| *cost <= MOST);
    ensure!(right, "an event costs {all:.2?} times as much {LEVELS} levels below the root");
    Ok(())
}

/// The least cost of an event in the high group and in the deep one.
fn least(process: &Process, [high_group, deep_group]: [&Group; 2]) -> Result<(f64, f64)> {
    let (mut high, mut deep) = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        high = high.min(cost(process, high_group)?);
        deep = deep.min(cost(process, deep_group)?);
    }
    Ok((high, deep))
}
