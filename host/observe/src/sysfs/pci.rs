//! PCI functions and the nodes that they are attached to.

use super::{SysfsError, parse, tree::Tree};
use std::{collections::BTreeMap, path::Path};
use vnuma_model::{HostNode, PciDevice, PciFunction, PciLink};

const DEVICES: &str = "sys/bus/pci/devices";

/// All PCI functions, in order of their address; none on a host without PCI.
pub(super) fn read(tree: &Tree, nodes: &[HostNode]) -> Result<Vec<PciDevice>, SysfsError> {
    let directory = tree.path(DEVICES);
    let mut devices = Vec::new();
    for address in tree.names(&directory)? {
        let device = directory.join(&address);
        if !vnuma_model::is_pci_address(&address) {
            return Err(SysfsError::value(&device, &address, "not the address of a PCI function"));
        }
        let number = |file, max| tree.parsed(&device.join(file), |text| parse::hex(text, max));
        let ids = (number("class", 0xff_ffff)?, number("vendor", 0xffff)?, number("device", 0xffff)?);
        // Unplugged while it was read, or not part of a copied tree.
        let (Some(class), Some(vendor), Some(id)) = ids else { continue };
        let node = match tree.parsed(&device.join("numa_node"), parse::numa_node)? {
            Some(node) => node,
            None => node_of_local_cpus(tree, &device, nodes)?,
        };
        devices.push(PciDevice {
            address,
            class,
            // Both are bounded above.
            vendor: vendor as u16,
            device: id as u16,
            // Firmware may name a node that has neither CPUs nor memory and is not online.
            node: node.filter(|&id| nodes.iter().any(|node| node.id == id)),
            iommu_group: iommu_group(tree, &device)?,
        });
    }
    Ok(devices)
}

/// The number of a device's IOMMU group, which the kernel links; none without an IOMMU.
fn iommu_group(tree: &Tree, device: &Path) -> Result<Option<u32>, SysfsError> {
    let path = device.join("iommu_group");
    let Some(name) = tree.link_name(&path) else { return Ok(None) };
    let number = parse::number(&name).ok().and_then(|number| u32::try_from(number).ok());
    number.map(Some).ok_or_else(|| SysfsError::value(&path, &name, "not the number of an IOMMU group"))
}

/// The node whose CPUs the kernel calls local to a device: old kernels show nothing else.
fn node_of_local_cpus(tree: &Tree, device: &Path, nodes: &[HostNode]) -> Result<Option<u32>, SysfsError> {
    let local = tree.set(&device.join("local_cpulist"), &device.join("local_cpus"))?;
    // With one node all CPUs are local to every device, so that shows nothing.
    let Some(local) = local.filter(|_| nodes.len() > 1) else { return Ok(None) };
    let all_local = |node: &&HostNode| !node.cpus.is_empty() && node.cpus.is_subset(&local);
    let mut found = nodes.iter().filter(all_local);
    Ok(found.next().filter(|_| found.next().is_none()).map(|node| node.id))
}

/// All PCI functions with their links, drivers and interfaces, in order of their address.
pub(super) fn read_functions(tree: &Tree, nodes: &[HostNode]) -> Result<Vec<PciFunction>, SysfsError> {
    let mut functions = Vec::new();
    for device in read(tree, nodes)? {
        let directory = tree.path(DEVICES).join(&device.address);
        functions.push(PciFunction {
            physical_function: physical_function(tree, &directory)?,
            link: link(tree, &directory)?,
            driver: tree.link_name(&directory.join("driver")),
            interfaces: tree.names(&directory.join("net"))?,
            vfio_device: tree.names(&directory.join("vfio-dev"))?.into_iter().next(),
            device,
        });
    }
    // A virtual function has no link of its own.
    let links: BTreeMap<String, PciLink> =
        functions.iter().filter_map(|one| Some((one.device.address.clone(), one.link?))).collect();
    for function in &mut functions {
        let physical = function.physical_function.as_ref().and_then(|address| links.get(address));
        function.link = function.link.or(physical.copied());
    }
    Ok(functions)
}

fn physical_function(tree: &Tree, device: &Path) -> Result<Option<String>, SysfsError> {
    let path = device.join("physfn");
    let Some(address) = tree.link_name(&path) else { return Ok(None) };
    if !vnuma_model::is_pci_address(&address) {
        return Err(SysfsError::value(&path, &address, "not the address of a PCI function"));
    }
    Ok(Some(address))
}

fn link(tree: &Tree, device: &Path) -> Result<Option<PciLink>, SysfsError> {
    let speed = tree.parsed(&device.join("current_link_speed"), parse::link_speed)?.flatten();
    let width = tree.parsed(&device.join("current_link_width"), parse::link_width)?.flatten();
    Ok(speed.zip(width).map(|(speed_mts, width)| PciLink { speed_mts, width }))
}
