//! The header of scx_vnuma's maps and its Rust mirror agree.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_bpf::sched::{self as s, Assignment, Exit, Header, Topology};

const HEADER: &str = "sched.h";

fn include() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

fn constants() -> Vec<(String, u64)> {
    [
        ("VNUMA_SCHED_MAGIC", s::MAGIC),
        ("VNUMA_SCHED_VERSION", s::VERSION),
        ("VNUMA_SCHED_MAX_CPUS", s::MAX_CPUS as u32),
        ("VNUMA_SCHED_MAX_NODES", s::MAX_NODES as u32),
        ("VNUMA_SCHED_MAX_THREADS", s::MAX_THREADS),
        ("VNUMA_SCHED_MASK_WORDS", s::MASK_WORDS as u32),
        ("VNUMA_SCHED_PLACED", s::PLACED),
        ("VNUMA_SCHED_NO_PRESSURE", s::NO_PRESSURE),
        ("VNUMA_SCHED_STEAL_PRESSURE", s::STEAL_PRESSURE),
        ("VNUMA_SCHED_STEAL_BLIND", s::STEAL_BLIND),
        ("VNUMA_SCHED_STEAL_PLACE", s::STEAL_PLACE),
        ("VNUMA_SCHED_COUNT_PLACED", s::COUNT_PLACED),
        ("VNUMA_SCHED_COUNT_LOCAL", s::COUNT_LOCAL),
        ("VNUMA_SCHED_COUNT_REMOTE", s::COUNT_REMOTE),
        ("VNUMA_SCHED_COUNT_STARVED", s::COUNT_STARVED),
        ("VNUMA_SCHED_COUNT_KEPT", s::COUNT_KEPT),
        ("VNUMA_SCHED_COUNT_THROTTLED", s::COUNT_THROTTLED),
        ("VNUMA_SCHED_COUNT_PREEMPTED", s::COUNT_PREEMPTED),
        ("VNUMA_SCHED_COUNTS", s::COUNTS),
    ]
    .map(|(name, value)| (name.to_owned(), u64::from(value)))
    .into()
}

#[test]
fn constants_agree() {
    layout_check::compare(&include(), HEADER, &constants());
    layout_check::all_constants(&include(), HEADER, &constants());
}

#[test]
fn layouts_agree() {
    let layouts = [
        layout!(Header, "vnuma_sched_header", {
            magic, version, header_size, assignment_size, full, steal, instance, heartbeat_ns, keep_ns, starve_ns,
            slice_ns,
        }),
        layout!(Assignment, "vnuma_sched_assignment", { epoch, pid, flags, pressure, reserved, cpus }),
        layout!(Topology, "vnuma_sched_topology", { nr_nodes, reserved, node_of, tickless, nearest }),
        layout!(Exit, "vnuma_sched_exit", { kind, reserved, code, reason, message }),
    ];
    layout_check::compare(&include(), HEADER, &layouts.concat());
}
