//! Which process has which device, by trees that the tests build file by file.

use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::symlink,
    path::Path,
};
use tempfile::TempDir;
use vnuma_model::{HostNode, PciDevice, PciFunction, PciLink};
use vnuma_observe::{
    devices::{
        DESCRIPTORS, DeviceFile, DevicesError, device_file, held_functions, read_device_files,
        used_interfaces,
    },
    read_pci_functions,
    sysfs::{Interface, nics_behind, read_interfaces},
};
use vnuma_process::procfs::OpenFile;

const PID: i32 = 77;

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a parent")).expect("created");
    fs::write(path, text).expect("written");
}

fn link(root: &Path, path: &str, target: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a parent")).expect("created");
    symlink(target, path).expect("linked");
}

/// A card with a virtual function, and a disk: the function and the disk share group 17.
fn tree() -> TempDir {
    let tree = tempfile::tempdir().expect("a directory");
    let root = tree.path();
    for (address, class, node) in [
        ("0000:81:00.0", "0x020000\n", "1\n"),
        ("0000:81:10.0", "0x020000\n", "1\n"),
        ("0000:82:00.0", "0x010802\n", "-1\n"),
    ] {
        let directory = format!("sys/bus/pci/devices/{address}");
        for (file, text) in
            [("class", class), ("vendor", "0x8086\n"), ("device", "0x10c9\n"), ("numa_node", node)]
        {
            write(root, &format!("{directory}/{file}"), text);
        }
    }
    let device = |address: &str, file: &str| format!("sys/bus/pci/devices/{address}/{file}");
    write(root, &device("0000:81:00.0", "current_link_speed"), "8.0 GT/s PCIe\n");
    write(root, &device("0000:81:00.0", "current_link_width"), "4\n");
    write(root, &device("0000:81:00.0", "net/eth0/ifindex"), "2\n");
    link(root, &device("0000:81:00.0", "driver"), "../../../../bus/pci/drivers/igb");
    write(root, &device("0000:81:10.0", "current_link_speed"), "Unknown\n");
    write(root, &device("0000:81:10.0", "current_link_width"), "0\n");
    write(root, &device("0000:81:10.0", "vfio-dev/vfio3/dev"), "511:3\n");
    link(root, &device("0000:81:10.0", "physfn"), "../0000:81:00.0");
    link(root, &device("0000:81:10.0", "driver"), "../../../../bus/pci/drivers/vfio-pci");
    for address in ["0000:81:10.0", "0000:82:00.0"] {
        link(root, &device(address, "iommu_group"), "../../../kernel/iommu_groups/17");
    }
    tree
}

fn functions(root: &Path) -> Vec<PciFunction> {
    read_pci_functions(root, &[HostNode { id: 1, ..HostNode::default() }]).expect("functions")
}

#[test]
fn functions_have_links_drivers_and_parents() {
    let tree = tree();
    let [card, function, disk] = &functions(tree.path())[..] else { panic!("three") };
    let gen3 = Some(PciLink { speed_mts: 8000, width: 4 });
    assert_eq!(
        (card.link, function.link, disk.link),
        (gen3, gen3, None),
        "of a virtual function, its parent's"
    );
    assert_eq!((card.interfaces.as_slice(), card.driver.as_deref()), (&["eth0".to_owned()][..], Some("igb")));
    assert_eq!(function.physical_function.as_deref(), Some("0000:81:00.0"));
    assert_eq!((function.vfio_device.as_deref(), function.device.iommu_group), (Some("vfio3"), Some(17)));
    assert_eq!((card.is_passed_through(), function.is_passed_through()), (false, true));
    assert_eq!((disk.driver.as_ref(), disk.device.node), (None, None));

    let speed = "sys/bus/pci/devices/0000:81:00.0/current_link_speed";
    write(tree.path(), speed, "fast\n");
    let error = read_pci_functions(tree.path(), &[]).expect_err("no speed").to_string();
    assert!(error.ends_with(&format!("{speed}: `fast`: not a speed such as `8.0 GT/s PCIe`")), "{error}");
    write(tree.path(), speed, "8.0 GT/s PCIe\n");
    fs::remove_file(tree.path().join("sys/bus/pci/devices/0000:81:10.0/physfn")).expect("removed");
    link(tree.path(), "sys/bus/pci/devices/0000:81:10.0/physfn", "../elsewhere");
    let error = read_pci_functions(tree.path(), &[]).expect_err("no address").to_string();
    assert!(error.ends_with("physfn: `elsewhere`: not the address of a PCI function"), "{error}");
}

#[test]
fn the_files_of_a_process_show_what_it_has() {
    let tree = tree();
    let root = tree.path();
    let open = |fd: u32, target: &str, info: &str| {
        link(root, &format!("proc/{PID}/fd/{fd}"), target);
        write(root, &format!("proc/{PID}/fdinfo/{fd}"), info);
    };
    open(3, "/dev/vfio/17", "pos:\t0\n");
    open(4, "/dev/vfio/vfio", "pos:\t0\n");
    open(5, "/dev/net/tun", "pos:\t0\niff:\ttap0\n");
    open(6, "/dev/net/tun", "pos:\t0\n");
    open(7, "/dev/tap9", "pos:\t0\n");
    open(8, "/dev/vhost-net (deleted)", "");
    open(9, "/dev/vhost-net", "");
    open(10, "/dev/null", "");
    open(11, "socket:[1234]", "");
    open(12, "anon_inode:[eventfd]", "");
    open(13, "/dev/vfio/99999999999", "");
    open(14, "anon_inode:[vfio-device]", "pos:\t0\n");
    open(15, "/dev/vfio/noiommu-18", "pos:\t0\n");
    let files = read_device_files(root, PID).expect("files");
    let vhost = || DeviceFile::Vhost("vhost-net".into());
    let (group, tap, macvtap) =
        (DeviceFile::VfioGroup, DeviceFile::Tap("tap0".into()), DeviceFile::Macvtap(9));
    let expected = [group(17), tap, macvtap, vhost(), vhost(), group(18)];
    assert_eq!(files, expected);
    let held = |files: &[DeviceFile]| held_functions(&functions(root), files).into_iter().collect::<Vec<_>>();
    // The disk of the group is not bound to VFIO.
    assert_eq!(held(&files), ["0000:81:10.0"]);
    assert_eq!(held(&[]), [""; 0]);

    // A file that only has the name of a group's.
    write(root, "sys/class/vfio/17/dev", "240:17\n");
    assert_eq!(read_device_files(root, PID).expect("files"), expected[1..]);
    open(2, "/dev/vfio/devices/vfio3", "");
    let device = DeviceFile::VfioDevice("vfio3".into());
    let with_device = [&[device], &expected[1..]].concat();
    assert_eq!(read_device_files(root, PID).expect("files"), with_device);
    write(root, "sys/class/vfio-dev/vfio3/dev", "511:3\n");
    assert_eq!(read_device_files(root, PID).expect("files"), expected[1..]);
    // This process has no files that can be looked at.
    let error = read_device_files(root, PID + 1).expect_err("gone").to_string();
    assert!(error.ends_with("/proc/78/fd: no such process or thread"), "{error}");
}

#[test]
fn of_very_many_files_some_are_read_and_the_others_are_not_guessed() {
    let tree = tree();
    let open = |fd: usize| link(tree.path(), &format!("proc/{PID}/fd/{fd}"), "/dev/vhost-net");
    (0..DESCRIPTORS).for_each(open);
    assert_eq!(read_device_files(tree.path(), PID).expect("as many as may be").len(), DESCRIPTORS);
    open(DESCRIPTORS);
    let error = read_device_files(tree.path(), PID).expect_err("one more");
    assert!(error.to_string().contains("/proc/77/fd: more than 16384 open files: "), "{error}");
    let DevicesError::TooMany { files, .. } = error else { panic!("{error}") };
    assert_eq!(files.len(), DESCRIPTORS);
}

#[test]
fn a_group_whose_devices_are_shown_is_not_guessed_at() {
    let tree = tree();
    fs::remove_file(tree.path().join("sys/bus/pci/devices/0000:81:10.0/driver")).expect("removed");
    let functions = functions(tree.path());
    let held = |files: &[DeviceFile]| held_functions(&functions, files).into_iter().collect::<Vec<_>>();
    assert_eq!(held(&[DeviceFile::VfioGroup(17)]), ["0000:81:10.0", "0000:82:00.0"], "none is bound to VFIO");
    let address = DeviceFile::VfioAddress("0000:82:00.0".into());
    assert_eq!(held(&[DeviceFile::VfioGroup(17), address]), ["0000:82:00.0"]);
    assert_eq!(held(&[DeviceFile::VfioDevice("vfio3".into())]), ["0000:81:10.0"]);
    assert_eq!(held(&[DeviceFile::VfioGroup(18), DeviceFile::VfioDevice("vfio4".into())]), [""; 0]);
    let file = OpenFile { fd: 3, path: "anon_inode:[vfio-device]".into(), number: None };
    let info = || "pos:\t0\nvfio-device-syspath: /sys/devices/pci0000:80/0000:82:00.0\n".to_owned();
    assert_eq!(device_file(&file, info), Some(DeviceFile::VfioAddress("0000:82:00.0".into())));
}

#[test]
fn nics_are_found_behind_bridges_and_below_macvtap() {
    let tree = tempfile::tempdir().expect("a directory");
    let root = tree.path();
    let interface = |name: &str, index: u32, target: &str, links: &[&str]| {
        write(root, &format!("sys/devices/{target}/net/{name}/ifindex"), &format!("{index}\n"));
        link(root, &format!("sys/class/net/{name}"), &format!("../../devices/{target}/net/{name}"));
        for other in links {
            link(root, &format!("sys/devices/{target}/net/{name}/{other}"), "x");
        }
    };
    interface("eth0", 2, "pci0000:20/0000:20:00.0/0000:21:00.0/virtio1", &["upper_bond0"]);
    interface("eth1", 3, "pci0000:28/0000:28:00.0", &["upper_bond0"]);
    interface("eth2", 4, "pci0000:30/0000:30:00.0", &["upper_macvtap0"]);
    interface("bond0", 5, "virtual", &["lower_eth0", "lower_eth1", "upper_br0"]);
    interface("br0", 6, "virtual", &["lower_bond0", "lower_tap0", "lower_tap1"]);
    interface("tap0", 7, "virtual", &["upper_br0"]);
    interface("tap1", 8, "virtual", &["upper_br0"]);
    interface("macvtap0", 9, "virtual", &["lower_eth2"]);
    let interfaces = read_interfaces(root).expect("interfaces");
    assert_eq!(nics_behind(&interfaces, "tap0"), ["0000:21:00.0", "0000:28:00.0"]);
    assert_eq!(nics_behind(&interfaces, "macvtap0"), ["0000:30:00.0"]);
    assert_eq!(nics_behind(&interfaces, "tap5"), [""; 0]);
    let files = [DeviceFile::Macvtap(9), DeviceFile::Macvtap(90), DeviceFile::Tap("tap0".into())];
    let used = used_interfaces(&interfaces, &files);
    assert_eq!(used, BTreeSet::from(["macvtap0", "tap0", "tap90"].map(str::to_owned)));
}

proptest! {
    /// Interfaces on top of each other in any way, circles included.
    #[test]
    fn what_is_behind_an_interface_is_found_in_any_graph(
        edges in proptest::collection::vec((0..8_usize, 0..8_usize), 0..20), from in 0..8_usize,
    ) {
        let name = |at: usize| format!("if{at}");
        let interface = |at: usize| Interface {
            index: Some(at as u64),
            upper: edges.iter().filter(|edge| edge.0 == at).map(|edge| name(edge.1)).collect(),
            lower: edges.iter().filter(|edge| edge.1 == at).map(|edge| name(edge.0)).collect(),
            pci: Some(name(at)),
        };
        let interfaces: BTreeMap<String, Interface> = (0..8).map(|at| (name(at), interface(at))).collect();
        let closure = |mut set: BTreeSet<usize>, step: &dyn Fn(usize, usize) -> bool| {
            for _ in 0..8 {
                let more: Vec<usize> = (0..8).filter(|&to| set.iter().any(|&at| step(at, to))).collect();
                set.extend(more);
            }
            set
        };
        let up = closure([from].into(), &|at, to| edges.contains(&(at, to)));
        let all = closure(up, &|at, to| edges.contains(&(to, at)));
        let expected: Vec<String> = all.into_iter().map(name).collect();
        prop_assert_eq!(nics_behind(&interfaces, &format!("if{from}")), expected);
    }

    /// Whatever somebody has open, only functions of the host are held, and those that are named are.
    #[test]
    fn only_functions_of_the_host_are_held(
        groups in proptest::collection::vec((proptest::option::of(0..3_u32), any::<bool>()), 0..6),
        files in proptest::collection::vec((0..3_u8, 0..8_u32), 0..6),
    ) {
        let function = |(at, (group, bound)): (usize, &(Option<u32>, bool))| PciFunction {
            device: PciDevice {
                address: format!("0000:0{at}:00.0"), class: 0, vendor: 0, device: 0, node: None, iommu_group: *group,
            },
            physical_function: None,
            link: None,
            driver: bound.then(|| "vfio-pci".to_owned()),
            interfaces: Vec::new(),
            vfio_device: Some(format!("vfio{at}")),
        };
        let functions: Vec<PciFunction> = groups.iter().enumerate().map(function).collect();
        let file = |&(kind, number): &(u8, u32)| match kind {
            0 => DeviceFile::VfioGroup(number),
            1 => DeviceFile::VfioDevice(format!("vfio{number}")),
            _ => DeviceFile::VfioAddress(format!("0000:0{number}:00.0")),
        };
        let files: Vec<DeviceFile> = files.iter().map(file).collect();
        let held = held_functions(&functions, &files);
        for function in &functions {
            let address = &function.device.address;
            let named = files.contains(&DeviceFile::VfioAddress(address.clone()))
                || function.vfio_device.as_ref().is_some_and(|name| files.contains(&DeviceFile::VfioDevice(name.clone())));
            let group = function.device.iommu_group.is_some_and(|group| files.contains(&DeviceFile::VfioGroup(group)));
            prop_assert!(!named || held.contains(address));
            prop_assert!(!held.contains(address) || named || group);
        }
        // Of each group that is open, something is held.
        for file in &files {
            let DeviceFile::VfioGroup(group) = file else { continue };
            let mut members = functions.iter().filter(|one| one.device.iommu_group == Some(*group)).peekable();
            prop_assert!(members.peek().is_none() || members.any(|one| held.contains(&one.device.address)));
        }
    }

    #[test]
    fn no_path_and_no_text_of_the_kernel_makes_it_panic(path in ".{0,40}", info in ".{0,80}") {
        for path in [path.clone(), format!("/dev/{path}"), format!("/dev/vfio/{path}"), "/dev/net/tun".into(), "anon_inode:[vfio-device]".into()] {
            let file = OpenFile { fd: 3, path, number: None };
            let _ = device_file(&file, || info.clone());
            let _ = device_file(&file, || format!("iff:{info}\nvfio-device-syspath:{info}"));
        }
    }
}
