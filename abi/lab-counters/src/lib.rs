//! Rust mirror of `include/vnuma/lab_counters.h`, the counters of the lab's emulated server.
//! `tests/layout.rs` compares the two; the header explains the fields.

#![forbid(unsafe_code)]
#![no_std]

/// `"VNUMALC1"`, little-endian.
pub const MAGIC: u64 = 0x3143_4c41_4d55_4e56;
/// A reader refuses any other major version.
pub const VERSION_MAJOR: u16 = 4;
/// Raised when reserved space gets a meaning.
pub const VERSION_MINOR: u16 = 0;
/// The region consists of pages.
pub const PAGE_SIZE: usize = 0x1000;
/// Where [`Devices`] lies.
pub const DEVICES_OFFSET: usize = 0x1000;
/// Where the [`Page`] of CPU 0 lies.
pub const CPUS_OFFSET: usize = 0x2000;
/// CPUs that the region can hold.
pub const MAX_CPUS: usize = 254;
/// Nodes that the region can hold.
pub const MAX_NODES: usize = 16;
/// Classes of distance between nodes.
pub const MAX_CLASSES: usize = 8;
/// Ranges of memory.
pub const MAX_RANGES: usize = 32;
/// Ranges of devices.
pub const MAX_DEVICES: usize = 128;
/// Bytes of a profile's name, with its NUL.
pub const NAME_SIZE: usize = 32;
/// Bytes of a cache line.
pub const LINE_SIZE: usize = 64;
/// A cost of one cycle.
pub const COST_ONE: u32 = 256;
/// [`Header::sample_shift`]: one set in 16 is modelled.
pub const SAMPLED: u32 = 4;
/// [`Header::sample_shift`]: every set is modelled.
pub const FULL: u32 = 0;
/// [`Header::status`]: no plugin has started.
pub const STATUS_OFF: u32 = 0;
/// [`Header::status`]: the shortcut is being compared with the API.
pub const STATUS_CHECKING: u32 = 1;
/// [`Header::status`]: addresses come from QEMU's internal layout.
pub const STATUS_SHORTCUT: u32 = 2;
/// [`Header::status`]: addresses come from the plugin API alone.
pub const STATUS_API: u32 = 3;
/// Index into [`Page::mode`]: kernels' code.
pub const KERNEL: usize = 0;
/// Index into [`Page::mode`]: programs' code.
pub const USER: usize = 1;
/// Length of [`Page::mode`].
pub const MODES: usize = 2;
/// Raw event: modelled cycles with the header's costs.
pub const EVENT_CYCLES: u64 = 0x1000;
/// Raw event, plus a class of distance: DRAM accesses that were not streamed.
pub const EVENT_DRAM: u64 = 0x1100;
/// Raw event, plus a class of distance: DRAM accesses that were streamed.
pub const EVENT_STREAMED: u64 = 0x1200;
/// As [`EVENT_DRAM`], were the second LLC the first.
pub const EVENT_SECOND_DRAM: u64 = 0x1300;
/// As [`EVENT_STREAMED`], were the second LLC the first.
pub const EVENT_SECOND_STREAMED: u64 = 0x1400;
/// Raw event, plus a class of distance: reads of devices' registers.
pub const EVENT_MMIO_READ: u64 = 0x1500;
/// Raw event, plus a class of distance: writes to devices' registers.
pub const EVENT_MMIO_WRITE: u64 = 0x1600;

/// `struct vnuma_lc_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First physical address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// The node that it belongs to.
    pub node: u32,
    /// Zero.
    pub reserved: u32,
}

/// `struct vnuma_lc_header`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION_MAJOR`].
    pub version_major: u16,
    /// [`VERSION_MINOR`].
    pub version_minor: u16,
    /// Bytes of the region, a power of two.
    pub region_size: u32,
    /// CPUs of the server.
    pub nr_cpus: u32,
    /// Nodes of the server.
    pub nr_nodes: u32,
    /// Classes of distance in use.
    pub nr_classes: u32,
    /// Entries of `ranges` in use.
    pub nr_ranges: u32,
    /// [`SAMPLED`] or [`FULL`].
    pub sample_shift: u32,
    /// Sets of each CPU's L2.
    pub l2_sets: u32,
    /// Ways of each CPU's L2.
    pub l2_ways: u32,
    /// Sets of each node's LLC.
    pub llc_sets: u32,
    /// Ways of each node's LLC.
    pub llc_ways: u32,
    /// Sets of each node's second LLC, which only counts; 0: there is none.
    pub second_sets: u32,
    /// Ways of each node's second LLC.
    pub second_ways: u32,
    /// Cost of a hit in the LLC that is not streamed.
    pub llc_hit_cost: u32,
    /// `STATUS_*`.
    pub status: u32,
    /// Version of QEMU's plugin API.
    pub api_version: u32,
    /// Addresses compared with the API's.
    pub compared: u64,
    /// Of these, how many differed.
    pub mismatched: u64,
    /// Name of the profile, NUL-terminated.
    pub profile: [u8; NAME_SIZE],
    /// Cost of a DRAM access, by class.
    pub dram_cost: [u32; MAX_CLASSES],
    /// Cost of a streamed DRAM access, by class.
    pub streamed_cost: [u32; MAX_CLASSES],
    /// Cost of a read of a device's register, by class.
    pub mmio_read_cost: [u32; MAX_CLASSES],
    /// Cost of a write to a device's register, by class.
    pub mmio_write_cost: [u32; MAX_CLASSES],
    /// Class of distance between a CPU's node and a memory's or a device's node.
    pub class_of: [[u8; MAX_NODES]; MAX_NODES],
    /// Node of each CPU.
    pub cpu_node: [u8; 256],
    /// Memory of the nodes.
    pub ranges: [Range; MAX_RANGES],
}

/// `struct vnuma_lc_devices`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Entries of `ranges` in use.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
    /// BARs of the server's PCI devices and the nodes that they are on.
    pub ranges: [Range; MAX_DEVICES],
}

/// `struct vnuma_lc_cpu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Instructions; a repeated string instruction is one.
    pub instructions: u64,
    /// One cycle per instruction and per line of a string.
    pub base_cycles: u64,
    /// Loads; a string counts once per line.
    pub loads: u64,
    /// Stores, likewise.
    pub stores: u64,
    /// Accesses that missed the L2.
    pub llc_references: u64,
    /// Of these, those that a prefetcher foresees.
    pub llc_streamed: u64,
    /// Accesses that missed the LLC too.
    pub llc_misses: u64,
    /// Of these, those that a prefetcher foresees.
    pub llc_misses_streamed: u64,
    /// MMIO to no known device.
    pub mmio_other: u64,
    /// [`Cpu::llc_misses`], were the second LLC the first.
    pub second_misses: u64,
    /// [`Cpu::llc_misses_streamed`], likewise.
    pub second_misses_streamed: u64,
    /// Zero.
    pub reserved: [u64; 5],
    /// Misses that were not streamed, by the memory's node.
    pub dram: [u64; MAX_NODES],
    /// Misses that were streamed, by the memory's node.
    pub dram_streamed: [u64; MAX_NODES],
    /// Reads of registers, by the device's node.
    pub mmio_read: [u64; MAX_NODES],
    /// [`Cpu::dram`], were the second LLC the first.
    pub second_dram: [u64; MAX_NODES],
    /// [`Cpu::dram_streamed`], likewise.
    pub second_dram_streamed: [u64; MAX_NODES],
    /// Writes to registers, by the device's node.
    pub mmio_write: [u64; MAX_NODES],
}

/// `struct vnuma_lc_page`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// What was done by [`KERNEL`] and by [`USER`].
    pub mode: [Cpu; MODES],
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// Fewer bytes than a header has.
    Short(usize),
    /// Another magic.
    Magic(u64),
    /// Another major version.
    Version(u16),
    /// A number beyond its limit: the field, its value and the limit.
    Limit(&'static str, u32, u32),
}

impl core::fmt::Display for HeaderError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Short(length) => write!(f, "{length} bytes, expected {}", size_of::<Header>()),
            Self::Magic(magic) => write!(f, "magic: {magic:#x}, expected {MAGIC:#x}"),
            Self::Version(version) => write!(f, "version_major: {version}, expected {VERSION_MAJOR}"),
            Self::Limit(field, value, limit) => write!(f, "{field}: {value}, at most {limit} are possible"),
        }
    }
}

impl core::error::Error for HeaderError {}

/// Values of the header in their order, to or from bytes.
struct Cursor<B> {
    bytes: B,
    at: usize,
}

impl Cursor<&[u8]> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        value
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

impl Cursor<&mut [u8]> {
    fn put(&mut self, value: &[u8]) {
        self.bytes[self.at..self.at + value.len()].copy_from_slice(value);
        self.at += value.len();
    }
}

impl Header {
    /// The header as it lies in the region.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        let mut to = Cursor { bytes: &mut bytes[..], at: 0 };
        to.put(&self.magic.to_le_bytes());
        to.put(&self.version_major.to_le_bytes());
        to.put(&self.version_minor.to_le_bytes());
        let numbers = [
            self.region_size,
            self.nr_cpus,
            self.nr_nodes,
            self.nr_classes,
            self.nr_ranges,
            self.sample_shift,
            self.l2_sets,
            self.l2_ways,
            self.llc_sets,
            self.llc_ways,
            self.second_sets,
            self.second_ways,
            self.llc_hit_cost,
            self.status,
            self.api_version,
        ];
        numbers.iter().for_each(|number| to.put(&number.to_le_bytes()));
        to.put(&self.compared.to_le_bytes());
        to.put(&self.mismatched.to_le_bytes());
        to.put(&self.profile);
        for costs in [&self.dram_cost, &self.streamed_cost, &self.mmio_read_cost, &self.mmio_write_cost] {
            costs.iter().for_each(|cost| to.put(&cost.to_le_bytes()));
        }
        self.class_of.iter().for_each(|row| to.put(row));
        to.put(&self.cpu_node);
        for range in &self.ranges {
            to.put(&range.start.to_le_bytes());
            to.put(&range.end.to_le_bytes());
            to.put(&range.node.to_le_bytes());
            to.put(&range.reserved.to_le_bytes());
        }
        bytes
    }

    /// Reads and checks a header; whatever it counts is within the limits of this module then.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HeaderError> {
        if bytes.len() < size_of::<Self>() {
            return Err(HeaderError::Short(bytes.len()));
        }
        let mut from = Cursor { bytes, at: 0 };
        let header = Self {
            magic: from.u64(),
            version_major: from.u16(),
            version_minor: from.u16(),
            region_size: from.u32(),
            nr_cpus: from.u32(),
            nr_nodes: from.u32(),
            nr_classes: from.u32(),
            nr_ranges: from.u32(),
            sample_shift: from.u32(),
            l2_sets: from.u32(),
            l2_ways: from.u32(),
            llc_sets: from.u32(),
            llc_ways: from.u32(),
            second_sets: from.u32(),
            second_ways: from.u32(),
            llc_hit_cost: from.u32(),
            status: from.u32(),
            api_version: from.u32(),
            compared: from.u64(),
            mismatched: from.u64(),
            profile: from.take(),
            dram_cost: core::array::from_fn(|_| from.u32()),
            streamed_cost: core::array::from_fn(|_| from.u32()),
            mmio_read_cost: core::array::from_fn(|_| from.u32()),
            mmio_write_cost: core::array::from_fn(|_| from.u32()),
            class_of: core::array::from_fn(|_| from.take()),
            cpu_node: from.take(),
            ranges: core::array::from_fn(|_| Range {
                start: from.u64(),
                end: from.u64(),
                node: from.u32(),
                reserved: from.u32(),
            }),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), HeaderError> {
        if self.magic != MAGIC {
            return Err(HeaderError::Magic(self.magic));
        }
        if self.version_major != VERSION_MAJOR {
            return Err(HeaderError::Version(self.version_major));
        }
        let limits = [
            ("nr_cpus", self.nr_cpus, MAX_CPUS),
            ("nr_nodes", self.nr_nodes, MAX_NODES),
            ("nr_classes", self.nr_classes, MAX_CLASSES),
            ("nr_ranges", self.nr_ranges, MAX_RANGES),
        ];
        for (field, value, limit) in limits {
            if value as usize > limit {
                return Err(HeaderError::Limit(field, value, limit as u32));
            }
        }
        Ok(())
    }

    /// The name of the profile, up to its NUL.
    pub fn profile_name(&self) -> &str {
        let bytes = self.profile.split(|&byte| byte == 0).next().unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or("?")
    }
}
