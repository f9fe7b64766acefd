//! A user without rights who has thousands of threads of class SCHED_EXT loop on one CPU. The scheduler stays loaded for longer than the
//! kernel's watchdog waits, every loop runs, and a thread that wakes there does not wait for them.

use crate::{
    scheduler,
    threads::{Group, Loop, beat, loaded, start, stop},
};
use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Command, Stdio},
    sync::{Arc, Barrier, Mutex, PoisonError},
    time::{Duration, Instant},
};
use vnuma_observe::scheduler::Scheduler;
use vnuma_process::{Class, change_class, open_pidfd};
use vnuma_scenario::{Process, wait_for};

/// The CPU that all are on.
const CPU: usize = 2;
const NOBODY: u32 = 65534;
/// The kernel ends a scheduler that has a thread wait for 30 s.
const LONGER_THAN_THE_WATCHDOG: Duration = Duration::from_secs(45);
/// All threads of a queue have their turn within 2 s, and a machine that is emulated has hiccups.
const MOST_MEAN_WAIT: Duration = Duration::from_millis(100);
/// Until so many threads have begun, all on one CPU.
const BEGIN_LIMIT: Duration = Duration::from_secs(300);
/// Loops with next to nothing of their CPU: more than have a turn of a 200th of it in 30 s.
const TINY: usize = 650;
/// Such loops where the kernel's own class leaves them a 20th of the CPU. A timer that is late makes their turns longer, as on a machine that is
/// emulated.
const TINY_BESIDE_FAIR: usize = 200;
const LOOK: Duration = Duration::from_millis(250);
/// Loops beside a thread that changes its priority all the time: so many that slices are short.
const BESIDE_CALLER: usize = 800;
/// What that thread has of the CPU, at most: as one of them it has a thousandth.
const MOST_OF_CALLER: f64 = 0.01;

/// The loops, in a process of their own: `lab-scenario scheduler --crowd N --on CPUS`.
pub fn be(count: usize, on: &vnuma_model::CpuSet) -> Result<()> {
    let pid = std::process::id().cast_signed();
    let begun = Arc::new(Barrier::new(count + 1));
    let tids = Arc::new(Mutex::new(Vec::new()));
    // It ends when all have their class. Until then they sleep: what runs in the fair class keeps the CPU from those that have it, and a
    // lock would be passed on by threads that wait for all others.
    let (wait, go) = std::io::pipe()?;
    let wait = Arc::new(wait);
    for _ in 0..count {
        let (begun, tids, wait) = (Arc::clone(&begun), Arc::clone(&tids), Arc::clone(&wait));
        let mut cpus = CpuSet::new();
        on.iter().try_for_each(|cpu| cpus.set(cpu as usize))?;
        let act = move || -> Result<()> {
            sched_setaffinity(Pid::from_raw(0), &cpus)?;
            tids.lock().unwrap_or_else(PoisonError::into_inner).push(gettid().as_raw());
            begun.wait();
            (&*wait).read_exact(&mut [0]).expect_err("nothing is written");
            loop {
                std::hint::spin_loop();
            }
        };
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        thread.spawn(move || act().unwrap_or_else(|error| eprintln!("a loop: {error:#}")))?;
    }
    begun.wait();
    let pidfd = open_pidfd(pid)?;
    for tid in tids.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        change_class(pidfd.as_fd(), pid, *tid, Class::Other, Class::Ext)?;
    }
    drop(go);
    println!("ready");
    std::io::stdout().flush()?;
    std::thread::sleep(BEGIN_LIMIT * 2);
    Ok(())
}

/// The process with the loops, which have class `SCHED_EXT` and run on these CPUs.
pub fn begin(count: usize, on: &str, group: &Group) -> Result<Process> {
    let words = ["scheduler", "--crowd", &count.to_string(), "--on", on];
    let program = std::env::current_exe().context("this program")?;
    let crowd = Command::new(program)
        .args(words)
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut crowd = Process(crowd.context("the crowd")?);
    let pid = crowd.0.id().cast_signed();
    group.take(&Loop::of_thread_of(pid, pid))?;
    let mut line = String::new();
    BufReader::new(crowd.0.stdout.take().context("its output")?).read_line(&mut line)?;
    ensure!(line == "ready\n", "the crowd said {line:?}");
    wait_for("all to have class SCHED_EXT", BEGIN_LIMIT, || Ok(loops(pid)?.len() == count))?;
    Ok(crowd)
}

/// The threads of a process that have class `SCHED_EXT`.
pub fn loops(pid: i32) -> Result<Vec<Loop>> {
    let all = vnuma_process::procfs::threads(pid)?;
    let ext = |tid: &i32| vnuma_process::read_class(*tid).is_ok_and(|class| class == Class::Ext);
    Ok(all.into_iter().filter(ext).map(|tid| Loop::of_thread_of(pid, tid)).collect())
}

pub fn run(count: usize) -> Result<()> {
    let (process, scheduler) = start(&[])?;
    let group = Group::new("crowd", "cpu.weight", "100")?;
    let crowd = begin(count, &CPU.to_string(), &group)?;
    let begin = Instant::now();
    let (mut waits, mut waited_ns) = (0, 0);
    while begin.elapsed() < LONGER_THAN_THE_WATCHDOG {
        let (_, ns) = scheduler::wake_beside_loops(&scheduler, Some("2"))?;
        waits += scheduler::WAKE_UPS;
        waited_ns += ns;
        ensure!(loaded()?.is_some(), "the kernel has ended the scheduler after {:?}", begin.elapsed());
    }
    let mean = Duration::from_nanos(waited_ns / waits);
    println!(
        "{count} loops of a user without rights on CPU {CPU}: a thread that woke {waits} times waited for {mean:?} on average"
    );
    ensure!(
        mean <= MOST_MEAN_WAIT,
        "a thread that wakes waits for {mean:?}, at most {MOST_MEAN_WAIT:?} are right"
    );
    drop(crowd);
    stop(process)
}

/// A user to whom a group was delegated gives its loops next to nothing of their CPU. Another loop of the user's has the rest, in that group or
/// by the kernel's own scheduler, which comes first. Each has a turn all the same, and the scheduler stays.
pub fn has_next_to_nothing() -> Result<()> {
    for (what, count, by_kernel) in [("SCHED_EXT", TINY, false), ("SCHED_OTHER", TINY_BESIDE_FAIR, true)] {
        let (process, scheduler) = start(&[])?;
        let above = Group::new("crowd", "cpu.weight", "100")?;
        above.write("cgroup.subtree_control", "+cpu")?;
        let light = Group::new("crowd/light", "cpu.weight", "1")?;
        let heavy = Group::new("crowd/heavy", "cpu.weight", "10000")?;
        let cpu = CPU.to_string();
        let crowd = begin(count, &cpu, &light)?;
        let other = if by_kernel { Loop::start_fair(&cpu)? } else { Loop::start(&cpu)? };
        heavy.take(&other)?;
        let seen = watch_waits(&scheduler, &loops(crowd.0.id().cast_signed())?)
            .with_context(|| format!("{count} loops beside one of class {what}"))?;
        println!(
            "{count} loops of weight 1 beside one of 10000 and class {what}: the longest wait was {:?}, they had {:.1} % of the CPU",
            seen.0,
            100.0 * seen.1
        );
        drop((other, crowd));
        stop(process)?;
    }
    Ok(())
}

/// Changes its priority all the time: `lab-scenario scheduler --caller`.
pub fn be_a_caller() -> Result<()> {
    loop {
        for nice in [1, 0] {
            // SAFETY: the call takes numbers, and no memory.
            let done = unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, nice) };
            ensure!(done == 0, "setpriority: {}", std::io::Error::last_os_error());
        }
    }
}

/// Each such call ends a thread's time on its CPU and begins it again, as far as the scheduler is told. It gets no more by that.
pub fn has_no_more_by_calls() -> Result<()> {
    let (process, scheduler) = start(&[])?;
    let cpu = CPU.to_string();
    let group = Group::new("crowd", "cpu.weight", "100")?;
    let crowd = begin(BESIDE_CALLER, &cpu, &group)?;
    let program = std::env::current_exe().context("this program")?;
    let caller = Command::new(program).args(["scheduler", "--caller"]).stdin(Stdio::null()).spawn();
    let caller = Process(caller.context("the caller")?);
    let pid = caller.0.id().cast_signed();
    let thread = Loop::of_thread_of(pid, pid);
    thread.allow(&cpu)?;
    thread.make_ext()?;
    group.take(&thread)?;
    let (began, before) = (Instant::now(), thread.ran_ns()?);
    while began.elapsed() < LONGER_THAN_THE_WATCHDOG {
        std::thread::sleep(LOOK);
        beat(&scheduler)?;
        ensure!(loaded()?.is_some(), "the kernel has ended the scheduler after {:?}", began.elapsed());
    }
    let part = (thread.ran_ns()? - before) as f64 / began.elapsed().as_nanos() as f64;
    println!(
        "beside {BESIDE_CALLER} loops a thread that changes its priority all the time had {part:.4} of the CPU"
    );
    ensure!(part <= MOST_OF_CALLER, "it had {part:.4}, at most {MOST_OF_CALLER} are right");
    drop((caller, crowd));
    stop(process)
}

/// The longest time in which one of these did not run, and what all had of a CPU. The kernel ends a scheduler that has one wait for 30 s.
fn watch_waits(scheduler: &Scheduler, threads: &[Loop]) -> Result<(Duration, f64)> {
    let ran = || threads.iter().map(Loop::ran_ns).collect::<Result<Vec<u64>>>();
    let (begin, before, mut longest) = (Instant::now(), ran()?, Duration::ZERO);
    let mut last: Vec<_> = before.iter().map(|&ran| (ran, begin)).collect();
    while begin.elapsed() < LONGER_THAN_THE_WATCHDOG {
        std::thread::sleep(LOOK);
        beat(scheduler)?;
        ensure!(loaded()?.is_some(), "the kernel has ended the scheduler after {:?}", begin.elapsed());
        for (last, ran) in last.iter_mut().zip(ran()?) {
            longest = longest.max(last.1.elapsed());
            if ran != last.0 {
                *last = (ran, Instant::now());
            }
        }
    }
    let after = ran()?;
    ensure!(after.iter().zip(&before).all(|(now, before)| now > before), "a loop has not run");
    let all = after.iter().zip(&before).map(|(now, before)| now - before).sum::<u64>();
    Ok((longest, all as f64 / begin.elapsed().as_nanos() as f64))
}
