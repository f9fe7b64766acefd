//! What a look at the memory of a VM of 1 TiB costs: 8192 of its pages, as vnumad looks at. The memory is this process's own: a
//! mapping of that size, in which the pages of several looks are there.
//!
//! `cargo xtask bench decide` runs it and compares it with the goal.

#![expect(missing_docs, reason = "criterion's macros make functions without")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::{
    cell::Cell,
    hint::black_box,
    os::fd::AsFd,
    ptr::{null, null_mut},
    time::Duration,
};
use vnuma_process::{choose_addresses, open_pidfd, sample_pages};

const TIB: u64 = 1 << 40;
const PAGE: u64 = 4096;
/// As many as vnumad looks at (host/daemon/src/shell/observer.rs).
const SAMPLES: u64 = 8192;
/// Looks that take turns, so that what a look needs of the kernel's tables is not in the caches from the one before.
const LOOKS: u64 = 8;

/// A TiB of addresses, at which nothing is yet.
fn map() -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel likes.
    let mapped = unsafe { libc::mmap(null_mut(), TIB as usize, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping made above; small pages cost a look most, and a huge one at each address would not fit into this machine.
    unsafe { libc::madvise(mapped, TIB as usize, libc::MADV_NOHUGEPAGE) };
    Some(mapped as u64)
}

/// The nodes of these pages, by one call.
fn ask(pid: i32, addresses: &[u64]) -> Vec<i32> {
    let mut nodes = vec![-1; addresses.len()];
    // SAFETY: both lists have as many entries as the call is told; nothing is moved without a list of nodes.
    let status = unsafe {
        let (count, pages) = (addresses.len(), addresses.as_ptr());
        libc::syscall(libc::SYS_move_pages, pid, count, pages, null::<i32>(), nodes.as_mut_ptr(), 0)
    };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    nodes
}

fn looks(criterion: &mut Criterion) {
    let pid = std::process::id().cast_signed();
    let (Ok(pidfd), Some(start)) = (open_pidfd(pid), map()) else {
        return eprintln!("skipped: this machine gives no TiB of addresses");
    };
    let all: Vec<Vec<u64>> =
        (0..LOOKS).map(|seed| choose_addresses(start, TIB, PAGE, SAMPLES, seed)).collect();
    for address in all.iter().flatten() {
        // SAFETY: inside of the mapping, which is writable, and there is no reference to it.
        unsafe { *(*address as *mut u8) = 1 };
    }
    if let Err(error) = sample_pages(pidfd.as_fd(), pid, &all[0]) {
        return eprintln!("skipped: pages cannot be looked at here: {error}");
    }
    let turn = Cell::new(0);
    criterion.bench_function("look/1-tib", |bench| {
        let next = || {
            turn.set((turn.get() + 1) % all.len());
            turn.get()
        };
        let look = |at: usize| black_box(sample_pages(pidfd.as_fd(), pid, &all[at]).expect("it lives"));
        bench.iter_batched(next, look, BatchSize::PerIteration);
    });
    // What a look cannot do without, by itself: the kernel is asked once where the pages are. The goal compares with it, so that a slow
    // machine is slow for both.
    criterion.bench_function("look/system-call", |bench| {
        let next = || {
            turn.set((turn.get() + 1) % all.len());
            turn.get()
        };
        bench.iter_batched(next, |at: usize| black_box(ask(pid, &all[at])), BatchSize::PerIteration);
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(8));
    targets = looks
}
criterion_main!(benches);
