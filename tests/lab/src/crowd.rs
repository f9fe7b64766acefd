//! A user without rights who has thousands of threads of class SCHED_EXT loop on one CPU. The scheduler stays loaded for longer than the
//! kernel's watchdog waits, every loop runs, and a thread that wakes there does not wait for them.

use crate::{
    scheduler,
    threads::{Group, Loop, loaded, start, stop},
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

/// The loops, in a process of their own: `lab-scenario scheduler --crowd N`.
pub fn be(count: usize) -> Result<()> {
    let pid = std::process::id().cast_signed();
    let begun = Arc::new(Barrier::new(count + 1));
    let tids = Arc::new(Mutex::new(Vec::new()));
    // It ends when all have their class. Until then they sleep: what runs in the fair class keeps the CPU from those that have it, and a
    // lock would be passed on by threads that wait for all others.
    let (wait, go) = std::io::pipe()?;
    let wait = Arc::new(wait);
    for _ in 0..count {
        let (begun, tids, wait) = (Arc::clone(&begun), Arc::clone(&tids), Arc::clone(&wait));
        let act = move || -> Result<()> {
            let mut cpus = CpuSet::new();
            cpus.set(CPU)?;
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

pub fn run(count: usize) -> Result<()> {
    let (process, scheduler) = start(&[])?;
    let words = ["scheduler", "--crowd", &count.to_string()];
    let program = std::env::current_exe().context("this program")?;
    let crowd = Command::new(program)
        .args(words)
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut crowd = Process(crowd.context("the crowd")?);
    let group = Group::new("crowd", "cpu.weight", "100")?;
    let pid = crowd.0.id().cast_signed();
    group.take(&Loop::of_thread_of(pid, pid))?;
    let mut line = String::new();
    BufReader::new(crowd.0.stdout.take().context("its output")?).read_line(&mut line)?;
    ensure!(line == "ready\n", "the crowd said {line:?}");
    let ext = || -> Result<usize> {
        let all = vnuma_process::procfs::threads(pid)?;
        Ok(all
            .into_iter()
            .filter(|tid| vnuma_process::read_class(*tid).is_ok_and(|class| class == Class::Ext))
            .count())
    };
    wait_for("all to have class SCHED_EXT", BEGIN_LIMIT, || Ok(ext()? == count))?;
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
