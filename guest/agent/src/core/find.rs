//! Is a process heavy on I/O, and which node is its device's?

use super::{Device, Evidence, NodeId, Process};
use crate::rules::{Choice, Rules};
use std::collections::{BTreeMap, BTreeSet};

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Nothing, or a rule says to leave it alone.
    Nothing,
    /// It belongs on this node.
    Workload {
        /// The node.
        node: NodeId,
        /// What shows that.
        because: String,
    },
    /// It is heavy on I/O, and cannot be placed.
    Unplaceable {
        /// What shows that it is.
        because: String,
        /// Why it cannot be.
        why: String,
    },
}

/// Base classes and subclasses of PCI.
const NETWORK: u32 = 0x02;
const BRIDGE: u32 = 0x06;

/// Looks at a process. The first rule that names it decides; without one, its evidence does.
pub fn find(process: &Process, devices: &BTreeMap<String, Device>, rules: &Rules) -> Finding {
    let rule = rules.workloads.iter().find(|rule| rule.names(process));
    match rule.map(|rule| &rule.choice) {
        Some(Choice::Ignore) => return Finding::Nothing,
        Some(Choice::Node(node)) => {
            return Finding::Workload { node: *node, because: format!("a rule names node {node}") };
        }
        Some(Choice::Device(name)) => {
            let because = format!("a rule names {name}");
            let Some(device) = named(devices, name) else {
                return Finding::Unplaceable { because, why: "there is no such device".to_owned() };
            };
            return of_nodes(device.node.into_iter().collect(), because);
        }
        None => {}
    }
    if process.evidence.is_empty() {
        return Finding::Nothing;
    }
    let because = shown(process);
    if process.runs_vm {
        let why = "it runs a VM, whose vCPUs are its hypervisor's to place".to_owned();
        return Finding::Unplaceable { because, why };
    }
    let nodes =
        devices_of(process, devices).iter().filter_map(|address| devices.get(address)?.node).collect();
    of_nodes(nodes, because)
}

fn of_nodes(nodes: BTreeSet<NodeId>, because: String) -> Finding {
    let mut each = nodes.iter();
    match (each.next(), each.next()) {
        (None, _) => Finding::Unplaceable { because, why: "no device with a known node".to_owned() },
        (Some(node), None) => Finding::Workload { node: *node, because },
        (Some(_), Some(_)) => {
            let list: Vec<_> = nodes.iter().map(NodeId::to_string).collect();
            let why = format!("its devices may be those of nodes {}: a rule can say which", list.join(", "));
            Finding::Unplaceable { because, why }
        }
    }
}

/// A device by its address or by another of its names.
fn named<'a>(devices: &'a BTreeMap<String, Device>, name: &str) -> Option<&'a Device> {
    devices.get(name).or_else(|| devices.values().find(|device| device.names.contains(name)))
}

/// Addresses of the devices that a process uses: those behind the files that it has open; if there are none, those that its
/// libraries may drive, which are the ones that do RDMA or, if none does, all network controllers.
pub(super) fn devices_of(process: &Process, devices: &BTreeMap<String, Device>) -> BTreeSet<String> {
    let open = open_devices(process, devices);
    let library = process.evidence.iter().any(|evidence| matches!(evidence, Evidence::Library(_)));
    if !open.is_empty() || !library {
        return open;
    }
    let all = |wanted: fn(&Device) -> bool| -> BTreeSet<String> {
        let found = devices.iter().filter(|(_, device)| wanted(device));
        found.map(|(address, _)| address.clone()).collect()
    };
    let rdma = all(|device| device.rdma);
    if rdma.is_empty() { all(|device| device.class >> 16 == NETWORK) } else { rdma }
}

/// Addresses of devices whose interrupts may follow a process: those that it has open, which takes a right to them. Any user can
/// have a file with the name of a library, and interrupts concern all; a process of root could set them itself.
pub(super) fn driven_by(process: &Process, devices: &BTreeMap<String, Device>) -> BTreeSet<String> {
    if process.of_root { devices_of(process, devices) } else { open_devices(process, devices) }
}

/// Addresses of the devices behind the files that a process has open.
fn open_devices(process: &Process, devices: &BTreeMap<String, Device>) -> BTreeSet<String> {
    let is_bridge = |address: &String| devices.get(address).is_none_or(|device| device.class >> 16 == BRIDGE);
    let mut open = BTreeSet::new();
    for evidence in &process.evidence {
        if let Evidence::File { devices, .. } = evidence {
            open.extend(devices.iter().filter(|address| !is_bridge(address)).cloned());
        }
    }
    open
}

fn shown(process: &Process) -> String {
    /// More would not be read.
    const SHOWN: usize = 3;
    let mut words: Vec<String> = process
        .evidence
        .iter()
        .take(SHOWN)
        .map(|evidence| match evidence {
            Evidence::Library(name) => format!("runs {name}"),
            Evidence::File { path, .. } => format!("has {path} open"),
        })
        .collect();
    if process.evidence.len() > SHOWN {
        words.push("...".to_owned());
    }
    words.join(", ")
}
