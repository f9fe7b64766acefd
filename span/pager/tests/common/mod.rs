//! What the tests of the pager share.
#![allow(dead_code)]

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use vnuma_dsm_pager::{Fault, Follower, Options, PAGE_SIZE, PagerError, Placement, Region};

/// Nothing here takes longer unless it hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// A region, or none where this process may not use userfaultfd.
pub fn region(pages: usize, options: Options) -> Option<Region> {
    match Region::create(pages * PAGE_SIZE, options) {
        Ok(region) => Some(region),
        Err(error @ (PagerError::Denied { .. } | PagerError::Kernel { .. })) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A region with one shard.
pub fn simple(pages: usize) -> Option<Region> {
    region(pages, Options::default())
}

/// A guest's view: loads and stores through the mapping that faults.
#[derive(Clone, Copy)]
pub struct Guest(usize);

impl Guest {
    pub fn of(region: &Region) -> Self {
        Self(region.guest().as_ptr() as usize)
    }

    fn at(self, page: u64, word: usize) -> *mut u64 {
        (self.0 + page as usize * PAGE_SIZE + word * 8) as *mut u64
    }

    pub fn load(self, page: u64, word: usize) -> u64 {
        // SAFETY: inside the region, which outlives the guest in every test, and aligned.
        unsafe { self.at(page, word).read_volatile() }
    }

    pub fn store(self, page: u64, word: usize, value: u64) {
        // SAFETY: as above; every thread of a test has words of its own.
        unsafe { self.at(page, word).write_volatile(value) }
    }

    /// The first byte as a system call reads it, which gets an error where a load would get SIGBUS.
    pub fn read_by_kernel(self, page: u64) -> nix::Result<u8> {
        let (from, to) = nix::unistd::pipe()?;
        // SAFETY: the address is mapped, and the kernel checks what it reads there.
        let bytes = unsafe { std::slice::from_raw_parts(self.at(page, 0) as *const u8, 1) };
        nix::unistd::write(&to, bytes)?;
        let mut byte = [0];
        nix::unistd::read(&from, &mut byte)?;
        Ok(byte[0])
    }
}

/// What another thread sends, within the limit for hangs.
pub fn expect<T>(receiver: &Receiver<T>, what: &str) -> T {
    match receiver.recv_timeout(HANG) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("{what}: nothing for {HANG:?}"),
        Err(RecvTimeoutError::Disconnected) => panic!("{what}: the thread ended"),
    }
}

/// A thread that serves the faults of a shard, and ends when this is dropped.
pub struct Server {
    over: Arc<AtomicBool>,
    /// It counts faults, and how often it was put on another CPU.
    thread: Option<JoinHandle<(u64, u64)>>,
}

/// Starts such a thread. `handler` must not touch the guest's mapping.
pub fn serve(
    region: &Arc<Region>,
    shard: usize,
    placement: Placement,
    mut handler: impl FnMut(&Region, &Fault) + Send + 'static,
) -> Server {
    let (region, over) = (Arc::clone(region), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&over);
    let thread = thread::spawn(move || {
        let (mut place, mut faults, mut count) = (Follower::new(placement), Vec::new(), 0);
        while !told.load(Relaxed) {
            let mut ready = [PollFd::new(region.shard_fd(shard), PollFlags::POLLIN)];
            poll(&mut ready, PollTimeout::from(5_u8)).expect("poll");
            region.read_faults(shard, &mut faults).expect("faults");
            for fault in faults.drain(..) {
                place.saw(fault.thread);
                handler(&region, &fault);
                count += 1;
            }
        }
        (count, place.moves)
    });
    Server { over, thread: Some(thread) }
}

impl Server {
    /// Ends the thread, and says what it has counted.
    pub fn stop(mut self) -> (u64, u64) {
        self.over.store(true, Relaxed);
        self.thread.take().expect("a thread").join().expect("no panic")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
