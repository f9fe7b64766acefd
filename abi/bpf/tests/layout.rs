//! The headers of vCPU events and of moves of pages agree with their Rust mirror.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_bpf::{self as bpf, VcpuEvent};

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn named<const N: usize>(constants: [(&str, u32); N]) -> Vec<(String, u64)> {
    constants.map(|(name, value)| (name.to_owned(), value.into())).into()
}

#[test]
fn events_agree() {
    let constants = named([
        ("VNUMA_VCPU_MIGRATED", bpf::MIGRATED),
        ("VNUMA_VCPU_AFFINITY", bpf::AFFINITY),
        ("VNUMA_VCPU_EXITED", bpf::EXITED),
        ("VNUMA_VCPU_PIDS", bpf::PIDS),
        ("VNUMA_VCPU_BITS", bpf::WATCHED_BITS),
        ("VNUMA_VCPU_WAKES", bpf::WAKES.into()),
        ("VNUMA_VCPU_WAITS", bpf::WAITS.into()),
        ("VNUMA_VCPU_PASSED", bpf::PASSED.into()),
        ("VNUMA_VCPU_MASKS", bpf::MASKS),
        ("VNUMA_VCPU_COUNT_REPORTED", bpf::COUNT_REPORTED),
        ("VNUMA_VCPU_COUNT_DROPPED", bpf::COUNT_DROPPED),
        ("VNUMA_VCPU_COUNTS", bpf::COUNT_DROPPED + 1),
    ]);
    layout_check::all_constants(&include(), "vcpu_event.h", &constants);
    let event = layout!(VcpuEvent, "vnuma_vcpu_event", { time_ns, tid, kind, cpu, reserved });
    layout_check::compare(&include(), "vcpu_event.h", &[constants, event].concat());
}

/// The mirror has the numbers that user space reads and writes.
#[test]
fn moves_of_pages_agree() {
    let constants = named([
        ("VNUMA_PAGE_MOVES_THREAD", bpf::PAGE_MOVES_THREAD),
        ("VNUMA_PAGE_MOVES_LONGEST_NS", bpf::PAGE_MOVES_LONGEST_NS),
    ]);
    layout_check::compare(&include(), "page_moves.h", &constants);
}
