//! Devices of the host and who has them, and what is free of the host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vnuma_model::{HostNodeId, PciFunction, PciLink};

/// Devices, and what VMs have of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Devices {
    /// PCI functions, in order of their address.
    pub functions: Vec<Device>,
    /// Network interfaces of VMs.
    pub interfaces: Vec<VmInterface>,
    /// vhost devices of VMs.
    pub vhost: Vec<VmVhost>,
    /// VMs of which it is not known what they have, and why.
    pub problems: Vec<String>,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// `domain:bus:device.function`.
    pub address: String,
    /// Class code, 24 bits.
    pub class: u32,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Name of its class, if the host has the file of names.
    pub class_name: Option<String>,
    /// Name of its vendor.
    pub vendor_name: Option<String>,
    /// Its name.
    pub device_name: Option<String>,
    /// Node that it is attached to, if the firmware says so.
    pub node: Option<HostNodeId>,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// The function that it is a virtual function of.
    pub physical_function: Option<String>,
    /// Its link as it is now.
    pub link: Option<PciLink>,
    /// Its driver.
    pub driver: Option<String>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
    /// Who has it, or whom it is reserved for.
    pub user: Option<DeviceUser>,
}

impl Device {
    /// A function without names and users.
    pub fn new(function: &PciFunction) -> Self {
        let (of, function) = (&function.device, function.clone());
        Self {
            address: of.address.clone(),
            class: of.class,
            vendor: of.vendor,
            device: of.device,
            class_name: None,
            vendor_name: None,
            device_name: None,
            node: of.node,
            iommu_group: of.iommu_group,
            physical_function: function.physical_function,
            link: function.link,
            driver: function.driver,
            interfaces: function.interfaces,
            user: None,
        }
    }
}

/// What kind of user has a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceUserKind {
    /// A VM.
    Vm,
    /// A process that is no VM that vnumad knows.
    Process,
    /// A VM that is to be started.
    Reservation,
}

/// Who has a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceUser {
    /// What it is.
    pub kind: DeviceUserKind,
    /// Name of the VM or process.
    pub name: String,
    /// The process, if there is one.
    pub pid: Option<i32>,
}

/// A tap or macvtap interface that a VM has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmInterface {
    /// The VM.
    pub vm: String,
    /// Its process.
    pub pid: i32,
    /// The interface.
    pub interface: String,
    /// Addresses of the PCI functions behind it: what it is bridged to, or on. None known, if the VM is in another network
    /// namespace.
    pub devices: Vec<String>,
}

/// A vhost device that a VM has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmVhost {
    /// The VM.
    pub vm: String,
    /// Its process.
    pub pid: i32,
    /// Which, such as `vhost-net`.
    pub device: String,
    /// How many times it has it open: of `vhost-net` once for each queue.
    pub files: u32,
}

/// What is free of a node for VMs that are to be started: what neither VMs nor reservations have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeFree {
    /// The node.
    pub node: HostNodeId,
    /// CPUs that VMs may have, free or not.
    pub usable_cpus: u32,
    /// CPUs that are free.
    pub free_cpus: u32,
    /// Cores of which all CPUs are free.
    pub free_cores: u32,
    /// Memory by page size, ordinary pages first.
    pub memory: Vec<FreeMemory>,
}

/// Free memory of a page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FreeMemory {
    /// Size of a page, bytes.
    pub page_bytes: u64,
    /// All of it, bytes.
    pub total_bytes: u64,
    /// What is neither used nor reserved, bytes.
    pub free_bytes: u64,
}
