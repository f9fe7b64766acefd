//! The memory: one file in memory, mapped twice.

use crate::error::PagerError;
use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap},
    },
};
use std::{
    num::NonZeroUsize,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
};

/// One mapping of a file, for as long as the value lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays at its address and belongs to this value. This file accesses it through raw pointers only.
// Callers see to the order of accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: impl AsFd, len: NonZeroUsize) -> Result<Self, PagerError> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, file, 0) }
            .map_err(|error| PagerError::system("mmap", error))?;
        Ok(Self { address: address.cast(), len: len.get() })
    }

    pub(crate) fn start(&self) -> usize {
        self.address.as_ptr() as usize
    }

    /// Address of a byte.
    ///
    /// # Panics
    /// When it is not inside.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.len, "offset {offset} of {}", self.len);
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.address.add(offset) }
    }

    /// Advice that changes neither the content nor the protection of memory that others refer to.
    pub(crate) fn advise(&self, offset: usize, len: usize, advice: MmapAdvise) -> Result<(), Errno> {
        assert!(offset <= self.len && len <= self.len - offset, "{offset}+{len} of {}", self.len);
        // SAFETY: inside the mapping. The callers' advice concerns how pages are mapped; the content is the
        // file's and stays.
        unsafe { madvise(self.address.add(offset).cast(), len, advice) }
    }

    /// Keeps pages in memory from their first use on.
    pub(crate) fn lock_on_fault(&self) -> Result<(), Errno> {
        // SAFETY: the call neither moves nor changes memory.
        let result =
            unsafe { libc::mlock2(self.address.as_ptr().cast_const().cast(), self.len, libc::MLOCK_ONFAULT) };
        Errno::result(result).map(drop)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this size, and nothing refers to it any more. It cannot
        // fail for such a mapping.
        let _ = unsafe { munmap(self.address.cast(), self.len) };
    }
}

/// The file and its two mappings.
#[derive(Debug)]
pub(crate) struct Memory {
    file: OwnedFd,
    /// What the guest's vCPUs and devices use, and what reports faults.
    pub(crate) guest: Mapping,
    /// What the pager itself uses. It never faults towards user space.
    pub(crate) alias: Mapping,
}

impl Memory {
    /// Memory that can neither grow nor shrink, without huge pages, and which a child does not inherit: its
    /// mappings would not report faults, so that it would read and write behind the pager's back.
    pub(crate) fn new(len: NonZeroUsize, lock: bool) -> Result<Self, PagerError> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file =
            memfd_create(c"vnuma-dsm", flags).map_err(|error| PagerError::system("memfd_create", error))?;
        nix::unistd::ftruncate(&file, len.get() as i64)
            .map_err(|error| PagerError::system("ftruncate", error))?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))
            .map_err(|error| PagerError::system("fcntl(F_ADD_SEALS)", error))?;
        let memory = Self { guest: Mapping::new(&file, len)?, alias: Mapping::new(&file, len)?, file };
        for mapping in [&memory.guest, &memory.alias] {
            for advice in [MmapAdvise::MADV_NOHUGEPAGE, MmapAdvise::MADV_DONTFORK] {
                match mapping.advise(0, len.get(), advice) {
                    // A kernel without huge pages does not know the advice.
                    Err(Errno::EINVAL) if advice == MmapAdvise::MADV_NOHUGEPAGE => {}
                    outcome => outcome.map_err(|error| PagerError::system("madvise", error))?,
                }
            }
        }
        if lock {
            // Of the alias only: the kernel refuses MADV_DONTNEED on a locked mapping, and one locked mapping
            // keeps a page in memory for all.
            let refused = |error: Errno| PagerError::Lock { len: len.get(), source: error.into() };
            memory.alias.lock_on_fault().map_err(refused)?;
        }
        Ok(memory)
    }

    /// Gives memory back to the system; the bytes read as zeros afterwards.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, flags, offset as i64, len as i64)
    }
}
