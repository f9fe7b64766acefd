//! Acts: puts vCPU threads where the plan wants them.
//!
//! The caller names a process by a pidfd that it has held since it came to know the VM, and a thread by the number that the VM's
//! QEMU gave. That QEMU is not trusted: it may name any thread of the system, and vnumad, which runs as root, must not act for it.
//! So [`pin_thread`] touches only threads of that process.
//!
//! Linux has no way to set a thread's affinity by anything but its number, and a number is free for others once its thread has
//! ended. The check and the act are therefore two steps, and the gap between them is closed as follows:
//!
//! 1. Before: the thread is in `/proc/PID/task`, and the pidfd shows that PID was the
//!    VM's process while that was looked up. The thread's start time is noted.
//! 2. The affinity is set.
//! 3. After: the same look-up must find the same start time. It does only if the thread
//!    lived from 1 to 3, so the act was done to that thread.
//!
//! If 3 fails, the thread ended in between (the usual case: the VM is being shut down, and the call failed or hit a thread about
//! to end). For the act to have hit a stranger, the kernel must have given all other thread numbers to somebody and come round to
//! this one in the microseconds between 1 and 2. [`ActError::Raced`] reports it either way.
//!
//! [`move_pages`] takes pages of such a process to another node, with the same care, and [`sample_pages`] looks at some.
//! [`damon`] tells how often pages are accessed. It ends there: no plan is made here.

pub mod apparmor;
mod class;
pub mod damon;
#[cfg(any(test, feature = "faults"))]
pub mod faults;
mod ledger;
mod looker;
mod looks;
pub mod main_loop;
pub mod own;
mod pages;
mod priority;
pub mod procfs;
pub mod qemu;
mod sample;
mod stop;
pub mod text;
mod thread;
mod threads;
mod worker;

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};
use vnuma_model::CpuSet;

pub use class::{Class, change_class, read_class};
pub use ledger::{Ledger, Withheld};
pub use looker::Looker;
pub use looks::{Hanging, LookError, Looks, MOST_LEFT};
pub use pages::{PAGES_AT_ONCE, PageState, find_pages, move_pages};
pub use priority::prefer_this_thread;
pub use procfs::{ProcError, read_allowed, thread_exists};
pub use sample::{BASE_PAGE, Sampled, SampledPage, choose_addresses, sample_pages};
pub use stop::{stopped, stopped_by_stat};
pub use threads::spawn_worker;
pub use worker::{Change, Groups, Heartbeat, Jobs, Next, Worker, Workers, panic_message};

/// Why an act failed. Nothing was changed then, unless the variant says so.
#[derive(Debug, thiserror::Error)]
pub enum ActError {
    /// The thread belongs to another process, or has ended.
    #[error("thread {tid} does not belong to process {pid}; it is left alone")]
    ForeignThread {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// The process has ended.
    #[error("process {pid} has ended")]
    Exited {
        /// The process.
        pid: i32,
    },
    /// The thread ended while it was acted on. Its affinity may have been set before.
    #[error("thread {tid} of process {pid} ended while its affinity was set")]
    Raced {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// No CPUs to put it on.
    #[error("thread {tid}: empty CPU set")]
    NoCpus {
        /// The thread.
        tid: i32,
    },
    /// A CPU number beyond what can be asked of the kernel.
    #[error("thread {tid}: CPU {cpu} is above the largest number a kernel can have")]
    Cpu {
        /// The thread.
        tid: i32,
        /// The CPU.
        cpu: u32,
    },
    /// Others have set its affinity since it was looked at.
    #[error("thread {tid}: its affinity is {found} now: somebody else has set it")]
    MaskChanged {
        /// The thread.
        tid: i32,
        /// Its affinity.
        found: CpuSet,
    },
    /// The system refused.
    #[error("thread {tid} of process {pid}: {act}: {source}")]
    System {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// What was tried.
        act: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Confines a thread of the process behind `pidfd` (whose number is `pid`) to `cpus`.
///
/// The kernel leaves out CPUs that are offline or outside the thread's cpuset, and refuses with `EINVAL` when none is left.
pub fn pin_thread(pidfd: BorrowedFd<'_>, pid: i32, tid: i32, cpus: &CpuSet) -> Result<(), ActError> {
    let before = thread::start_time(pidfd, pid, tid)?;
    pin_started(pidfd, pid, tid, cpus, before)
}

/// Steps 2 and 3, for a thread that started at this time.
fn pin_started(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    tid: i32,
    cpus: &CpuSet,
    before: u64,
) -> Result<(), ActError> {
    let outcome = set_affinity(tid, &mask_of(tid, cpus)?);
    match thread::start_time(pidfd, pid, tid) {
        Ok(after) if after == before => {}
        Ok(_) | Err(ActError::ForeignThread { .. }) => return Err(ActError::Raced { pid, tid }),
        Err(other) => return Err(other),
    }
    outcome.map_err(|source| ActError::System { pid, tid, act: "setting its affinity", source })
}

/// The same, if the thread's affinity is still what the caller believes it to be. Nobody else can be kept from setting it in
/// the microseconds between the look and the act; who sets it before is noticed.
pub fn pin_thread_if(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    tid: i32,
    mut expected: impl FnMut(&CpuSet) -> bool,
    cpus: &CpuSet,
) -> Result<(), ActError> {
    let found = procfs::read_affinity(tid);
    // After that, as it ends only once: what was found is this thread's, and step 1 is done. A look at `stat` costs more than
    // the act.
    let before = thread::start_time(pidfd, pid, tid)?;
    let found = found.map_err(|error| match error {
        ProcError::Gone { .. } => ActError::ForeignThread { pid, tid },
        error => {
            let (act, source) = ("reading its affinity", io::Error::other(error));
            ActError::System { pid, tid, act, source }
        }
    })?;
    // A CPU that goes offline is missing there before anybody can know it. `status` still has it.
    if !expected(&found) && !read_allowed(pid, tid).is_ok_and(|allowed| expected(&allowed)) {
        return Err(ActError::MaskChanged { tid, found });
    }
    pin_started(pidfd, pid, tid, cpus, before)
}

/// Does something to a thread of the process behind `pidfd` (whose number is `pid`) that can only name it by its number, and says
/// whether it was that thread. `None`: it ended, or was never one of that process; what was done may be undone by dropping it.
pub fn on_thread<T>(pidfd: BorrowedFd<'_>, pid: i32, tid: i32, act: impl FnOnce() -> T) -> Option<T> {
    let before = thread::start_time(pidfd, pid, tid).ok()?;
    let done = act();
    (thread::start_time(pidfd, pid, tid).ok()? == before).then_some(done)
}

/// Confines a thread of the process behind `pidfd` (whose number is `pid`) as another of its threads is.
pub fn copy_affinity(pidfd: BorrowedFd<'_>, pid: i32, from: i32, to: i32) -> Result<(), ActError> {
    let allowed = read_allowed(pid, from).map_err(|error| match error {
        ProcError::Gone { .. } => ActError::ForeignThread { pid, tid: from },
        error => {
            let (act, source) = ("reading its affinity", io::Error::other(error));
            ActError::System { pid, tid: from, act, source }
        }
    })?;
    pin_thread(pidfd, pid, to, &allowed)
}

/// Words of a kernel CPU mask. Sized by the largest member: `libc::cpu_set_t` ends at 1024.
fn mask_of(tid: i32, cpus: &CpuSet) -> Result<Vec<libc::c_ulong>, ActError> {
    const BITS: u32 = libc::c_ulong::BITS;
    let Some(last) = cpus.iter().max() else {
        return Err(ActError::NoCpus { tid });
    };
    if last > CpuSet::MAX_CPU {
        return Err(ActError::Cpu { tid, cpu: last });
    }
    let mut mask = vec![0; (last / BITS + 1) as usize];
    for cpu in cpus.iter() {
        mask[(cpu / BITS) as usize] |= 1 << (cpu % BITS);
    }
    Ok(mask)
}

fn set_affinity(tid: i32, mask: &[libc::c_ulong]) -> io::Result<()> {
    // SAFETY: the kernel reads exactly the given number of bytes, all of which are in `mask`.
    let result = unsafe {
        libc::syscall(libc::SYS_sched_setaffinity, tid, std::mem::size_of_val(mask), mask.as_ptr())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A pidfd of a process. See afterwards that it is the process that was meant: it may have ended before, and its number may
/// have been given to another one.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Does the process behind the pidfd still exist (as more than a zombie)?
fn alive(pidfd: BorrowedFd<'_>) -> io::Result<bool> {
    // A pidfd becomes readable when its process ends, and signal 0 still finds a zombie.
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid pollfd.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    match ready {
        0 => Ok(true),
        1.. if poll.revents & libc::POLLIN != 0 => Ok(false),
        1.. => Err(io::Error::from_raw_os_error(libc::EBADF)),
        _ => Err(io::Error::last_os_error()),
    }
}
