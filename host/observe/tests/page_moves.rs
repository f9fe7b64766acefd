//! Moves of pages, timed by the kernel. A machine with one node moves pages when it is told to put free memory together.

use std::{
    fs,
    io::ErrorKind,
    thread,
    time::{Duration, Instant},
};
use vnuma_observe::page_moves::PageMoves;

const COMPACT: &str = "/proc/sys/vm/compact_memory";
const PAGE: usize = 4096;

/// Memory with holes: every other page of it was given back.
struct Holes(*mut libc::c_void);

impl Holes {
    const LENGTH: usize = 64 << 20;

    fn new() -> Self {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever the kernel likes; advice, a write and the holes are within it.
        unsafe {
            let at = libc::mmap(std::ptr::null_mut(), Self::LENGTH, access, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::madvise(at, Self::LENGTH, libc::MADV_NOHUGEPAGE);
            libc::memset(at, 1, Self::LENGTH);
            for offset in (0..Self::LENGTH).step_by(2 * PAGE) {
                libc::madvise(at.byte_add(offset), PAGE, libc::MADV_DONTNEED);
            }
            Self(at)
        }
    }
}

impl Drop for Holes {
    fn drop(&mut self) {
        // SAFETY: the mapping is whole, and there is no reference to it.
        unsafe { libc::munmap(self.0, Self::LENGTH) };
    }
}

#[test]
#[cfg_attr(not(root), ignore = "needs root, for BPF")]
fn moves_of_this_thread_are_timed_and_no_others() {
    let timer = match PageMoves::of_this_thread() {
        Ok(timer) => timer,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    assert_eq!(timer.take_longest().unwrap(), Duration::ZERO);
    let compact = || match fs::write(COMPACT, "1") {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => panic!("{COMPACT}: {error}"),
    };
    let holes = Holes::new();
    let begun = Instant::now();
    if !compact() {
        return eprintln!("skipped: this kernel has no {COMPACT}");
    }
    let (longest, all) = (timer.take_longest().unwrap(), begun.elapsed());
    assert!(Duration::ZERO < longest && longest < all, "{longest:?} of {all:?}");
    assert_eq!(timer.take_longest().unwrap(), Duration::ZERO, "it was taken");
    drop(holes);

    let _holes = Holes::new();
    thread::spawn(compact).join().unwrap();
    assert_eq!(timer.take_longest().unwrap(), Duration::ZERO, "another thread's");
}
