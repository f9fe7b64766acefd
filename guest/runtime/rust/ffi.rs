//! `vnuma/vnuma.h`. A test compares the structs with it.

use std::ffi::{c_char, c_int, c_uint};

pub const SOURCE_DEVICE: c_int = 1;
const MAX_CPUS: usize = 4096;
const MAX_NODES: usize = 1024;

/// `struct vnuma`: its content is the library's.
#[repr(C)]
pub struct Handle {
    opaque: [u8; 0],
}

/// `struct vnuma_node_set`
#[repr(C)]
pub struct NodeSet {
    pub bits: [u64; MAX_NODES / 64],
}

impl NodeSet {
    /// Numbers of nodes, in ascending order.
    pub fn list(&self) -> Vec<u32> {
        let is_set = |node: &u32| self.bits[*node as usize / 64] >> (node % 64) & 1 == 1;
        (0..MAX_NODES as u32).filter(is_set).collect()
    }
}

/// `struct vnuma_nodes`
#[repr(C)]
pub struct Nodes {
    pub generation: u64,
    pub cpus: NodeSet,
    pub memory: NodeSet,
}

/// `struct vnuma_cpus`
#[repr(C)]
pub struct Cpus {
    pub generation: u64,
    pub count: u32,
    pub node: [i16; MAX_CPUS],
}

unsafe extern "C" {
    pub fn vnuma_open_at(out: *mut *mut Handle, root: *const c_char) -> c_int;
    pub fn vnuma_close(handle: *mut Handle);
    pub fn vnuma_source(handle: *const Handle) -> c_int;
    pub fn vnuma_device_problem(handle: *const Handle) -> *const c_char;
    pub fn vnuma_generation(handle: *const Handle) -> u64;
    pub fn vnuma_refresh(handle: *mut Handle) -> c_int;
    pub fn vnuma_cpu_node(handle: *const Handle, cpu: c_uint) -> c_int;
    pub fn vnuma_current_node(handle: *const Handle) -> c_int;
    pub fn vnuma_copy_cpus(handle: *const Handle, out: *mut Cpus) -> c_int;
    pub fn vnuma_distance(handle: *const Handle, from: c_int, to: c_int) -> c_int;
    pub fn vnuma_read_nodes(handle: *const Handle, out: *mut Nodes) -> c_int;
    pub fn vnuma_watch(handle: *const Handle) -> c_int;
    pub fn vnuma_clear_watch(fd: c_int) -> c_int;
}

#[cfg(test)]
#[path = "../../../abi/tests/layout_check.rs"]
mod layout_check;

#[cfg(test)]
mod tests {
    use super::{
        layout_check::{all_constants, compare},
        *,
    };
    use std::{mem::offset_of, path::Path};

    #[test]
    fn the_mirror_agrees_with_the_header() {
        let pairs = [
            ("sizeof(struct vnuma_nodes)", size_of::<Nodes>() as u64),
            ("offsetof(struct vnuma_nodes, cpus)", offset_of!(Nodes, cpus) as u64),
            ("offsetof(struct vnuma_nodes, memory)", offset_of!(Nodes, memory) as u64),
            ("sizeof(struct vnuma_cpus)", size_of::<Cpus>() as u64),
            ("offsetof(struct vnuma_cpus, count)", offset_of!(Cpus, count) as u64),
            ("offsetof(struct vnuma_cpus, node)", offset_of!(Cpus, node) as u64),
            ("VNUMA_SOURCE_DEVICE", SOURCE_DEVICE as u64),
            ("VNUMA_MAX_CPUS", MAX_CPUS as u64),
            ("VNUMA_MAX_NODES", MAX_NODES as u64),
            // Below 0, as everything that is no node.
            ("VNUMA_NO_NODE", -1_i64 as u64),
        ]
        .map(|(expression, value)| (expression.to_owned(), value));
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
        compare(&include, "vnuma.h", &pairs);
        all_constants(&include, "vnuma.h", &pairs);
    }
}
