//! Limits of CPU time (`cpu.max`): a new one counts at once, and in full mode each of them once.

use crate::threads::{Group, Loop, beat, loaded, start, stop};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_observe::{location::monotonic_ns, scheduler::Scheduler};
use vnuma_scenario::{HANG_LIMIT, Process, wait_for};

/// A thread waits for its limit if it has not run for so long: a limit's period is 100 ms by default.
const STANDS: Duration = Duration::from_millis(400);
const LOOK: Duration = Duration::from_millis(20);
/// Longer than the kernel's watchdog waits.
const CHANGES: Duration = Duration::from_secs(36);
/// Half seconds in which shares are measured, and how often before they are wrong.
const WATCHED: u32 = 8;
const SPANS: usize = 4;
/// Time in which a thread shares a folder with others that have a millisecond in each second, and their folder.
const SHARES: Duration = Duration::from_secs(20);
const FOLDER: &str = "/run/scx-folder";
/// Until it has the folder: they wait for up to ten seconds at once, and a machine that is emulated has hiccups.
const MOST_WAIT: Duration = Duration::from_secs(5);
/// What they have of a CPU at most: 0.002 to 0.09 were seen, more where the machine is busy, as what it takes from the server's CPUs counts. They
/// have 1 if they do not wait.
const MOST_USED: f64 = 0.5;
/// Of a CPU: a limit, and what a tick of the kernel and its deduction add to it.
const LIMIT: f64 = 0.2;
const MORE: f64 = 0.06;

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

/// A thread waits for its limit while another group's changes all the time, and the thread's affinity each second. The kernel ends a
/// scheduler that has a thread queued anew 256 times, or wait for 30 s.
pub(super) fn change_all_the_time(scheduler: &Scheduler) -> Result<()> {
    let (group, other) = (
        Group::new("scx-waits", "cpu.max", "1000 1000000")?,
        Group::new("scx-changes", "cpu.max", "max 100000")?,
    );
    let threads = [Loop::start("1")?];
    group.take(&threads[0])?;
    wait_until_they_stand(scheduler, &threads)?;
    let (began, mut changes, mut seconds) = (Instant::now(), 0_u64, 0);
    while began.elapsed() < CHANGES {
        other.write("cpu.max", ["50000 100000", "60000 100000"][(changes % 2) as usize])?;
        changes += 1;
        std::thread::sleep(Duration::from_millis(5));
        if began.elapsed().as_secs() > seconds {
            seconds = began.elapsed().as_secs();
            threads[0].allow(["1", "1-2"][(seconds % 2) as usize])?;
            beat(scheduler)?;
            let ops = loaded()?;
            ensure!(
                ops.as_deref() == Some("vnuma"),
                "after {seconds} s and {changes} changes: {ops:?} is loaded"
            );
        }
    }
    println!("a thread waited for its limit while {changes} others were set: scx_vnuma is still loaded");
    Ok(())
}

/// Makes a folder in this one and removes it again, which others wait for. The longest time that it took.
fn make_folders(within: &Path, time: Duration) -> Result<Duration> {
    let (begin, mut longest) = (Instant::now(), Duration::ZERO);
    let path = within.join(std::process::id().to_string());
    while begin.elapsed() < time {
        let begin = Instant::now();
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        fs::remove_dir(&path).with_context(|| path.display().to_string())?;
        longest = longest.max(begin.elapsed());
    }
    Ok(longest)
}

/// `lab-scenario scheduler --folders PATH`: without end.
pub(super) fn be_a_maker(within: &Path) -> Result<()> {
    make_folders(within, Duration::MAX).map(drop)
}

/// Threads that have used up their limit wait, but not with the lock of a folder that others want.
pub(super) fn wait_without_locks(scheduler: &Scheduler) -> Result<()> {
    let group = Group::new("scx-makers", "cpu.max", "1000 1000000")?;
    let folder = Path::new(FOLDER);
    fs::create_dir_all(folder).context(FOLDER)?;
    let program = std::env::current_exe().context("this program")?;
    let mut makers = Vec::new();
    for cpu in ["1", "2", "3"] {
        let words = ["scheduler", "--folders", FOLDER];
        let process = Process(Command::new(&program).args(words).stdin(Stdio::null()).spawn()?);
        let pid = process.0.id().cast_signed();
        let thread = Loop::of_thread_of(pid, pid);
        thread.allow(cpu)?;
        thread.make_ext()?;
        group.take(&thread)?;
        makers.push((process, thread));
    }
    let ran = || makers.iter().map(|(_, thread)| thread.ran_ns()).sum::<Result<u64>>();
    beat(scheduler)?;
    let (began, before) = (monotonic_ns(), ran()?);
    let longest = make_folders(folder, SHARES)?;
    let used = (ran()? - before) as f64 / (monotonic_ns() - began) as f64;
    println!(
        "beside {} threads that have used up a limit of a thousandth a folder was made within {longest:?}; they had {used:.4} of a CPU",
        makers.len()
    );
    ensure!(longest <= MOST_WAIT, "a thread waits with the lock of a folder: for {longest:?}");
    ensure!(used <= MOST_USED, "a limit of a thousandth: they had {used:.4} of a CPU");
    Ok(())
}

/// Shares of a CPU that a thread of class SCHED_OTHER and one of class SCHED_EXT have, which are in one group with a limit.
fn watch(scheduler: &Scheduler, threads: &[&Loop; 2]) -> Result<[f64; 2]> {
    let (began, before) = (monotonic_ns(), [threads[0].ran_ns()?, threads[1].ran_ns()?]);
    for _ in 0..WATCHED {
        beat(scheduler)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    let time = (monotonic_ns() - began) as f64;
    Ok([(threads[0].ran_ns()? - before[0]) as f64 / time, (threads[1].ran_ns()? - before[1]) as f64 / time])
}

/// A limit holds for all threads of a group in full mode. In partial mode it holds for each of two schedulers by itself: for what the
/// kernel's own has and for what scx_vnuma has.
pub(super) fn count_once_in_full_mode() -> Result<()> {
    for (options, most) in [(&[][..], 2.0), (&["--full"], 1.0)] {
        let (process, scheduler) = start(options)?;
        let group = Group::new("scx-twice", "cpu.max", "20000 100000")?;
        let (other, ext) = (Loop::start_fair("2")?, Loop::start("3")?);
        [&other, &ext].iter().try_for_each(|thread| group.take(thread))?;
        let mut seen = [0.0; 2];
        let right = |seen: &[f64; 2]| seen.iter().sum::<f64>() <= most * (LIMIT + MORE);
        for _ in 0..SPANS {
            seen = watch(&scheduler, &[&other, &ext])?;
            println!(
                "options {options:?}, a limit of {LIMIT}: SCHED_OTHER and SCHED_EXT have {seen:.3?} of a CPU"
            );
            if right(&seen) {
                break;
            }
        }
        ensure!(
            right(&seen),
            "options {options:?}: {seen:.3?}, a limit of {LIMIT} counts {most} times at most"
        );
        drop((other, ext));
        stop(process).context("after a limit")?;
    }
    Ok(())
}
