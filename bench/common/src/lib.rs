//! What benchmarks on a lab server share: where the memory of a VM is and taking it elsewhere, what threads did, and what the
//! server's kernel and numad do beside them; and what their judges share.

pub mod bars;
pub mod frames;
pub mod guest_memory;
pub mod host;
pub mod judging;
pub mod talk;
pub mod threads;

pub use vnuma_bench_figures::{cells, configuration, ending, goals, report, stats};
