/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The topology channel: the memory through which the host tells a guest its
 * present virtual NUMA topology.
 *
 * This header is the one definition of the layout. The kernel driver and C
 * programs include it; the Rust mirror in src/lib.rs is compared with it, field
 * by field, by tests/layout.rs.
 *
 *   offset 0                 struct vnuma_tc_header
 *   offset slot_offset[0]    struct vnuma_tc_slot
 *   offset slot_offset[1]    struct vnuma_tc_slot
 *
 * All values are little-endian; the host and the guest are both x86-64. Nothing in
 * here names a node of the host: a guest learns only its own guest nodes.
 *
 * Writer (the host). It keeps its own copy of what it told and never reads this
 * memory, which the guest can write:
 *   1. slot = counter & 1, the slot that `published` does not name
 *   2. slot->generation = 0; store fence
 *   3. fill the slot;        store fence
 *   4. slot->generation = g
 *   5. published = g         (one 8-byte store with release order)
 * then raise the interrupt. Killed between any two of these stores, the host
 * leaves either the old slot current and whole, or a current slot whose
 * generation does not match, which readers refuse.
 *
 * Reader (the guest), at most VNUMA_TC_READ_RETRIES times:
 *   1. g = published (acquire); none if 0
 *   2. slot = g & 1; slot->generation must be g
 *   3. copy the slot; load fence
 *   4. slot->generation and published must still be g, else again
 * A reader that runs out of tries keeps the topology that it has; the interrupt of
 * the publication that disturbed it brings it back.
 *
 * A generation is compared for *change* only, never for order: its upper half is
 * the start epoch of the writer, so that a restarted writer never repeats one.
 *
 * Changing the layout: a reader refuses an unknown VNUMA_TC_VERSION_MAJOR and
 * ignores the minor version. A field added in reserved space (which the writer
 * zeroes) raises the minor version; anything else raises the major version, and then both
 * ends keep the older one for as long as a supported guest driver needs it.
 */
#ifndef VNUMA_TOPOLOGY_CHANNEL_H
#define VNUMA_TOPOLOGY_CHANNEL_H

#include <linux/types.h>

#define VNUMA_TC_MAGIC		0x314354414d554e56ULL	/* "VNUMATC1" */
#define VNUMA_TC_VERSION_MAJOR	1
#define VNUMA_TC_VERSION_MINOR	0

#define VNUMA_TC_MAX_NODES	64
#define VNUMA_TC_MAX_VCPUS	4096
#define VNUMA_TC_READ_RETRIES	8

/* Size of the whole region, a power of two because it is a PCI BAR. */
#define VNUMA_TC_REGION_SIZE	0x20000
#define VNUMA_TC_SLOT0_OFFSET	0x1000
#define VNUMA_TC_SLOT1_OFFSET	0xb000

/* SLIT (ACPI 6.5, section 5.2.17): 10 is local, 255 unreachable. */
#define VNUMA_TC_DISTANCE_LOCAL		10
#define VNUMA_TC_DISTANCE_UNREACHABLE	255

/*
 * The vCPU is on a host node that is no guest node's home; `node` is the
 * nearest guest node.
 */
#define VNUMA_TC_VCPU_APPROXIMATE	0x1

struct vnuma_tc_header {
	__u64 magic;
	__u16 version_major;
	__u16 version_minor;
	__u32 header_size;	/* sizeof(struct vnuma_tc_header) */
	__u32 region_size;	/* VNUMA_TC_REGION_SIZE */
	__u32 slot_size;	/* sizeof(struct vnuma_tc_slot) */
	__u32 slot_offset[2];
	__u32 max_nodes;	/* rows and columns of `distance` */
	__u32 max_vcpus;	/* entries of `vcpu` */
	__u64 reserved0[3];
	/* On a cache line of its own: it is all that a polling reader loads. */
	__u64 published;	/* generation of the current slot, 0: none */
	__u64 reserved1[7];
};

struct vnuma_tc_vcpu {
	__u32 apic_id;		/* x2APIC id, the guest's name for the vCPU */
	__u16 node;		/* guest node, < nr_nodes */
	__u16 flags;		/* VNUMA_TC_VCPU_* */
};

struct vnuma_tc_slot {
	__u64 generation;	/* (start epoch << 32) | counter; 0: being written */
	__u32 nr_nodes;		/* 1 to VNUMA_TC_MAX_NODES */
	__u32 nr_vcpus;		/* 1 to VNUMA_TC_MAX_VCPUS */
	__u64 reserved[6];
	/* distance[from][to]; rows are VNUMA_TC_MAX_NODES apart. */
	__u8 distance[VNUMA_TC_MAX_NODES][VNUMA_TC_MAX_NODES];
	struct vnuma_tc_vcpu vcpu[VNUMA_TC_MAX_VCPUS];
};

/*
 * The ivshmem-doorbell transport (QEMU docs/specs/ivshmem-spec): the region is
 * BAR 2. Peer and vector numbers in the doorbell register:
 *   host  -> guest  vector 0 of VNUMA_IVSHMEM_GUEST_PEER: "published changed"
 *   guest -> host   vector (counter % VNUMA_IVSHMEM_WINDOW) of
 *                   VNUMA_IVSHMEM_HOST_PEER: "my kernel's maps now agree with
 *                   the generation of this counter"; VNUMA_IVSHMEM_WINDOW more
 *                   when they were changed by CPU hotplug (the driver's safe mode). It
 *                   lets the host show `stale` and the mode, and measure latency; no
 *                   decision rests on it.
 */
#define VNUMA_IVSHMEM_PCI_VENDOR	0x1af4
#define VNUMA_IVSHMEM_PCI_DEVICE	0x1110
#define VNUMA_IVSHMEM_GUEST_PEER	0	/* QEMU gives `master=on` to peer 0 only */
#define VNUMA_IVSHMEM_HOST_PEER		1
#define VNUMA_IVSHMEM_WINDOW		8
#define VNUMA_IVSHMEM_VECTORS		16	/* of either peer */
#define VNUMA_IVSHMEM_REG_IVPOSITION	0x08	/* BAR 0 */
#define VNUMA_IVSHMEM_REG_DOORBELL	0x0c	/* BAR 0: peer << 16 | vector */

#endif /* VNUMA_TOPOLOGY_CHANNEL_H */
