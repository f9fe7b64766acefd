//! Nodes of the DSM among peers that fail, and an independent checker of what they read.
//!
//! | part | what it does |
//! |---|---|
//! | [`Proxy`] | stands for the network, and misbehaves on request |
//! | `dsm-chaos-node` | a node's process: reads and writes at random, and writes a history down |
//! | [`Record`] | a line of a history |
//! | [`check`] | finds values in histories that no correct memory returns |
//!
//! `tests/seeds.rs` runs them.

mod checker;
mod history;
mod proxy;

pub use checker::{Verdict, check};
pub use history::{History, Kind, RECORD, Record, sequence_of, value};
pub use proxy::{Conduct, Proxy};

/// Pages of the shared memory.
pub const PAGES: u64 = 12;
