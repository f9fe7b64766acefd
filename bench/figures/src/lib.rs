//! What figures come to: medians and percentiles, goals, and the status that a benchmark ends with.

pub mod ending;
pub mod goals;
pub mod stats;
