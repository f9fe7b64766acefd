//! Why a VM goes where it goes: each figure of the arithmetic.

use crate::{refusal::Remote, size::shown_bytes};
use serde::{Deserialize, Serialize};
use std::fmt;
use vnuma_model::HostNodeId;

/// The rule that a VM was placed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// Devices: the shares on their nodes are those of equations (3) and (4).
    Equations,
    /// Devices, and an equation gives none of the vCPUs or of the memory: as much as fits is on their nodes.
    Small,
    /// Devices, and what the equations leave for other nodes does not fit there: as much as fits is on their nodes.
    RestDoesNotFit,
    /// Devices, locality is preferred, and the VM does not fit with a part on each of their nodes: it is where it fits.
    HomesGivenUp,
    /// No devices whose node is known: the node with most free cores.
    OneNode,
    /// The same, larger than what any node has: as few nodes as suffice, near to each other.
    Spans,
}

impl Rule {
    fn text(self) -> &'static str {
        match self {
            Self::Equations => {
                "the shares on the nodes of its devices are those of equations (3) and (4), the rest is on the nearest nodes"
            }
            Self::Small => {
                "an equation gives less than one, so the VM is small: as much as fits is on the nodes of its devices"
            }
            Self::RestDoesNotFit => {
                "what the equations leave for other nodes does not fit there: as much as fits is on the nodes of its devices"
            }
            Self::HomesGivenUp => {
                "the VM does not fit with a part on each node of its devices: it is where it fits, if possible near to them"
            }
            Self::OneNode => {
                "no device with a known node: the node with most free cores that holds all of it"
            }
            Self::Spans => {
                "no device with a known node, and no node holds all of it: the fewest nodes, near to each other"
            }
        }
    }
}

/// What a node had, and what it gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeFigures {
    /// The node.
    pub node: HostNodeId,
    /// Free CPUs before.
    pub free_cpus: u32,
    /// Of these, cores of which all CPUs were free.
    pub free_cores: u32,
    /// Free memory of the page size before, bytes, in whole units.
    pub free_memory_bytes: u64,
    /// It could be the home of a guest node with vCPUs: it had both.
    pub counted: bool,
    /// vCPUs that it got.
    pub vcpus: u32,
    /// Memory that it got, bytes.
    pub memory_bytes: u64,
}

/// The share of the VM on the node of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HomeShare {
    /// The node.
    pub node: HostNodeId,
    /// Its devices.
    pub devices: Vec<String>,
    /// The node that the devices are attached to, if this one takes its place: that one has no CPUs, or nothing left.
    pub instead_of: Option<HostNodeId>,
    /// Its free CPUs, of equation (4).
    pub free_cpus: u32,
    /// Its free memory in units, of equation (3).
    pub free_units: u64,
    /// vCPUs by equation (4).
    pub vcpus: u32,
    /// Memory by equation (3), in units.
    pub units: u64,
}

/// Why a VM goes where it goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Explanation {
    /// The rule.
    pub rule: Rule,
    /// vCPUs asked for.
    pub vcpus: u32,
    /// Memory asked for, in units.
    pub units: u64,
    /// Unit of memory, bytes: the size of a page, but at least 2 MiB.
    pub unit_bytes: u64,
    /// Free CPUs of all nodes that count.
    pub free_cpus: u32,
    /// Free memory of all nodes that count, in units.
    pub free_units: u64,
    /// All nodes are counted for memory: those with a free CPU have too little.
    pub memory_of_all: bool,
    /// Shares of the nodes of devices, by rising number of the node.
    pub homes: Vec<HomeShare>,
    /// Each node of the host.
    pub nodes: Vec<NodeFigures>,
    /// Devices that are not local, with the reason of each.
    pub remote: Vec<Remote>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = shown_bytes(self.unit_bytes);
        for node in &self.nodes {
            let memory = shown_bytes(node.free_memory_bytes);
            write!(
                f,
                "host node {}: {} free CPUs, {} whole cores",
                node.node, node.free_cpus, node.free_cores
            )?;
            write!(f, ", {memory} free")?;
            writeln!(f, "{}", if node.counted { "" } else { " (counts for memory only)" })?;
        }
        let whole = if self.memory_of_all { "all nodes" } else { "nodes with a free CPU" };
        for home in &self.homes {
            let devices = home.devices.join(", ");
            match home.instead_of {
                Some(other) => {
                    writeln!(f, "host node {} in place of node {other}, of {devices}:", home.node)?
                }
                None => writeln!(f, "host node {} of {devices}:", home.node)?,
            }
            let (own, all, asked) = (home.free_units, self.free_units, self.units);
            writeln!(
                f,
                "  memory, equation (3): floor({own} x {asked} / {all}) = {} units of {unit}; {all} is that of {whole}",
                home.units
            )?;
            let (own, all, asked) = (home.free_cpus, self.free_cpus, self.vcpus);
            writeln!(f, "  vCPUs, equation (4): floor({own} x {asked} / {all}) = {}", home.vcpus)?;
        }
        writeln!(f, "rule: {}", self.rule.text())?;
        for remote in &self.remote {
            writeln!(f, "device {}: not local: {}", remote.device, remote.reason)?;
        }
        for node in self.nodes.iter().filter(|node| node.memory_bytes > 0) {
            let memory = shown_bytes(node.memory_bytes);
            writeln!(f, "host node {} gets {} vCPUs and {memory}", node.node, node.vcpus)?;
        }
        Ok(())
    }
}
