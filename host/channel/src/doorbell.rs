//! Signals and clears an eventfd that another process shares, without ever blocking.
//!
//! `O_NONBLOCK` belongs to the open file, so a process that shares it can clear it at any time.
//! Neither call here depends on that flag:
//!
//! - [`clear`] reads with `RWF_NOWAIT`, which applies to this one call.
//! - [`Doorbells::signal`] has the kernel signal the eventfd when an empty asynchronous read of a file of this process
//!   completes (`IOCB_FLAG_RESFD`, io_submit(2)). `eventfd_signal()` saturates a full counter and does not
//!   wait. A plain write would wait, and eventfds refuse `RWF_NOWAIT` for writes.

use nix::{
    errno::Errno,
    libc::{self, c_long},
    sys::memfd::{MFdFlags, memfd_create},
};
use rustix::io::ReadWriteFlags;
use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Mutex, OnceLock, PoisonError},
};

/// `IOCB_CMD_PREAD` of `linux/aio_abi.h`.
const IOCB_CMD_PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD`: signal `aio_resfd` on completion.
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct io_event` of `linux/aio_abi.h`.
#[repr(C)]
struct IoEvent {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

/// Sets the counter to zero.
pub(crate) fn clear(vector: BorrowedFd<'_>) -> io::Result<()> {
    let mut counter = [0; 8];
    // Offset -1: the file position, which an eventfd does not have.
    match rustix::io::preadv2(vector, &mut [IoSliceMut::new(&mut counter)], u64::MAX, ReadWriteFlags::NOWAIT)
    {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Completions that are left lying until they are taken together.
const COMPLETIONS: usize = 32;

/// A context of asynchronous reads, none of which is in flight for longer than a call. All channels of the process share it. It stays until the
/// process ends: `io_destroy` waits for a grace period of the kernel, for which no thread here has time.
#[derive(Debug)]
pub(crate) struct Doorbells {
    context: Mutex<Context>,
    /// An empty file of this process alone: no other one can make its reads wait.
    empty: OwnedFd,
}

#[derive(Debug)]
struct Context {
    number: libc::c_ulong,
    /// Completions that were not taken yet.
    completed: usize,
}

impl Doorbells {
    /// The one of this process.
    pub(crate) fn shared() -> io::Result<&'static Self> {
        static SHARED: OnceLock<Doorbells> = OnceLock::new();
        if let Some(doorbells) = SHARED.get() {
            return Ok(doorbells);
        }
        // Of two threads that come here at once, one has made a context in vain and drops it.
        let doorbells = Self::new()?;
        Ok(SHARED.get_or_init(|| doorbells))
    }

    fn new() -> io::Result<Self> {
        let empty = memfd_create(c"vnuma-doorbell", MFdFlags::MFD_CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `context`, which is large enough.
        Errno::result(unsafe { libc::syscall(libc::SYS_io_setup, COMPLETIONS as c_long, &raw mut context) })?;
        Ok(Self { context: Mutex::new(Context { number: context, completed: 0 }), empty })
    }

    /// Adds one to the counter, which stays as it is if it is full.
    ///
    /// The read completes within `io_submit`, as there is nothing to read.
    pub(crate) fn signal(&self, vector: BorrowedFd<'_>) -> io::Result<()> {
        // Nothing that is done with the lock held waits.
        let mut context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        if context.completed == COMPLETIONS {
            take_completions(context.number)?;
            context.completed = 0;
        }
        let mut nothing = 0u8;
        // SAFETY: a request is plain integers, for all of which zero is valid.
        let mut request: libc::iocb = unsafe { MaybeUninit::zeroed().assume_init() };
        request.aio_lio_opcode = IOCB_CMD_PREAD;
        request.aio_fildes = self.empty.as_raw_fd().cast_unsigned();
        request.aio_buf = (&raw mut nothing).addr() as u64;
        request.aio_flags = IOCB_FLAG_RESFD;
        request.aio_resfd = vector.as_raw_fd().cast_unsigned();
        let mut requests = [&raw mut request];
        // SAFETY: the context is this value's own. One request is named, and the kernel reads it within
        // the call; it writes nothing to `nothing`, as zero bytes are read.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, context.number, 1 as c_long, requests.as_mut_ptr()) };
        Errno::result(submitted)?;
        context.completed += 1;
        Ok(())
    }
}

/// Makes room for the next requests.
fn take_completions(context: libc::c_ulong) -> io::Result<()> {
    let mut events = [const { IoEvent { data: 0, obj: 0, res: 0, res2: 0 } }; COMPLETIONS];
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes at most as many events as there is room for, and reads the timeout within the call.
    let taken = unsafe {
        libc::syscall(
            libc::SYS_io_getevents,
            context,
            0 as c_long,
            COMPLETIONS as c_long,
            events.as_mut_ptr(),
            &raw const at_once,
        )
    };
    Ok(Errno::result(taken).map(drop)?)
}

impl Drop for Doorbells {
    fn drop(&mut self) {
        let context = self.context.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is this value's own, and no request is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, context.number) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::eventfd::EventFd;
    use std::os::fd::AsFd;

    #[test]
    fn a_signal_adds_one_and_saturates() {
        let vector = EventFd::new().expect("made");
        let doorbells = Doorbells::shared().expect("made");
        (0..3).for_each(|_| doorbells.signal(vector.as_fd()).expect("signalled"));
        assert_eq!(vector.read(), Ok(3));
        vector.write(u64::MAX - 1).expect("filled");
        (0..3).for_each(|_| doorbells.signal(vector.as_fd()).expect("signalled"));
        assert_eq!(vector.read(), Ok(u64::MAX));
    }

    #[test]
    fn more_signals_than_completions_that_can_lie_all_arrive() {
        let vector = EventFd::new().expect("made");
        let doorbells = Doorbells::shared().expect("made");
        let many = 10 * COMPLETIONS as u64 + 1;
        (0..many).for_each(|_| doorbells.signal(vector.as_fd()).expect("signalled"));
        assert_eq!(vector.read(), Ok(many));
    }

    #[test]
    fn an_empty_counter_is_cleared_without_waiting() {
        let vector = EventFd::new().expect("made");
        clear(vector.as_fd()).expect("cleared");
        vector.write(7).expect("signalled");
        clear(vector.as_fd()).expect("cleared");
        vector.write(2).expect("signalled");
        assert_eq!(vector.read(), Ok(2));
    }

    #[test]
    fn what_is_no_eventfd_is_an_error() {
        let file = memfd_create(c"no-eventfd", MFdFlags::MFD_CLOEXEC).expect("made");
        let doorbells = Doorbells::shared().expect("made");
        assert!(doorbells.signal(file.as_fd()).is_err());
        let vector = EventFd::new().expect("made");
        doorbells.signal(vector.as_fd()).expect("the next one works");
        assert_eq!(vector.read(), Ok(1));
    }
}
