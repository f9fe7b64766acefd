//! Fixed amounts of a guest's own work, the same on every run: what XPV, section 5.2, compares a VM by.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::hint::black_box;
use std::thread;

/// What is done.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Kind {
    /// STREAM's triad over arrays that no cache holds
    Stream,
    /// Allocates, touches and frees, so that the kernel maps and unmaps pages
    Allocate,
    /// Cheap system calls
    Syscalls,
}

/// Elements of each of the triad's arrays.
const ELEMENTS: usize = 1 << 19;
const PASSES: usize = 6;
/// Of one allocation: above malloc's threshold, so that each is mapped and unmapped.
const BLOCK: usize = 1 << 18;
const BLOCKS: usize = 400;
const PAGE: usize = 4096;
const CALLS: usize = 200_000;

/// Does it on each CPU at once.
pub fn run(kind: Kind) -> Result<()> {
    let cpus = thread::available_parallelism().context("number of CPUs")?.get();
    let threads: Vec<_> = (0..cpus).map(|cpu| thread::spawn(move || on_cpu(cpu, kind))).collect();
    threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
}

fn on_cpu(cpu: usize, kind: Kind) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).context("CPU")?;
    sched_setaffinity(Pid::from_raw(0), &set).context("sched_setaffinity")?;
    match kind {
        Kind::Stream => stream(),
        Kind::Allocate => allocate(),
        Kind::Syscalls => (0..CALLS).for_each(|_| {
            black_box(nix::unistd::getppid());
        }),
    }
    Ok(())
}

fn stream() {
    let (b, c) = (vec![1.0f64; ELEMENTS], vec![2.0f64; ELEMENTS]);
    let mut a = vec![0.0f64; ELEMENTS];
    for _ in 0..PASSES {
        a.iter_mut().zip(b.iter().zip(&c)).for_each(|(a, (b, c))| *a = 3.0 * c + b);
        black_box(&mut a);
    }
}

fn allocate() {
    for _ in 0..BLOCKS {
        let mut block: Vec<u8> = Vec::with_capacity(BLOCK);
        for page in block.spare_capacity_mut().chunks_mut(PAGE) {
            page[0].write(1);
        }
        black_box(&mut block);
    }
}
