//! What a VM is to have.

use crate::{capacity::Capacity, capacity::unit_bytes, size::shown_bytes};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Most vCPUs of a VM, as in KVM (`KVM_MAX_VCPUS`).
pub const MAX_VCPUS: u32 = 4096;
/// Most devices of a VM: slots of a PCI host bridge, as all can be on one node. A machine has 256 buses for them.
pub(crate) const MAX_DEVICES: usize = 32;
/// Longest name.
const MAX_NAME: usize = 64;

/// Must a VM have a part of itself on the nodes of its devices?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Locality {
    /// If a device's node has neither a CPU nor memory left, the VM is refused.
    #[default]
    Required,
    /// If so, the nearest node that has both takes its place.
    Preferred,
}

/// What a VM is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its name.
    pub name: String,
    /// vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u32,
    /// Memory, bytes; a multiple of the page size and of 2 MiB.
    pub memory_bytes: u64,
    /// Size of its pages, bytes.
    pub page_bytes: u64,
    /// Addresses of PCI functions, as in sysfs.
    pub devices: Vec<String>,
    /// What if it cannot be near them?
    pub locality: Locality,
}

/// What is wrong with a request.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum RequestError {
    /// The name would be none of a VM.
    #[error(
        "name {0:?}: expected 1 to {MAX_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit"
    )]
    Name(String),
    /// Too few vCPUs or too many.
    #[error("vcpus {0}: expected 1 to {MAX_VCPUS}")]
    Vcpus(u32),
    /// No memory.
    #[error("memory 0: expected at least {}", shown_bytes(*.unit_bytes))]
    NoMemory {
        /// Unit of this page size.
        unit_bytes: u64,
    },
    /// No multiple of the unit.
    #[error(
        "memory {}: not a multiple of {}, {}",
        shown_bytes(*.bytes),
        shown_bytes(*.unit_bytes),
        if .unit_bytes == .page_bytes { "the size of its pages" } else { "so that transparent huge pages fit" }
    )]
    Unit {
        /// The memory.
        bytes: u64,
        /// The unit.
        unit_bytes: u64,
        /// The page size.
        page_bytes: u64,
    },
    /// No node has a pool of such pages.
    #[error("page size {}: the host has pages of {}", shown_bytes(*.page_bytes), list(.there))]
    PageSize {
        /// The page size.
        page_bytes: u64,
        /// Those of the host.
        there: Vec<u64>,
    },
    /// More than there can be.
    #[error("{0} devices: expected at most {MAX_DEVICES}")]
    Devices(usize),
    /// A device that the host does not have.
    #[error("device {0:?}: the host has no such PCI function; expected an address such as 0000:81:00.0")]
    NoDevice(String),
    /// A device twice.
    #[error("device {0}: named twice")]
    Twice(String),
    /// A device of another VM.
    #[error("device {device}: in use by {holder}")]
    InUse {
        /// The device.
        device: String,
        /// Who has it.
        holder: String,
    },
    /// A device whose IOMMU group is another VM's.
    #[error("device {device}: shares IOMMU group {group} with {other}, which is in use by {holder}")]
    Group {
        /// The device.
        device: String,
        /// Its group.
        group: u32,
        /// A device of the same group.
        other: String,
        /// Who has that.
        holder: String,
    },
}

fn list(sizes: &[u64]) -> String {
    sizes.iter().map(|size| shown_bytes(*size)).collect::<Vec<_>>().join(", ")
}

/// Is it fit to be the name of a VM? It becomes an option of QEMU, a comment in a script, an element of XML.
pub fn is_name(name: &str) -> bool {
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    name.len() <= MAX_NAME && name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(fit)
}

impl Request {
    /// Could it be placed on an empty host like this, as far as it is the request that decides that?
    pub(crate) fn check(&self, capacity: &Capacity) -> Result<(), RequestError> {
        if !is_name(&self.name) {
            return Err(RequestError::Name(self.name.chars().take(2 * MAX_NAME).collect()));
        }
        if !(1..=MAX_VCPUS).contains(&self.vcpus) {
            return Err(RequestError::Vcpus(self.vcpus));
        }
        let there = capacity.page_sizes();
        if !there.contains(&self.page_bytes) {
            return Err(RequestError::PageSize { page_bytes: self.page_bytes, there });
        }
        let (bytes, unit_bytes) = (self.memory_bytes, unit_bytes(self.page_bytes));
        if bytes == 0 {
            return Err(RequestError::NoMemory { unit_bytes });
        }
        if !bytes.is_multiple_of(unit_bytes) {
            return Err(RequestError::Unit { bytes, unit_bytes, page_bytes: self.page_bytes });
        }
        self.check_devices(capacity)
    }

    fn check_devices(&self, capacity: &Capacity) -> Result<(), RequestError> {
        if self.devices.len() > MAX_DEVICES {
            return Err(RequestError::Devices(self.devices.len()));
        }
        let mut named = BTreeSet::new();
        for address in &self.devices {
            let Some(device) = capacity.device(address) else {
                return Err(RequestError::NoDevice(address.chars().take(2 * MAX_NAME).collect()));
            };
            let address = device.address.clone();
            if !named.insert(&device.address) {
                return Err(RequestError::Twice(address));
            }
            if let Some(holder) = capacity.holder(&address) {
                return Err(RequestError::InUse { device: address, holder: holder.to_owned() });
            }
            if let Some((other, holder)) = capacity.group_holder(device) {
                let (other, holder) = (other.to_owned(), holder.to_owned());
                let group = device.iommu_group.unwrap_or_default();
                return Err(RequestError::Group { device: address, group, other, holder });
            }
        }
        Ok(())
    }
}
