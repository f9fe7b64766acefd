//! The frame of benchmarks: cells and where they are stored, goals, reports, medians and percentiles, and the status that one ends with.

pub mod cells;
pub mod configuration;
pub mod ending;
pub mod goals;
pub mod report;
pub mod stats;
pub mod waiting;
