//! PCI functions with what programs, not placement, want to know of them.

use crate::host::PciDevice;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Address of a PCI function in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PciAddress {
    /// Its PCI domain.
    pub segment: u16,
    /// Its bus.
    pub bus: u8,
    /// `device << 3 | function`.
    pub devfn: u8,
}

impl fmt::Display for PciAddress {
    /// As Linux shows it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, bus, devfn } = self;
        write!(f, "{segment:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7)
    }
}

/// The link of a PCIe function, as it was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciLink {
    /// Speed of a lane, megatransfers per second: 2500 for PCIe 1, 64000 for PCIe 6.
    pub speed_mts: u32,
    /// Lanes.
    pub width: u32,
}

/// A PCI function, and who uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// What placement knows of it.
    pub device: PciDevice,
    /// Address of the function that it is a virtual function of (SR-IOV).
    pub physical_function: Option<String>,
    /// Its link; of a virtual function, that of its physical one. None if it has none, or it is down.
    pub link: Option<PciLink>,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
    /// Its name in `/dev/vfio/devices`, if the kernel has that.
    pub vfio_device: Option<String>,
}

impl PciFunction {
    /// Is it bound to a driver that passes it through? Beside `vfio-pci` there are some for single devices, all named so.
    pub fn is_passed_through(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.contains("vfio"))
    }
}
