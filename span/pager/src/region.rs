//! A region and what can be done with its pages.
//!
//! Each change has one order of steps in which no update of a guest is lost:
//!
//! | change | steps |
//! |---|---|
//! | install | write the alias, then map the page for the guest |
//! | upgrade | clear the write protection |
//! | downgrade | set the write protection, then read the alias |
//! | invalidate | take the mapping away, then read the alias |
//!
//! The other order of the last two copies the page while a vCPU still writes to it. The test `steals` shows both.
//! The system calls return when no CPU has the old right in its TLB any more, a vCPU's second-level tables included.

use crate::{
    Access, Fault, PAGE_SIZE, PageState,
    awaited::Awaited,
    error::PagerError,
    fault::{self, MESSAGE},
    memory::Memory,
    state::{Locked, PageError, States},
    uffd::{Userfault, feature},
};
use nix::{errno::Errno, sys::mman::MmapAdvise};
use std::{
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU8, Ordering},
};

/// The bytes of a page.
pub type Page = [u8; PAGE_SIZE];

/// How a region is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of descriptors, each with its own part of the pages. 1 to 256.
    pub shards: usize,
    /// Keep the memory from being swapped. Without it a page that was swapped out costs its reader more time, and nothing else.
    pub lock: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { shards: 1, lock: false }
    }
}

/// What this kernel can do beyond what is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Lost pages can be poisoned (Linux 6.6). Without it [`Region::poison`] is refused.
    pub poison: bool,
}

/// Largest number of shards.
const SHARD_LIMIT: usize = 256;
/// Stripes of pages that go to the shards in turn; each is a mapping of its own to the kernel, of which a process may have 65530.
const STRIPE_LIMIT: usize = 1024;
/// Smallest stripe in pages where there are enough pages: 2 MiB, what one page of page table maps.
const STRIPE_PAGES: usize = 512;
/// Messages read at once.
const BATCH: usize = 16;

/// Memory whose page faults are served in user space.
///
/// All methods take `&self` and may be called from any thread. Two changes of one page wait for each other.
#[derive(Debug)]
pub struct Region {
    // Closed first: a thread that still waits is let go and finds ordinary memory.
    shards: Vec<Userfault>,
    states: States,
    awaited: Awaited,
    stripe_pages: usize,
    memory: Memory,
}

impl Region {
    /// A region of `len` bytes, all pages invalid.
    pub fn create(len: usize, options: Options) -> Result<Self, PagerError> {
        let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(-1);
        if size != PAGE_SIZE as i64 {
            return Err(PagerError::PageSize { size });
        }
        let bytes = NonZeroUsize::new(len).filter(|_| len.is_multiple_of(PAGE_SIZE));
        let bytes = bytes.filter(|_| i64::try_from(len).is_ok()).ok_or(PagerError::Length { len })?;
        let pages = len / PAGE_SIZE;
        let limit = SHARD_LIMIT.min(pages);
        if options.shards == 0 || options.shards > limit {
            return Err(PagerError::Shards { shards: options.shards, limit });
        }
        // The descriptors first: where they are not permitted, no memory need be set up.
        let shards = (0..options.shards).map(|_| Userfault::open()).collect::<Result<Vec<_>, _>>()?;
        let memory = Memory::new(bytes, options.lock)?;
        let smallest = STRIPE_PAGES.max(pages.div_ceil(STRIPE_LIMIT));
        let stripe_pages = smallest.min(pages.div_ceil(options.shards));
        let region =
            Self { shards, states: States::new(pages), awaited: Awaited::default(), stripe_pages, memory };
        for first in (0..pages).step_by(region.stripe_pages) {
            let bytes = region.stripe_pages.min(pages - first) * PAGE_SIZE;
            let shard = region.shard_of(first as u64);
            region.shards[shard].register(region.memory.guest.start() + first * PAGE_SIZE, bytes)?;
        }
        region.expect_read_only_mapping()?;
        Ok(region)
    }

    /// Whether pages can be mapped read-only in one step shows only when it is done.
    fn expect_read_only_mapping(&self) -> Result<(), PagerError> {
        let mut locked = self
            .states
            .lock(0)
            .map_err(|error| PagerError::Message { shard: 0, detail: error.to_string() })?;
        let wrong = |error: PageError| match error {
            PageError::System { source, .. } if source.raw_os_error() == Some(libc::EINVAL) => {
                PagerError::Kernel { missing: "UFFDIO_CONTINUE_MODE_WP", since: "6.4" }
            }
            error => PagerError::System { call: "UFFDIO_CONTINUE", source: std::io::Error::other(error) },
        };
        self.write_alias(0, |_| {});
        self.map(0, Access::Read).map_err(wrong)?;
        self.unmap(0).map_err(wrong)?;
        locked.state = PageState::Invalid;
        let discarded = self.memory.discard(0, PAGE_SIZE);
        discarded.map_err(|error| PagerError::system("fallocate(FALLOC_FL_PUNCH_HOLE)", error))
    }

    /// Address of the guest's mapping, for KVM and the guest's threads. It stays while the region lives.
    ///
    /// Every access through it may wait for the handler. A handler must therefore not touch it.
    pub fn guest(&self) -> NonNull<u8> {
        self.memory.guest.at(0)
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.states.len() as usize * PAGE_SIZE
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.states.len()
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// The shard of a page: stripes of pages take turns.
    pub fn shard_of(&self, page: u64) -> usize {
        (page / self.stripe_pages as u64 % self.shards.len() as u64) as usize
    }

    /// Pages in a row that belong to one shard. The same length and number of shards give the same on every host.
    pub fn stripe_pages(&self) -> u64 {
        self.stripe_pages as u64
    }

    /// What this kernel has beyond what is needed.
    pub fn features(&self) -> Features {
        Features { poison: self.shards.iter().all(|shard| shard.has(feature::POISON)) }
    }

    /// The state of a page at this moment.
    pub fn state(&self, page: u64) -> Result<PageState, PageError> {
        self.states.get(page)
    }

    /// Becomes readable when [`Self::read_faults`] has something.
    ///
    /// # Panics
    /// When there is no such shard.
    pub fn shard_fd(&self, shard: usize) -> BorrowedFd<'_> {
        self.shards[shard].as_fd()
    }

    /// Appends faults of a shard that wait for the caller and returns how many there were; it does not wait for any.
    ///
    /// Faults that need nothing but a mapping are served here: the kernel may drop a mapping of the guest at any time
    /// (to swap the page out, or to move it), and the state says that the guest is allowed to have it.
    ///
    /// After an error `faults` has those that were read all the same: the kernel does not tell of them again.
    ///
    /// # Panics
    /// When there is no such shard.
    pub fn read_faults(&self, shard: usize, faults: &mut Vec<Fault>) -> Result<usize, PagerError> {
        let mut buffer = [0; MESSAGE * BATCH];
        let read = match self.shards[shard].read(&mut buffer) {
            Ok(read) => read,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(0),
            Err(error) => return Err(PagerError::system("read(userfaultfd)", error)),
        };
        self.take(shard, &buffer[..read], faults)
    }

    /// As [`Self::read_faults`], of messages that were read.
    fn take(&self, shard: usize, bytes: &[u8], faults: &mut Vec<Fault>) -> Result<usize, PagerError> {
        let (messages, rest) = bytes.as_chunks::<MESSAGE>();
        let (before, mut wrong) = (faults.len(), None);
        if !rest.is_empty() {
            wrong = Some(format!("{} bytes, no multiple of {MESSAGE}", bytes.len()));
        }
        for message in messages {
            let fault = match fault::parse(message, self.memory.guest.start(), self.pages()) {
                Ok(fault) => fault,
                Err(detail) => {
                    wrong.get_or_insert(detail);
                    continue;
                }
            };
            match self.settle(&fault) {
                Ok(true) => {}
                Ok(false) => faults.push(fault),
                Err(error) => {
                    wrong.get_or_insert(error.to_string());
                    faults.push(fault);
                }
            }
        }
        match wrong {
            None => Ok(faults.len() - before),
            Some(detail) => Err(PagerError::Message { shard, detail }),
        }
    }

    /// Serves a fault that the page's state allows; false when the state does not, and the handler has to act.
    pub fn settle(&self, fault: &Fault) -> Result<bool, PageError> {
        if !self.states.get(fault.page)?.allows(fault.access) {
            // A poisoned page needs nothing: who waits is woken and gets SIGBUS.
            if self.states.get(fault.page)? != PageState::Poisoned {
                return Ok(false);
            }
            self.wake(fault.page)?;
            return Ok(true);
        }
        let locked = self.states.lock(fault.page)?;
        if !locked.state.allows(fault.access) {
            return Ok(false);
        }
        let access = if locked.state == PageState::ReadWrite { Access::Write } else { Access::Read };
        match self.map(fault.page, access) {
            Ok(()) => {}
            // It is mapped: the fault was read late, after another one of the same page had been served.
            Err(PageError::System { source, .. }) if source.raw_os_error() == Some(libc::EEXIST) => {
                self.wake(fault.page)?;
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Gives the guest a page with this content, and wakes who waits for it. The page is invalid or poisoned before.
    pub fn install(&self, page: u64, content: &Page, access: Access) -> Result<(), PageError> {
        self.install_with(page, access, |bytes| bytes.copy_from_slice(content))
    }

    /// As [`Self::install`]; `fill` gets what the page held when it became invalid (zeros if it never was valid, or
    /// was discarded), for example to apply a delta.
    pub fn install_with(
        &self,
        page: u64,
        access: Access,
        fill: impl FnOnce(&mut Page),
    ) -> Result<(), PageError> {
        let mut locked = self.states.lock(page)?;
        if !matches!(locked.state, PageState::Invalid | PageState::Poisoned) {
            return locked.refuse("installed");
        }
        self.write_alias(page, fill);
        self.map(page, access)?;
        locked.state = match access {
            Access::Read => PageState::ReadOnly,
            Access::Write => PageState::ReadWrite,
        };
        self.awaited.take(&locked);
        Ok(())
    }

    /// Has `fill` change what an invalid or poisoned page holds, as [`Self::install_with`] does. The guest does not get it: it waits on.
    pub fn store(&self, page: u64, fill: impl FnOnce(&mut Page)) -> Result<(), PageError> {
        let locked = self.states.lock(page)?;
        if !matches!(locked.state, PageState::Invalid | PageState::Poisoned) {
            return locked.refuse("stored");
        }
        self.write_alias(page, fill);
        Ok(())
    }

    /// Lets the guest write to a page that it can read, and wakes who waits for that.
    pub fn upgrade(&self, page: u64) -> Result<(), PageError> {
        let mut locked = self.states.lock(page)?;
        if locked.state != PageState::ReadOnly {
            return locked.refuse("upgraded");
        }
        self.protect(page, false, false)?;
        locked.state = PageState::ReadWrite;
        self.awaited.take(&locked);
        Ok(())
    }

    /// Takes the right to write from the guest; `read` then gets the content.
    pub fn downgrade<T>(&self, page: u64, read: impl FnOnce(&Page) -> T) -> Result<T, PageError> {
        let mut locked = self.states.lock(page)?;
        if locked.state != PageState::ReadWrite {
            return locked.refuse("downgraded");
        }
        locked.unpinned("downgraded")?;
        self.protect(page, true, false)?;
        locked.state = PageState::ReadOnly;
        Ok(read(self.alias(&locked, page)))
    }

    /// Takes a page from the guest; `read` then gets the content, which stays for a later delta.
    pub fn invalidate<T>(&self, page: u64, read: impl FnOnce(&Page) -> T) -> Result<T, PageError> {
        let mut locked = self.states.lock(page)?;
        if !matches!(locked.state, PageState::ReadOnly | PageState::ReadWrite) {
            return locked.refuse("invalidated");
        }
        locked.unpinned("invalidated")?;
        self.unmap(page)?;
        locked.state = PageState::Invalid;
        Ok(read(self.alias(&locked, page)))
    }

    /// What a page that the guest cannot write holds: the content if it is read-only, the last content if invalid.
    pub fn peek<T>(&self, page: u64, read: impl FnOnce(&Page) -> T) -> Result<T, PageError> {
        let locked = self.states.lock(page)?;
        match locked.state {
            PageState::ReadWrite | PageState::Poisoned => locked.refuse("read"),
            PageState::Invalid | PageState::ReadOnly => Ok(read(self.alias(&locked, page))),
        }
    }

    /// Makes every access to a page whose content is lost an error instead of a wait: SIGBUS in a thread, an error of
    /// `KVM_RUN` in a vCPU, `EFAULT` of a system call. A thread that waits for it is woken.
    ///
    /// On a kernel before 6.6 this is `ENOTSUP` and the page is invalid: [`Self::features`] says so beforehand, and the
    /// owner of the region has to stop the guest.
    pub fn poison(&self, page: u64) -> Result<(), PageError> {
        let mut locked = self.states.lock(page)?;
        if locked.state == PageState::Poisoned {
            return Ok(());
        }
        locked.unpinned("poisoned")?;
        if locked.state != PageState::Invalid {
            self.unmap(page)?;
            locked.state = PageState::Invalid;
        }
        if !self.features().poison {
            return Err(system(page, "UFFDIO_POISON (Linux 6.6)", Errno::ENOTSUP));
        }
        // The kernel remembers the write protection of a page that is not mapped, and would not poison such a page.
        self.protect(page, false, true)?;
        let (start, shard) = self.place(page);
        shard.poison(start, PAGE_SIZE).map_err(|error| system(page, "UFFDIO_POISON", error))?;
        locked.state = PageState::Poisoned;
        Ok(())
    }

    /// Has threads that wait for a page try again; those that still may not have it fault again.
    pub fn wake(&self, page: u64) -> Result<(), PageError> {
        self.states.get(page)?;
        let (start, shard) = self.place(page);
        shard.wake(start, PAGE_SIZE).map_err(|error| system(page, "UFFDIO_WAKE", error))
    }

    /// Keeps a page where it is while device code works on its memory: until the pin is dropped, whatever takes rights from
    /// the guest is refused. The page must already allow the access.
    ///
    /// The kernel does not tell the pager who pins memory (VFIO, io_uring, O_DIRECT). Writes through such a pin of its own
    /// are lost when the page moves meanwhile. Device code has to ask here.
    pub fn pin(&self, page: u64, access: Access) -> Result<Pin<'_>, PageError> {
        let locked = self.states.lock(page)?;
        if !locked.state.allows(access) {
            return locked.refuse("pinned");
        }
        locked.pin()?;
        Ok(Pin { region: self, page })
    }

    /// As [`Self::pin`], and first touches the page through [`Self::guest`], which waits for a handler if the page does not allow
    /// the access. The page stays from the moment in which it does, however many hosts want it.
    ///
    /// Pin several pages in rising order: two hosts that each hold what the other waits for would wait until one
    /// of them fails. Touching a poisoned page is SIGBUS, here as in any thread.
    pub fn fetch_and_pin(&self, page: u64, access: Access) -> Result<Pin<'_>, PageError> {
        let asked = {
            let locked = self.states.lock(page)?;
            if locked.state.allows(access) {
                locked.pin()?;
                return Ok(Pin { region: self, page });
            }
            self.awaited.ask(&locked, access)
        };
        loop {
            self.touch(page, access);
            // The touch may be over before the change that allowed it.
            drop(self.states.lock(page)?);
            if let Some(answer) = asked.get() {
                (*answer)?;
                return Ok(Pin { region: self, page });
            }
        }
    }

    /// Does what faults if the guest may not have this access.
    fn touch(&self, page: u64, access: Access) {
        let start = self.memory.guest.at(offset(page));
        // SAFETY: a byte inside the guest's mapping. Putting what it holds in its place changes nothing for other threads.
        let byte = unsafe { AtomicU8::from_ptr(start.as_ptr()) };
        let value = byte.load(Ordering::SeqCst);
        if access == Access::Write {
            // Not `fetch_add(0)`: compilers make a load of it, which needs no right to write.
            let _ = byte.compare_exchange(value, value, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Does device code hold the page at this moment? What takes rights from the guest would be refused.
    pub fn is_pinned(&self, page: u64) -> Result<bool, PageError> {
        self.states.is_pinned(page)
    }

    fn place(&self, page: u64) -> (usize, &Userfault) {
        (self.memory.guest.start() + offset(page), &self.shards[self.shard_of(page)])
    }

    fn map(&self, page: u64, access: Access) -> Result<(), PageError> {
        let (start, shard) = self.place(page);
        let done = shard.resume(start, PAGE_SIZE, access == Access::Read);
        done.map_err(|error| system(page, "UFFDIO_CONTINUE", error))
    }

    fn protect(&self, page: u64, protect: bool, quiet: bool) -> Result<(), PageError> {
        let (start, shard) = self.place(page);
        let done = shard.write_protect(start, PAGE_SIZE, protect, quiet);
        done.map_err(|error| system(page, "UFFDIO_WRITEPROTECT", error))
    }

    fn unmap(&self, page: u64) -> Result<(), PageError> {
        let done = self.memory.guest.advise(offset(page), PAGE_SIZE, MmapAdvise::MADV_DONTNEED);
        done.map_err(|error| system(page, "madvise(MADV_DONTNEED)", error))
    }

    /// Writes the content of a page that the guest has no mapping of. The caller holds the page's lock.
    fn write_alias(&self, page: u64, fill: impl FnOnce(&mut Page)) {
        // SAFETY: a page inside the alias, aligned as bytes are. The guest has it not mapped and pins refuse to
        // take it away, and the lock keeps other threads of the pager away.
        let bytes = unsafe { self.memory.alias.at(offset(page)).cast::<Page>().as_mut() };
        fill(bytes);
        // A page that was never touched is not in the file, and could not be mapped.
        // SAFETY: a byte of the same page.
        unsafe { (&raw const bytes[0]).read_volatile() };
    }

    /// The content of a page that the guest cannot write.
    fn alias<'a>(&'a self, _locked: &'a Locked<'_>, page: u64) -> &'a Page {
        // SAFETY: a page inside the alias. The guest cannot write it, and the lock keeps other threads of the
        // pager away for as long as the reference lives.
        unsafe { self.memory.alias.at(offset(page)).cast::<Page>().as_ref() }
    }
}

/// Byte offset of a page that is inside the region, which a look at its state has shown.
fn offset(page: u64) -> usize {
    page as usize * PAGE_SIZE
}

fn system(page: u64, call: &'static str, error: Errno) -> PageError {
    PageError::System { page, call, source: error.into() }
}

/// A page that stays where it is.
#[derive(Debug)]
pub struct Pin<'a> {
    region: &'a Region,
    page: u64,
}

impl Pin<'_> {
    /// Address of the page's memory, without faults. Good for reading; for writing if it was pinned for that.
    pub fn address(&self) -> NonNull<u8> {
        self.region.memory.alias.at(offset(self.page))
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.region.states.unpin(self.page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The threads of the other faults wait, too.
    #[test]
    fn what_was_read_besides_a_message_that_makes_no_sense_is_told() {
        let region = match Region::create(4 * PAGE_SIZE, Options::default()) {
            Ok(region) => region,
            Err(error @ (PagerError::Denied { .. } | PagerError::Kernel { .. })) => {
                return eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        };
        let message = |event: u8, page: usize| {
            let mut message = [0; MESSAGE];
            message[0] = event;
            message[16..24].copy_from_slice(&(region.memory.guest.start() + page * PAGE_SIZE).to_ne_bytes());
            message
        };
        let bytes = [message(0x12, 1), message(0x15, 2), message(0x12, 9), message(0x12, 3)].concat();
        let mut faults = Vec::new();
        let error = region.take(0, &bytes, &mut faults).expect_err("an event of another kind").to_string();
        assert!(error.contains("event 0x15"), "{error}");
        assert_eq!(faults.iter().map(|fault| fault.page).collect::<Vec<_>>(), [1, 3]);
        let error = region.take(0, &bytes[..MESSAGE + 1], &mut faults).expect_err("too short").to_string();
        assert!(error.contains("33 bytes") && faults.len() == 3, "{error}");
    }
}
