//! A thread's CPUs change while an idle CPU steals it. The kernel ends a scheduler that gives a thread to a CPU where it may not run.

use crate::threads::Loop;
use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CpuSet as Cpus, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};
use vnuma_observe::scheduler::Scheduler;
use vnuma_random::Rng;
use vnuma_scenario::HANG_LIMIT;

/// Threads that wait beside the one that is stolen, so that there is time between its choice and the theft.
const OTHERS: usize = 50;
/// Its CPUs stay as they are for less than that.
const MOST: Duration = Duration::from_micros(400);
/// Changes between two looks at the counts.
const CHANGES: usize = 50;

/// Spins until the test ends.
fn spin(tell: mpsc::Sender<i32>, ended: &AtomicBool) {
    // Fails only if the test is over.
    let _ = tell.send(gettid().as_raw());
    while !ended.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

fn allow(tid: i32, cpus: &[usize]) -> Result<()> {
    let mut set = Cpus::new();
    cpus.iter().try_for_each(|&cpu| set.set(cpu))?;
    sched_setaffinity(Pid::from_raw(tid), &set).with_context(|| format!("thread {tid}, CPUs {cpus:?}"))
}

/// CPU 3 has nothing to do but to steal a thread of CPU 2 whenever that may run there. Until it has done so this many times.
pub fn run(scheduler: &Scheduler, thefts: u64) -> Result<()> {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for _ in 0..=OTHERS {
            let (tell, ended) = (tell.clone(), &ended);
            scope.spawn(move || spin(tell, ended));
        }
        let flipped = (0..=OTHERS)
            .map(|_| {
                let tid = told.recv_timeout(HANG_LIMIT)?;
                allow(tid, &[2])?;
                Loop::of_thread(tid).make_ext()?;
                Ok(tid)
            })
            .collect::<Result<Vec<i32>>>()
            .and_then(|tids| {
                // In a thread of its own, as that is kept to other CPUs.
                let flipped = scope.spawn(move || flip(scheduler, tids[0], thefts)).join();
                flipped.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
            });
        ended.store(true, Ordering::Relaxed);
        flipped
    })
}

fn flip(scheduler: &Scheduler, tid: i32, thefts: u64) -> Result<()> {
    allow(0, &[0, 1])?;
    let stolen = || scheduler.counts().stolen_local;
    let (before, mut last, mut progress) = (stolen(), 0, Instant::now());
    let (mut random, mut flips) = (Rng::new(1), 0);
    while last < thefts {
        for _ in 0..CHANGES {
            for cpus in [&[2, 3][..], &[2]] {
                allow(tid, cpus)?;
                let until = Instant::now() + MOST.mul_f64(random.share());
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
        }
        flips += CHANGES;
        scheduler.check().with_context(|| format!("after {flips} changes of CPUs and {last} thefts"))?;
        let now = stolen() - before;
        if now > last {
            (last, progress) = (now, Instant::now());
        }
        ensure!(progress.elapsed() < HANG_LIMIT, "{last} thefts with {flips} changes, and no more");
    }
    println!("a thread was stolen {last} times while its CPUs were changed {flips} times");
    Ok(())
}
