//! PCI functions of the server, and their way into VMs.

use crate::{Monitor, Vm, output};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel lists them, in servers and guests.
pub const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// A function of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    /// `0000:28:00.0`.
    pub address: String,
    /// `0x010802`.
    pub class: String,
    /// Its node, if the kernel knows one.
    pub node: Option<u32>,
}

/// Those of the server, in order of their addresses.
pub fn host_devices() -> Result<Vec<HostDevice>> {
    read(Path::new(PCI_DEVICES))
}

fn read(directory: &Path) -> Result<Vec<HostDevice>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        let text = |name: &str| -> Result<String> {
            let file = path.join(name);
            Ok(fs::read_to_string(&file).with_context(|| file.display().to_string())?.trim().to_owned())
        };
        let address = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // -1 is no node.
        let node = text("numa_node")?.parse().ok();
        found.push(HostDevice { address, class: text("class")?, node });
    }
    found.sort_by(|one, other| one.address.cmp(&other.address));
    Ok(found)
}

/// The first one of a class.
pub fn device_of_class(class: &str) -> Result<HostDevice> {
    let found = host_devices()?.into_iter().find(|device| device.class == class);
    found.with_context(|| format!("{PCI_DEVICES}: no device of class {class}"))
}

/// Gives a function to VFIO.
pub fn pass_through(address: &str) -> Result<()> {
    output("modprobe", &["-a", "vfio-pci", "vfio_iommu_type1"])?;
    let device = Path::new(PCI_DEVICES).join(address);
    let write =
        |path: PathBuf, text: &str| fs::write(&path, text).with_context(|| path.display().to_string());
    write(device.join("driver_override"), "vfio-pci")?;
    if device.join("driver").exists() {
        write(device.join("driver/unbind"), address)?;
    }
    write("/sys/bus/pci/drivers_probe".into(), address)?;
    let driver = fs::read_link(device.join("driver")).with_context(|| format!("driver of {address}"))?;
    ensure!(driver.ends_with("vfio-pci"), "{address} has the driver {}", driver.display());
    ensure!(device.join("iommu_group").exists(), "{address} has no IOMMU group");
    Ok(())
}

impl Vm {
    /// Plugs a function that VFIO has into a port of the VM.
    pub fn plug(&self, id: &str, address: &str, port: &str) -> Result<()> {
        let arguments = json!({"driver": "vfio-pci", "id": id, "host": address, "bus": port});
        let mut monitor = Monitor::connect(&self.monitor())?;
        monitor.execute(&json!({"execute": "device_add", "arguments": arguments})).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_their_class_and_node() {
        let directory = tempfile::tempdir().unwrap();
        for (address, class, node) in
            [("0000:40:00.0", "0x020000\n", "1\n"), ("0000:00:01.0", "0x010802\n", "-1\n")]
        {
            let device = directory.path().join(address);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("class"), class).unwrap();
            fs::write(device.join("numa_node"), node).unwrap();
        }
        let found = read(directory.path()).unwrap();
        let of = |address: &str, class: &str, node| HostDevice {
            address: address.into(),
            class: class.into(),
            node,
        };
        assert_eq!(found, [of("0000:00:01.0", "0x010802", None), of("0000:40:00.0", "0x020000", Some(1))]);
    }
}
