//! Reads the counters of the lab's server: through `perf_event_open`, as any tool would.

pub mod counters;
pub mod load;
pub mod perf;
pub mod report;
pub mod server;
