//! Memory of a guest node that is plugged while the VM runs.

use vnuma_model::{BackingMapping, GuestNodeId, MemoryBacking, MemoryDevice};

const MIB: u64 = 1 << 20;
/// Where the device has its memory.
pub const START: u64 = 9 << 40;
/// And where that ends.
pub const END: u64 = START + 2048 * MIB;

/// A virtio-mem device of 2 GiB, of which so much is plugged and resident on a host node.
pub fn device(guest_node: GuestNodeId, plugged_mib: u64, on: u32) -> MemoryDevice {
    let memory = MemoryBacking {
        id: format!("plug{guest_node}"),
        size_bytes: END - START,
        policy: "default".into(),
        host_nodes: Vec::new(),
        resident_kib: vec![(on, plugged_mib * 1024)],
        mapping: Some(BackingMapping { start: START, page_kib: 4 }),
    };
    MemoryDevice {
        id: Some(format!("vmem{guest_node}")),
        guest_node,
        requested_bytes: plugged_mib * MIB,
        plugged_bytes: plugged_mib * MIB,
        block_bytes: 2 * MIB,
        memory,
    }
}
