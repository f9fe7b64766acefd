//! Rust mirror of `include/vnuma/topology_channel.h`, the memory in which a host
//! publishes the present virtual NUMA topology of a guest. The header is the
//! definition and explains the protocol; `tests/layout.rs` compares the two.

#![forbid(unsafe_code)]
#![no_std]

/// `"VNUMATCH"`, little-endian.
pub const MAGIC: u64 = 0x4843_5441_4d55_4e56;
/// `"VNUMATGT"`: [`Guest::magic`] while a driver is there.
pub const GUEST_MAGIC: u64 = 0x5447_5441_4d55_4e56;
/// A reader refuses any other layout.
pub const LAYOUT: u16 = 2;
/// Guest nodes that one publication can hold.
pub const MAX_NODES: usize = 64;
/// vCPUs that one publication can hold.
pub const MAX_VCPUS: usize = 4096;
/// PCI functions that one publication can hold.
pub const MAX_DEVICES: usize = 256;
/// Sections of one publication.
pub const MAX_SECTIONS: usize = 64;
/// Entries of a list of supported sections.
pub const MAX_SUPPORTED: usize = 16;
/// Times a reader tries before it keeps the topology that it has.
pub const READ_RETRIES: usize = 8;
/// Bytes of the whole region; a power of two because it is a PCI BAR.
pub const REGION_SIZE: usize = 0x80000;
/// Most bytes of a region of any version.
pub const MAX_REGION_SIZE: usize = 0x20_0000;
/// Where the guest's area lies.
pub const GUEST_OFFSET: usize = 0x1000;
/// Bytes of the guest's area.
pub const GUEST_SIZE: usize = 0x1000;
/// Where the two slots lie.
pub const SLOT_OFFSET: [usize; 2] = [0x2000, 0x41000];
/// Bytes of each slot.
pub const SLOT_SIZE: usize = 0x3f000;
/// SLIT distance of a node to itself.
pub const DISTANCE_LOCAL: u8 = 10;
/// SLIT distance that says "no path".
pub const DISTANCE_UNREACHABLE: u8 = 255;
/// [`Guest::mode`]: nothing can be applied.
pub const MODE_NONE: u32 = 0;
/// [`Guest::mode`]: maps are changed in place.
pub const MODE_FAST: u32 = 1;
/// [`Guest::mode`]: maps are changed by CPU hotplug.
pub const MODE_SAFE: u32 = 2;
/// [`Section::kind`] of [`Nodes`].
pub const SECTION_NODES: u16 = 1;
/// [`Section::kind`] of [`Vcpus`].
pub const SECTION_VCPUS: u16 = 2;
/// [`Section::kind`] of [`Devices`].
pub const SECTION_DEVICES: u16 = 3;
/// Version of [`Nodes`].
pub const NODES_VERSION: u16 = 1;
/// Version of [`Vcpus`].
pub const VCPUS_VERSION: u16 = 1;
/// Version of [`Devices`].
pub const DEVICES_VERSION: u16 = 1;
/// [`Section::flags`]: a reader that must skip the section refuses the publication.
pub const SECTION_REQUIRED: u16 = 1;

/// The ivshmem-doorbell transport: PCI ids, peers and vectors.
pub mod ivshmem {
    /// PCI vendor of the device.
    pub const PCI_VENDOR: u16 = 0x1af4;
    /// PCI device id, shared with other uses of ivshmem: check the magic.
    pub const PCI_DEVICE: u16 = 0x1110;
    /// Peer number of the guest. QEMU gives `master=on` to peer 0 only.
    pub const GUEST_PEER: u16 = 0;
    /// Peer number of the host.
    pub const HOST_PEER: u16 = 1;
    /// Vectors of either peer.
    pub const VECTORS: usize = 4;
    /// The guest's vector that says that `published` has changed.
    pub const PUBLISH_VECTOR: usize = 0;
    /// The host's vector that says that the guest's area has changed.
    pub const ACKNOWLEDGE_VECTOR: usize = 0;
    /// BAR 0 register with the guest's own peer number.
    pub const REG_IVPOSITION: u32 = 0x08;
    /// BAR 0 register that takes `peer << 16 | vector`.
    pub const REG_DOORBELL: u32 = 0x0c;
}

/// `struct vnuma_tc_supported_section`: a section that one side supports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SupportedSection {
    /// `SECTION_*`; 0 is no entry.
    pub kind: u16,
    /// The newest version that is supported.
    pub version: u16,
}

/// `struct vnuma_tc_header`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`LAYOUT`].
    pub layout: u16,
    /// Entries of `supported`.
    pub nr_supported: u16,
    /// Bytes of the writer's struct.
    pub header_size: u32,
    /// [`REGION_SIZE`].
    pub region_size: u32,
    /// [`SLOT_SIZE`].
    pub slot_size: u32,
    /// [`SLOT_OFFSET`].
    pub slot_offset: [u32; 2],
    /// [`GUEST_OFFSET`].
    pub guest_offset: u32,
    /// [`GUEST_SIZE`].
    pub guest_size: u32,
    /// Of vnumad: `major << 16 | minor << 8 | patch`.
    pub host_version: u32,
    /// Zero.
    pub reserved0: u32,
    /// Sections that the host can send.
    pub supported: [SupportedSection; MAX_SUPPORTED],
    /// Zero.
    pub reserved1: [u64; 2],
    /// Generation of the current slot, 0 for none. The last store of a publication.
    pub published: u64,
    /// Zero.
    pub reserved2: [u64; 7],
}

/// `struct vnuma_tc_guest`: what the guest says. It can say anything.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// [`GUEST_MAGIC`] while a driver is there.
    pub magic: u64,
    /// Entries of `supported`.
    pub nr_supported: u16,
    /// Zero.
    pub reserved0: u16,
    /// `MODE_*`.
    pub mode: u32,
    /// `major << 16 | minor << 8 | patch`.
    pub driver_version: u32,
    /// Zero.
    pub reserved1: u32,
    /// Sections that the driver understands.
    pub supported: [SupportedSection; MAX_SUPPORTED],
    /// PCI devices that came or went in the guest so far: a hint to look.
    pub device_changes: u64,
    /// Zero.
    pub reserved2: [u64; 4],
    /// Last generation that all maps agree with.
    pub acknowledged: u64,
    /// Last generation refused or applied in part only.
    pub refused: u64,
    /// Why: `-errno`.
    pub refused_error: i64,
    /// Zero.
    pub reserved3: [u64; 5],
}

/// `struct vnuma_tc_slot`: the start of a publication.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// `start epoch << 32 | counter`, 0 while the slot is written.
    pub generation: u64,
    /// Bytes in use, this struct included.
    pub length: u32,
    /// Sections that follow.
    pub nr_sections: u32,
}

/// `struct vnuma_tc_section`: the start of a section.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// `SECTION_*`.
    pub kind: u16,
    /// Version of the section's layout.
    pub version: u16,
    /// Oldest version whose readers may read it.
    pub compatible: u16,
    /// `SECTION_REQUIRED`.
    pub flags: u16,
    /// Bytes, this struct included; a multiple of 8.
    pub length: u32,
    /// Zero.
    pub reserved: u32,
}

/// `struct vnuma_tc_nodes`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    /// Of kind [`SECTION_NODES`].
    pub section: Section,
    /// 1 to [`MAX_NODES`].
    pub nr_nodes: u32,
    /// Where in the section the distances lie, a byte each, row by row.
    pub distance_offset: u32,
}

/// `struct vnuma_tc_vcpus`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Vcpus {
    /// Of kind [`SECTION_VCPUS`].
    pub section: Section,
    /// 1 to [`MAX_VCPUS`].
    pub nr_vcpus: u32,
    /// Where in the section the first [`Vcpu`] lies.
    pub vcpu_offset: u32,
    /// Bytes from one to the next, a multiple of 8.
    pub vcpu_size: u32,
    /// Zero.
    pub reserved: u32,
}

/// `struct vnuma_tc_vcpu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vcpu {
    /// x2APIC id, the guest's name for the vCPU.
    pub apic_id: u32,
    /// Guest node, below [`Nodes::nr_nodes`].
    pub node: u32,
}

/// `struct vnuma_tc_devices`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Devices {
    /// Of kind [`SECTION_DEVICES`].
    pub section: Section,
    /// 0 to [`MAX_DEVICES`].
    pub nr_devices: u32,
    /// Where in the section the first [`Device`] lies.
    pub device_offset: u32,
    /// Bytes from one to the next, a multiple of 8.
    pub device_size: u32,
    /// Zero.
    pub reserved: u32,
}

/// `struct vnuma_tc_device`: a PCI function by the address that the guest uses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// PCI domain.
    pub segment: u16,
    /// Bus.
    pub bus: u8,
    /// `device << 3 | function`.
    pub devfn: u8,
    /// Guest node, below [`Nodes::nr_nodes`].
    pub node: u32,
}
