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

/// Is it the address of a PCI function as `/sys/bus/pci/devices` has it, `0000:81:00.0`?
pub fn is_pci_address(text: &str) -> bool {
    let hex = |part: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&part.len()) && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let mut parts = text.splitn(3, ':');
    let (Some(domain), Some(bus), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let Some((device, function)) = rest.split_once('.') else { return false };
    // Domains beyond 0xffff exist: those of Intel's Volume Management Device.
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(device, 2..=2) && hex(function, 1..=1)
}

/// The link of a PCIe function, as it was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_known_by_their_form() {
        for good in ["0000:81:00.0", "0000:00:1f.2", "10000:e1:1f.7"] {
            assert!(is_pci_address(good), "{good}");
        }
        for bad in [
            "",
            "..",
            "81:00.0",
            "0000:81:00",
            "0000:81:00.",
            "0000:81:00.0/",
            "0000:81:00.0/..",
            "0000:81:00.0:1",
            "../0000:81:00.0",
            "../../etc:00:00.0",
            "0000:8g:00.0",
            "0000:8A:00.0",
            "ffffffff0:00:00.0",
        ] {
            assert!(!is_pci_address(bad), "{bad}");
        }
    }
}
