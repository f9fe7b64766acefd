//! One userfaultfd descriptor and its ioctls.
//!
//! The layouts are those of `linux/userfaultfd.h`; a test compares the sizes and the numbers that follow from them with those
//! that a C compiler makes of that header. The crate `userfaultfd` stops at older kernels, which lack what the pager needs.

use crate::error::PagerError;
use nix::errno::Errno;
use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// `UFFD_API`.
const API: u64 = 0xaa;
/// Bits of `struct uffdio_api::features`.
pub(crate) mod feature {
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    pub const MISSING_SHMEM: u64 = 1 << 5;
    pub const THREAD_ID: u64 = 1 << 8;
    pub const MINOR_SHMEM: u64 = 1 << 10;
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    pub const POISON: u64 = 1 << 14;
}

/// The features without which there is no pager, the oldest kernel that has each, and its name.
const NEEDED: [(u64, &str, &str); 5] = [
    (feature::PAGEFAULT_FLAG_WP, "UFFD_FEATURE_PAGEFAULT_FLAG_WP", "5.7"),
    (feature::MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM", "4.11"),
    (feature::THREAD_ID, "UFFD_FEATURE_THREAD_ID", "4.14"),
    (feature::MINOR_SHMEM, "UFFD_FEATURE_MINOR_SHMEM", "5.14"),
    (feature::WP_HUGETLBFS_SHMEM, "UFFD_FEATURE_WP_HUGETLBFS_SHMEM", "5.19"),
];

const REGISTER_MISSING: u64 = 1 << 0;
const REGISTER_WP: u64 = 1 << 1;
const REGISTER_MINOR: u64 = 1 << 2;
const WRITEPROTECT_WP: u64 = 1 << 0;
const WRITEPROTECT_DONTWAKE: u64 = 1 << 1;
const CONTINUE_WP: u64 = 1 << 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
pub(crate) struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
pub(crate) struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffdio_continue` and `struct uffdio_poison`, which are laid out alike.
#[repr(C)]
pub(crate) struct Resolve {
    range: Range,
    mode: u64,
    /// Bytes done, or a negative error number.
    done: i64,
}

mod ioctls {
    use super::{Api, Range, Register, Resolve, WriteProtect};
    nix::ioctl_none!(dev_new, 0xaa, 0x00);
    nix::ioctl_readwrite!(api, 0xaa, 0x3f, Api);
    nix::ioctl_readwrite!(register, 0xaa, 0x00, Register);
    nix::ioctl_read!(wake, 0xaa, 0x02, Range);
    nix::ioctl_readwrite!(write_protect, 0xaa, 0x06, WriteProtect);
    nix::ioctl_readwrite!(resume, 0xaa, 0x07, Resolve);
    nix::ioctl_readwrite!(poison, 0xaa, 0x08, Resolve);
}

/// How long a range was busy being changed by another thread of this process before the pager gives up: the
/// kernel's own reason for `EAGAIN` passes within a system call of that thread.
const AGAIN_LIMIT: u32 = 1_000_000;

/// One descriptor.
#[derive(Debug)]
pub(crate) struct Userfault {
    descriptor: OwnedFd,
    supported: u64,
}

impl Userfault {
    /// Opens a descriptor that sees faults of the kernel too, as a vCPU's are, and agrees on the features.
    pub(crate) fn open() -> Result<Self, PagerError> {
        let supported = Self::handshake(&open_descriptor()?, 0)?;
        for (bit, name, since) in NEEDED {
            if supported & bit == 0 {
                return Err(PagerError::Kernel { missing: name, since });
            }
        }
        let optional = supported & feature::POISON;
        let wanted = NEEDED.iter().fold(optional, |bits, (bit, ..)| bits | bit);
        // A descriptor takes one handshake that names features.
        let descriptor = open_descriptor()?;
        Self::handshake(&descriptor, wanted)?;
        Ok(Self { descriptor, supported })
    }

    fn handshake(descriptor: &OwnedFd, features: u64) -> Result<u64, PagerError> {
        let mut argument = Api { api: API, features, ioctls: 0 };
        // SAFETY: the kernel reads and writes one `Api`, which lives through the call.
        unsafe { ioctls::api(descriptor.as_raw_fd(), &raw mut argument) }
            .map_err(|error| PagerError::system("UFFDIO_API", error))?;
        Ok(argument.features)
    }

    /// Does the kernel have the feature?
    pub(crate) fn has(&self, bit: u64) -> bool {
        self.supported & bit != 0
    }

    /// Has the range report missing pages, pages that are in the file but not mapped, and writes to protected ones.
    pub(crate) fn register(&self, start: usize, len: usize) -> Result<(), PagerError> {
        let mode = REGISTER_MISSING | REGISTER_WP | REGISTER_MINOR;
        let mut argument = Register { range: range(start, len), mode, ioctls: 0 };
        // SAFETY: the kernel reads and writes one `Register`. Registration changes how faults of the range are
        // served and no memory.
        unsafe { ioctls::register(self.descriptor.as_raw_fd(), &raw mut argument) }
            .map_err(|error| PagerError::system("UFFDIO_REGISTER", error))?;
        Ok(())
    }

    /// Maps pages that are in the file, and wakes who waits for them.
    pub(crate) fn resume(&self, start: usize, len: usize, read_only: bool) -> Result<(), Errno> {
        let mode = if read_only { CONTINUE_WP } else { 0 };
        self.resolve(start, len, mode, ioctls::resume)
    }

    /// Makes every access to pages that are not mapped end in SIGBUS.
    pub(crate) fn poison(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.resolve(start, len, 0, ioctls::poison)
    }

    /// Goes on after a part of the range was done, and again while another thread changes the mappings.
    fn resolve(
        &self,
        start: usize,
        len: usize,
        mode: u64,
        ioctl: unsafe fn(libc::c_int, *mut Resolve) -> nix::Result<libc::c_int>,
    ) -> Result<(), Errno> {
        let mut finished = 0;
        let mut tries = 0;
        while finished < len {
            let mut argument = Resolve { range: range(start + finished, len - finished), mode, done: 0 };
            // SAFETY: the kernel reads and writes one `Resolve`. The range is one that this descriptor is
            // registered for, or the kernel refuses it.
            let outcome = unsafe { ioctl(self.descriptor.as_raw_fd(), &raw mut argument) };
            let done = usize::try_from(argument.done).unwrap_or(0);
            finished += done;
            match outcome {
                Ok(_) => {}
                // The kernel says so of a part too, with the part's length.
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    tries = if done > 0 { 0 } else { tries + 1 };
                    if tries > AGAIN_LIMIT {
                        return Err(Errno::EAGAIN);
                    }
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sets write protection of pages, or clears it; waiting writers are woken by the latter unless `quiet`.
    pub(crate) fn write_protect(
        &self,
        start: usize,
        len: usize,
        protect: bool,
        quiet: bool,
    ) -> Result<(), Errno> {
        let mode = match (protect, quiet) {
            (true, _) => WRITEPROTECT_WP,
            (false, true) => WRITEPROTECT_DONTWAKE,
            (false, false) => 0,
        };
        for _ in 0..AGAIN_LIMIT {
            let mut argument = WriteProtect { range: range(start, len), mode };
            // SAFETY: as in `resolve`, with a `WriteProtect`.
            match unsafe { ioctls::write_protect(self.descriptor.as_raw_fd(), &raw mut argument) } {
                Err(Errno::EAGAIN | Errno::EINTR) => std::thread::yield_now(),
                outcome => return outcome.map(drop),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Has threads that wait for these pages try again.
    pub(crate) fn wake(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut argument = range(start, len);
        // SAFETY: the kernel reads one `Range`.
        unsafe { ioctls::wake(self.descriptor.as_raw_fd(), &raw mut argument) }.map(drop)
    }

    /// Reads messages; `EAGAIN` when there is none.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        nix::unistd::read(&self.descriptor, buffer)
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn range(start: usize, len: usize) -> Range {
    Range { start: start as u64, len: len as u64 }
}

/// By the system call, and where that is not permitted by the device.
fn open_descriptor() -> Result<OwnedFd, PagerError> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes flags and returns a new descriptor or an error.
    let result = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if let Ok(number @ 0..) = i32::try_from(result) {
        // SAFETY: the kernel has just opened it for this process, and nothing else knows its number.
        return Ok(unsafe { OwnedFd::from_raw_fd(number) });
    }
    match Errno::last() {
        Errno::ENOSYS => {
            Err(PagerError::Kernel { missing: "userfaultfd (CONFIG_USERFAULTFD)", since: "4.3" })
        }
        Errno::EPERM => open_device(flags),
        error => Err(PagerError::system("userfaultfd", error)),
    }
}

fn open_device(flags: i32) -> Result<OwnedFd, PagerError> {
    let device = File::open("/dev/userfaultfd").map_err(|source| PagerError::Denied { source })?;
    // SAFETY: the ioctl takes flags by value and returns a new descriptor or an error.
    let number = unsafe { libc::ioctl(device.as_raw_fd(), ioctl_new(), flags) };
    if number < 0 {
        return Err(PagerError::Denied { source: io::Error::last_os_error() });
    }
    // SAFETY: the kernel has just opened it for this process, and nothing else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// `USERFAULTFD_IOC_NEW`, whose argument is a value and not a pointer.
const fn ioctl_new() -> libc::c_ulong {
    nix::request_code_none!(0xaa, 0x00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_numbers_are_those_of_the_header() {
        let sizes = [size_of::<Api>(), size_of::<Range>(), size_of::<Register>(), size_of::<WriteProtect>()];
        assert_eq!((sizes, size_of::<Resolve>()), ([24, 16, 32, 24], 32));
        let numbers = [
            nix::request_code_readwrite!(0xaa, 0x3f, size_of::<Api>()),
            nix::request_code_readwrite!(0xaa, 0x00, size_of::<Register>()),
            nix::request_code_read!(0xaa, 0x02, size_of::<Range>()),
            nix::request_code_readwrite!(0xaa, 0x06, size_of::<WriteProtect>()),
            nix::request_code_readwrite!(0xaa, 0x07, size_of::<Resolve>()),
        ];
        assert_eq!(numbers, [0xc018_aa3f, 0xc020_aa00, 0x8010_aa02, 0xc018_aa06, 0xc020_aa07]);
    }

    /// Why the pager does not use `UFFDIO_RWPROTECT`. A kernel on which this fails has a use for it: an invalid page could stay
    /// mapped, and would need no `MADV_DONTNEED` and `UFFDIO_CONTINUE`.
    #[test]
    fn no_mapping_has_both_write_protection_and_rwprotect() {
        const FEATURE_RWP: u64 = 1 << 17;
        const REGISTER_RWP: u64 = 1 << 3;
        let open = |features| {
            let descriptor = open_descriptor()?;
            Userfault::handshake(&descriptor, features).map(|supported| (descriptor, supported))
        };
        let (_, supported) = match open(0) {
            Ok(opened) => opened,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        if supported & FEATURE_RWP == 0 {
            return eprintln!("skipped: this kernel has no UFFD_FEATURE_RWP");
        }
        let wanted = NEEDED.iter().fold(FEATURE_RWP, |bits, (bit, ..)| bits | bit);
        let (descriptor, _) = open(wanted).expect("what the kernel offers");
        let page = std::num::NonZeroUsize::new(crate::PAGE_SIZE).expect("a page");
        let memory = crate::memory::Memory::new(page, false).expect("memory");
        let register = |mode| {
            let range = range(memory.guest.start(), crate::PAGE_SIZE);
            let mut argument = Register { range, mode, ioctls: 0 };
            // SAFETY: the kernel reads and writes one `Register`, which lives through the call, and the memory is this test's.
            unsafe { ioctls::register(descriptor.as_raw_fd(), &raw mut argument) }.map(drop)
        };
        assert_eq!(register(REGISTER_WP | REGISTER_RWP), Err(Errno::EINVAL));
        assert_eq!(register(REGISTER_MINOR | REGISTER_RWP), Ok(()));
    }
}
