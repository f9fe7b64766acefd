//! What tests and benchmarks of schedulers share: threads and groups that one has, what the kernel counts of it, and how long threads
//! wait for a CPU after they were woken.

#![forbid(unsafe_code)]

mod counts;
mod others;
mod threads;
mod wakes;

pub use counts::{Programs, Yields};
pub use others::Other;
pub use threads::{Group, KEEP_S, LOOKS, Loop, beat, expect_share, loaded, shares, start, stop};
pub use wakes::Wakes;
