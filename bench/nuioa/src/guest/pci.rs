//! The devices of the guest that workloads use.

use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

const DEVICES: &str = "/sys/bus/pci/devices";
/// Vendor and device of an Intel 82576, which QEMU's igb is.
const CARD: (&str, &str) = ("0x8086", "0x10c9");
/// Class of an NVMe disk.
const DISK: &str = "0x010802";
/// Of the configuration space: the command register, and its bits for memory and for being a bus master (PCI Local Bus
/// Specification 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u8 = 0b110;

fn read(device: &Path, name: &str) -> Result<String> {
    let path = device.join(name);
    Ok(fs::read_to_string(&path).with_context(|| path.display().to_string())?.trim().to_owned())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{}: writing {text:?}", path.display()))
}

fn all(wanted: impl Fn(&Path) -> Result<bool>) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(DEVICES).context(DEVICES)? {
        let path = entry?.path();
        if wanted(&path)? {
            found.push(path);
        }
    }
    found.sort();
    ensure!(!found.is_empty(), "{DEVICES}: the guest lacks the device");
    Ok(found)
}

/// The network cards that are passed through.
pub fn cards() -> Result<Vec<PathBuf>> {
    let cards =
        all(|device| Ok((read(device, "vendor")?.as_str(), read(device, "device")?.as_str()) == CARD))?;
    ensure!(cards.len() == 2, "expected two cards: {cards:?}");
    Ok(cards)
}

/// The disks that are.
pub fn disks() -> Result<Vec<PathBuf>> {
    all(|device| Ok(read(device, "class")? == DISK))
}

/// The guest node that a device is on, as the kernel says; -1 for none.
pub fn node(device: &Path) -> Result<i64> {
    let text = read(device, "numa_node")?;
    text.parse().with_context(|| format!("{}/numa_node: {text:?}", device.display()))
}

/// Its address.
pub fn address(device: &Path) -> Result<&str> {
    device.file_name().and_then(|name| name.to_str()).with_context(|| device.display().to_string())
}

/// Its interrupts.
pub fn interrupts(device: &Path) -> Result<Vec<String>> {
    names(&device.join("msi_irqs"))
}

/// What a folder of `/sys` has, which is one.
pub fn only_name(directory: &Path) -> Result<String> {
    let found = names(directory)?;
    let [name] = &found[..] else { anyhow::bail!("{}: expected one, found {found:?}", directory.display()) };
    Ok(name.clone())
}

fn names(directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        found.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(found)
}

/// Gives a device to a driver, or to none.
pub fn bind(device: &Path, driver: Option<&str>) -> Result<()> {
    let address = address(device)?;
    let link = device.join("driver");
    if link.exists() {
        write(&link.join("unbind"), address)?;
    }
    // An empty line takes what was there away.
    write(&device.join("driver_override"), driver.unwrap_or("\n"))?;
    let Some(driver) = driver else { return Ok(()) };
    write(Path::new("/sys/bus/pci/drivers_probe"), address)?;
    let bound = fs::read_link(&link).with_context(|| format!("driver of {address}"))?;
    ensure!(bound.ends_with(driver), "{address} has the driver {}, expected {driver}", bound.display());
    Ok(())
}

/// Lets a device without a driver answer and reach memory.
pub fn enable(device: &Path) -> Result<()> {
    let path = device.join("config");
    let file = OpenOptions::new().read(true).write(true).open(&path);
    let file = file.with_context(|| path.display().to_string())?;
    let mut command = [0];
    file.read_exact_at(&mut command, COMMAND)?;
    command[0] |= MEMORY_AND_MASTER;
    file.write_all_at(&command, COMMAND).with_context(|| path.display().to_string())
}
