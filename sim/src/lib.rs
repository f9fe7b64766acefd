//! A seeded simulation of vnumad's core: thousands of VMs that misbehave, and a checker that knows what is true.
//!
//! ```text
//!   World (truth) ◀──── Chaos: what goes wrong
//!     │     ▲
//!     ▼     │ carried out, late, never or otherwise
//!   shell, workers ──▶ Event ──▶ Core::step ──▶ Command ──▶ shell, workers
//!                        │                         │
//!                        └────────▶ Checker ◀──────┘
//! ```
//!
//! One thread, simulated time, numbers from one seed: the same seed gives the same commands, byte for byte.

#![forbid(unsafe_code)]

mod action;
mod chaos;
pub mod checker;
pub mod daemon;
pub mod faults;
mod finish;
pub mod host;
mod memory;
mod migration;
mod policy;
mod shell;
pub mod simulation;
pub mod truth;
mod worker;
pub mod world;

pub use faults::Fault;
pub use simulation::{Outcome, Settings, Simulation};
