//! Which threads the BPF programs watch, and how: two bits for each thread id that there can be, in memory that both share. The
//! programs look a thread up whenever the scheduler moves any, and this takes them two loads. Beside it, what they have reported of
//! the allowed CPUs of threads.

use libbpf_rs::{MapCore, MapHandle};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    io,
    num::NonZero,
    os::fd::AsFd,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
};
use vnuma_abi_bpf::{MASKS, PIDS, WATCHED_BITS};

/// Threads of a word.
const THREADS: u32 = u64::BITS / WATCHED_BITS;
const WORDS: NonZero<usize> = NonZero::new((PIDS / THREADS) as usize).expect("there are threads");
/// Bits of the first thread of a word.
const FIRST: u64 = (1 << WATCHED_BITS) - 1;

/// Words of a map. The programs change them at any time, so all accesses are atomic.
#[derive(Debug)]
struct Words {
    at: NonNull<AtomicU64>,
    count: NonZero<usize>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and everything in it is atomic.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn size(count: NonZero<usize>) -> NonZero<usize> {
        count.saturating_mul(const { NonZero::new(size_of::<u64>()).expect("a word has bytes") })
    }

    /// Maps them.
    fn of(map: &MapHandle, count: NonZero<usize>) -> io::Result<Self> {
        if (map.max_entries() as usize, map.value_size() as usize) != (count.get(), size_of::<u64>()) {
            return Err(io::Error::other(format!("the map `{}` has another size", map.name().display())));
        }
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap(None, Self::size(count), protection, MapFlags::MAP_SHARED, map.as_fd(), 0)? };
        Ok(Self { at: at.cast(), count })
    }

    fn get(&self, index: u32) -> Option<&AtomicU64> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.count.get())?;
        // SAFETY: inside the mapping, which lives as long as `self`, and is aligned to a page; any bits are a valid word.
        Some(unsafe { self.at.add(index).as_ref() })
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: there is no reference into the mapping any more.
        if let Err(error) = unsafe { munmap(self.at.cast(), Self::size(self.count).get()) } {
            tracing::error!(%error, "cannot unmap memory that is shared with the BPF programs");
        }
    }
}

/// The memory of the maps `watched` and `masks`.
#[derive(Debug)]
pub(super) struct Watched {
    threads: Words,
    masks: Words,
}

impl Watched {
    /// Maps both.
    pub(super) fn of(watched: &MapHandle, masks: &MapHandle) -> io::Result<Self> {
        let count = const { NonZero::new(MASKS as usize).expect("there are masks") };
        Ok(Self { threads: Words::of(watched, WORDS)?, masks: Words::of(masks, count)? })
    }

    /// The word of a thread, and the position of its bits. `None`: no thread has this number.
    fn word(&self, tid: i32) -> Option<(&AtomicU64, u32)> {
        let tid = u32::try_from(tid).ok().filter(|tid| *tid < PIDS)?;
        Some((self.threads.get(tid / THREADS)?, tid % THREADS * WATCHED_BITS))
    }

    /// The next time that its allowed CPUs are set makes a record, whatever they are.
    pub(super) fn forget_mask(&self, tid: i32) {
        let word = u32::try_from(tid).ok().and_then(|tid| self.masks.get(tid % MASKS));
        word.into_iter().for_each(|word| word.store(0, SeqCst));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As the map is, in memory of this process alone.
    fn anonymous() -> Watched {
        let words = |count| {
            let (size, protection) = (Words::size(count), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
            // SAFETY: a new mapping, at an address that the kernel chooses.
            let at = unsafe { nix::sys::mman::mmap_anonymous(None, size, protection, MapFlags::MAP_PRIVATE) };
            Words { at: at.expect("memory").cast(), count }
        };
        Watched { threads: words(WORDS), masks: words(NonZero::new(MASKS as usize).expect("some")) }
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
            watched.forget_mask(tid);
            assert!(watched.word(tid).is_none());
        }
    }

    #[test]
    fn a_mask_is_forgotten_by_the_remainder_of_the_thread() {
        let watched = anonymous();
        let mask = |at: u32| watched.masks.get(at).expect("an entry");
        [5, 6].iter().for_each(|at| mask(*at).store(7, SeqCst));
        watched.forget_mask(MASKS.cast_signed() + 5);
        assert_eq!([5, 6].map(|at| mask(at).load(SeqCst)), [0, 7]);
    }
}
