//! The C header and its Rust mirror describe the same region.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_lab_counters::{self as lc, Cpu, Devices, Header, Page, Range};

const HEADER: &str = "lab_counters.h";

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn constants() -> Vec<(String, u64)> {
    [
        ("VNUMA_LC_MAGIC", lc::MAGIC),
        ("VNUMA_LC_VERSION_MAJOR", lc::VERSION_MAJOR.into()),
        ("VNUMA_LC_VERSION_MINOR", lc::VERSION_MINOR.into()),
        ("VNUMA_LC_PAGE_SIZE", lc::PAGE_SIZE as u64),
        ("VNUMA_LC_DEVICES_OFFSET", lc::DEVICES_OFFSET as u64),
        ("VNUMA_LC_CPUS_OFFSET", lc::CPUS_OFFSET as u64),
        ("VNUMA_LC_MAX_CPUS", lc::MAX_CPUS as u64),
        ("VNUMA_LC_MAX_NODES", lc::MAX_NODES as u64),
        ("VNUMA_LC_MAX_CLASSES", lc::MAX_CLASSES as u64),
        ("VNUMA_LC_MAX_RANGES", lc::MAX_RANGES as u64),
        ("VNUMA_LC_MAX_DEVICES", lc::MAX_DEVICES as u64),
        ("VNUMA_LC_NAME_SIZE", lc::NAME_SIZE as u64),
        ("VNUMA_LC_LINE_SIZE", lc::LINE_SIZE as u64),
        ("VNUMA_LC_COST_ONE", lc::COST_ONE.into()),
        ("VNUMA_LC_SAMPLED", lc::SAMPLED.into()),
        ("VNUMA_LC_FULL", lc::FULL.into()),
        ("VNUMA_LC_STATUS_OFF", lc::STATUS_OFF.into()),
        ("VNUMA_LC_STATUS_CHECKING", lc::STATUS_CHECKING.into()),
        ("VNUMA_LC_STATUS_SHORTCUT", lc::STATUS_SHORTCUT.into()),
        ("VNUMA_LC_STATUS_API", lc::STATUS_API.into()),
        ("VNUMA_LC_KERNEL", lc::KERNEL as u64),
        ("VNUMA_LC_USER", lc::USER as u64),
        ("VNUMA_LC_MODES", lc::MODES as u64),
        ("VNUMA_LC_EVENT_CYCLES", lc::EVENT_CYCLES),
        ("VNUMA_LC_EVENT_DRAM", lc::EVENT_DRAM),
        ("VNUMA_LC_EVENT_STREAMED", lc::EVENT_STREAMED),
        ("VNUMA_LC_EVENT_SECOND_DRAM", lc::EVENT_SECOND_DRAM),
        ("VNUMA_LC_EVENT_SECOND_STREAMED", lc::EVENT_SECOND_STREAMED),
        ("VNUMA_LC_EVENT_MMIO_READ", lc::EVENT_MMIO_READ),
        ("VNUMA_LC_EVENT_MMIO_WRITE", lc::EVENT_MMIO_WRITE),
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
fn the_structs_agree() {
    let mut expected = layout!(Range, "vnuma_lc_range", { start, end, node, reserved });
    expected.extend(layout!(Header, "vnuma_lc_header", {
        magic, version_major, version_minor, region_size, nr_cpus, nr_nodes, nr_classes, nr_ranges,
        sample_shift, l2_sets, l2_ways, llc_sets, llc_ways, second_sets, second_ways, llc_hit_cost, status,
        api_version, compared, mismatched, profile, dram_cost, streamed_cost, mmio_read_cost, mmio_write_cost,
        class_of, cpu_node, ranges,
    }));
    expected.extend(layout!(Devices, "vnuma_lc_devices", { count, reserved, ranges }));
    expected.extend(layout!(Cpu, "vnuma_lc_cpu", {
        instructions, base_cycles, loads, stores, llc_references, llc_streamed, llc_misses,
        llc_misses_streamed, mmio_other, second_misses, second_misses_streamed, reserved, dram, dram_streamed,
        mmio_read, second_dram, second_dram_streamed, mmio_write,
    }));
    expected.extend(layout!(Page, "vnuma_lc_page", { mode }));
    layout_check::compare(&include(), HEADER, &expected);
}

#[test]
fn each_struct_fits_into_its_page() {
    assert_eq!(lc::MAGIC.to_le_bytes(), *b"VNUMALC1");
    assert!(size_of::<Header>() <= lc::PAGE_SIZE);
    assert!(size_of::<Devices>() <= lc::PAGE_SIZE);
    assert!(size_of::<Page>() <= lc::PAGE_SIZE);
    const { assert!((size_of::<Cpu>() as u64 / 8) < lc::EVENT_CYCLES, "raw events name every word") };
    const { assert!(lc::CPUS_OFFSET / lc::PAGE_SIZE + lc::MAX_CPUS <= 256, "a region of 1 MiB holds all CPUs") };
}

/// A header in which every byte differs from its neighbours, but for what is checked.
fn header() -> Header {
    Header {
        magic: lc::MAGIC,
        version_major: lc::VERSION_MAJOR,
        version_minor: 7,
        region_size: 0x0001_0203,
        nr_cpus: 8,
        nr_nodes: 4,
        nr_classes: 3,
        nr_ranges: 5,
        sample_shift: lc::SAMPLED,
        l2_sets: 0x1112_1314,
        l2_ways: 0x2122_2324,
        llc_sets: 0x3132_3334,
        llc_ways: 0x4142_4344,
        second_sets: 0x4546_4748,
        second_ways: 0x494a_4b4c,
        llc_hit_cost: 0x5152_5354,
        status: 0x6162_6364,
        api_version: 0x7172_7374,
        compared: 0x8182_8384_8586_8788,
        mismatched: 0x9192_9394_9596_9798,
        profile: *b"a-profile\0......................",
        dram_cost: std::array::from_fn(|i| 0xa0 + i as u32),
        streamed_cost: std::array::from_fn(|i| 0xb000 + i as u32),
        mmio_read_cost: std::array::from_fn(|i| 0xc000 + i as u32),
        mmio_write_cost: std::array::from_fn(|i| 0xd000 + i as u32),
        class_of: std::array::from_fn(|row| std::array::from_fn(|column| (row * 16 + column) as u8)),
        cpu_node: std::array::from_fn(|i| 255 - i as u8),
        ranges: std::array::from_fn(|i| Range { start: i as u64, end: 1 << 40, node: 9, reserved: 3 }),
    }
}

#[test]
fn bytes_are_the_struct_in_memory_and_back() {
    let header = header();
    let bytes = header.to_bytes();
    assert_eq!(Header::from_bytes(&bytes), Ok(header));
    assert_eq!(header.profile_name(), "a-profile");
    let at = |offset: usize, size: usize| &bytes[offset..offset + size];
    assert_eq!(at(offset_of!(Header, second_ways), 4), 0x494a_4b4c_u32.to_le_bytes());
    assert_eq!(at(offset_of!(Header, llc_hit_cost), 4), 0x5152_5354_u32.to_le_bytes());
    assert_eq!(at(offset_of!(Header, mismatched), 8), 0x9192_9394_9596_9798_u64.to_le_bytes());
    assert_eq!(at(offset_of!(Header, streamed_cost) + 28, 4), 0xb007_u32.to_le_bytes());
    assert_eq!(at(offset_of!(Header, mmio_write_cost) + 4, 4), 0xd001_u32.to_le_bytes());
    assert_eq!(at(offset_of!(Header, class_of) + 0x37, 1), [0x37]);
    assert_eq!(at(offset_of!(Header, cpu_node) + 1, 1), [254]);
    assert_eq!(at(offset_of!(Header, ranges) + 31 * size_of::<Range>(), 8), 31_u64.to_le_bytes());
}

#[test]
fn a_header_that_cannot_be_is_refused_with_field_and_value() {
    let bytes = header().to_bytes();
    let error = |bytes: &[u8]| Header::from_bytes(bytes).unwrap_err().to_string();
    assert_eq!(error(&bytes[1..]), format!("{} bytes, expected {}", bytes.len() - 1, bytes.len()));
    assert!(error(&[0; size_of::<Header>()]).starts_with("magic: 0x0,"));
    let refused = |change: fn(&mut Header)| {
        let mut header = header();
        change(&mut header);
        error(&header.to_bytes())
    };
    assert_eq!(refused(|h| h.version_major = 1), "version_major: 1, expected 4");
    assert_eq!(refused(|h| h.nr_cpus = 255), "nr_cpus: 255, at most 254 are possible");
    assert_eq!(refused(|h| h.nr_nodes = 17), "nr_nodes: 17, at most 16 are possible");
    assert_eq!(refused(|h| h.nr_classes = 9), "nr_classes: 9, at most 8 are possible");
    assert_eq!(refused(|h| h.nr_ranges = 33), "nr_ranges: 33, at most 32 are possible");
}
