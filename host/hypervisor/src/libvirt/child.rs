//! What the child of a handshake does: a few system calls, on memory that was prepared ([`handshake`](super::handshake) says why).

use super::sockets::{Batch, credentials_of, has_read_all, pass_client, refuse, send_all};
use std::{os::fd::RawFd, ptr};
use vnuma_model::Backoff;

/// How soon a child looks again whether everything was read, milliseconds: at first, and at most. A QEMU that reads nothing keeps
/// its child, which is not to use a CPU for that.
const LOOKS_MS: Backoff = Backoff::new(2, 1000);

/// Clients that a child has refused by a message and keeps open, so that they read it. Of more, the first are closed.
const REFUSED: usize = 64;

/// How long a child keeps open what those have not read, milliseconds. What it has sent to the QEMU that is meant it keeps open for good.
const REFUSED_MS: i64 = 20_000;

/// Before a client is accepted again, if that failed, milliseconds.
const FAILED_MS: i32 = 10;

/// Exit codes of a child.
pub(super) const SERVED: i32 = 0;
pub(super) const CANCELLED: i32 = 2;
pub(super) const TIMED_OUT: i32 = 3;
pub(super) const FAILED: i32 = 4;

/// Descriptors of the child. The last two may be none.
pub(super) struct Ends {
    pub(super) listener: RawFd,
    pub(super) cancel: RawFd,
    pub(super) accepts: RawFd,
    pub(super) passes: RawFd,
}

/// Clients that were refused and may not have read that.
struct Refused {
    open: [RawFd; REFUSED],
    count: usize,
}

impl Refused {
    /// Tells a client that it gets nothing. It is kept open for a while: a QEMU that is closed before it has read reads without end.
    ///
    /// # Safety
    /// The descriptor is this function's. It makes system calls only.
    unsafe fn refuse(&mut self, peer: RawFd) {
        let place = &mut self.open[self.count % REFUSED];
        // SAFETY: plain system calls on descriptors that nothing else uses.
        unsafe {
            refuse(peer);
            if self.count >= REFUSED {
                libc::close(*place);
            }
        }
        *place = peer;
        self.count += 1;
    }

    fn open(&self) -> &[RawFd] {
        &self.open[..self.count.min(REFUSED)]
    }
}

/// The child: waits for QEMU, and sends it the messages. It makes system calls only, as the process that it is forked by.
pub(super) fn serve_messages(ends: &Ends, pid: i32, keep: &[RawFd], batch: &mut Batch, limit_ms: i32) -> ! {
    let mut refused = Refused { open: [-1; REFUSED], count: 0 };
    // SAFETY: plain system calls, on numbers and on memory of this process that outlives them.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"vnuma-handshake".as_ptr());
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut());
        close_others(keep);
        let until = now_ms() + i64::from(limit_ms);
        let (code, qemu) = loop {
            let left = until - now_ms();
            if left <= 0 {
                break (TIMED_OUT, -1);
            }
            let wait = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut waits = [wait(ends.listener), wait(ends.cancel)];
            libc::poll(waits.as_mut_ptr(), 2, left as i32);
            if waits[0].revents == 0 && waits[1].revents != 0 {
                break (CANCELLED, -1);
            }
            if waits[0].revents == 0 {
                continue;
            }
            let peer = libc::accept4(ends.listener, ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC);
            if peer < 0 {
                // It may have gone. If no descriptor is left, the next try would fail at once.
                libc::poll(ptr::null_mut(), 0, FAILED_MS);
                continue;
            }
            let from = credentials_of(peer);
            if from.pid == pid {
                let code = if send_all(peer, &mut batch.headers) { SERVED } else { FAILED };
                break (code, peer);
            }
            // No other process gets what is meant for that one. One may come even to a socket that was made for another one: libvirt
            // finds the domain by its UUID, and it may have been started anew meanwhile.
            if ends.passes >= 0 && pass_client(ends.passes, peer, from.uid) {
                libc::close(peer);
            } else {
                refused.refuse(peer);
            }
        };
        // A client that connects from now on is refused, or is the parent's.
        libc::close(ends.listener);
        libc::close(ends.accepts);
        libc::close(ends.passes);
        if code == SERVED {
            await_read(qemu, i64::MAX);
        }
        // The parent knows at once, whatever others do.
        if refused.count > 0 && libc::fork() == 0 {
            let until = now_ms() + REFUSED_MS;
            refused.open().iter().for_each(|&peer| await_read(peer, until));
        }
        libc::_exit(code)
    }
}

/// Waits until the other end has read everything, is closed, or the time is over (`until`, milliseconds).
///
/// # Safety
/// None beyond that of a system call.
unsafe fn await_read(peer: RawFd, until: i64) {
    let mut looks = LOOKS_MS;
    loop {
        if has_read_all(peer) || now_ms() >= until {
            return;
        }
        let mut wait = libc::pollfd { fd: peer, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
        let look_ms = looks.pause() as i32;
        // SAFETY: `wait` is one valid pollfd.
        if unsafe { libc::poll(&raw mut wait, 1, look_ms) } != 0 {
            if wait.revents & (libc::POLLHUP | libc::POLLERR) != 0 {
                return;
            }
            // It has written something that is not read: the poll does not wait any more.
            // SAFETY: no descriptors are given, so it only sleeps.
            unsafe { libc::poll(ptr::null_mut(), 0, look_ms) };
        }
    }
}

/// Closes all descriptors but these, which are in rising order.
///
/// # Safety
/// The others are not used.
pub(super) unsafe fn close_others(keep: &[RawFd]) {
    let mut from = 0;
    // SAFETY: the call takes three numbers; whose descriptors these are is the caller's to see to.
    let close = |first: u32, last: u32| unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    for &fd in keep {
        let fd = fd as u32;
        if fd > from {
            close(from, fd - 1);
        }
        from = fd + 1;
    }
    close(from, u32::MAX);
}

fn now_ms() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to the structure that it is given, which outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000)
}
