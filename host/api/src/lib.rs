//! The HTTP/JSON interface between vnumad and its clients, over a Unix socket.
//!
//! | request                    | body            | answer                      | right |
//! |----------------------------|-----------------|-----------------------------|-------|
//! | `GET /v1/hardware`         |                 | [`HostTopology`]            | read  |
//! | `GET /v1/devices`          |                 | [`Devices`]                 | read  |
//! | `GET /v1/capacity`         |                 | array of [`NodeFree`]       | read  |
//! | `GET /v1/daemon`           |                 | [`Daemon`]                  | read  |
//! | `GET /v1/vms`              |                 | array of [`Vm`]             | read  |
//! | `GET /v1/vms/NAME`         |                 | [`Vm`]                      | read  |
//! | `POST /v1/vms/NAME/attach` | [`AttachRequest`], or none | [`Vm`]           | act   |
//! | `POST /v1/vms/NAME/detach` |                 | [`Vm`]                      | act   |
//! | `POST /v1/vms/NAME/move`   | [`MoveRequest`] | [`Vm`]                      | act   |
//! | `POST /v1/vms/NAME/replug` | [`ReplugRequest`] | [`Replugged`]             | act   |
//! | `POST /v1/vms/NAME/policy` | [`PolicyRequest`] | [`Scheduling`]            | act   |
//! | `GET /v1/vms/NAME/policy`  |                 | [`Scheduling`]              | read  |
//! | `POST /v1/vms/NAME/memory` | [`MemoryPolicyRequest`] | [`VmMemory`]        | act   |
//! | `GET /v1/vms/NAME/memory`  |                 | [`VmMemory`]                | read  |
//! | `POST /v1/vms/NAME/rehome` | [`RehomeRequest`] | [`Rehome`]              | act   |
//! | `POST /v1/vms/NAME/rehome/stop` |         | [`Rehome`]                  | act   |
//! | `GET /v1/vms/NAME/rehome`  |                 | [`Rehome`]                  | read  |
//! | `POST /v1/vms/NAME/resize` | [`ResizeRequest`] | [`Sizes`]               | act   |
//! | `POST /v1/vms/NAME/resize/stop` |         | [`Sizes`]                   | act   |
//! | `GET /v1/vms/NAME/resize`  |                 | [`Sizes`]                   | read  |
//! | `POST /v1/vms/NAME/migrate` | [`MigrateRequest`] | [`Migration`]          | act   |
//! | `POST /v1/vms/NAME/migrate/cancel` |      | [`Migration`]               | act   |
//! | `GET /v1/vms/NAME/migrate` |                 | [`Migration`]               | read  |
//! | `GET /v1/policies`         |                 | array of [`Scheduling`]     | read  |
//! | `POST /v1/placements`      | [`PlaceRequest`] | [`Placed`]                 | act   |
//! | `GET /v1/placements`       |                 | array of [`Reserved`]       | read  |
//! | `POST /v1/placements/NAME/release` |         | [`Reserved`]                | act   |
//! | `GET /v1/observations`     |                 | [`Observation`]s, one JSON a line, one a period | read |
//! | `GET /v1/watch`            |                 | [`Event`]s, one JSON a line | read  |
//! | `GET /metrics`             |                 | metrics, in OpenMetrics or Prometheus' text format | read |
//! | `GET /openapi.json`        |                 | this table, as OpenAPI 3.1 has it | read |
//!
//! Everybody who may connect to the socket may read. Acting is for root, the daemon's own user, and a group if one is
//! configured. A request that fails is answered with an HTTP status of 400 or above and an [`ApiError`].
//!
//! Changing it: fields and kinds of events may be added within `/v1`, and clients ignore what they do
//! not know; anything else takes another version in the path.

#![forbid(unsafe_code)]

mod device;
mod event;
mod memory;
mod migration;
mod observation;
pub mod operation;
mod path;
mod placement;
mod rehome;
mod scheduling;
mod sizes;
mod vm;

pub use device::{Device, DeviceUser, DeviceUserKind, Devices, FreeMemory, NodeFree, VmInterface, VmVhost};
pub use event::{Event, EventKind, Generation, UnknownEvent};
pub use memory::{
    Bytes, GuestNodeMemory, Hotness, HotnessWatch, MemoryPlace, MemoryPolicyRequest, Unmovable, VmMemory,
};
pub use migration::{AttachRequest, MigrateRequest, Migration};
pub use observation::{Observation, ObservedCounts, ObservedVcpu, ObservedVm};
pub use path::{
    CAPACITY, DAEMON, DEVICES, HARDWARE, METRICS, OBSERVATIONS, OPENAPI, PLACEMENTS, POLICIES, VMS, WATCH,
    vm_path,
};
pub use placement::{PlaceRequest, Placed, Reserved};
pub use rehome::{GuestNodeHome, MemoryStays, NodeBytes, Rehome, RehomeRequest, RehomeState};
pub use scheduling::{
    Counters, MemoryMoves, MemoryStep, OtherThreads, PolicyRequest, PolicyStep, REHOME, Scheduling,
    VcpuScheduling,
};
pub use sizes::{AutoSize, GuestNodeSize, Pluggable, ResizeRequest, ResizeState, SizeBounds, Sizes};
pub use vm::{
    ChannelState, DriverMode, GuestNode, Hypervisor, Publication, RefusedGeneration, Vcpu, Vm, VmDevice,
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
pub use vnuma_model::{Capability, HostTopology, Limited, PassedOver, PciLink, VcpuState};

/// vnumad's socket by default.
pub const DEFAULT_SOCKET: &str = "/run/vnuma/vnumad.sock";

/// Body of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// APIC id of the vCPU.
    pub vcpu: u32,
    /// Host node to confine it to.
    pub node: u32,
}

/// Body of a replug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplugRequest {
    /// APIC id of the vCPU.
    pub vcpu: u32,
}

/// A vCPU that was replugged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replugged {
    /// APIC id that it had.
    pub vcpu: u32,
    /// APIC id that it has now. Its number in the guest is another one, too.
    pub new_vcpu: u32,
    /// Guest node that it is on now.
    pub guest_node: u32,
    /// The VM.
    pub vm: Vm,
}

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request makes no sense (400).
    BadRequest,
    /// The right to act is missing (403).
    Forbidden,
    /// No such VM, vCPU, node or path (404).
    NotFound,
    /// The VM is not in a state for this (409).
    Conflict,
    /// Something in vnumad or the system failed (500).
    Internal,
    /// The VM's hypervisor does not answer, or refuses (502).
    Vm,
    /// The user has as many connections, watchers or requests as one may have (503).
    Busy,
}

/// Body of every failed request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// For programs.
    pub error: ErrorKind,
    /// For people: what failed, and what to do about it where that is known.
    pub message: String,
}

/// How policies set the places of vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlaceSetting {
    /// [`PlaceSetting::AFFINITY`] or [`PlaceSetting::SCHEDULER`].
    pub mechanism: String,
    /// Why it is not the scheduler, or why some vCPU is not scheduled by it.
    pub why_not: Option<String>,
    /// The scheduler has all threads of the host, not only vCPUs.
    pub full: bool,
    /// vCPUs that it schedules.
    pub vcpus: usize,
    /// vCPUs that it has taken to their place.
    pub placed: u64,
    /// vCPUs that idle CPUs have stolen within their node.
    pub stolen_local: u64,
    /// The same from another node.
    pub stolen_remote: u64,
    /// Of both, because they had waited too long.
    pub starved: u64,
}

impl PlaceSetting {
    /// Affinities of the threads.
    pub const AFFINITY: &'static str = "affinity";
    /// scx_vnuma, a sched_ext scheduler.
    pub const SCHEDULER: &'static str = "sched_ext";
}

/// A connection to libvirt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LibvirtConnection {
    /// Its URI.
    pub uri: String,
    /// Why domains could not be listed when that was tried last. `None`: they were, or it was not tried yet.
    pub problem: Option<String>,
}

/// The daemon itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Daemon {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: i32,
    /// What can be done in several ways here, and in which it is done.
    #[serde(default)]
    pub capabilities: Vec<Capability>,
    /// How vCPU locations are learned: `bpf` or `poll`.
    pub location_source: String,
    /// Why it is not `bpf`.
    pub why_not_bpf: Option<String>,
    /// A change of a thread's allowed CPUs alone is noticed at once; if not, with the next resync or when the thread runs.
    pub affinity_events: bool,
    /// Location events that came faster than they were taken; all locations were read again after each loss.
    pub location_events_lost: u64,
    /// Seconds after which it replugs a vCPU without a request where nothing can be published to the guest. `None`: never.
    pub replug_after_s: Option<u64>,
    /// Policy of a VM until an operator sets another one.
    #[serde(default)]
    pub policy: String,
    /// Length of a period of the policies, milliseconds.
    #[serde(default)]
    pub policy_period_ms: u64,
    /// Where the counts of vCPUs come from.
    #[serde(default)]
    pub counters: Counters,
    /// How policies set the places of vCPUs.
    #[serde(default)]
    pub places: PlaceSetting,
    /// Connections to libvirt that the configuration names.
    #[serde(default)]
    pub libvirt: Vec<LibvirtConnection>,
    /// Watchers that are connected.
    pub watchers: usize,
    /// Watchers that were dropped because they read too slowly.
    pub watchers_dropped: u64,
    /// Threads of vnumad that have worked for long without any progress. None, if all is well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent_threads: Vec<String>,
    /// Who had to wait since vnumad started, as more work was wanted for them than is done for one party.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<Limited>,
    /// Looks at processes of VMs that have not returned in time. Until they do these processes are not looked at. None, if all is well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hanging_looks: Vec<HangingLook>,
}

/// A look at a VM's process that has not returned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HangingLook {
    /// The VM. `None`: it is not known any more.
    pub vm: Option<String>,
    /// Its process.
    pub pid: i32,
    /// The thread of vnumad that waits for it.
    pub thread: String,
    /// For how long.
    pub seconds: u64,
}
