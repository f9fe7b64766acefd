//! What the tests of several packages need. It panics where a test would.

#![forbid(unsafe_code)]

pub mod errors;
pub mod host;
pub mod http;

pub use host::{HANG_LIMIT, wait_for};
