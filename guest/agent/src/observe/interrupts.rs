//! Interrupts of devices.

use crate::{
    core::{Device, Interrupt},
    files,
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use vnuma_model::CpuSet;
use vnuma_process::text::sanitize_short;

const LIMIT: u64 = 64 << 20;
/// A number for each of 8192 CPUs, and names.
const LINE: usize = 128 * 1024;
/// Most interrupts of a device: MSI-X has 2048 vectors.
const VECTORS: usize = 2048;
/// Base classes whose queues matter: disks and network controllers.
const CLASSES: [u32; 2] = [0x01, 0x02];

/// Where the kernel has what it says of an interrupt.
pub fn affinity_file(root: &Path, irq: u32) -> PathBuf {
    root.join(format!("proc/irq/{irq}/smp_affinity_list"))
}

/// A line of `/proc/interrupts`: the number of an interrupt of a device, and who handles it. `None`: nobody does, or it is
/// not one of a device.
pub fn handler(line: &[u8]) -> Option<(u32, String)> {
    let text = String::from_utf8_lossy(line);
    let (irq, rest) = text.trim_start().split_once(':')?;
    let irq = irq.parse().ok()?;
    let mut words =
        rest.split_ascii_whitespace().skip_while(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
    // The controller, and the number that it has there.
    words.next()?;
    words.next()?;
    let name = sanitize_short(&words.collect::<Vec<_>>().join(" "));
    (!name.is_empty()).then_some((irq, name))
}

/// Interrupts of disks, network controllers and devices that do RDMA.
pub(super) fn read(root: &Path, devices: &BTreeMap<String, Device>) -> Vec<Interrupt> {
    let mut handlers = BTreeMap::new();
    let each = |line: &[u8]| handlers.extend(handler(line));
    // Without it no interrupt is known.
    let _ = files::lines(&root.join("proc/interrupts"), LIMIT, LINE, each);
    let mut found = Vec::new();
    for (address, device) in devices {
        if !device.rdma && !CLASSES.contains(&(device.class >> 16)) {
            continue;
        }
        let vectors = files::names(&root.join("sys/bus/pci/devices").join(address).join("msi_irqs"));
        for irq in vectors.iter().take(VECTORS).filter_map(|name| name.parse::<u32>().ok()) {
            let list = files::text(&affinity_file(root, irq));
            let cpus = list.and_then(|list| list.parse::<CpuSet>().ok()).filter(|cpus| !cpus.is_empty());
            if let (Some(name), Some(cpus)) = (handlers.get(&irq), cpus) {
                found.push(Interrupt { irq, device: address.clone(), name: name.clone(), cpus });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_are_named() {
        let line = b" 24:       1234          0  PCI-MSIX-0000:00:04.0   0-edge      eth0-TxRx-0, x";
        assert_eq!(handler(line), Some((24, "eth0-TxRx-0, x".to_owned())));
        for none in [
            &b"           CPU0       CPU1"[..],
            b"NMI:          0          0   Non-maskable interrupts",
            b" 25:   0   0  PCI-MSIX-0000:00:04.0   1-edge",
            b"ERR:          0",
            b"",
            b"99999999999: 1 a b c",
            b"24: 1 a b \x0b",
        ] {
            assert_eq!(handler(none), None, "{}", String::from_utf8_lossy(none));
        }
        assert_eq!(handler(b"7: 1 IO-APIC 7-edge a\x1b[2J\n"), Some((7, "a\\u{1b}[2J".to_owned())));
    }
}
