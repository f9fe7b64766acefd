//! Which process has which device: VFIO files, tap and vhost devices among its open files.
//!
//! An IOMMU group can be open in one process only, and a function of it is used by that process. The path of an open file is
//! seen as its process has it, which may be a lie, so a group's file counts only with the device number that `/sys` has for it.

use crate::sysfs::{Interface, SysfsError, read_class_number};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use vnuma_model::PciFunction;
use vnuma_process::procfs::{self, OpenFile, ProcError};

/// A device file that a process has open.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceFile {
    /// An IOMMU group.
    VfioGroup(u32),
    /// A device, by its name in `/dev/vfio/devices`.
    VfioDevice(String),
    /// A device, by its address. Linux shows it from 6.18 on.
    VfioAddress(String),
    /// A queue of a tap interface, by the name that this has.
    Tap(String),
    /// A queue of a macvtap interface, by its number.
    Macvtap(u64),
    /// A vhost device, such as `vhost-net`.
    Vhost(String),
}

/// Why it is not known what a process has.
#[derive(Debug, thiserror::Error)]
pub enum DevicesError {
    /// A file of the process cannot be read.
    #[error(transparent)]
    Process(#[from] ProcError),
    /// A file of the host.
    #[error(transparent)]
    Host(#[from] SysfsError),
    /// It has more descriptors than [`DESCRIPTORS`].
    #[error("{path}: more than {DESCRIPTORS} open files: which devices are among the rest is not known")]
    TooMany {
        /// The directory.
        path: String,
        /// What is known.
        files: Vec<DeviceFile>,
    },
}

/// Most descriptors of a process that are looked at: a process decides how many it has. QEMU has some for each queue of each device, and
/// as many queues as vCPUs, so that those of a large VM are thousands.
pub const DESCRIPTORS: usize = 1 << 14;

/// Device files that a process has open, each once for each time that it is. `root` has `sys` and `proc`. An error if there are
/// more descriptors than [`DESCRIPTORS`]: what is among the others is not known.
pub fn read_device_files(root: &Path, pid: i32) -> Result<Vec<DeviceFile>, DevicesError> {
    let proc = root.join("proc");
    let mut files = Vec::new();
    let (open, all) = procfs::read_open_files(&proc, pid, DESCRIPTORS)?;
    for file in open {
        let info = || procfs::read_file_info(&proc, pid, file.fd).unwrap_or_default();
        let Some(found) = device_file(&file, info) else { continue };
        if has_number_of(root, &found, &file)? {
            files.push(found);
        }
    }
    if !all {
        let path = proc.join(pid.to_string()).join("fd").display().to_string();
        return Err(DevicesError::TooMany { path, files });
    }
    Ok(files)
}

/// Is an open file of VFIO the device that the kernel has under that name? A process can have any file under it, another device
/// included.
fn has_number_of(root: &Path, found: &DeviceFile, file: &OpenFile) -> Result<bool, SysfsError> {
    let class = match found {
        DeviceFile::VfioGroup(_) => "vfio",
        DeviceFile::VfioDevice(_) => "vfio-dev",
        _ => return Ok(true),
    };
    let Some((_, name)) = file.path.rsplit_once('/') else { return Ok(false) };
    Ok(read_class_number(root, class, name)? == file.number)
}

/// What an open file is, by its path and what the kernel tells of it.
pub fn device_file(file: &OpenFile, info: impl Fn() -> String) -> Option<DeviceFile> {
    if file.path == "anon_inode:[vfio-device]" {
        let info = info();
        let address = procfs::file_info(&info, "vfio-device-syspath").rsplit('/').next()?;
        let known = vnuma_model::is_pci_address(address);
        return known.then(|| DeviceFile::VfioAddress(address.to_owned()));
    }
    let name = file.path.strip_prefix("/dev/")?;
    let number =
        |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?;
    if let Some(device) = name.strip_prefix("vfio/devices/") {
        return (!device.contains('/')).then(|| DeviceFile::VfioDevice(device.to_owned()));
    }
    if let Some(group) = name.strip_prefix("vfio/") {
        // Without an IOMMU, if the kernel is configured so.
        return number(group.strip_prefix("noiommu-").unwrap_or(group))
            .and_then(|group| u32::try_from(group).ok())
            .map(DeviceFile::VfioGroup);
    }
    if name == "net/tun" {
        let info = info();
        let interface = procfs::file_info(&info, "iff");
        return (!interface.is_empty()).then(|| DeviceFile::Tap(interface.to_owned()));
    }
    if let Some(index) = name.strip_prefix("tap").filter(|index| !index.is_empty()) {
        return number(index).map(DeviceFile::Macvtap);
    }
    name.starts_with("vhost-").then(|| DeviceFile::Vhost(name.to_owned()))
}

/// Addresses of the PCI functions that a process with these files has. Of a group whose single devices it does not show, all
/// that are bound to VFIO or, if none is, all.
pub fn held_functions(functions: &[PciFunction], files: &[DeviceFile]) -> BTreeSet<String> {
    let mut held = BTreeSet::new();
    for function in functions {
        let address = &function.device.address;
        let named = files.iter().any(|file| match file {
            DeviceFile::VfioAddress(named) => named == address,
            DeviceFile::VfioDevice(named) => function.vfio_device.as_ref() == Some(named),
            _ => false,
        });
        if named {
            held.insert(address.clone());
        }
    }
    let groups = files.iter().filter_map(|file| match file {
        DeviceFile::VfioGroup(group) => Some(*group),
        _ => None,
    });
    for group in groups.collect::<BTreeSet<_>>() {
        let members = || functions.iter().filter(|function| function.device.iommu_group == Some(group));
        if members().any(|member| held.contains(&member.device.address)) {
            continue;
        }
        let bound = members().any(PciFunction::is_passed_through);
        let used = members().filter(|member| !bound || member.is_passed_through());
        held.extend(used.map(|member| member.device.address.clone()));
    }
    held
}

/// Names of the tap and macvtap interfaces that a process with these files has.
pub fn used_interfaces(interfaces: &BTreeMap<String, Interface>, files: &[DeviceFile]) -> BTreeSet<String> {
    let name = |file: &DeviceFile| match file {
        DeviceFile::Tap(name) => Some(name.clone()),
        DeviceFile::Macvtap(index) => {
            let found = interfaces.iter().find(|(_, interface)| interface.index == Some(*index));
            Some(found.map_or_else(|| format!("tap{index}"), |(name, _)| name.clone()))
        }
        _ => None,
    };
    files.iter().filter_map(name).collect()
}
