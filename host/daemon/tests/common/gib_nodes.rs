//! A VM that is only described, whose memory can be moved.

use std::collections::BTreeMap;
use vnuma_model::{BackingMapping, GuestNode, MemoryBacking, Vcpu, VmDescription};

const MIB: u64 = 1 << 20;

/// Guest nodes 0 and 1 of 1 GiB each, all of it resident on the host node of the same number.
pub fn vm(pid: i32, vcpus: Vec<Vcpu>) -> VmDescription {
    let node = |id: u32| {
        let memory = MemoryBacking {
            id: format!("ram{id}"),
            size_bytes: 1024 * MIB,
            policy: "default".into(),
            host_nodes: Vec::new(),
            resident_kib: vec![(id, 1 << 20)],
            mapping: Some(BackingMapping { start: u64::from(id + 1) << 40, page_kib: 4 }),
        };
        GuestNode { id, memory_bytes: 1024 * MIB, memory: Some(memory) }
    };
    VmDescription {
        name: "a".into(),
        pid,
        run_state: "running".into(),
        guest_nodes: vec![node(0), node(1)],
        vcpus,
        spare_slots: BTreeMap::new(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}
