//! PCI functions and the nodes that they are attached to.

use super::{SysfsError, parse, tree::Tree};
use vnuma_topology::{HostNode, PciDevice};

/// All PCI functions, in order of their address; none on a host without PCI.
pub(super) fn read(tree: &Tree, nodes: &[HostNode]) -> Result<Vec<PciDevice>, SysfsError> {
    let directory = tree.path("sys/bus/pci/devices");
    let mut devices = Vec::new();
    for address in tree.names(&directory)? {
        let device = directory.join(&address);
        if !parse::is_pci_address(&address) {
            return Err(SysfsError::value(&device, &address, "not the address of a PCI function"));
        }
        let number = |file, max| tree.parsed(&device.join(file), |text| parse::hex(text, max));
        let ids = (number("class", 0xff_ffff)?, number("vendor", 0xffff)?, number("device", 0xffff)?);
        // Unplugged while it was read, or not part of a copied tree.
        let (Some(class), Some(vendor), Some(id)) = ids else { continue };
        let node = tree.parsed(&device.join("numa_node"), parse::numa_node)?.flatten();
        devices.push(PciDevice {
            address,
            class,
            // Both are bounded above.
            vendor: vendor as u16,
            device: id as u16,
            // Firmware may name a node that has neither CPUs nor memory and is not online.
            node: node.filter(|&id| nodes.iter().any(|node| node.id == id)),
        });
    }
    Ok(devices)
}
