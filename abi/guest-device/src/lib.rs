//! Rust mirror of `include/vnuma/guest_device.h`, the page that `/dev/vnuma` shows
//! to the programs of a guest. `tests/layout.rs` compares the two.

#![forbid(unsafe_code)]
#![no_std]

/// `"\0VNUMGD1"`, little-endian.
pub const MAGIC: u64 = 0x3144_474d_554e_5600;
/// A reader refuses any other major version.
pub const VERSION_MAJOR: u16 = 1;
/// Raised when reserved space gets a meaning.
pub const VERSION_MINOR: u16 = 1;
/// CPUs that the page can name.
pub const MAX_CPUS: usize = 4096;
/// Bytes to map.
pub const SIZE: usize = 0x3000;
/// [`Page::mode`]: nothing can be applied.
pub const MODE_NONE: u32 = 0;
/// [`Page::mode`]: the kernel's maps are changed in place.
pub const MODE_FAST: u32 = 1;
/// [`Page::mode`]: a CPU is taken offline and online to change its node.
pub const MODE_SAFE: u32 = 2;
/// [`Page::distances`]: the kernel had them already.
pub const DISTANCES_SAME: u32 = 0;
/// [`Page::distances`]: the kernel's table was changed.
pub const DISTANCES_APPLIED: u32 = 1;
/// [`Page::distances`]: published, but this kernel keeps its own.
pub const DISTANCES_UNSUPPORTED: u32 = 2;
/// [`Page::cpu_node`] of a CPU that the kernel does not have.
pub const NO_NODE: u16 = 0xffff;

/// `struct vnuma_gd_page`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION_MAJOR`].
    pub version_major: u16,
    /// [`VERSION_MINOR`].
    pub version_minor: u16,
    /// Bytes of this struct.
    pub page_size: u32,
    /// Last generation applied, see `cpus_unapplied`; 0 for none.
    pub generation: u64,
    /// Odd while the driver writes.
    pub sequence: u32,
    /// `MODE_*`.
    pub mode: u32,
    /// Generations applied since the driver was loaded.
    pub updates: u64,
    /// Malformed or torn publications.
    pub refused: u64,
    /// `CLOCK_MONOTONIC` of the last interrupt, nanoseconds.
    pub interrupt_ns: u64,
    /// `CLOCK_MONOTONIC` when all maps agreed, nanoseconds.
    pub applied_ns: u64,
    /// Guest nodes.
    pub nr_nodes: u32,
    /// Entries of `cpu_node` in use.
    pub nr_cpus: u32,
    /// `DISTANCES_*`.
    pub distances: u32,
    /// 0 or `-errno` of the last publication.
    pub last_error: i32,
    /// Since 1.1: online CPUs that are not on their published node.
    pub cpus_unapplied: u32,
    /// Zero.
    pub reserved0: u32,
    /// Zero.
    pub reserved: [u64; 4],
    /// Node by the kernel's CPU number.
    pub cpu_node: [u16; MAX_CPUS],
}
