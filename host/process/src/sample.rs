//! A sample of the pages of another process: the node of each, how large a page it is part of, and what keeps it where it is.
//!
//! | what | by | where it cannot be had |
//! |---|---|---|
//! | node | `move_pages(2)`, which only looks | the sample fails |
//! | swapped out, mapped by others as well | `/proc/PID/pagemap` | the sample fails |
//! | part of a huge page | `PAGEMAP_SCAN` (Linux 6.7), else `/proc/kpageflags` | [`PageKind::Unknown`] |
//! | merged by KSM, locked, of a pool | `/proc/kpageflags`, for root | taken not to be |
//!
//! What it costs depends on the number of pages that are looked at, not on the size of the process.

use crate::{PAGES_AT_ONCE, PageState, find_pages};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::fs::FileExt,
    },
};
use vnuma_model::{HostNodeId, PageKind};
use vnuma_random::Rng;

/// A page of the smallest size, bytes.
pub const BASE_PAGE: u64 = 4096;

/// What is known of a page that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledPage {
    /// Its node.
    pub node: HostNodeId,
    /// The size of page that it is part of.
    pub kind: PageKind,
    /// Other processes, or other mappings, have it as well: `move_pages` leaves it.
    pub shared: bool,
    /// KSM has merged it with pages of equal content.
    pub merged: bool,
    /// It is locked (`mlock`). It can be moved all the same.
    pub locked: bool,
}

/// An address of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// A page is there.
    Page(SampledPage),
    /// It is in swap.
    Swapped,
    /// Nothing is there yet, or any more, or the zero page.
    Absent,
}

/// Addresses to look at, in `bytes` from `start` on: all pages of `page` bytes if these are at most `most`, else one of each of
/// `most` equal parts, which `seed` chooses. Where memory begins and how large it is may be what a hypervisor says: there is none
/// beyond the last address.
pub fn choose_addresses(start: u64, bytes: u64, page: u64, most: u64, seed: u64) -> Vec<u64> {
    let pages = bytes.min(u64::MAX - start) / page.max(1);
    if pages <= most {
        return (0..pages).map(|at| start + at * page).collect();
    }
    let mut random = Rng::new(seed);
    let bound = |part: u64| (u128::from(part) * u128::from(pages) / u128::from(most)) as u64;
    let choose = |part: u64| {
        let (first, end) = (bound(part), bound(part + 1));
        start + (first + random.number() % (end - first)) * page
    };
    (0..most).map(choose).collect()
}

/// Looks at these addresses of the process behind `pidfd` (whose number is `pid`).
pub fn sample_pages(pidfd: BorrowedFd<'_>, pid: i32, addresses: &[u64]) -> io::Result<Vec<Sampled>> {
    let map = PageMap::open(pid)?;
    let mut sample = Vec::with_capacity(addresses.len());
    for addresses in addresses.chunks(PAGES_AT_ONCE) {
        // The file stays that of the process that it was opened for. If that is another one, this fails.
        let states = find_pages(pidfd, pid, addresses)?;
        for (&address, state) in addresses.iter().zip(states) {
            sample.push(map.look(address, state)?);
        }
    }
    Ok(sample)
}

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const EXCLUSIVE: u64 = 1 << 56;
const FRAME: u64 = (1 << 55) - 1;
/// Bits of an entry of `/proc/kpageflags` (include/linux/kernel-page-flags.h and include/uapi/linux/kernel-page-flags.h).
const POOL: u64 = 1 << 17;
const MERGED: u64 = 1 << 21;
const HUGE: u64 = 1 << 22;
const LOCKED: u64 = 1 << 33;

/// What the kernel tells of the pages of a process.
struct PageMap {
    pages: File,
    /// None without root's rights, or without such a file.
    flags: Option<File>,
}

impl PageMap {
    fn open(pid: i32) -> io::Result<Self> {
        let pages = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Self { pages, flags: File::open("/proc/kpageflags").ok() })
    }

    fn look(&self, address: u64, state: PageState) -> io::Result<Sampled> {
        let mut entry = [0; 8];
        // Nothing is read beyond the end of the address space, or of a process that has ended.
        if self.pages.read_at(&mut entry, address / BASE_PAGE * 8)? < 8 {
            return Ok(Sampled::Absent);
        }
        let entry = u64::from_ne_bytes(entry);
        let PageState::On(node) = state else {
            let swapped = entry & (PRESENT | SWAPPED) == SWAPPED;
            return Ok(if swapped { Sampled::Swapped } else { Sampled::Absent });
        };
        // Between the two looks it may have gone.
        if entry & PRESENT == 0 {
            return Ok(Sampled::Absent);
        }
        let flags = self.flags_of(entry & FRAME);
        let has = |flag: u64| flags.is_some_and(|flags| flags & flag != 0);
        let kind = match (scan_huge(&self.pages, address), flags) {
            _ if has(POOL) => PageKind::Pool,
            (Some(true), _) => PageKind::Huge,
            (Some(false), _) => PageKind::Base,
            (None, Some(_)) if has(HUGE) => PageKind::Huge,
            (None, Some(_)) => PageKind::Base,
            (None, None) => PageKind::Unknown,
        };
        // A huge page is mapped once for all of its parts.
        let shared = entry & EXCLUSIVE == 0;
        Ok(Sampled::Page(SampledPage { node, kind, shared, merged: has(MERGED), locked: has(LOCKED) }))
    }

    /// A process that may not see frames reads frame 0.
    fn flags_of(&self, frame: u64) -> Option<u64> {
        let mut entry = [0; 8];
        let file = self.flags.as_ref().filter(|_| frame != 0)?;
        (file.read_at(&mut entry, frame * 8).ok()? == 8).then(|| u64::from_ne_bytes(entry))
    }
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Default)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl =
    (3 << 30 | (size_of::<ScanArgument>() as libc::Ioctl) << 16 | (b'f' as libc::Ioctl) << 8 | 16) as _;
const IS_PRESENT: u64 = 1 << 3;
const IS_HUGE: u64 = 1 << 6;

/// Is the page at this address part of a huge one? `None`: this kernel has no `PAGEMAP_SCAN`, or the page has gone.
fn scan_huge(pages: &File, address: u64) -> Option<bool> {
    let start = address / BASE_PAGE * BASE_PAGE;
    let mut region = ScanRegion::default();
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        start,
        end: start + BASE_PAGE,
        vec: (&raw mut region) as u64,
        vec_len: 1,
        category_mask: IS_PRESENT,
        return_mask: IS_PRESENT | IS_HUGE,
        ..ScanArgument::default()
    };
    // SAFETY: the kernel reads and writes one argument of the size that it has, and writes at most one region to `vec`, which
    // is `region`. Both live until the call has returned. No flag is set, so that the other process is not changed.
    let found = unsafe { libc::ioctl(pages.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
    (found == 1).then_some(region.categories & IS_HUGE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_pidfd;
    use proptest::prelude::*;
    use std::{
        os::fd::{AsFd, FromRawFd},
        ptr::null_mut,
    };

    const MIB: u64 = 1 << 20;

    /// Memory of this process, none of it there yet. It begins where a huge page can.
    struct Memory {
        mapped: *mut libc::c_void,
        length: usize,
        start: u64,
    }

    impl Memory {
        fn new(bytes: u64) -> Self {
            let length = (bytes + 2 * MIB) as usize;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping, wherever the kernel likes.
            let mapped =
                unsafe { libc::mmap(null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            assert_ne!(mapped, libc::MAP_FAILED);
            Self { mapped, length, start: (mapped as u64).next_multiple_of(2 * MIB) }
        }

        fn touch(&self, offset: u64) {
            // SAFETY: inside of the mapping, which is writable, and there is no reference to it.
            unsafe { *((self.start + offset) as *mut u8) = 1 };
        }

        fn advise(&self, advice: libc::c_int) -> i32 {
            // SAFETY: a range of the mapping; no advice that is given here takes the mapping away.
            unsafe { libc::madvise(self.start as *mut libc::c_void, self.length - 2 * MIB as usize, advice) }
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: the mapping is whole, and there is no reference to it any more.
            unsafe { libc::munmap(self.mapped, self.length) };
        }
    }

    /// What is found there; none where this machine does not let anybody look.
    fn look(addresses: &[u64]) -> Option<Vec<Sampled>> {
        let pid = std::process::id().cast_signed();
        let pidfd = open_pidfd(pid).expect("a pidfd");
        sample_pages(pidfd.as_fd(), pid, addresses)
            .inspect_err(|error| eprintln!("skipped: pages cannot be looked at here: {error}"))
            .ok()
    }

    #[test]
    fn pages_that_are_there_are_told_from_those_that_are_not() {
        let memory = Memory::new(4 * MIB);
        memory.advise(libc::MADV_NOHUGEPAGE);
        let offsets = [0, 5 * BASE_PAGE, 700 * BASE_PAGE];
        offsets.iter().for_each(|offset| memory.touch(*offset));
        let addresses: Vec<u64> = (0..1024).map(|page| memory.start + page * BASE_PAGE).collect();
        let Some(found) = look(&addresses) else { return };
        for (page, found) in found.iter().enumerate() {
            let there = offsets.contains(&(page as u64 * BASE_PAGE));
            match found {
                Sampled::Page(found) => {
                    assert!(there, "page {page}");
                    assert!(matches!(found.kind, PageKind::Base | PageKind::Unknown), "{found:?}");
                    assert!(!found.shared && !found.merged && !found.locked, "{found:?}");
                }
                other => assert!(!there && *other == Sampled::Absent, "page {page}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_locked_page_is_seen_to_be_locked() {
        let memory = Memory::new(2 * MIB);
        memory.advise(libc::MADV_NOHUGEPAGE);
        memory.touch(0);
        // SAFETY: a page of the mapping.
        if unsafe { libc::mlock(memory.start as *const libc::c_void, 4096) } != 0 {
            eprintln!("skipped: mlock is not allowed");
            return;
        }
        if File::open("/proc/kpageflags").is_err() {
            eprintln!("skipped: /proc/kpageflags cannot be read");
            return;
        }
        let Some(found) = look(&[memory.start]) else { return };
        let [Sampled::Page(page)] = found[..] else { panic!("{found:?}") };
        assert!(page.locked, "{page:?}");
    }

    #[test]
    fn a_page_that_is_mapped_twice_is_shared() {
        // SAFETY: the name is a string of C.
        let file = unsafe { libc::memfd_create(c"sample".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(file >= 0);
        // SAFETY: the call has just made this descriptor, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(file) };
        file.set_len(BASE_PAGE).expect("a page");
        let map = || {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, wherever the kernel likes.
            let at = unsafe { libc::mmap(null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
            assert_ne!(at, libc::MAP_FAILED);
            // SAFETY: the page was mapped just now, to be written.
            unsafe { *at.cast::<u8>() = 1 };
            at
        };
        let is_shared = |at: *mut libc::c_void| {
            let found = look(&[at as u64])?;
            let [Sampled::Page(page)] = found[..] else { panic!("{found:?}") };
            Some(page.shared)
        };
        let first = map();
        let Some(alone) = is_shared(first) else { return };
        let second = map();
        assert_eq!((alone, is_shared(first)), (false, Some(true)));
        for at in [first, second] {
            // SAFETY: a mapping of this test, to which there is no reference any more.
            unsafe { libc::munmap(at, 4096) };
        }
    }

    #[test]
    fn a_huge_page_is_seen_as_one() {
        let memory = Memory::new(2 * MIB);
        memory.advise(libc::MADV_HUGEPAGE);
        (0..512).for_each(|page| memory.touch(page * BASE_PAGE));
        // MADV_COLLAPSE, since Linux 6.1.
        if memory.advise(25) != 0 {
            eprintln!("skipped: no huge page: {}", io::Error::last_os_error());
            return;
        }
        let Some(found) = look(&[memory.start, memory.start + 300 * BASE_PAGE]) else { return };
        for found in found {
            let Sampled::Page(page) = found else { panic!("{found:?}") };
            if page.kind != PageKind::Unknown {
                assert_eq!((page.kind, page.shared), (PageKind::Huge, false));
            }
        }
    }

    #[test]
    fn a_process_that_has_ended_cannot_be_looked_at() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let pidfd = open_pidfd(pid).expect("a pidfd");
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert!(sample_pages(pidfd.as_fd(), pid, &[4096]).is_err());
    }

    proptest! {
        #[test]
        fn addresses_are_pages_of_the_range_one_of_each_part(
            start in (0_u64..1 << 35).prop_map(|page| page * BASE_PAGE),
            bytes in 0_u64..1 << 44,
            page in prop_oneof![Just(BASE_PAGE), Just(2 * MIB), Just(1024 * MIB)],
            most in 1_u64..3000,
            seed in any::<u64>(),
        ) {
            let chosen = choose_addresses(start, bytes, page, most, seed);
            let pages = bytes / page;
            prop_assert_eq!(chosen.len() as u64, pages.min(most));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            for (part, address) in chosen.iter().enumerate() {
                let at = (address - start) / page;
                prop_assert_eq!((address - start) % page, 0);
                prop_assert!(at < pages);
                if pages > most {
                    // Its part, by the definition.
                    let (part, pages, most) = (part as u128, u128::from(pages), u128::from(most));
                    let at = u128::from(at);
                    prop_assert!(part * pages / most <= at && at < (part + 1) * pages / most);
                }
            }
        }
    }

    #[test]
    fn memory_that_is_said_to_go_on_beyond_the_last_address_ends_there() {
        let start = u64::MAX - 10 * BASE_PAGE;
        for most in [5, 100] {
            let chosen = choose_addresses(start, u64::MAX, BASE_PAGE, most, 1);
            assert_eq!(chosen.len() as u64, most.min(10));
            assert!(chosen.iter().all(|address| (start..=u64::MAX - BASE_PAGE).contains(address)));
        }
    }

    #[test]
    fn another_seed_chooses_other_addresses() {
        let choose = |seed| choose_addresses(0, 1 << 40, BASE_PAGE, 100, seed);
        assert_eq!(choose(1), choose(1));
        assert_ne!(choose(1), choose(2));
    }
}
