//! A placement as QEMU, libvirt and programs take it.
//!
//! | part of a placement | QEMU | libvirt |
//! |---|---|---|
//! | guest node | `-numa node`, `-numa cpu`, one socket for each vCPU | `cell` |
//! | memory on its home | `-object memory-backend-*` with `policy=bind` | `memnode` |
//! | huge pages | `memory-backend-memfd` with `hugetlb=on` | `hugepages` |
//! | distances | `-numa dist` | `sibling` |
//! | device on a guest node | `pxb-pcie` of that node, a root port, `vfio-pci` | `pcie-expander-bus`, `pcie-root-port`, `hostdev` |
//! | pins | a script, as QEMU cannot pin its threads | `vcpupin`, `emulatorpin` |
//!
//! Each has one root port more on `pcie.0`, for the topology channel.

mod libvirt;
mod qemu;

pub use qemu::{options, pinning};

use crate::placement::{DevicePlan, Placement};
use std::{collections::BTreeMap, str::FromStr};

/// What a placement is printed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Options of QEMU, and a script that pins its threads, as comments.
    Qemu,
    /// A domain of libvirt.
    Libvirt,
    /// JSON.
    Json,
}

impl FromStr for Format {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "qemu" => Ok(Self::Qemu),
            "libvirt" => Ok(Self::Libvirt),
            "json" => Ok(Self::Json),
            _ => Err(format!("format {text:?}: expected qemu, libvirt or json")),
        }
    }
}

/// Prints a placement.
pub fn text(placement: &Placement, format: Format) -> String {
    match format {
        Format::Qemu => qemu::text(placement),
        Format::Libvirt => libvirt::text(placement),
        // Maps with keys that are no text are the only thing that JSON has not.
        Format::Json => serde_json::to_string_pretty(placement).unwrap_or_default() + "\n",
    }
}

/// A PCI host bridge of a guest node, with the devices that are behind it.
struct Bridge<'a> {
    guest_node: u32,
    /// Number of its bus. Those of its ports follow.
    bus: usize,
    devices: Vec<&'a DevicePlan>,
}

/// PCI buses that a machine has.
const BUSES: usize = 256;

/// Bridges by guest node. Their buses are the last ones: those before are for what else the machine has.
fn bridges(placement: &Placement) -> Vec<Bridge<'_>> {
    let mut nodes = BTreeMap::<u32, Vec<&DevicePlan>>::new();
    for device in &placement.devices {
        if let Some(guest_node) = device.guest_node {
            nodes.entry(guest_node).or_default().push(device);
        }
    }
    let used: usize = nodes.values().map(|devices| devices.len() + 1).sum();
    let mut bus = BUSES.saturating_sub(used);
    let bridge = |(guest_node, devices): (u32, Vec<_>)| {
        let bridge = Bridge { guest_node, bus, devices };
        bus += bridge.devices.len() + 1;
        bridge
    };
    nodes.into_iter().map(bridge).collect()
}

/// Devices whose node is not known.
fn elsewhere(placement: &Placement) -> impl Iterator<Item = &DevicePlan> {
    placement.devices.iter().filter(|device| device.guest_node.is_none())
}
