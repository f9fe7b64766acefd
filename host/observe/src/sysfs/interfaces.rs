//! Network interfaces: which one is on top of which, and the PCI functions at the bottom.

use super::{SysfsError, parse, tree::Tree};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path},
};

const INTERFACES: &str = "sys/class/net";

/// A network interface of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number.
    pub index: Option<u64>,
    /// Interfaces that it is a part of: a bridge, a bond.
    pub upper: Vec<String>,
    /// Interfaces that it consists of, or is on.
    pub lower: Vec<String>,
    /// Address of the PCI function that it belongs to.
    pub pci: Option<String>,
}

/// Reads all interfaces of the network namespace that `/sys` below `root` shows, by name.
pub fn read_interfaces(root: &Path) -> Result<BTreeMap<String, Interface>, SysfsError> {
    let tree = Tree::new(root);
    let directory = tree.path(INTERFACES);
    let mut interfaces = BTreeMap::new();
    for name in tree.names(&directory)? {
        let path = directory.join(&name);
        let entries = tree.names(&path)?;
        let with = |prefix: &str| {
            entries.iter().filter_map(|entry| entry.strip_prefix(prefix)).map(str::to_owned).collect()
        };
        // For example ../../devices/pci0000:20/0000:20:00.0/0000:21:00.0/virtio1/net/eth0
        let target = tree.link(&path).unwrap_or_default();
        let mut parts = target.components().filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        });
        let pci = parts.rfind(|part| vnuma_model::is_pci_address(part)).map(str::to_owned);
        let index = tree.parsed(&path.join("ifindex"), parse::number)?;
        interfaces.insert(name, Interface { index, upper: with("upper_"), lower: with("lower_"), pci });
    }
    Ok(interfaces)
}

/// PCI functions that what is sent to an interface can leave by: it goes up to bridges and bonds, and from there down. All ports
/// of Open vSwitch are below one interface, so that all its functions are behind each of them.
pub fn nics_behind(interfaces: &BTreeMap<String, Interface>, name: &str) -> Vec<String> {
    let up = reachable(interfaces, [name.to_owned()].into(), |interface| &interface.upper);
    let all = reachable(interfaces, up, |interface| &interface.lower);
    let functions = all.iter().filter_map(|name| interfaces.get(name)?.pci.clone());
    functions.collect::<BTreeSet<_>>().into_iter().collect()
}

fn reachable(
    interfaces: &BTreeMap<String, Interface>,
    from: BTreeSet<String>,
    next: impl Fn(&Interface) -> &Vec<String>,
) -> BTreeSet<String> {
    let mut found = from.clone();
    let mut open: Vec<String> = from.into_iter().collect();
    while let Some(name) = open.pop() {
        for other in interfaces.get(&name).map(&next).into_iter().flatten() {
            if found.insert(other.clone()) {
                open.push(other.clone());
            }
        }
    }
    found
}
