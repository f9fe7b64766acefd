//! A CPU that the kernel runs without a tick for one thread has none with scx_vnuma either. What comes to it, a limit and another place count
//! there all the same. On a server that has such a CPU.

use crate::threads::{Group, Loop, beat, start, stop};
use anyhow::{Context, Result, bail, ensure};
use std::{fs, time::Duration};
use vnuma_observe::{location::monotonic_ns, scheduler::Scheduler};

const CPU: &str = "3";
const BESIDE: &str = "2";
/// Half seconds in which ticks and time are measured.
const WATCHED: u32 = 10;
/// In that time the kernel ticks 1250 times, less if the machine stops the server's CPUs.
const MORE_TICKS: u64 = 100;
/// How often they are measured before they are too many: threads of the kernel come, too.
const SPANS: usize = 4;
/// Of a CPU, beside another one, and with a limit of a fifth.
const HALF: std::ops::RangeInclusive<f64> = 0.3..=0.7;
const LIMITED: f64 = 0.4;

/// Interrupts of the CPU's timer so far.
fn ticks() -> Result<u64> {
    let text = fs::read_to_string("/proc/interrupts").context("/proc/interrupts")?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("LOC:"));
    let field = line.and_then(|line| line.split_whitespace().nth(CPU.parse().ok()?));
    field.context("/proc/interrupts: no LOC of the CPU")?.parse().context("/proc/interrupts: LOC")
}

/// What a loop has of a CPU, and the ticks of its CPU.
fn watch(scheduler: Option<&Scheduler>, thread: &Loop) -> Result<(f64, u64)> {
    let sleep = |times| -> Result<()> {
        for _ in 0..times {
            scheduler.map_or(Ok(()), beat)?;
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    };
    sleep(4)?;
    let (began, ran, ticked) = (monotonic_ns(), thread.ran_ns()?, ticks()?);
    sleep(WATCHED)?;
    let share = (thread.ran_ns()? - ran) as f64 / (monotonic_ns() - began) as f64;
    Ok((share, ticks()? - ticked))
}

/// A loop that no other is beside.
fn expect_no_tick(scheduler: &Scheduler, thread: &Loop, fair: (f64, u64)) -> Result<()> {
    let mut seen = Vec::new();
    for _ in 0..SPANS {
        let alone = watch(Some(scheduler), thread)?;
        println!(
            "a loop alone had {:.3} of CPU {CPU}, which ticked {} times; by the kernel's own scheduler {fair:.3?}",
            alone.0, alone.1
        );
        if alone.1 <= fair.1 + MORE_TICKS {
            return Ok(());
        }
        seen.push(alone.1);
    }
    bail!("CPU {CPU} ticked {seen:?} times, by the kernel's own scheduler {}", fair.1)
}

pub(super) fn have_no_tick() -> Result<()> {
    let path = "/sys/devices/system/cpu/nohz_full";
    let cpus = fs::read_to_string(path).context(path)?;
    ensure!(cpus.trim() == CPU, "{path}: {cpus:?}, expected {CPU}");
    let (process, scheduler) = start(&[])?;
    let thread = Loop::start_fair(&format!("{BESIDE}-{CPU}"))?;
    thread.allow(CPU)?;
    let fair = watch(None, &thread)?;
    thread.make_ext()?;
    expect_no_tick(&scheduler, &thread, fair)?;
    let other = Loop::start(CPU)?;
    let both = watch(Some(&scheduler), &thread)?;
    println!("beside another loop it had {:.3}, and {} ticks", both.0, both.1);
    ensure!(HALF.contains(&both.0), "a loop beside another one had {:.3} of their CPU", both.0);
    drop(other);

    expect_no_tick(&scheduler, &thread, fair)?;
    let group = Group::new("scx-tickless", "cpu.max", "20000 100000")?;
    group.take(&thread)?;
    let limited = watch(Some(&scheduler), &thread)?;
    println!("with a limit of a fifth it had {:.3}, and {} ticks", limited.0, limited.1);
    ensure!(limited.0 <= LIMITED, "a limit of a fifth: it had {:.3}", limited.0);
    drop((thread, group));

    let thread = Loop::start(&format!("{BESIDE}-{CPU}"))?;
    for cpu in [CPU, BESIDE] {
        thread.place(&scheduler, Some(cpu), 0)?;
        thread.wait_until_on(&scheduler, &[cpu.parse()?])?;
    }
    println!("it follows its place from CPU {CPU} to CPU {BESIDE}");
    drop(thread);
    stop(process)
}
