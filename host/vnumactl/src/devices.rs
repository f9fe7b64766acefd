//! Devices of the host and who has them, and what is free of the host.

use crate::table::{Table, or_dash, plain, plain_lines, size};
use vnuma_api::{Device, DeviceUser, DeviceUserKind, Devices, FreeMemory, NodeFree, PciLink};
use vnuma_placement::{BASE_PAGE_BYTES, shown_bytes};

/// All devices, then what else VMs have.
pub fn text(devices: &Devices) -> String {
    let mut text = functions(&devices.functions);
    if !devices.interfaces.is_empty() {
        text += "\nNetwork interfaces of VMs\n";
        let mut table = Table::new("VM  >PID  INTERFACE  DEVICES  >NODE");
        for one in &devices.interfaces {
            let nodes = one.devices.iter().map(|address| or_dash(node(devices, address)));
            table.row([
                plain(&one.vm),
                one.pid.to_string(),
                plain(&one.interface),
                joined(one.devices.iter().map(|address| plain(address))),
                joined(nodes),
            ]);
        }
        text += &table.text(2);
    }
    if !devices.vhost.is_empty() {
        text += "\nvhost devices of VMs\n";
        let mut table = Table::new("VM  >PID  DEVICE  >FILES");
        for one in &devices.vhost {
            table.row([plain(&one.vm), one.pid.to_string(), plain(&one.device), one.files.to_string()]);
        }
        text += &table.text(2);
    }
    for problem in &devices.problems {
        text += &format!("\nnot known: {}\n", plain_lines(problem));
    }
    text
}

fn functions(functions: &[Device]) -> String {
    if functions.is_empty() {
        return "no PCI devices\n".to_owned();
    }
    let mut table = Table::new("ADDRESS  >NODE  >GROUP  VF OF  LINK  DRIVER  USED BY  CLASS  NAME");
    for one in functions {
        let class = one.class_name.as_deref().map(plain);
        table.row([
            plain(&one.address),
            or_dash(one.node),
            or_dash(one.iommu_group),
            or_dash(one.physical_function.as_deref().map(plain)),
            or_dash(one.link.map(link)),
            or_dash(one.driver.as_deref().map(plain)),
            or_dash(one.user.as_ref().map(user)),
            class.unwrap_or_else(|| format!("{:06x}", one.class)),
            name(one),
        ]);
    }
    table.text(0)
}

/// For example `8 GT/s x4`.
fn link(PciLink { speed_mts, width }: PciLink) -> String {
    let tenths = speed_mts % 1000 / 100;
    let tenths = if tenths == 0 { String::new() } else { format!(".{tenths}") };
    format!("{}{tenths} GT/s x{width}", speed_mts / 1000)
}

fn user(DeviceUser { kind, name, pid }: &DeviceUser) -> String {
    let name = plain(name);
    match (kind, pid) {
        (DeviceUserKind::Vm, _) => name,
        (DeviceUserKind::Process, Some(pid)) => format!("process {pid} ({name})"),
        (DeviceUserKind::Process, None) => format!("process ({name})"),
        (DeviceUserKind::Reservation, _) => format!("{name} (reserved)"),
    }
}

fn name(device: &Device) -> String {
    let id = format!("{:04x}:{:04x}", device.vendor, device.device);
    let vendor = device.vendor_name.as_deref().map(plain);
    match (vendor, device.device_name.as_deref().map(plain)) {
        (Some(vendor), Some(name)) => format!("{vendor} {name} [{id}]"),
        (Some(vendor), None) => format!("{vendor} [{id}]"),
        _ => format!("[{id}]"),
    }
}

fn node(devices: &Devices, address: &str) -> Option<u32> {
    devices.functions.iter().find(|one| one.address == address)?.node
}

fn joined(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() { "-".to_owned() } else { items.join(",") }
}

/// What is free on each node.
pub fn capacity(nodes: &[NodeFree]) -> String {
    let mut table =
        Table::new(">NODE  >CPUS (FREE/ALL)  >FREE CORES  >MEMORY (FREE/ALL)  HUGE PAGES (FREE/ALL)");
    for one in nodes {
        let (ordinary, huge): (Vec<_>, Vec<_>) =
            one.memory.iter().partition(|memory| memory.page_bytes == BASE_PAGE_BYTES);
        let bytes = |memory: &&FreeMemory| {
            format!("{}/{}", size(memory.free_bytes >> 10), size(memory.total_bytes >> 10))
        };
        let pages = |memory: &&FreeMemory| {
            let count = |bytes: u64| bytes.checked_div(memory.page_bytes).unwrap_or_default();
            format!(
                "{} x {}/{}",
                shown_bytes(memory.page_bytes),
                count(memory.free_bytes),
                count(memory.total_bytes)
            )
        };
        table.row([
            one.node.to_string(),
            format!("{}/{}", one.free_cpus, one.usable_cpus),
            one.free_cores.to_string(),
            joined(ordinary.iter().map(bytes)),
            joined(huge.iter().filter(|memory| memory.total_bytes > 0).map(pages)),
        ]);
    }
    table.text(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{VmInterface, VmVhost};

    fn device(address: &str, node: Option<u32>) -> Device {
        Device {
            address: address.into(),
            class: 0x01_08_02,
            vendor: 0x8086,
            device: 0x10ca,
            class_name: None,
            vendor_name: None,
            device_name: None,
            node,
            iommu_group: None,
            physical_function: None,
            link: None,
            driver: None,
            interfaces: Vec::new(),
            user: None,
        }
    }

    #[test]
    fn devices_are_shown_with_their_users() {
        let held = Device {
            class_name: Some("Ethernet controller".into()),
            vendor_name: Some("Intel Corporation".into()),
            device_name: Some("82576 Virtual Function".into()),
            iommu_group: Some(17),
            physical_function: Some("0000:81:00.0".into()),
            link: Some(PciLink { speed_mts: 2500, width: 4 }),
            driver: Some("vfio-pci".into()),
            user: Some(DeviceUser { kind: DeviceUserKind::Vm, name: "w\u{1b}".into(), pid: Some(7) }),
            ..device("0000:81:10.0", Some(1))
        };
        let other = Device {
            user: Some(DeviceUser { kind: DeviceUserKind::Process, name: "dpdk".into(), pid: Some(8) }),
            link: Some(PciLink { speed_mts: 16_000, width: 16 }),
            vendor_name: Some("Intel Corporation".into()),
            ..device("0000:82:00.0", None)
        };
        let reserved = Device {
            user: Some(DeviceUser { kind: DeviceUserKind::Reservation, name: "db".into(), pid: None }),
            ..device("0000:83:00.0", Some(0))
        };
        let (vm, pid) = ("w".to_owned(), 7);
        let (interface, devices) =
            ("tap0".to_owned(), vec!["0000:81:10.0".to_owned(), "0000:99:00.0".to_owned()]);
        let shown = Devices {
            functions: vec![held, other, reserved],
            interfaces: vec![VmInterface { vm: vm.clone(), pid, interface, devices }],
            vhost: vec![VmVhost { vm, pid, device: "vhost-net".into(), files: 2 }],
            problems: vec!["devices of the VM x: /proc/9/fd: no".into()],
        };
        let expected = "\
ADDRESS       NODE  GROUP  VF OF         LINK         DRIVER    USED BY           CLASS                NAME
0000:81:10.0     1     17  0000:81:00.0  2.5 GT/s x4  vfio-pci  w\u{fffd}                Ethernet controller  Intel Corporation 82576 Virtual Function [8086:10ca]
0000:82:00.0     -      -  -             16 GT/s x16  -         process 8 (dpdk)  010802               Intel Corporation [8086:10ca]
0000:83:00.0     0      -  -             -            -         db (reserved)     010802               [8086:10ca]

Network interfaces of VMs
  VM  PID  INTERFACE  DEVICES                    NODE
  w     7  tap0       0000:81:10.0,0000:99:00.0   1,-

vhost devices of VMs
  VM  PID  DEVICE     FILES
  w     7  vhost-net      2

not known: devices of the VM x: /proc/9/fd: no
";
        assert_eq!(text(&shown), expected);
        assert_eq!(text(&Devices::default()), "no PCI devices\n");
    }

    #[test]
    fn what_is_free_is_shown_by_node() {
        let memory = |page_bytes, total_bytes, free_bytes| FreeMemory { page_bytes, total_bytes, free_bytes };
        let node = |node, memory| NodeFree { node, usable_cpus: 8, free_cpus: 5, free_cores: 2, memory };
        let nodes = [
            node(
                0,
                vec![
                    memory(4096, 8 << 30, 3 << 29),
                    memory(2 << 20, 20 << 20, 6 << 20),
                    memory(1 << 30, 0, 0),
                ],
            ),
            node(3, vec![memory(4096, 0, 0)]),
        ];
        let expected = "\
NODE  CPUS (FREE/ALL)  FREE CORES  MEMORY (FREE/ALL)  HUGE PAGES (FREE/ALL)
   0              5/8           2  1536 MiB/8192 MiB  2 MiB x 3/10
   3              5/8           2        0 KiB/0 KiB  -
";
        assert_eq!(capacity(&nodes), expected);
    }
}
