//! Which VM, or other process, has which device.

use crate::core::uses::VmUse;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use vnuma_api::{Device, DeviceUser, DeviceUserKind, Devices, VmInterface, VmVhost};
use vnuma_model::{HostTopology, PciFunction};
use vnuma_observe::{
    SysfsError,
    devices::{DeviceFile, DevicesError, held_functions, read_device_files, used_interfaces},
    read_pci_functions,
    sysfs::{Interface, nics_behind, pci_ids, read_interfaces},
};
use vnuma_placement::{
    Claim,
    reservation::{Book, Reservation},
};
use vnuma_process::procfs;

/// A process, and the device files that it has.
struct User {
    kind: DeviceUserKind,
    name: String,
    pid: i32,
    files: Vec<DeviceFile>,
}

/// The devices of a host, and the processes that have some.
pub(super) struct Observed {
    functions: Vec<PciFunction>,
    users: Vec<User>,
    /// VMs of which it is not known what they have.
    problems: Vec<String>,
}

impl Observed {
    /// Looks at the files of VMs and, where a function is bound to VFIO, of all other processes. One of these that cannot be
    /// looked at, or has ended by then, is left out. Of one with very many files some count.
    pub(super) fn read(root: &Path, host: &HostTopology, uses: &[VmUse]) -> Result<Self, SysfsError> {
        let functions = read_pci_functions(root, &host.nodes)?;
        let (mut users, mut problems) = (Vec::new(), Vec::new());
        for vm in uses {
            let name = vm.claim.owner.clone();
            match read_device_files(root, vm.pid) {
                Ok(files) => users.push(User { kind: DeviceUserKind::Vm, name, pid: vm.pid, files }),
                // With what it had.
                Err(DevicesError::Process(procfs::ProcError::Gone { .. })) => {}
                Err(error) => {
                    problems.push(format!("devices of the VM {name}: {error}"));
                    // It is shown with what is known, and no device is given away.
                    if let DevicesError::TooMany { files, .. } = error {
                        users.push(User { kind: DeviceUserKind::Vm, name, pid: vm.pid, files });
                    }
                }
            }
        }
        if functions.iter().any(PciFunction::is_passed_through) {
            let proc = root.join("proc");
            let others = procfs::read_processes(&proc).unwrap_or_default();
            for pid in others.into_iter().filter(|pid| uses.iter().all(|vm| vm.pid != *pid)) {
                // Any user can have a process with very many files. That is not to keep devices from all.
                let files = match read_device_files(root, pid) {
                    Ok(files) | Err(DevicesError::TooMany { files, .. }) => files,
                    Err(_) => continue,
                };
                if !held_functions(&functions, &files).is_empty() {
                    let name = procfs::read_name(&proc, pid).unwrap_or_default();
                    users.push(User { kind: DeviceUserKind::Process, name, pid, files });
                }
            }
        }
        Ok(Self { functions, users, problems })
    }

    /// What is wrong, if it is not known what a VM has.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problems.first().map(String::as_str)
    }

    /// Devices that somebody has, and physical functions of which somebody has a virtual one, or waits for it: these would
    /// lose it with the driver of the physical one.
    pub(super) fn claims(&self, book: &Book) -> Vec<Claim> {
        let owner = |user: &User| match user.kind {
            DeviceUserKind::Process => format!("process {} ({})", user.pid, user.name),
            DeviceUserKind::Vm | DeviceUserKind::Reservation => user.name.clone(),
        };
        let of_process = |user: &User| (owner(user), held_functions(&self.functions, &user.files));
        let mut had: Vec<(String, BTreeSet<String>)> = book
            .all()
            .map(|Reservation { placement, .. }| {
                let devices = placement.devices.iter().map(|device| device.address.clone());
                (placement.name.clone(), devices.collect())
            })
            .collect();
        had.extend(self.users.iter().map(of_process));
        let claim = |owner, devices| Claim { owner, devices, ..Claim::default() };
        let mut claims = Vec::new();
        for (owner, devices) in had {
            for function in self.functions.iter().filter(|one| devices.contains(&one.device.address)) {
                if let Some(physical) = &function.physical_function {
                    let owner =
                        format!("{owner}, which has its virtual function {}", function.device.address);
                    claims.push(claim(owner, vec![physical.clone()]));
                }
            }
            claims.push(claim(owner, devices.into_iter().collect()));
        }
        claims
    }

    /// What keeps devices from being passed through as the host is now. Of an IOMMU group VFIO gives all functions away or none.
    pub(super) fn obstacles(&self, devices: &[String]) -> Vec<String> {
        let (asked, others): (Vec<_>, Vec<_>) =
            self.functions.iter().partition(|function| devices.contains(&function.device.address));
        let mut obstacles = Vec::new();
        for function in asked {
            let address = &function.device.address;
            let Some(group) = function.device.iommu_group else {
                obstacles.push(format!(
                    "device {address}: in no IOMMU group: the host has no IOMMU, or it is off"
                ));
                continue;
            };
            if !function.is_passed_through() {
                let holder = holder(function);
                obstacles.push(format!(
                    "device {address}: {holder}; QEMU needs vfio-pci to have it, libvirt changes that by itself"
                ));
            }
            let keeps = |other: &&&PciFunction| other.device.iommu_group == Some(group) && keeps_group(other);
            for other in others.iter().filter(keeps) {
                let holder = holder(other);
                obstacles.push(format!(
                    "device {address}: shares IOMMU group {group} with {}: {holder}; until it gives that up no VM gets a device of the group",
                    other.device.address
                ));
            }
        }
        obstacles
    }

    /// All of it, with names. The VM that has a device is named before the one that it is reserved for.
    pub(super) fn shown(&self, root: &Path, reservations: &[Reservation]) -> Result<Devices, SysfsError> {
        let interfaces = read_interfaces(root)?;
        let mut users = BTreeMap::<String, DeviceUser>::new();
        for Reservation { placement, .. } in reservations {
            let user =
                DeviceUser { kind: DeviceUserKind::Reservation, name: placement.name.clone(), pid: None };
            let devices = placement.devices.iter().map(|device| (device.address.clone(), user.clone()));
            users.extend(devices);
        }
        for User { kind, name, pid, files } in &self.users {
            let user = DeviceUser { kind: *kind, name: name.clone(), pid: Some(*pid) };
            users.extend(held_functions(&self.functions, files).into_iter().map(|held| (held, user.clone())));
        }
        let wanted = self.functions.iter().map(|one| (one.device.vendor, one.device.device)).collect();
        let names = pci_ids::read(root, &wanted);
        let function = |function: &PciFunction| {
            let (class, vendor, device) =
                (function.device.class, function.device.vendor, function.device.device);
            Device {
                class_name: names.class(class).map(str::to_owned),
                vendor_name: names.vendor(vendor).map(str::to_owned),
                device_name: names.device(vendor, device).map(str::to_owned),
                user: users.remove(&function.device.address),
                ..Device::new(function)
            }
        };
        let functions = self.functions.iter().map(function).collect();
        let vms = || self.users.iter().filter(|user| user.kind == DeviceUserKind::Vm);
        Ok(Devices {
            functions,
            interfaces: vms().flat_map(|user| vm_interfaces(root, user, &interfaces)).collect(),
            vhost: vms().flat_map(vm_vhost).collect(),
            problems: self.problems.clone(),
        })
    }
}

/// Has a function a driver that keeps its IOMMU group from VFIO? Some that start no transfers of their own do not
/// (`driver_managed_dma` in Linux).
fn keeps_group(function: &PciFunction) -> bool {
    let driver = function.driver.as_deref();
    driver.is_some_and(|driver| !function.is_passed_through() && !matches!(driver, "pcieport" | "pci-stub"))
}

/// Which driver has a function, and what the host has by it.
fn holder(PciFunction { driver, interfaces, .. }: &PciFunction) -> String {
    match (driver, interfaces.is_empty()) {
        (None, _) => "no driver has it".to_owned(),
        (Some(driver), true) => format!("the host's driver {driver} has it"),
        (Some(driver), false) => format!("the host's driver {driver} has it ({})", interfaces.join(", ")),
    }
}

fn vm_interfaces(root: &Path, user: &User, interfaces: &BTreeMap<String, Interface>) -> Vec<VmInterface> {
    let namespace = |process: &str| std::fs::read_link(root.join("proc").join(process).join("ns/net")).ok();
    let same = namespace(&user.pid.to_string()) == namespace("self");
    let used = used_interfaces(interfaces, &user.files).into_iter();
    used.map(|interface| VmInterface {
        vm: user.name.clone(),
        pid: user.pid,
        devices: if same { nics_behind(interfaces, &interface) } else { Vec::new() },
        interface,
    })
    .collect()
}

fn vm_vhost(user: &User) -> Vec<VmVhost> {
    let mut counts = BTreeMap::<&str, u32>::new();
    for file in &user.files {
        if let DeviceFile::Vhost(device) = file {
            *counts.entry(device).or_default() += 1;
        }
    }
    let vhost = |(device, files): (&str, u32)| VmVhost {
        vm: user.name.clone(),
        pid: user.pid,
        device: device.to_owned(),
        files,
    };
    counts.into_iter().map(vhost).collect()
}
