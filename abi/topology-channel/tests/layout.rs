//! The C header and its Rust mirror describe the same memory.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_topology_channel::{
    self as tc, Device, Devices, Guest, Header, Nodes, Section, Slot, SupportedSection, Vcpu, Vcpus, ivshmem,
};

const HEADER: &str = "topology_channel.h";

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn constants() -> Vec<(String, u64)> {
    [
        ("VNUMA_TC_MAGIC", tc::MAGIC),
        ("VNUMA_TC_GUEST_MAGIC", tc::GUEST_MAGIC),
        ("VNUMA_TC_LAYOUT", tc::LAYOUT.into()),
        ("VNUMA_TC_MAX_NODES", tc::MAX_NODES as u64),
        ("VNUMA_TC_MAX_VCPUS", tc::MAX_VCPUS as u64),
        ("VNUMA_TC_MAX_DEVICES", tc::MAX_DEVICES as u64),
        ("VNUMA_TC_MAX_SECTIONS", tc::MAX_SECTIONS as u64),
        ("VNUMA_TC_MAX_SUPPORTED", tc::MAX_SUPPORTED as u64),
        ("VNUMA_TC_READ_RETRIES", tc::READ_RETRIES as u64),
        ("VNUMA_TC_REGION_SIZE", tc::REGION_SIZE as u64),
        ("VNUMA_TC_MAX_REGION_SIZE", tc::MAX_REGION_SIZE as u64),
        ("VNUMA_TC_GUEST_OFFSET", tc::GUEST_OFFSET as u64),
        ("VNUMA_TC_GUEST_SIZE", tc::GUEST_SIZE as u64),
        ("VNUMA_TC_SLOT0_OFFSET", tc::SLOT_OFFSET[0] as u64),
        ("VNUMA_TC_SLOT1_OFFSET", tc::SLOT_OFFSET[1] as u64),
        ("VNUMA_TC_SLOT_SIZE", tc::SLOT_SIZE as u64),
        ("VNUMA_TC_DISTANCE_LOCAL", tc::DISTANCE_LOCAL.into()),
        ("VNUMA_TC_DISTANCE_UNREACHABLE", tc::DISTANCE_UNREACHABLE.into()),
        ("VNUMA_TC_MODE_NONE", tc::MODE_NONE.into()),
        ("VNUMA_TC_MODE_FAST", tc::MODE_FAST.into()),
        ("VNUMA_TC_MODE_SAFE", tc::MODE_SAFE.into()),
        ("VNUMA_TC_SECTION_NODES", tc::SECTION_NODES.into()),
        ("VNUMA_TC_SECTION_VCPUS", tc::SECTION_VCPUS.into()),
        ("VNUMA_TC_SECTION_DEVICES", tc::SECTION_DEVICES.into()),
        ("VNUMA_TC_NODES_VERSION", tc::NODES_VERSION.into()),
        ("VNUMA_TC_VCPUS_VERSION", tc::VCPUS_VERSION.into()),
        ("VNUMA_TC_DEVICES_VERSION", tc::DEVICES_VERSION.into()),
        ("VNUMA_TC_SECTION_REQUIRED", tc::SECTION_REQUIRED.into()),
        ("VNUMA_IVSHMEM_PCI_VENDOR", ivshmem::PCI_VENDOR.into()),
        ("VNUMA_IVSHMEM_PCI_DEVICE", ivshmem::PCI_DEVICE.into()),
        ("VNUMA_IVSHMEM_HOST_PEER", ivshmem::HOST_PEER.into()),
        ("VNUMA_IVSHMEM_GUEST_PEER", ivshmem::GUEST_PEER.into()),
        ("VNUMA_IVSHMEM_VECTORS", ivshmem::VECTORS as u64),
        ("VNUMA_IVSHMEM_PUBLISH_VECTOR", ivshmem::PUBLISH_VECTOR as u64),
        ("VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR", ivshmem::ACKNOWLEDGE_VECTOR as u64),
        ("VNUMA_IVSHMEM_REG_IVPOSITION", ivshmem::REG_IVPOSITION.into()),
        ("VNUMA_IVSHMEM_REG_DOORBELL", ivshmem::REG_DOORBELL.into()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

#[test]
fn constants_agree_and_none_is_missing() {
    layout_check::compare(&include(), HEADER, &constants());
    layout_check::all_constants(&include(), HEADER, &constants());
}

#[test]
fn structs_agree() {
    let mut expected = layout!(SupportedSection, "vnuma_tc_supported_section", { kind, version });
    expected.extend(layout!(Header, "vnuma_tc_header", {
        magic, layout, nr_supported, header_size, region_size, slot_size, slot_offset, guest_offset,
        guest_size, host_version, reserved0, supported, reserved1, published, reserved2,
    }));
    expected.extend(layout!(Guest, "vnuma_tc_guest", {
        magic, nr_supported, reserved0, mode, driver_version, reserved1, supported, device_changes, reserved2,
        acknowledged, refused, refused_error, reserved3,
    }));
    expected.extend(layout!(Slot, "vnuma_tc_slot", { generation, length, nr_sections }));
    expected.extend(layout!(Section, "vnuma_tc_section", {
        kind, version, compatible, flags, length, reserved,
    }));
    expected.extend(layout!(Nodes, "vnuma_tc_nodes", { section, nr_nodes, distance_offset }));
    expected.extend(layout!(Vcpus, "vnuma_tc_vcpus", {
        section, nr_vcpus, vcpu_offset, vcpu_size, reserved,
    }));
    expected.extend(layout!(Vcpu, "vnuma_tc_vcpu", { apic_id, node }));
    expected.extend(layout!(Devices, "vnuma_tc_devices", {
        section, nr_devices, device_offset, device_size, reserved,
    }));
    expected.extend(layout!(Device, "vnuma_tc_device", { segment, bus, devfn, node }));
    layout_check::compare(&include(), HEADER, &expected);
}

#[test]
fn the_region_holds_everything_and_is_a_bar() {
    assert!(tc::REGION_SIZE.is_power_of_two() && tc::REGION_SIZE <= tc::MAX_REGION_SIZE);
    assert!(size_of::<Header>() <= tc::GUEST_OFFSET);
    assert!(size_of::<Guest>() <= tc::GUEST_SIZE);
    assert!(tc::GUEST_OFFSET + tc::GUEST_SIZE <= tc::SLOT_OFFSET[0]);
    assert!(tc::SLOT_OFFSET[0] + tc::SLOT_SIZE <= tc::SLOT_OFFSET[1]);
    assert!(tc::SLOT_OFFSET[1] + tc::SLOT_SIZE <= tc::REGION_SIZE);
    let largest = size_of::<Slot>()
        + size_of::<Nodes>()
        + tc::MAX_NODES * tc::MAX_NODES
        + size_of::<Vcpus>()
        + tc::MAX_VCPUS * size_of::<Vcpu>()
        + size_of::<Devices>()
        + tc::MAX_DEVICES * size_of::<Device>();
    assert!(largest <= tc::SLOT_SIZE / 4, "room for later sections");
    assert_eq!(offset_of!(Header, published) % 64, 0, "`published` begins a cache line");
    assert_eq!(offset_of!(Guest, acknowledged) % 64, 0, "`acknowledged` begins a cache line");
    assert_eq!((tc::MAGIC.to_le_bytes(), tc::GUEST_MAGIC.to_le_bytes()), (*b"VNUMATCH", *b"VNUMATGT"));
}
