//! The rules by which a VM is divided over nodes.
//!
//! # VMs with devices
//!
//! Each node H that a device is attached to is a home node. It gets, of a VM with `n` vCPUs and memory `m`,
//!
//! ```text
//!   m_H = floor(M_H * m / M)    (3)        n_H = floor(N_H * n / N)    (4)
//! ```
//!
//! with the free memory and CPUs of the node (M_H, N_H) and of the server (M, N). What the paper leaves open:
//!
//! - *What is free of the server* is what is free on nodes that can be the home of a guest node: those with a free CPU and a
//!   free unit of memory. If these have less memory than the VM, M is the memory of all nodes.
//! - *Memory* is counted in units of the page size, at least 2 MiB.
//! - *The rest* goes to the nearest other nodes, as few as suffice. Of two at the same distance the one with more free CPUs is
//!   first.
//! - *A small VM*, for which (3) or (4) is zero on one of its home nodes, is on its home nodes as far as it fits, and for the
//!   rest on the nearest ones. It has a vCPU and a unit on each home node, if it has that many; if not, the home nodes with
//!   most devices are served.
//! - So is a VM whose rest does not fit elsewhere, because each guest node needs a unit of memory.
//! - *A node without CPUs* is no home: the nearest node that has some takes its place.
//! - *A node with nothing left* is an error, unless locality is only preferred: then the nearest node that has both a free CPU
//!   and a free unit takes its place, and the device is not local.
//! - *A VM that does not fit with a part on each home node*, for example because the only unit that is left must go where more CPUs
//!   are, is an error, unless locality is only preferred: then it is where it fits, home nodes and near ones first.
//!
//! # VMs without devices
//!
//! Such a VM is on one node if it fits, if possible on one where each vCPU has a core of its own. Of these it is on the one with
//! most free cores, so that VMs spread over the nodes. A VM that fits on no node is on as few as suffice, which are near to
//! each other.

use crate::{
    capacity::Capacity,
    explain::{HomeShare, Rule},
    refusal::Remote,
    request::{Locality, Request},
    spread::{Part, Room, spread},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};
use vnuma_model::HostNodeId;

/// A home node of devices.
#[derive(Clone, Debug)]
pub struct Home {
    /// Its position.
    pub at: usize,
    /// Position of the node whose place it takes.
    pub instead_of: Option<usize>,
    /// Addresses.
    pub devices: Vec<String>,
}

/// How a VM is divided.
pub struct Division {
    /// The rule.
    pub rule: Rule,
    /// What each node gets. Home nodes first, parts of memory only last.
    pub parts: Vec<Part>,
    /// Free CPUs and units of all nodes that count.
    pub free: (u32, u64),
    /// All nodes count for memory.
    pub memory_of_all: bool,
    /// Shares of home nodes.
    pub shares: Vec<HomeShare>,
}

/// What is divided, and over what.
pub struct Task<'a> {
    /// The host.
    pub capacity: &'a Capacity,
    /// What each node has, by position.
    pub rooms: Vec<Room>,
    /// vCPUs.
    pub vcpus: u32,
    /// Memory, in units.
    pub units: u64,
}

impl<'a> Task<'a> {
    /// Of a request.
    pub fn new(capacity: &'a Capacity, request: &Request, unit_bytes: u64) -> Self {
        let units = |node: &crate::NodeCapacity| node.free_bytes(request.page_bytes) / unit_bytes;
        let room = |node: &crate::NodeCapacity| Room { cpus: node.free_cpus, units: units(node) };
        let rooms = capacity.nodes.iter().map(room).collect();
        Self { capacity, rooms, vcpus: request.vcpus, units: request.memory_bytes / unit_bytes }
    }

    fn nodes(&self) -> std::ops::Range<usize> {
        0..self.rooms.len()
    }

    /// The nearest node for which this holds, the lowest of several.
    fn nearest(&self, from: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
        self.nodes()
            .filter(|&at| holds(at))
            .min_by_key(|&at| (at != from, self.capacity.distance(from, at), at))
    }

    /// Home nodes of devices by rising number. Where required, one with nothing left stays one.
    pub fn homes(&self, request: &Request) -> Vec<Home> {
        let mut homes = BTreeMap::<(usize, Option<usize>), Vec<String>>::new();
        for address in &request.devices {
            let node = self.capacity.device(address).and_then(|device| device.node);
            let Some(node) = node.and_then(|id| self.capacity.position(id)) else { continue };
            let has_cpus = |at: usize| self.capacity.nodes[at].usable_cpus > 0;
            let near = self.nearest(node, has_cpus).unwrap_or(node);
            let at = match request.locality {
                Locality::Required => near,
                Locality::Preferred => self.nearest(near, |at| self.rooms[at].both()).unwrap_or(near),
            };
            homes.entry((at, (at != node).then_some(node))).or_default().push(address.clone());
        }
        homes.into_iter().map(|((at, instead_of), devices)| Home { at, instead_of, devices }).collect()
    }

    /// Is a device that is attached to `node` local on `home`?
    pub fn is_local(&self, node: usize, home: usize) -> bool {
        let has_cpus = |at: usize| self.capacity.nodes[at].usable_cpus > 0;
        home == node || self.nearest(node, has_cpus) == Some(home)
    }

    /// Divides a VM with devices.
    pub fn with_devices(&self, homes: &[Home], locality: Locality) -> Option<Division> {
        let (free, memory_of_all) = self.free();
        let shares: Vec<HomeShare> = homes.iter().map(|home| self.share(home, free)).collect();
        // Devices of one node can be listed in several homes: in its own right, and in the place of others.
        let mut positions: Vec<usize> = homes.iter().map(|home| home.at).collect();
        positions.dedup();
        let small = shares.iter().any(|share| share.vcpus == 0 || share.units == 0);
        let division = |rule, parts| Division { rule, parts, free, memory_of_all, shares: shares.clone() };
        if !small && let Some(parts) = self.by_equations(&positions, free) {
            return Some(division(Rule::Equations, parts));
        }
        if let Some(parts) = self.at_home(homes) {
            let rule = if small { Rule::Small } else { Rule::RestDoesNotFit };
            return Some(division(rule, parts));
        }
        match locality {
            Locality::Required => None,
            Locality::Preferred => Some(division(Rule::HomesGivenUp, self.without_homes(homes)?)),
        }
    }

    /// Free CPUs and units of the server, and whether the units are those of all nodes.
    fn free(&self) -> ((u32, u64), bool) {
        let counted = || self.rooms.iter().filter(|room| room.both());
        let cpus = counted().map(|room| room.cpus).sum();
        let units = counted().map(|room| room.units).sum::<u64>();
        match units < self.units {
            true => ((cpus, self.rooms.iter().map(|room| room.units).sum()), true),
            false => ((cpus, units), false),
        }
    }

    fn share(&self, home: &Home, free: (u32, u64)) -> HomeShare {
        let room = self.rooms[home.at];
        let (vcpus, units) = self.equations(room, free);
        HomeShare {
            node: self.capacity.nodes[home.at].id,
            devices: home.devices.clone(),
            instead_of: home.instead_of.map(|at| self.capacity.nodes[at].id),
            free_cpus: room.cpus,
            free_units: room.units,
            vcpus,
            units,
        }
    }

    /// Equations (4) and (3).
    fn equations(&self, room: Room, (cpus, units): (u32, u64)) -> (u32, u64) {
        let share = |own: u64, asked: u64, all: u64| {
            (u128::from(own) * u128::from(asked)).checked_div(u128::from(all)).unwrap_or_default()
        };
        let vcpus = share(room.cpus.into(), self.vcpus.into(), cpus.into());
        // Not more than asked for, as no node has more than all.
        (vcpus as u32, share(room.units, self.units, units) as u64)
    }

    fn by_equations(&self, homes: &[usize], free: (u32, u64)) -> Option<Vec<Part>> {
        if self.vcpus > free.0 || self.units > free.1 {
            return None;
        }
        let part = |&node: &usize| {
            let (vcpus, units) = self.equations(self.rooms[node], free);
            Part { node, vcpus, units }
        };
        let mut parts: Vec<Part> = homes.iter().map(part).collect();
        let vcpus = self.vcpus - parts.iter().map(|part| part.vcpus).sum::<u32>();
        let units = self.units - parts.iter().map(|part| part.units).sum::<u64>();
        let order = self.by_distance(homes);
        parts.extend(spread(&self.rooms, &order, 0, vcpus, units)?);
        Some(parts)
    }

    /// Home nodes that get a part of the VM: those with most devices, if it has fewer vCPUs or units than there are.
    pub fn served(&self, homes: &[Home]) -> Vec<usize> {
        let devices = |at: usize| -> usize {
            homes.iter().filter(|home| home.at == at).map(|home| home.devices.len()).sum()
        };
        let mut positions: Vec<usize> = homes.iter().map(|home| home.at).collect();
        positions.dedup();
        positions.sort_by_key(|&at| (Reverse(devices(at)), at));
        let units = usize::try_from(self.units).unwrap_or(usize::MAX);
        positions.truncate(units.min(self.vcpus as usize));
        positions
    }

    /// On the home nodes as far as it fits, and then on the nearest ones.
    fn at_home(&self, homes: &[Home]) -> Option<Vec<Part>> {
        if !self.full(homes).is_empty() {
            return None;
        }
        let mut order = self.served(homes);
        let served = order.len();
        order.extend(self.by_distance(&order));
        spread(&self.rooms, &order, served, self.vcpus, self.units)
    }

    /// Near to the home nodes, but on any of them only if it fits so.
    fn without_homes(&self, homes: &[Home]) -> Option<Vec<Part>> {
        let mut order = self.served(homes);
        order.extend(self.by_distance(&order));
        spread(&self.rooms, &order, 0, self.vcpus, self.units)
    }

    /// All nodes but these, the nearest to any of them first.
    fn by_distance(&self, from: &[usize]) -> Vec<usize> {
        let mut others: Vec<usize> = self.nodes().filter(|at| !from.contains(at)).collect();
        let near = |at: usize| from.iter().map(|&home| self.capacity.distance(home, at)).min();
        others.sort_by_cached_key(|&at| (near(at), Reverse(self.rooms[at].cpus), at));
        others
    }

    /// Divides a VM without devices.
    pub fn without_devices(&self) -> Option<Division> {
        let (free, memory_of_all) = self.free();
        let division = |rule, parts| Division { rule, parts, free, memory_of_all, shares: Vec::new() };
        let holds = |at: &usize| self.rooms[*at].cpus >= self.vcpus && self.rooms[*at].units >= self.units;
        let best = self.nodes().filter(holds).min_by_key(|&at| {
            let node = &self.capacity.nodes[at];
            (Reverse(node.free_cores), Reverse(node.free_cpus), Reverse(self.rooms[at].units), at)
        });
        if let Some(node) = best {
            let all = Part { node, vcpus: self.vcpus, units: self.units };
            return Some(division(Rule::OneNode, vec![all]));
        }
        let candidates = self.nodes().filter(|&at| self.rooms[at].both()).filter_map(|centre| {
            let order: Vec<usize> = [centre].into_iter().chain(self.by_distance(&[centre])).collect();
            let parts = spread(&self.rooms, &order, 0, self.vcpus, self.units)?;
            let distance: u32 =
                parts.iter().map(|part| u32::from(self.capacity.distance(centre, part.node))).sum();
            let cpus: u32 = parts.iter().map(|part| self.rooms[part.node].cpus).sum();
            Some(((parts.len(), distance, Reverse(cpus), centre), parts))
        });
        let (_, parts) = candidates.min_by_key(|(key, _)| *key)?;
        Some(division(Rule::Spans, parts))
    }

    /// Home nodes that lack a CPU or a unit.
    pub fn full(&self, homes: &[Home]) -> BTreeSet<usize> {
        homes.iter().map(|home| home.at).filter(|&at| !self.rooms[at].both()).collect()
    }

    /// Why a device is not local, in words.
    pub fn remote(&self, device: &str, node: usize, home: HostNodeId, served: bool, rule: Rule) -> Remote {
        let id = self.capacity.nodes[node].id;
        let reason = match rule {
            _ if served => format!("host node {id} has no free CPU or no free memory"),
            Rule::HomesGivenUp => format!("the VM fits only if none of it is on host node {home}"),
            _ => format!(
                "the VM has fewer vCPUs or units of memory than nodes with devices, and host node {id} was left out"
            ),
        };
        Remote { device: device.to_owned(), reason }
    }
}
