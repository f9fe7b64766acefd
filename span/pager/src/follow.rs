//! A thread for each shard.

use crate::{Fault, PagerError, Region};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{io, os::fd::AsFd, sync::Arc, thread::JoinHandle};

/// Where a handler's thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where the scheduler puts it. It usually wakes a handler near the thread that faulted.
    Float,
    /// On the CPU of the threads that fault, looked up from time to time. A fault is then served without waking
    /// another CPU.
    Follow,
    /// On one CPU.
    Cpu(u32),
}

/// What is done about faults.
pub trait Handler: Send + 'static {
    /// Serves a fault, now or later; the thread waits until a page operation of the region lets it go on.
    ///
    /// The same fault may be reported again. While this runs, no other fault of the shard is served; it must not touch
    /// [`Region::guest`].
    fn fault(&mut self, region: &Region, fault: &Fault);
}

impl<F: FnMut(&Region, &Fault) + Send + 'static> Handler for F {
    fn fault(&mut self, region: &Region, fault: &Fault) {
        self(region, fault);
    }
}

/// What a thread has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Faults that were given to the handler.
    pub faults: u64,
    /// How often the thread was put on another CPU.
    pub moves: u64,
}

/// The thread of a shard. It ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<Result<Served, PagerError>>>,
}

/// Starts the thread of a shard.
///
/// # Panics
/// When there is no such shard.
pub fn serve(
    region: Arc<Region>,
    shard: usize,
    placement: Placement,
    mut handler: impl Handler,
) -> Result<Server, PagerError> {
    assert!(shard < region.shards(), "shard {shard} of {}", region.shards());
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let stop = EventFd::from_value_and_flags(0, flags);
    let stop = Arc::new(stop.map_err(|error| PagerError::system("eventfd", error))?);
    let told = Arc::clone(&stop);
    let work = move || run(&region, shard, placement, &mut handler, &told);
    let thread = vnuma_process::spawn_worker(&format!("dsm-fault-{shard}"), work);
    let thread = thread.map_err(|source| PagerError::System { call: "clone", source })?;
    Ok(Server { stop, thread: Some(thread) })
}

fn run(
    region: &Region,
    shard: usize,
    placement: Placement,
    handler: &mut impl Handler,
    stop: &EventFd,
) -> Result<Served, PagerError> {
    let mut served = Served::default();
    let mut place = Follower::new(placement);
    let mut faults = Vec::new();
    loop {
        let mut ready = [
            PollFd::new(region.shard_fd(shard), PollFlags::POLLIN),
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(PagerError::system("poll", error)),
        }
        if ready[1].any().unwrap_or(true) {
            return Ok(served);
        }
        faults.clear();
        let read = region.read_faults(shard, &mut faults);
        for fault in &faults {
            place.saw(fault.thread);
            handler.fault(region, fault);
        }
        served.faults += faults.len() as u64;
        served.moves = place.moves;
        read?;
    }
}

impl Server {
    /// Ends the thread and tells what it has done. A thread that ended by itself says why.
    pub fn stop(mut self) -> Result<Served, PagerError> {
        self.join().unwrap_or_else(|| Ok(Served::default()))
    }

    /// Has the thread ended by itself?
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn join(&mut self) -> Option<Result<Served, PagerError>> {
        let thread = self.thread.take()?;
        let _ = self.stop.write(1);
        let panicked = || PagerError::System { call: "handler", source: io::Error::other("it panicked") };
        Some(thread.join().unwrap_or_else(|_| Err(panicked())))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.join();
    }
}

/// Keeps the calling thread where the faults are.
#[derive(Debug)]
pub struct Follower {
    placement: Placement,
    /// Faults until the next look.
    left: u32,
    cpu: Option<u32>,
    /// How often the thread was moved.
    pub moves: u64,
}

/// Faults between two looks at where the faulting thread runs. A look costs about as much as two faults.
const LOOK: u32 = 64;

impl Follower {
    /// For the calling thread.
    pub fn new(placement: Placement) -> Self {
        let mut follower = Self { placement, left: 0, cpu: None, moves: 0 };
        if let Placement::Cpu(cpu) = placement {
            follower.go(cpu);
        }
        follower
    }

    /// A thread of this process faulted. That it cannot be found, or its CPU is not allowed, is no error: the thread
    /// stays where it is.
    pub fn saw(&mut self, thread: i32) {
        if self.placement != Placement::Follow {
            return;
        }
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = LOOK;
        let process = i32::try_from(std::process::id()).unwrap_or(0);
        if let Ok(cpu) = vnuma_process::procfs::read_last_cpu(process, thread) {
            self.go(cpu);
        }
    }

    fn go(&mut self, cpu: u32) {
        if self.cpu == Some(cpu) {
            return;
        }
        let mut set = nix::sched::CpuSet::new();
        let chosen = usize::try_from(cpu).ok().and_then(|cpu| set.set(cpu).ok());
        let myself = nix::unistd::Pid::from_raw(0);
        if chosen.is_some() && nix::sched::sched_setaffinity(myself, &set).is_ok() {
            self.cpu = Some(cpu);
            self.moves += 1;
        }
    }
}
