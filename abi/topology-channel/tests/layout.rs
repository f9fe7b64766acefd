//! The C header and its Rust mirror describe the same memory.

#[path = "../../layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_topology_channel::{self as tc, Header, Slot, Vcpu, ivshmem};

const HEADER: &str = "topology_channel.h";

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn constants() -> Vec<(String, u64)> {
    [
        ("VNUMA_TC_MAGIC", tc::MAGIC),
        ("VNUMA_TC_VERSION_MAJOR", tc::VERSION_MAJOR.into()),
        ("VNUMA_TC_VERSION_MINOR", tc::VERSION_MINOR.into()),
        ("VNUMA_TC_MAX_NODES", tc::MAX_NODES as u64),
        ("VNUMA_TC_MAX_VCPUS", tc::MAX_VCPUS as u64),
        ("VNUMA_TC_READ_RETRIES", tc::READ_RETRIES as u64),
        ("VNUMA_TC_REGION_SIZE", tc::REGION_SIZE as u64),
        ("VNUMA_TC_SLOT0_OFFSET", tc::SLOT_OFFSET[0] as u64),
        ("VNUMA_TC_SLOT1_OFFSET", tc::SLOT_OFFSET[1] as u64),
        ("VNUMA_TC_DISTANCE_LOCAL", tc::DISTANCE_LOCAL.into()),
        ("VNUMA_TC_DISTANCE_UNREACHABLE", tc::DISTANCE_UNREACHABLE.into()),
        ("VNUMA_TC_VCPU_APPROXIMATE", tc::VCPU_APPROXIMATE.into()),
        ("VNUMA_IVSHMEM_PCI_VENDOR", ivshmem::PCI_VENDOR.into()),
        ("VNUMA_IVSHMEM_PCI_DEVICE", ivshmem::PCI_DEVICE.into()),
        ("VNUMA_IVSHMEM_HOST_PEER", ivshmem::HOST_PEER.into()),
        ("VNUMA_IVSHMEM_GUEST_PEER", ivshmem::GUEST_PEER.into()),
        ("VNUMA_IVSHMEM_WINDOW", ivshmem::WINDOW as u64),
        ("VNUMA_IVSHMEM_VECTORS", ivshmem::VECTORS as u64),
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
    let mut expected = layout!(Header, "vnuma_tc_header", {
        magic, version_major, version_minor, header_size, region_size, slot_size, slot_offset,
        max_nodes, max_vcpus, reserved0, published, reserved1,
    });
    expected.extend(layout!(Vcpu, "vnuma_tc_vcpu", { apic_id, node, flags }));
    expected.extend(layout!(Slot, "vnuma_tc_slot", {
        generation, nr_nodes, nr_vcpus, reserved, distance, vcpu,
    }));
    layout_check::compare(&include(), HEADER, &expected);
}

#[test]
fn the_region_holds_both_slots_and_is_a_bar() {
    assert!(tc::REGION_SIZE.is_power_of_two());
    assert!(size_of::<Header>() <= tc::SLOT_OFFSET[0]);
    assert!(tc::SLOT_OFFSET[0] + size_of::<Slot>() <= tc::SLOT_OFFSET[1]);
    assert!(tc::SLOT_OFFSET[1] + size_of::<Slot>() <= tc::REGION_SIZE);
    assert_eq!(offset_of!(Header, published) % 64, 0, "`published` begins a cache line");
    assert_eq!(tc::MAGIC.to_le_bytes(), *b"VNUMATC1");
}
