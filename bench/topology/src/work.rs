//! Fixed amounts of a guest's own work, the same on every run: what XPV, section 5.2, compares a VM by.

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::hint::black_box;
use std::process::Command;
use std::thread::available_parallelism;

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

/// Elements of each of the triad's three arrays: 96 MiB a CPU, more than the last-level cache of any counter profile.
const ELEMENTS: usize = 1 << 22;
const PASSES: usize = 2;
/// Elements between the arrays: 21 pages. The place of arrays that malloc makes is a matter of chance, and so is then
/// whether their pages share a slot of the counters' detector of streams (lab/counters), which is a sixth of the cycles.
const SKEW: usize = 21 * PAGE / size_of::<f64>();
/// Of one allocation, in bytes.
const BLOCK: usize = 1 << 18;
const BLOCKS: usize = 400;
/// Larger blocks are mapped and unmapped one by one. Unless it is set, malloc raises it to the size of the first block
/// that is freed, and the kernel has no more to do.
const MMAP_THRESHOLD: i32 = 1 << 17;
const PAGE: usize = 4096;
const CALLS: usize = 200_000;

impl Kind {
    /// Runs that make up for how much single ones vary.
    pub fn runs(self) -> usize {
        match self {
            Self::Allocate => 2,
            Self::Stream | Self::Syscalls => 1,
        }
    }
}

/// Does it on each CPU at once, in processes of their own: a thread that unmaps memory waits until the CPUs of all others have
/// taken note, for as long as the host keeps these from running.
pub fn run(kind: Kind) -> Result<()> {
    let cpus = available_parallelism().context("number of CPUs")?.get();
    let name = kind.to_possible_value().context("a kind of work without a name")?;
    let program = std::env::current_exe().context("the path of this program")?;
    let start = |cpu: usize| {
        let mut command = Command::new(&program);
        command.args(["work", name.get_name(), "--cpu", &cpu.to_string()]);
        command.spawn().with_context(|| format!("CPU {cpu}"))
    };
    let children: Vec<_> = (0..cpus).map(start).collect::<Result<_>>()?;
    for (cpu, mut child) in children.into_iter().enumerate() {
        let status = child.wait().with_context(|| format!("CPU {cpu}"))?;
        ensure!(status.success(), "CPU {cpu}: {status}");
    }
    Ok(())
}

/// Does it on one CPU.
pub fn on_cpu(cpu: usize, kind: Kind) -> Result<()> {
    // SAFETY: no other thread runs.
    ensure!(unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD) } == 1, "mallopt");
    let mut set = CpuSet::new();
    let pinned = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
    pinned.with_context(|| format!("CPU {cpu}"))?;
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
    let mut all = vec![1.0f64; 3 * ELEMENTS + 2 * SKEW];
    let (a, rest) = all.split_at_mut(ELEMENTS + SKEW);
    let (b, c) = rest.split_at_mut(ELEMENTS + SKEW);
    for _ in 0..PASSES {
        a.iter_mut().zip(b.iter().zip(&*c)).for_each(|(a, (b, c))| *a = 3.0 * c + b);
        black_box(&mut *a);
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
