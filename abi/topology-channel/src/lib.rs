//! Rust mirror of `include/vnuma/topology_channel.h`, the memory through which a
//! host tells a guest its present virtual NUMA topology. The header is the
//! definition and explains the protocol; `tests/layout.rs` compares the two.

#![forbid(unsafe_code)]
#![no_std]

/// `"VNUMATC1"`, little-endian.
pub const MAGIC: u64 = 0x3143_5441_4d55_4e56;
/// A reader refuses any other major version.
pub const VERSION_MAJOR: u16 = 1;
/// Raised when reserved space gets a meaning.
pub const VERSION_MINOR: u16 = 0;
/// Guest nodes that one slot can hold.
pub const MAX_NODES: usize = 64;
/// vCPUs that one slot can hold.
pub const MAX_VCPUS: usize = 4096;
/// Times a reader tries before it keeps the topology that it has.
pub const READ_RETRIES: usize = 8;
/// Bytes of the whole region; a power of two because it is a PCI BAR.
pub const REGION_SIZE: usize = 0x20000;
/// Where the two slots lie.
pub const SLOT_OFFSET: [usize; 2] = [0x1000, 0xb000];
/// SLIT distance of a node to itself.
pub const DISTANCE_LOCAL: u8 = 10;
/// SLIT distance that says "no path".
pub const DISTANCE_UNREACHABLE: u8 = 255;
/// [`Vcpu::flags`]: the vCPU is on a host node that is no guest node's home.
pub const VCPU_APPROXIMATE: u16 = 1;

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
    /// The guest acknowledges counter `c` on vector `c % WINDOW` of the host, or on `WINDOW + c % WINDOW` when its
    /// driver is in safe mode.
    pub const WINDOW: usize = 8;
    /// Vectors of either peer. The host raises vector 0 of the guest.
    pub const VECTORS: usize = 2 * WINDOW;
    /// BAR 0 register with the guest's own peer number.
    pub const REG_IVPOSITION: u32 = 0x08;
    /// BAR 0 register that takes `peer << 16 | vector`.
    pub const REG_DOORBELL: u32 = 0x0c;
}

/// `struct vnuma_tc_header`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION_MAJOR`].
    pub version_major: u16,
    /// [`VERSION_MINOR`].
    pub version_minor: u16,
    /// Bytes of this struct.
    pub header_size: u32,
    /// [`REGION_SIZE`].
    pub region_size: u32,
    /// Bytes of a [`Slot`].
    pub slot_size: u32,
    /// [`SLOT_OFFSET`].
    pub slot_offset: [u32; 2],
    /// [`MAX_NODES`].
    pub max_nodes: u32,
    /// [`MAX_VCPUS`].
    pub max_vcpus: u32,
    /// Zero.
    pub reserved0: [u64; 3],
    /// Generation of the current slot, 0 for none. The last store of a publication.
    pub published: u64,
    /// Zero.
    pub reserved1: [u64; 7],
}

/// `struct vnuma_tc_vcpu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vcpu {
    /// x2APIC id, the guest's name for the vCPU.
    pub apic_id: u32,
    /// Guest node, below [`Slot::nr_nodes`].
    pub node: u16,
    /// `VCPU_*`.
    pub flags: u16,
}

/// `struct vnuma_tc_slot`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// `start epoch << 32 | counter`, 0 while the slot is written.
    pub generation: u64,
    /// 1 to [`MAX_NODES`].
    pub nr_nodes: u32,
    /// 1 to [`MAX_VCPUS`].
    pub nr_vcpus: u32,
    /// Zero.
    pub reserved: [u64; 6],
    /// `distance[from][to]`.
    pub distance: [[u8; MAX_NODES]; MAX_NODES],
    /// The first `nr_vcpus` entries count.
    pub vcpu: [Vcpu; MAX_VCPUS],
}
