//! Waiting for a descriptor without blocking the runtime.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Tells when `descriptor` becomes readable. Works on a copy of it, so the caller may close its own.
pub(crate) fn readable(descriptor: BorrowedFd<'_>) -> io::Result<AsyncFd<OwnedFd>> {
    let copy = descriptor.try_clone_to_owned()?;
    // SAFETY: an owned descriptor is open and stays the same until it is dropped, and the result
    // owns it.
    let registered = unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) };
    registered.map_err(io::Error::from)
}
