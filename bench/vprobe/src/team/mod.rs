//! In a guest: programs of several threads that share memory, with the access patterns of kernels of the NAS parallel benchmarks.
//! They are small and written for this benchmark; they are not those.

mod adi;
mod cg;
mod lu;
mod mg;
mod shared;

use crate::{
    committed::Kind,
    load::{Count, Ready, line},
};
use adi::{Adi, Solver};
use anyhow::{Context, Result, ensure};
use cg::Cg;
use lab_count::load::Memory;
use lu::Lu;
use mg::Mg;
pub use shared::Random;
use shared::{Kernel, Shared};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use vnuma_bench_common::{cells::print, host::affine};

const HUGE: usize = 2 << 20;

/// Sizes, fixed before the first figure: some 25 MiB for each of four threads.
fn kernel(kind: Kind) -> Option<Box<dyn Kernel>> {
    Some(match kind {
        Kind::BtLike => Box::new(Adi { zones: 20, edge: 40, solver: Solver::Block }),
        Kind::SpLike => Box::new(Adi { zones: 20, edge: 40, solver: Solver::Scalar }),
        Kind::CgLike => Box::new(Cg { rows: 65_536 }),
        Kind::LuLike => Box::new(Lu { edge: 112 }),
        Kind::MgLike => Box::new(Mg { edge: 160, levels: 4 }),
        _ => return None,
    })
}

/// Bytes of each thread's part, in huge pages.
pub fn bytes(kind: Kind, threads: usize) -> Option<usize> {
    Some((kernel(kind)?.words(threads) * size_of::<u64>()).next_multiple_of(HUGE))
}

/// The words of memory that no other thread uses.
fn words(memory: &mut Memory) -> &[AtomicU64] {
    let words = memory.words();
    // SAFETY: the same words, of the same size and alignment, borrowed for as long, and no other thread has them.
    unsafe { std::slice::from_raw_parts(words.as_mut_ptr().cast(), words.len()) }
}

/// Runs until it is killed: thread `i` on CPU `i`. Prints a line for each.
pub fn run(kind: Kind, threads: usize) -> Result<()> {
    let kernel = kernel(kind).with_context(|| format!("{} has no threads", kind.name()))?;
    ensure!(threads > 0, "--threads 0: expected at least 1");
    let size = bytes(kind, threads).context("size")?;
    let (mut memories, mut counts) = (Vec::new(), Vec::new());
    for cpu in 0..threads {
        // Where the guest has nodes, a part lies on that of its thread.
        affine(0, &[cpu as u32])?;
        memories.push(Memory::map(size, None, true).with_context(|| format!("{size} bytes"))?);
        counts.push(Count::new(None)?);
    }
    let lines = memories.iter().zip(&counts).map(|(memory, count)| line(memory, count));
    let lines = lines.collect::<Result<Vec<_>>>()?;
    let shared = Shared::new(memories.iter_mut().map(words).collect());
    std::thread::scope(|scope| {
        for (me, count) in counts.iter_mut().map(|count| words(&mut count.0)).enumerate() {
            let (kernel, shared, lines) = (&kernel, &shared, &lines);
            scope.spawn(move || {
                if let Err(error) = begin(kernel.as_ref(), shared, me, lines) {
                    eprintln!("{error:#}");
                    // The others would wait for it.
                    std::process::exit(1);
                }
                let mut done = |operations| count[0].store(count[0].load(Relaxed) + operations, Relaxed);
                loop {
                    kernel.round(shared, me, &mut done);
                }
            });
        }
    });
    Ok(())
}

/// On its CPU, with its part filled; the first thread says so for all.
fn begin(kernel: &dyn Kernel, shared: &Shared<'_>, me: usize, lines: &[Ready]) -> Result<()> {
    affine(0, &[me as u32])?;
    kernel.fill(shared, me);
    shared.meet();
    if me == 0 { lines.iter().try_for_each(print) } else { Ok(()) }
}
