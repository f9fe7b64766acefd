//! Where a VM that is to be started goes: a pure function from what is free to a placement, or to what is lacking.
//!
//! ```text
//!   HostTopology, CpuLayout ──▶ Capacity ──▶ place(&Capacity, &Request) ──▶ Placed: Placement, Explanation
//!   Claim: VMs, reservations ──▶   ▲                                   └──▶ PlaceError: what is wrong, or lacking
//!                                  └── what is free on each node
//! ```
//!
//! A VM with devices is placed as in *Optimized Resource Allocation on Virtualized Non-Uniform I/O Architectures* (CCGrid
//! 2022), section V: a share of it goes to the node of its devices, by equations (3) and (4). The module `rule` states what the
//! paper leaves open.
//!
//! No I/O, no threads and no clock. Equal input gives equal output.

#![forbid(unsafe_code)]

mod capacity;
mod cpus;
mod explain;
mod place;
mod placement;
pub mod print;
mod refusal;
mod request;
pub mod reservation;
mod rule;
mod size;
mod spread;

pub use capacity::{BASE_PAGE_BYTES, Capacity, Claim, NodeCapacity, Pool, Promise};
pub use explain::{Explanation, HomeShare, NodeFigures, Rule};
pub use place::{Placed, place};
pub use placement::{DevicePlan, GuestNodePlan, Placement, VcpuPin};
pub use refusal::{Fits, Lack, PlaceError, Refusal, Remote, Resource};
pub use request::{Locality, MAX_VCPUS, Request, RequestError};
pub use size::shown_bytes;

/// Memory is placed in units of its page size, but in no smaller ones than this, so that transparent huge pages fit.
pub const LEAST_UNIT_BYTES: u64 = 2 << 20;

/// Most nodes that a guest can have, as in QEMU (`MAX_NODES`).
pub const MAX_GUEST_NODES: usize = 128;
