//! The C header and its Rust mirror describe the same page.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_guest_device::{self as gd, Page};

const HEADER: &str = "guest_device.h";

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn constants() -> Vec<(String, u64)> {
    [
        ("VNUMA_GD_MAGIC", gd::MAGIC),
        ("VNUMA_GD_VERSION_MAJOR", gd::VERSION_MAJOR.into()),
        ("VNUMA_GD_VERSION_MINOR", gd::VERSION_MINOR.into()),
        ("VNUMA_GD_MAX_CPUS", gd::MAX_CPUS as u64),
        ("VNUMA_GD_SIZE", gd::SIZE as u64),
        ("VNUMA_GD_MODE_NONE", gd::MODE_NONE.into()),
        ("VNUMA_GD_MODE_FAST", gd::MODE_FAST.into()),
        ("VNUMA_GD_MODE_SAFE", gd::MODE_SAFE.into()),
        ("VNUMA_GD_DISTANCES_SAME", gd::DISTANCES_SAME.into()),
        ("VNUMA_GD_DISTANCES_APPLIED", gd::DISTANCES_APPLIED.into()),
        ("VNUMA_GD_DISTANCES_UNSUPPORTED", gd::DISTANCES_UNSUPPORTED.into()),
        ("VNUMA_GD_NO_NODE", gd::NO_NODE.into()),
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
fn the_page_agrees() {
    let expected = layout!(Page, "vnuma_gd_page", {
        magic, version_major, version_minor, page_size, generation, sequence, mode, updates, refused,
        interrupt_ns, applied_ns, nr_nodes, nr_cpus, distances, last_error, cpus_unapplied, reserved0, reserved,
        cpu_node,
    });
    layout_check::compare(&include(), HEADER, &expected);
}

#[test]
fn the_page_fits_into_what_is_mapped() {
    assert!(size_of::<Page>() <= gd::SIZE);
    assert_eq!(gd::SIZE % 4096, 0, "whole pages");
    assert_eq!(gd::MAGIC.to_le_bytes(), *b"\0VNUMGD1");
}
