//! A domain of libvirt.

use super::{bridges, elsewhere};
use crate::{
    capacity::BASE_PAGE_BYTES,
    placement::{GuestNodePlan, Placement},
};
use std::fmt::Write;
use vnuma_model::CpuSet;

/// XML that `virsh define` takes. What the placement says nothing of, such as disks, is to be added. Names and addresses in it
/// are of letters, digits and punctuation that XML has no use for.
pub fn text(placement: &Placement) -> String {
    let mut xml = String::new();
    // Writing to a string cannot fail.
    let _ = domain(placement, &mut xml);
    xml
}

fn domain(placement: &Placement, xml: &mut String) -> std::fmt::Result {
    writeln!(xml, "<domain type='kvm'>")?;
    writeln!(xml, "  <name>{}</name>", placement.name)?;
    writeln!(xml, "  <memory unit='KiB'>{}</memory>", placement.memory_bytes() >> 10)?;
    if placement.page_bytes != BASE_PAGE_BYTES {
        let size = placement.page_bytes >> 10;
        writeln!(xml, "  <memoryBacking>\n    <hugepages>\n      <page size='{size}' unit='KiB'/>")?;
        writeln!(xml, "    </hugepages>\n  </memoryBacking>")?;
    }
    writeln!(xml, "  <vcpu placement='static'>{}</vcpu>", placement.vcpus())?;
    writeln!(xml, "  <cputune>")?;
    for pin in placement.pins() {
        writeln!(xml, "    <vcpupin vcpu='{}' cpuset='{}'/>", pin.vcpu, pin.cpu)?;
    }
    writeln!(xml, "    <emulatorpin cpuset='{}'/>\n  </cputune>", placement.emulator_cpus())?;
    let homes: CpuSet = placement.guest_nodes.iter().map(|node| node.home).collect();
    writeln!(xml, "  <numatune>\n    <memory mode='strict' nodeset='{homes}'/>")?;
    for node in &placement.guest_nodes {
        writeln!(xml, "    <memnode cellid='{}' mode='strict' nodeset='{}'/>", node.id, node.home)?;
    }
    writeln!(xml, "  </numatune>")?;
    writeln!(xml, "  <os>\n    <type arch='x86_64' machine='q35'>hvm</type>\n  </os>")?;
    // Without ACPI the guest has no tables of nodes.
    writeln!(xml, "  <features>\n    <acpi/>\n    <apic/>\n  </features>")?;
    writeln!(xml, "  <cpu mode='host-passthrough'>")?;
    writeln!(xml, "    <topology sockets='{}' cores='1' threads='1'/>\n    <numa>", placement.vcpus())?;
    for (node, row) in placement.guest_nodes.iter().zip(placement.distances.rows()) {
        cell(node, row, xml)?;
    }
    writeln!(xml, "    </numa>\n  </cpu>\n  <devices>")?;
    devices(placement, xml)?;
    writeln!(xml, "  </devices>\n</domain>")
}

fn cell(node: &GuestNodePlan, distances: &[u8], xml: &mut String) -> std::fmt::Result {
    let vcpus: CpuSet = node.vcpus.iter().map(|pin| pin.vcpu).collect();
    let cpus = if vcpus.is_empty() { String::new() } else { format!(" cpus='{vcpus}'") };
    writeln!(xml, "      <cell id='{}'{cpus} memory='{}' unit='KiB'>", node.id, node.memory_bytes >> 10)?;
    writeln!(xml, "        <distances>")?;
    for (to, distance) in distances.iter().enumerate() {
        writeln!(xml, "          <sibling id='{to}' value='{distance}'/>")?;
    }
    writeln!(xml, "        </distances>\n      </cell>")
}

fn devices(placement: &Placement, xml: &mut String) -> std::fmt::Result {
    writeln!(xml, "    <controller type='pci' index='0' model='pcie-root'/>")?;
    // Without these two libvirt adds devices of its own, into the first free port.
    writeln!(xml, "    <controller type='usb' model='none'/>\n    <memballoon model='none'/>")?;
    // libvirt numbers controllers, and calls that the bus of what is plugged into them. One is for the topology channel.
    writeln!(xml, "    <controller type='pci' index='1' model='pcie-root-port'/>")?;
    let mut next = 2;
    let mut hosts = Vec::new();
    for bridge in bridges(placement) {
        let expander = next;
        next += 1;
        writeln!(xml, "    <controller type='pci' index='{expander}' model='pcie-expander-bus'>")?;
        writeln!(xml, "      <target busNr='{}'>\n        <node>{}</node>", bridge.bus, bridge.guest_node)?;
        writeln!(xml, "      </target>\n    </controller>")?;
        for (slot, device) in bridge.devices.iter().enumerate() {
            writeln!(xml, "    <controller type='pci' index='{next}' model='pcie-root-port'>")?;
            let place = format!("domain='0x0000' bus='0x{expander:02x}' slot='0x{slot:02x}' function='0x0'");
            writeln!(xml, "      <address type='pci' {place}/>\n    </controller>")?;
            hosts.push((next, device.address.as_str()));
            next += 1;
        }
    }
    for device in elsewhere(placement) {
        writeln!(xml, "    <controller type='pci' index='{next}' model='pcie-root-port'/>")?;
        hosts.push((next, device.address.as_str()));
        next += 1;
    }
    hosts.into_iter().try_for_each(|(bus, address)| hostdev(bus, address, xml))
}

fn hostdev(bus: usize, address: &str, xml: &mut String) -> std::fmt::Result {
    let mut parts = address.split([':', '.']);
    let mut part = || parts.next().unwrap_or_default();
    let source =
        format!("domain='0x{}' bus='0x{}' slot='0x{}' function='0x{}'", part(), part(), part(), part());
    writeln!(xml, "    <hostdev mode='subsystem' type='pci' managed='yes'>\n      <driver name='vfio'/>")?;
    writeln!(xml, "      <source>\n        <address {source}/>\n      </source>")?;
    let own = format!("domain='0x0000' bus='0x{bus:02x}' slot='0x00' function='0x0'");
    writeln!(xml, "      <address type='pci' {own}/>\n    </hostdev>")
}
