//! Decide: pure functions from what was observed to what a guest has to be told.
//!
//! ```text
//!            VmDescription          VcpuLocation
//!                  │                     │
//!             homes(), distances()   choose_node()        what is true now
//!                  └────────┬────────────┘
//!                        Settler                          is it worth telling yet
//!                           │
//!                      VmPlacement ──▶ Telling            one publication
//!                           ▲
//!                     acknowledgement                     what the guest believes
//! ```
//!
//! A guest that cannot be told has its vCPUs replugged, if an operator wants that: [`Replugger`] says which and when.
//!
//! No I/O, no threads and no clock: time comes in as nanoseconds of one monotonic clock,
//! so that tests and simulations run the code that ships.

#![forbid(unsafe_code)]

mod belief;
mod home;
mod node;
mod replug;
mod settle;
mod vm;

pub use belief::{Updated, WINDOW as ACKNOWLEDGEMENT_WINDOW};
pub use home::{Homes, distances, homes};
pub use node::{Placed, choose_node};
pub use replug::{ReplugEnd, Replugger};
pub use settle::{SettlePolicy, Settler, Suppressed};
pub use vm::{Observation, Telling, ToldVcpu, VcpuState, VcpuStatus, VmPlacement};
