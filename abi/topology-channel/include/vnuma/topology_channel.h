/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The topology channel: memory in which the host publishes the present virtual NUMA
 * topology of a guest, and the guest acknowledges it.
 *
 * This header is the one definition of the layout. The kernel driver and C
 * programs include it. tests/layout.rs compares the Rust mirror in src/lib.rs with it,
 * field by field.
 *
 *   offset 0		struct vnuma_tc_header	written by the host
 *   guest_offset	struct vnuma_tc_guest	written by the guest
 *   slot_offset[0]	struct vnuma_tc_slot	written by the host
 *   slot_offset[1]	struct vnuma_tc_slot	written by the host
 *
 * All values are little-endian. The host and the guest are both x86-64. Nothing
 * here names a node of the host: a guest learns only its own guest nodes. These are
 * named by their proximity domains (ACPI's SRAT and SLIT), which QEMU and libvirt call
 * their ids. The guest's kernel may have other numbers for them.
 *
 * A publication is a slot: struct vnuma_tc_slot, then nr_sections sections, each
 * beginning with struct vnuma_tc_section and at a multiple of 8. Only `length`
 * bytes of the slot have a meaning.
 *
 * Writer (the host). It keeps its own copy of what it published and never reads a
 * slot or the header, which the guest can write:
 *   1. slot = counter & 1, the slot that `published` does not name
 *   2. slot->generation = 0; store fence
 *   3. fill the slot;        store fence
 *   4. slot->generation = g; store fence
 *   5. published = g         (one 8-byte store with release order)
 * then raise the interrupt. A host that dies between any two of these stores
 * leaves either the old slot current and whole, or a current slot whose
 * generation does not match, which readers refuse.
 *
 * Reader (the guest), at most VNUMA_TC_READ_RETRIES times:
 *   1. g = published (acquire); none if 0
 *   2. slot = g & 1; slot->generation must be g
 *   3. copy what it understands of the slot; load fence
 *   4. slot->generation and published must still be g, else again
 * A reader that runs out of tries keeps the topology that it has; the interrupt of
 * the publication that disturbed it brings it back.
 *
 * A generation is compared for *change* only, never for order: its upper half is
 * the start epoch of the writer, so that a restarted writer never repeats one.
 *
 * Answers (the guest). It writes its area, `magic` last, when its driver starts.
 * Afterwards it stores the full generation in `acknowledged`, or first the error in
 * `refused_error` and then the generation in `refused`, and signals vector
 * VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR of the host. A driver that goes stores 0 in `magic`.
 * The host reads the area by 8-byte loads and trusts nothing in it: a generation
 * counts only if it equals a publication that the guest has not answered yet.
 *
 * Growing. Either side may be older than the other:
 *   - A reader skips a section of a kind that it does not support, and one whose
 *     `compatible` is above the version that it supports. If such a section has
 *     VNUMA_TC_SECTION_REQUIRED, the reader refuses the publication.
 *   - A section of another version is read otherwise: a newer one as far as the
 *     reader knows its fields, an older one with zero for what it lacks.
 *     So a version only appends: fields to the section's struct, before the
 *     arrays that its offsets name, and fields to an array's elements, whose
 *     size is in the section. A change of meaning raises `compatible`.
 *   - struct vnuma_tc_header and struct vnuma_tc_guest grow by their reserved
 *     fields and at their ends. Their sizes and offsets are in the header.
 *     Each lists the sections that its writer supports and their versions.
 *   - What cannot be done so needs another `layout`, which a reader refuses.
 */
#ifndef VNUMA_TOPOLOGY_CHANNEL_H
#define VNUMA_TOPOLOGY_CHANNEL_H

#include <linux/types.h>

#define VNUMA_TC_MAGIC		0x484354414d554e56ULL	/* "VNUMATCH" */
#define VNUMA_TC_GUEST_MAGIC	0x544754414d554e56ULL	/* "VNUMATGT" */
#define VNUMA_TC_LAYOUT		2

#define VNUMA_TC_MAX_NODES	64
#define VNUMA_TC_MAX_VCPUS	4096
#define VNUMA_TC_MAX_DEVICES	256	/* PCI functions */
#define VNUMA_TC_MAX_SECTIONS	64	/* of a slot */
#define VNUMA_TC_MAX_SUPPORTED	16	/* of a list of supported sections */
#define VNUMA_TC_READ_RETRIES	8

/* What this version of the host uses. Readers take sizes and offsets from the header. */
#define VNUMA_TC_REGION_SIZE	0x80000	/* a power of two because it is a PCI BAR */
#define VNUMA_TC_GUEST_OFFSET	0x1000
#define VNUMA_TC_GUEST_SIZE	0x1000
#define VNUMA_TC_SLOT0_OFFSET	0x2000
#define VNUMA_TC_SLOT1_OFFSET	0x41000
#define VNUMA_TC_SLOT_SIZE	0x3f000

/* Most bytes that any version of the host shares. */
#define VNUMA_TC_MAX_REGION_SIZE	0x200000

/* SLIT (ACPI 6.5, section 5.2.17): 10 is local, 255 unreachable. */
#define VNUMA_TC_DISTANCE_LOCAL		10
#define VNUMA_TC_DISTANCE_UNREACHABLE	255

/* vnuma_tc_guest.mode: how the guest kernel's maps are changed */
#define VNUMA_TC_MODE_NONE	0	/* nothing can be applied */
#define VNUMA_TC_MODE_FAST	1	/* in place, without CPU hotplug */
#define VNUMA_TC_MODE_SAFE	2	/* by taking the CPU offline and online */

/* vnuma_tc_section.kind */
#define VNUMA_TC_SECTION_NODES	1	/* struct vnuma_tc_nodes */
#define VNUMA_TC_SECTION_VCPUS	2	/* struct vnuma_tc_vcpus */
#define VNUMA_TC_SECTION_DEVICES	3	/* struct vnuma_tc_devices */

/* Versions that this header describes. */
#define VNUMA_TC_NODES_VERSION	1
#define VNUMA_TC_VCPUS_VERSION	1
#define VNUMA_TC_DEVICES_VERSION	1

/* vnuma_tc_section.flags: a reader that must skip the section refuses the publication */
#define VNUMA_TC_SECTION_REQUIRED	0x1

/* A section that one side supports, and the newest version of it; kind 0 is no entry. */
struct vnuma_tc_supported_section {
	__u16 kind;
	__u16 version;
};

struct vnuma_tc_header {
	__u64 magic;
	__u16 layout;		/* VNUMA_TC_LAYOUT */
	__u16 nr_supported;	/* entries of `supported` */
	__u32 header_size;	/* of the writer's struct, at least this one's */
	__u32 region_size;
	__u32 slot_size;
	__u32 slot_offset[2];
	__u32 guest_offset;
	__u32 guest_size;	/* room for struct vnuma_tc_guest */
	__u32 host_version;	/* of vnumad: major << 16 | minor << 8 | patch */
	__u32 reserved0;
	struct vnuma_tc_supported_section supported[VNUMA_TC_MAX_SUPPORTED];
	__u64 reserved1[2];
	/* On a cache line of its own: it is all that a polling reader loads. */
	__u64 published;	/* generation of the current slot, 0: none */
	__u64 reserved2[7];
};

struct vnuma_tc_guest {
	__u64 magic;		/* VNUMA_TC_GUEST_MAGIC while a driver is there */
	__u16 nr_supported;	/* entries of `supported` */
	__u16 reserved0;
	__u32 mode;		/* VNUMA_TC_MODE_* */
	__u32 driver_version;	/* major << 16 | minor << 8 | patch */
	__u32 reserved1;
	struct vnuma_tc_supported_section supported[VNUMA_TC_MAX_SUPPORTED];
	__u64 device_changes;	/* PCI devices that came or went so far: a hint to look */
	__u64 reserved2[4];
	__u64 acknowledged;	/* last generation that all maps agree with, 0: none */
	__u64 refused;		/* last one refused or applied in part only, 0: none */
	__s64 refused_error;	/* why: -errno */
	__u64 reserved3[5];
};

struct vnuma_tc_slot {
	__u64 generation;	/* (start epoch << 32) | counter; 0: being written */
	__u32 length;		/* bytes in use, this struct included */
	__u32 nr_sections;	/* at most VNUMA_TC_MAX_SECTIONS */
};

struct vnuma_tc_section {
	__u16 kind;		/* VNUMA_TC_SECTION_* */
	__u16 version;
	__u16 compatible;	/* oldest version whose readers may read it */
	__u16 flags;		/* VNUMA_TC_SECTION_REQUIRED */
	__u32 length;		/* bytes, this struct included; a multiple of 8 */
	__u32 reserved;
};

/* Guest nodes and the distances between them. Every publication has it once. */
struct vnuma_tc_nodes {
	struct vnuma_tc_section section;
	__u32 nr_nodes;		/* 1 to VNUMA_TC_MAX_NODES */
	__u32 distance_offset;	/* in the section: __u8 distance[nr_nodes][nr_nodes] */
};

/* The node of each vCPU. Every publication has it once. */
struct vnuma_tc_vcpus {
	struct vnuma_tc_section section;
	__u32 nr_vcpus;		/* 1 to VNUMA_TC_MAX_VCPUS */
	__u32 vcpu_offset;	/* in the section: struct vnuma_tc_vcpu vcpu[nr_vcpus] */
	__u32 vcpu_size;	/* bytes from one to the next, a multiple of 8 */
	__u32 reserved;
};

struct vnuma_tc_vcpu {
	__u32 apic_id;		/* x2APIC id, the guest's name for the vCPU */
	__u32 node;		/* guest node (proximity domain), < nr_nodes */
};

/*
 * The node of PCI functions that the host knows it of: those that are passed through. At
 * most once in a publication. A reader leaves all other functions as it found them, and
 * gives back what it found where a function is not named any more. A function may
 * be named that is not there, or not there yet. The driver of the guest uses it.
 */
struct vnuma_tc_devices {
	struct vnuma_tc_section section;
	__u32 nr_devices;	/* 0 to VNUMA_TC_MAX_DEVICES */
	__u32 device_offset;	/* in the section: struct vnuma_tc_device device[nr_devices] */
	__u32 device_size;	/* bytes from one to the next, a multiple of 8 */
	__u32 reserved;
};

/* The address is the one that the guest uses; each occurs once. */
struct vnuma_tc_device {
	__u16 segment;		/* PCI domain */
	__u8 bus;
	__u8 devfn;		/* device << 3 | function */
	__u32 node;		/* guest node, < nr_nodes */
};

/*
 * The ivshmem-doorbell transport (QEMU docs/specs/ivshmem-spec): the region is
 * BAR 2. The doorbell register of BAR 0 takes peer << 16 | vector:
 *   host  -> guest  VNUMA_IVSHMEM_PUBLISH_VECTOR of VNUMA_IVSHMEM_GUEST_PEER:
 *                   `published` has changed
 *   guest -> host   VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR of VNUMA_IVSHMEM_HOST_PEER:
 *                   struct vnuma_tc_guest has changed
 * The other vectors have no use yet.
 */
#define VNUMA_IVSHMEM_PCI_VENDOR	0x1af4
#define VNUMA_IVSHMEM_PCI_DEVICE	0x1110
#define VNUMA_IVSHMEM_GUEST_PEER	0	/* QEMU gives `master=on` to peer 0 only */
#define VNUMA_IVSHMEM_HOST_PEER		1
#define VNUMA_IVSHMEM_VECTORS		4	/* of either peer */
#define VNUMA_IVSHMEM_PUBLISH_VECTOR		0
#define VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR	0
#define VNUMA_IVSHMEM_REG_IVPOSITION	0x08	/* BAR 0 */
#define VNUMA_IVSHMEM_REG_DOORBELL	0x0c	/* BAR 0 */

#endif /* VNUMA_TOPOLOGY_CHANNEL_H */
