//! Placements that are taken until their VM is there, and then for as long as it is.
//!
//! ```text
//!             reserve                 appeared
//!   (none) ───────────▶ waiting ─────────────────▶ held ──▶ (none)
//!                          │                              gone
//!                          │ release, or its time is over
//!                          ▼
//!                        (none)
//! ```
//!
//! [`Book::reserve`] decides and takes in one call, so that of requests that come at once each sees what the ones before it
//! have taken. A VM is known by its name; while it is there, also by the PID of its hypervisor.
//!
//! Time is `CLOCK_MONOTONIC` in nanoseconds, an argument of each call. The book is written to a [file](file) after each change,
//! so that a reservation outlives vnumad.

pub mod file;

use crate::{
    capacity::{Capacity, Claim, Promise},
    place::{Placed, place},
    placement::Placement,
    refusal::PlaceError,
    request::Request,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vnuma_model::{CpuLayout, HostNodeId, HostTopology};

/// Most reservations at a time.
pub const MAX_RESERVATIONS: usize = 4096;
/// Lifetimes of reservations that wait: from a second to an hour.
pub const LIFETIMES_NS: std::ops::RangeInclusive<u64> = 1_000_000_000..=3_600_000_000_000;
/// The lifetime by default, a minute.
pub const LIFETIME_NS: u64 = 60_000_000_000;

/// Whether the VM of a reservation is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum State {
    /// Not yet. It has to come before this time, nanoseconds.
    Waiting {
        /// The time.
        until_ns: u64,
    },
    /// It is.
    Held {
        /// PID of its hypervisor.
        pid: i32,
        /// When that process started, clock ticks since boot, if it could be read: another one may get its number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        started: Option<u64>,
    },
}

/// A placement that is taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reservation {
    /// Its number. Never used twice until the host is rebooted.
    pub id: u64,
    /// Whether the VM is there.
    pub state: State,
    /// What is taken.
    pub placement: Placement,
}

impl Reservation {
    /// What it takes, of which the VM has `resident` bytes on a node already.
    fn claim(&self, resident: impl Fn(HostNodeId) -> u64) -> Claim {
        let promise = |node: &crate::GuestNodePlan| Promise {
            node: node.home,
            page_bytes: self.placement.page_bytes,
            bytes: node.memory_bytes.saturating_sub(resident(node.home)),
        };
        Claim {
            owner: self.placement.name.clone(),
            cpus: self.placement.cpus(),
            floating: Vec::new(),
            memory: self.placement.guest_nodes.iter().map(promise).collect(),
            devices: self.placement.devices.iter().map(|device| device.address.clone()).collect(),
        }
    }

    fn over(&self, now_ns: u64) -> bool {
        matches!(self.state, State::Waiting { until_ns } if until_ns <= now_ns)
    }
}

/// Why nothing was reserved.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ReserveError {
    /// There is no placement.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A VM of that name has one.
    #[error("name {name}: reservation {id} has it")]
    Name {
        /// The name.
        name: String,
        /// The reservation.
        id: u64,
    },
    /// A lifetime that is out of range.
    #[error("lifetime {} ms: expected {} to {}", .0 / 1_000_000, LIFETIMES_NS.start() / 1_000_000, LIFETIMES_NS.end() / 1_000_000)]
    Lifetime(u64),
    /// There are too many.
    #[error("there are {MAX_RESERVATIONS} reservations, which is the limit")]
    TooMany,
}

/// Why a reservation was not given up.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ReleaseError {
    /// There is none.
    #[error("there is no reservation of the name {0:?}")]
    None(String),
    /// Its VM is there.
    #[error("reservation {id} is held by the VM {name}, PID {pid}: it ends with that")]
    Held {
        /// The reservation.
        id: u64,
        /// The VM.
        name: String,
        /// Its hypervisor.
        pid: i32,
    },
}

/// What requests are placed on.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    /// The host.
    pub host: &'a HostTopology,
    /// Its CPUs.
    pub layout: &'a CpuLayout,
    /// What others than reservations have: the host itself, VMs without a reservation.
    pub others: &'a [Claim],
}

/// All reservations of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Book {
    next_id: u64,
    reservations: BTreeMap<u64, Reservation>,
}

impl Book {
    /// All, by number.
    pub fn all(&self) -> impl Iterator<Item = &Reservation> {
        self.reservations.values()
    }

    /// That of a VM.
    pub fn of(&self, name: &str) -> Option<&Reservation> {
        self.all().find(|reservation| reservation.placement.name == name)
    }

    /// VMs that are there and have one, with the PIDs of their hypervisors, and when these started.
    pub fn holders(&self) -> impl Iterator<Item = (&str, i32, Option<u64>)> {
        self.all().filter_map(|one| match one.state {
            State::Held { pid, started } => Some((one.placement.name.as_str(), pid, started)),
            State::Waiting { .. } => None,
        })
    }

    /// What reservations take, of which the VM of a name has `resident` bytes on a node already. Only VMs that hold theirs are
    /// asked for.
    pub fn claims(&self, resident: impl Fn(&str, HostNodeId) -> u64) -> Vec<Claim> {
        let claim = |reservation: &Reservation| match reservation.state {
            State::Waiting { .. } => reservation.claim(|_| 0),
            State::Held { .. } => reservation.claim(|node| resident(&reservation.placement.name, node)),
        };
        self.all().map(claim).collect()
    }

    /// What VMs, reservations and others leave of the host.
    pub fn capacity(&self, ground: Ground<'_>, resident: impl Fn(&str, HostNodeId) -> u64) -> Capacity {
        let mut claims = self.claims(resident);
        claims.extend_from_slice(ground.others);
        Capacity::new(ground.host, ground.layout, &claims)
    }

    /// Decides where a VM goes and takes it, for so long. Reservations whose time is over end first: who wants to hear of
    /// them calls [`expire`](Self::expire) before.
    pub fn reserve(
        &mut self,
        ground: Ground<'_>,
        resident: impl Fn(&str, HostNodeId) -> u64,
        request: &Request,
        now_ns: u64,
        lifetime_ns: u64,
    ) -> Result<(u64, Placed), ReserveError> {
        if !LIFETIMES_NS.contains(&lifetime_ns) {
            return Err(ReserveError::Lifetime(lifetime_ns));
        }
        self.expire(now_ns);
        if let Some(other) = self.of(&request.name) {
            return Err(ReserveError::Name { name: request.name.clone(), id: other.id });
        }
        if self.reservations.len() >= MAX_RESERVATIONS {
            return Err(ReserveError::TooMany);
        }
        let placed = place(&self.capacity(ground, resident), request)?;
        let id = self.next_id;
        self.next_id += 1;
        let state = State::Waiting { until_ns: now_ns.saturating_add(lifetime_ns) };
        let placement = placed.placement.clone();
        self.reservations.insert(id, Reservation { id, state, placement });
        Ok((id, placed))
    }

    /// A VM is there, whose process started then. The number of its reservation, if it has one that waited for it and was not over.
    pub fn appeared(&mut self, name: &str, pid: i32, started: Option<u64>, now_ns: u64) -> Option<u64> {
        let waits = |reservation: &&mut Reservation| {
            let waiting = matches!(reservation.state, State::Waiting { .. });
            reservation.placement.name == name && waiting && !reservation.over(now_ns)
        };
        let reservation = self.reservations.values_mut().find(waits)?;
        reservation.state = State::Held { pid, started };
        Some(reservation.id)
    }

    /// The VM of this process is gone, and with it its reservation, if it held one.
    pub fn gone(&mut self, name: &str, pid: i32) -> Option<Reservation> {
        let held = |reservation: &&Reservation| {
            let holds = matches!(reservation.state, State::Held { pid: holder, .. } if holder == pid);
            reservation.placement.name == name && holds
        };
        let id = self.all().find(held)?.id;
        self.reservations.remove(&id)
    }

    /// Gives a reservation up whose VM is not there.
    pub fn release(&mut self, name: &str) -> Result<Reservation, ReleaseError> {
        let none = || ReleaseError::None(name.chars().take(64).collect());
        let reservation = self.of(name).ok_or_else(none)?;
        let id = reservation.id;
        match reservation.state {
            State::Held { pid, .. } => Err(ReleaseError::Held { id, name: name.to_owned(), pid }),
            State::Waiting { .. } => self.reservations.remove(&id).ok_or_else(none),
        }
    }

    /// Ends the reservations whose time is over.
    pub fn expire(&mut self, now_ns: u64) -> Vec<Reservation> {
        let over: Vec<u64> = self.all().filter(|one| one.over(now_ns)).map(|one| one.id).collect();
        over.iter().filter_map(|id| self.reservations.remove(id)).collect()
    }

    /// When the next one is over.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let until = |one: &Reservation| match one.state {
            State::Waiting { until_ns } => Some(until_ns),
            State::Held { .. } => None,
        };
        self.all().filter_map(until).min()
    }
}
