//! Decide: pure functions from what is known to what is to be done.
//!
//! ```text
//!   World ──▶ decide(&World, &Policies, now) ──▶ Plan: publish, move, confine, replug, each with its reason
//!     ▲
//!     │ VmPlacement   per VM: homes(), distances(), choose_node()    what is true now
//!     │   Settler                                                    is it worth publishing yet
//!     │   AckedTopology                                              what the guest uses
//!     │ Link, ChannelState                                           what can be asked, what is in flight
//!   whoever observes
//! ```
//!
//! No I/O, no threads and no clock: time comes in as nanoseconds of one monotonic clock, so that tests and the simulation
//! run the code that ships.

#![forbid(unsafe_code)]

mod acked;
mod assignment;
mod devices;
mod home;
pub mod hotness;
pub mod migration;
mod plan;
pub mod rehome;
pub mod rehome_policy;
pub mod repatriation;
pub mod residency;
pub mod scheduling;
mod settle;
pub mod sizing;
mod vm;
pub mod world;

pub use acked::Update;
pub use assignment::{NodeAssignment, choose_node};
pub use devices::DeviceStatus;
pub use home::{Homes, backings, displaced_bytes, distances, homes, resident_kib};
pub use plan::{Action, Plan, Policies, PublishReason, Ranks, Reason, Step, decide};
pub use settle::{Due, SettlePolicy, Settler, Suppressed};
pub use vm::{Observation, Publication, VcpuState, VcpuStatus, VmPlacement};
pub use world::World;
