//! What an event costs the scheduler: as much in a control group far below the root as beside it. By the kernel's statistics of BPF programs.

use anyhow::{Context, Result, ensure};
use vnuma_scenario::{Process, output};
use vnuma_scheduled::{Group, Programs, start, stop};

/// How far.
const LEVELS: usize = 14;
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
