//! PCI functions, and those behind the files of `/dev` that drive them.

use crate::{core::Device, files};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};
use vnuma_model::is_pci_address;
use vnuma_process::procfs::OpenFile;

const PCI: &str = "sys/bus/pci/devices";
/// Most functions that are taken.
const FUNCTIONS: usize = 8192;

/// All functions by address.
pub(super) fn read(root: &Path) -> BTreeMap<String, Device> {
    let directory = root.join(PCI);
    let addresses = files::names(&directory).into_iter().filter(|name| is_pci_address(name)).take(FUNCTIONS);
    addresses.map(|address| (address.clone(), device(&directory.join(&address)))).collect()
}

fn device(directory: &Path) -> Device {
    let node = files::text(&directory.join("numa_node")).and_then(|text| text.parse().ok());
    let class = files::text(&directory.join("class"))
        .and_then(|text| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok())
        .unwrap_or(0);
    let rdma = files::names(&directory.join("infiniband"));
    let mut names: BTreeSet<String> = files::names(&directory.join("net")).into_iter().collect();
    // The interface of a virtio device is that of its child on virtio's bus.
    for child in files::names(directory).iter().filter(|name| name.starts_with("virtio")) {
        names.extend(files::names(&directory.join(child).join("net")));
    }
    let is_rdma = !rdma.is_empty();
    names.extend(rdma);
    Device { node, class, rdma: is_rdma, names }
}

/// Addresses of the functions that an open file drives. `None`: it is no such file.
pub(super) fn behind(root: &Path, file: &OpenFile) -> Option<BTreeSet<String>> {
    let name = file.path.strip_prefix("/dev/")?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbered = |text: &str, prefix: &str| text.strip_prefix(prefix).is_some_and(digits);
    let is_file_of = |directory: &Path| {
        // Its path is what the process's mounts make of it. The number is the kernel's.
        file.number.is_some() && files::text(&directory.join("dev")) == file.number
    };
    let class = |class: &str, name: &str| {
        let directory = root.join("sys/class").join(class).join(name);
        is_file_of(&directory).then_some(directory)
    };
    if let Some(group) = name.strip_prefix("vfio/").map(|name| name.strip_prefix("noiommu-").unwrap_or(name))
        && digits(group)
    {
        class("vfio", name.strip_prefix("vfio/").unwrap_or(group))?;
        let devices = files::names(&root.join("sys/kernel/iommu_groups").join(group).join("devices"));
        return Some(devices.into_iter().filter(|name| is_pci_address(name)).collect());
    }
    if let Some(device) = name.strip_prefix("vfio/devices/").filter(|name| numbered(name, "vfio")) {
        return Some(function_of(&class("vfio-dev", device)?.join("device")).into_iter().collect());
    }
    if numbered(name, "uio") {
        return Some(function_of(&class("uio", name)?.join("device")).into_iter().collect());
    }
    let verbs = name.strip_prefix("infiniband/").filter(|name| numbered(name, "uverbs"))?;
    let directory = class("infiniband_verbs", verbs)?;
    Some(rdma_function(root, &directory).into_iter().collect())
}

/// The function of an RDMA device. One in software is that of its network interface.
fn rdma_function(root: &Path, verbs: &Path) -> Option<String> {
    function_of(&verbs.join("device")).or_else(|| {
        let plain = |name: &String| !name.is_empty() && !name.contains('/') && name != "..";
        let device = files::text(&verbs.join("ibdev")).filter(plain)?;
        let parent = files::text(&root.join("sys/class/infiniband").join(device).join("parent"));
        let interface = parent.filter(plain)?;
        function_of(&root.join("sys/class/net").join(interface).join("device"))
    })
}

/// The function that a device is, or that it is a child of.
fn function_of(link: &Path) -> Option<String> {
    let target: PathBuf = std::fs::canonicalize(link).ok()?;
    let names = target.components().rev().filter_map(|part| part.as_os_str().to_str());
    names.take(4).find(|name| is_pci_address(name)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn functions_are_found_behind_files() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |path: &str| root.path().join(path);
        let make = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().expect("inside")).expect("made");
            fs::write(at(path), text).expect("written");
        };
        let link = |target: &str, path: &str| {
            fs::create_dir_all(at(path).parent().expect("inside")).expect("made");
            symlink(at(target), at(path)).expect("linked");
        };
        let (card, disk) = ("0000:01:00.0", "0000:02:00.0");
        make(&format!("sys/devices/pci0/{card}/numa_node"), "1\n");
        make(&format!("sys/devices/pci0/{card}/class"), "0x020000\n");
        make(&format!("sys/devices/pci0/{card}/virtio3/net/eth7/mtu"), "1500\n");
        make(&format!("sys/devices/pci0/{disk}/numa_node"), "-1\n");
        for address in [card, disk] {
            link(&format!("sys/devices/pci0/{address}"), &format!("{PCI}/{address}"));
        }
        let devices = read(root.path());
        assert_eq!((devices[card].node, devices[card].class, devices[disk].node), (Some(1), 0x02_0000, None));
        assert_eq!(devices[card].names, BTreeSet::from(["eth7".to_owned()]));

        make("sys/class/uio/uio0/dev", "246:0\n");
        link(&format!("sys/devices/pci0/{disk}"), "sys/class/uio/uio0/device");
        make(&format!("sys/kernel/iommu_groups/12/devices/{card}"), "");
        make(&format!("sys/kernel/iommu_groups/13/devices/{card}"), "");
        make("sys/class/vfio/12/dev", "243:12\n");
        make("sys/class/infiniband_verbs/uverbs0/dev", "231:192\n");
        make("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0\n");
        make("sys/class/infiniband/rxe0/parent", "eth7\n");
        link(&format!("sys/devices/pci0/{card}/virtio3"), "sys/class/net/eth7/device");
        let found = |path: &str, number: Option<&str>| {
            let file = OpenFile { fd: 3, path: path.to_owned(), number: number.map(str::to_owned) };
            behind(root.path(), &file).map(|found| found.into_iter().collect::<Vec<_>>())
        };
        let one = |address: &str| Some(vec![address.to_owned()]);
        assert_eq!(found("/dev/uio0", Some("246:0")), one(disk));
        assert_eq!(found("/dev/uio0", Some("1:3")), None, "another file under that name");
        assert_eq!(found("/dev/vfio/12", Some("243:12")), one(card));
        assert_eq!(found("/dev/infiniband/uverbs0", Some("231:192")), one(card), "RDMA in software");
        assert_eq!(found("/dev/vfio/12", None), None, "a plain file under that name");
        assert_eq!(
            (found("/dev/vfio/13", None), found("/dev/vfio/13", Some("1:3"))),
            (None, None),
            "no VFIO"
        );
        for no in ["/dev/null", "/dev/vfio/vfio", "/dev/vfio/../12", "/dev/uio0/x", "/dev/uio", "/tmp/uio0"] {
            assert_eq!(found(no, None), None, "{no}");
        }
    }
}
