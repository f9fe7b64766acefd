//! Which threads the BPF programs watch, and how: two bits for each thread id that there can be, in memory that both share. The
//! programs look a thread up whenever the scheduler moves any, and this takes them two loads.

use libbpf_rs::{MapCore, MapHandle};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    io,
    num::NonZero,
    os::fd::AsFd,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
};
use vnuma_abi_bpf::{PIDS, WATCHED_BITS};

/// Threads of a word.
const THREADS: u32 = u64::BITS / WATCHED_BITS;
const WORDS: usize = (PIDS / THREADS) as usize;
const SIZE: NonZero<usize> = NonZero::new(WORDS * size_of::<u64>()).expect("there are threads");
/// Bits of the first thread of a word.
const FIRST: u64 = (1 << WATCHED_BITS) - 1;

/// The memory of the map `watched`. The programs change it at any time, so all accesses are atomic.
#[derive(Debug)]
pub(super) struct Watched(NonNull<AtomicU64>);

// SAFETY: the mapping belongs to the process, not to a thread, and everything in it is atomic.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Watched {
    /// Maps it.
    pub(super) fn of(map: &MapHandle) -> io::Result<Self> {
        if (map.max_entries() as usize, map.value_size() as usize) != (WORDS, size_of::<u64>()) {
            return Err(io::Error::other("the map `watched` has another size"));
        }
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap(None, SIZE, protection, MapFlags::MAP_SHARED, map.as_fd(), 0)? };
        Ok(Self(at.cast()))
    }

    /// The word of a thread, and the position of its bits. `None`: no thread has this number.
    fn word(&self, tid: i32) -> Option<(&AtomicU64, u32)> {
        let tid = u32::try_from(tid).ok().filter(|tid| *tid < PIDS)?;
        // SAFETY: inside the mapping, which lives as long as `self`, and is aligned to a page; any bits are a valid word.
        let word = unsafe { self.0.add((tid / THREADS) as usize).as_ref() };
        Some((word, tid % THREADS * WATCHED_BITS))
    }

    /// Watches a thread in this way, or not any more (0). With `only`, one that is not watched stays so: its program may have seen its
    /// end.
    pub(super) fn set(&self, tid: i32, how: u8, only: bool) {
        let Some((word, shift)) = self.word(tid) else { return };
        let changed = |bits: u64| {
            let unwatched = bits >> shift & FIRST == 0;
            (!only || !unwatched).then(|| bits & !(FIRST << shift) | (u64::from(how) & FIRST) << shift)
        };
        // Fails only if nothing is to be changed.
        let _ = word.fetch_update(SeqCst, SeqCst, changed);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: there is no reference into the mapping any more.
        if let Err(error) = unsafe { munmap(self.0.cast(), SIZE.get()) } {
            tracing::error!(%error, "cannot unmap the threads that are watched");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the map is, in memory of this process alone.
    fn anonymous() -> Watched {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { nix::sys::mman::mmap_anonymous(None, SIZE, protection, MapFlags::MAP_PRIVATE) };
        Watched(at.expect("memory").cast())
    }

    fn bits(watched: &Watched, tid: i32) -> u64 {
        let (word, shift) = watched.word(tid).expect("a thread");
        word.load(SeqCst) >> shift & FIRST
    }

    #[test]
    fn each_thread_has_bits_of_its_own() {
        let watched = anonymous();
        let tids = [1, 31, 32, 33, PIDS.cast_signed() - 1];
        for (at, tid) in tids.into_iter().enumerate() {
            watched.set(tid, [1, 2][at % 2], false);
        }
        assert_eq!(tids.map(|tid| bits(&watched, tid)), [1, 2, 1, 2, 1]);
        assert_eq!([0, 2, 30, 34].map(|tid| bits(&watched, tid)), [0; 4]);
        watched.set(32, 0, false);
        watched.set(33, 1, true);
        watched.set(34, 1, true);
        assert_eq!([31, 32, 33, 34].map(|tid| bits(&watched, tid)), [2, 0, 1, 0]);
    }

    #[test]
    fn numbers_that_no_thread_has_change_nothing() {
        let watched = anonymous();
        for tid in [-1, i32::MIN, i32::MAX, PIDS.cast_signed()] {
            watched.set(tid, 1, false);
            assert!(watched.word(tid).is_none());
        }
    }
}
