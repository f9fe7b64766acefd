//! Placements of VMs that are to be started, and reservations.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vnuma_placement::{
    BASE_PAGE_BYTES, Explanation, Locality, Placement,
    reservation::{LIFETIME_NS, Reservation, State},
};

/// Body of a request for a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlaceRequest {
    /// Name that the VM will have.
    pub name: String,
    /// vCPUs.
    pub vcpus: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Size of its pages, bytes; ordinary ones if it is left out.
    #[serde(default = "base_page")]
    pub page_bytes: u64,
    /// Addresses of PCI functions.
    #[serde(default)]
    pub devices: Vec<String>,
    /// What if it cannot be near them?
    #[serde(default)]
    pub locality: Locality,
    /// How long the reservation waits for the VM, milliseconds; a minute if it is left out.
    #[serde(default = "lifetime")]
    pub lifetime_ms: u64,
}

fn base_page() -> u64 {
    BASE_PAGE_BYTES
}

fn lifetime() -> u64 {
    LIFETIME_NS / 1_000_000
}

/// A placement that was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    /// The reservation.
    pub reservation: Reserved,
    /// The arithmetic.
    pub explanation: Explanation,
    /// What keeps its devices from being passed through as the host is now: that has to change before the VM starts.
    #[serde(default)]
    pub obstacles: Vec<String>,
}

/// A reservation as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reserved {
    /// Its number.
    pub id: u64,
    /// How long it waits for its VM, milliseconds. `None`: the VM is there.
    pub waits_ms: Option<u64>,
    /// Process of the VM's hypervisor, if it is there.
    pub pid: Option<i32>,
    /// What is reserved.
    pub placement: Placement,
}

impl Reserved {
    /// A reservation at a time.
    pub fn new(reservation: &Reservation, now_ns: u64) -> Self {
        let (waits_ms, pid) = match reservation.state {
            State::Waiting { until_ns } => (Some(until_ns.saturating_sub(now_ns) / 1_000_000), None),
            State::Held { pid, .. } => (None, Some(pid)),
        };
        Self { id: reservation.id, waits_ms, pid, placement: reservation.placement.clone() }
    }
}
