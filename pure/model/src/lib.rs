//! The model: host nodes with CPUs, caches, memory, devices and distances; VMs with
//! guest nodes and vCPUs; where a vCPU is. Plain data and pure functions, no I/O.
//!
//! `vnuma-observe` and `vnuma-hypervisor` fill these types from sysfs, hypervisors and /proc; `vnuma-policy` decides on
//! them; the API shows them as JSON. Types check what they can check alone ([`CpuSet`],
//! [`DistanceMatrix`], on parsing and on deserializing); what several of them must
//! agree on (a distance row per node, CPUs of one node only) is the reader's to see to.
//!
//! # VMs that several processes or hosts know
//!
//! So far a VM has one process on one host. A VM that spans hosts has a process on each, and each knows a part of it: some vCPUs,
//! some memory. It enters here:
//!
//! - [`VmDescription::pid`], the host nodes of [`MemoryBacking`] and the thread of a [`Vcpu`] become those of a *part*: a
//!   description will have parts, each with its host and its process, and what it has now of a VM as a whole (name, guest nodes, run state).
//! - [`HostNodeId`] and [`CpuId`] are numbers of one host. Next to them stands the host's id, and [`HostTopology`] will be one of
//!   several, with distances between nodes of different hosts.
//! - [`VmCandidate`] stays what one backend on one host has found; candidates whose process says that they are parts of one VM are
//!   joined by the core, as it joins two handles of one process today.
//!
//! Nothing of that is built before there is such a VM: one host and one process are what all code may rely on.

#![forbid(unsafe_code)]

mod backoff;
mod budget;
mod candidate;
mod capability;
mod cpu_set;
mod distance;
mod host;
mod ids;
mod observed;
mod pci;
mod vm;
mod words;

pub use backoff::{Backoff, Rest};
pub use budget::{Budget, Budgets, Limited, Party, Rate, Work};
pub use candidate::{Abilities, Destinations, VmCandidate, VmHandle};
pub use capability::{Capability, PassedOver};
pub use cpu_set::{CpuSet, CpuSetError};
pub use distance::{DistanceError, DistanceMatrix, LOCAL_DISTANCE};
pub use host::{CacheGroup, CpuLayout, HostNode, HostTopology, HugePages, PciDevice};
pub use ids::{ConnectionId, RequestId, VmId};
pub use observed::{
    Accesses, Counted, DriverStatus, MigrationProgress, MigrationStatus, PageKind, Steal, StopReason,
    ThreadCounts, WatchedRegion,
};
pub use pci::{PciAddress, PciFunction, PciLink, is_pci_address};
pub use vm::{
    BackingMapping, GuestNode, MemoryBacking, MemoryDevice, Vcpu, VcpuLocation, VcpuState, VmDescription,
    VmDevice,
};
pub use words::{NumaPolicy, RunState};

/// A node of the host, by the kernel's number.
pub type HostNodeId = u32;
/// A node of a guest, by the hypervisor's number, which is also the guest kernel's when every guest node has memory.
pub type GuestNodeId = u32;
/// A logical CPU of the host.
pub type CpuId = u32;
/// x2APIC id of a vCPU: how host and guest name the same vCPU.
pub type ApicId = u32;
