//! The shared memory.

use crate::publish::{Step, WORD, header};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::{MapFlags, ProtFlags, mmap, munmap},
        stat::fstat,
    },
};
use std::{
    io,
    mem::offset_of,
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};
use vnuma_abi_topology_channel::{Header, REGION_SIZE};

/// A region of its own memory, which can neither grow nor shrink: nobody who shares it can make a store
/// of this process fault.
#[derive(Debug)]
pub struct Region {
    memory: OwnedFd,
    address: NonNull<AtomicU64>,
}

// SAFETY: the mapping belongs to this value and stays at its address; it is accessed by atomic
// loads and stores only.
unsafe impl Send for Region {}

impl Region {
    /// A region with its header and no publication.
    pub fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memory = memfd_create(c"vnuma-topology", flags)?;
        nix::unistd::ftruncate(&memory, REGION_SIZE as i64)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&memory, FcntlArg::F_ADD_SEALS(seals))?;
        Self::map(memory)
    }

    /// A region that another process made and may have died writing, and the generation that it says is published: the
    /// guest could have written that, so it is good for a hint only.
    pub(crate) fn take_over(memory: OwnedFd) -> io::Result<(Self, u64)> {
        let seals = SealFlag::from_bits_truncate(fcntl(&memory, FcntlArg::F_GET_SEALS)?);
        let size = fstat(&memory)?.st_size;
        if !seals.contains(SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK) || size != REGION_SIZE as i64 {
            return Err(io::Error::other(format!(
                "{size} bytes with {seals:?}, not {REGION_SIZE} that stay"
            )));
        }
        let region = Self::map(memory)?;
        let published = region.load(offset_of!(Header, published));
        Ok((region, published))
    }

    fn map(memory: OwnedFd) -> io::Result<Self> {
        let size = NonZeroUsize::new(REGION_SIZE).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe {
            mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &memory, 0)?
        };
        let mut region = Self { memory, address: address.cast() };
        region.apply_all(&header());
        Ok(region)
    }

    /// The memory, to be shared with a VM.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Does one step.
    ///
    /// # Panics
    /// When a store is not aligned or not inside the region, which no step of [`crate::publish`] is.
    pub fn apply(&mut self, step: &Step) {
        match *step {
            Step::Fence => fence(Ordering::SeqCst),
            Step::Store { offset, value } => self.word(offset).store(value, Ordering::Release),
        }
    }

    /// Loads a word, which may have any value.
    ///
    /// # Panics
    /// As [`Self::apply`].
    pub(crate) fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(WORD) && offset + WORD <= REGION_SIZE, "offset {offset:#x}");
        // SAFETY: inside the mapping and aligned, as was just checked; mmap returns page aligned
        // memory. Others access it at the same time, hence the atomic.
        unsafe { self.address.add(offset / WORD).as_ref() }
    }

    /// Does all steps in order.
    pub fn apply_all(&mut self, steps: &[Step]) {
        steps.iter().for_each(|step| self.apply(step));
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this size, and nothing refers to it any more.
        // It cannot fail for such a mapping.
        let _ = unsafe { munmap(self.address.cast(), REGION_SIZE) };
    }
}
