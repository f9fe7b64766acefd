//! Decide: pure functions from what is known to what is to be done.
//!
//! ```text
//!   World ──▶ decide(&World, &Policies, &mut Memories, now) ──▶ Plan: publish, move, confine, replug, each with its reason
//!     ▲         each policy proposes, conflicts are settled     and the Memories for the next decision
//!     │         Settler: is a difference worth publishing yet
//!     │ VmPlacement   per VM: homes(), distances(), choose_node()    what is true now
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
pub mod memory_budget;
pub mod memory_move;
pub mod migration;
mod plan;
pub mod policies;
pub mod rehome;
pub mod rehome_policy;
pub mod repatriation;
pub mod residency;
pub mod rules;
pub mod scheduling;
mod settings;
mod settle;
pub mod sizing;
mod task;
mod vm;
pub mod world;

pub use acked::Update;
pub use assignment::{NodeAssignment, choose_node};
pub use devices::DeviceStatus;
pub use home::{Homes, backings, displaced_bytes, distances, homes, resident_kib};
pub use plan::{Action, Batch, Plan, PublishReason, Ranks, Reason, Step};
pub use policies::{Memories, Propose, decide};
pub use settings::Policies;
pub use settle::{SettlePolicy, Settler, Suppressed};
pub use vm::{Observation, Publication, VcpuStatus, VmPlacement};
pub use world::World;
