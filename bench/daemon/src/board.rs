//! Memory that the bench shares with its VMs: a place for each vCPU.

use anyhow::Context;
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use std::{
    fs::OpenOptions,
    num::NonZeroUsize,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicI32, AtomicU32, AtomicU64},
};

/// What bench and VM know of a vCPU.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Place {
    /// Its thread; 0 before it runs.
    pub tid: AtomicI32,
    /// The thread sleeps on this word, and wakes up when it changes.
    pub wake: AtomicU32,
    /// Guest node that the last move made right.
    pub wanted: AtomicU32,
    /// When that began, `CLOCK_MONOTONIC`, nanoseconds.
    pub moved_ns: AtomicU64,
    /// When the guest had woken up and read it, likewise.
    pub seen_ns: AtomicU64,
    /// Of the first vCPU of a VM: 1 while its QEMU sends events without end.
    pub flood: AtomicU32,
}

/// Places of all vCPUs, in the order of the VMs. Mapped until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Board {
    first: NonNull<Place>,
    count: usize,
}

// SAFETY: it refers to memory that stays mapped and consists of atomics.
unsafe impl Send for Board {}
// SAFETY: likewise.
unsafe impl Sync for Board {}

impl Board {
    /// Makes the file.
    pub fn create(path: &Path, count: usize) -> anyhow::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        file.set_len((count * size_of::<Place>()) as u64)?;
        Self::open(path)
    }

    /// Maps the file.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        let length = usize::try_from(file.metadata()?.len())?;
        let size = NonZeroUsize::new(length).context("an empty board")?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, &file, 0)? };
        Ok(Self { first: address.cast(), count: length / size_of::<Place>() })
    }

    /// All places.
    pub fn places(&self) -> &[Place] {
        // SAFETY: so many places are mapped, for as long as the process runs; they are atomics, for which any bytes are
        // valid, and the mapping is aligned to a page.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Sleeps until the word is another one, or for no reason.
pub fn sleep_on(word: &AtomicU32, value: u32) {
    // SAFETY: the kernel reads the word, which outlives the call; there is no timeout.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            std::ptr::null::<libc::timespec>(),
        )
    };
}

/// Wakes the thread that sleeps on the word.
pub fn wake(word: &AtomicU32) {
    word.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the kernel uses the address only as a key.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// Wakes threads that sleep on a word that has another value now.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel uses the address only as a key.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// `CLOCK_MONOTONIC`, nanoseconds.
pub fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |now| now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_one_writes_the_other_reads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("board");
        let board = Board::create(&path, 3).unwrap();
        let other = Board::open(&path).unwrap();
        board.places()[2].seen_ns.store(7, Ordering::Relaxed);
        assert_eq!(other.places()[2].seen_ns.load(Ordering::Relaxed), 7);
        assert_eq!(other.places().len(), 3);
        assert!(Board::create(&path, 3).is_err());
    }
}
