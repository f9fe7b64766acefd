/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * /dev/vnuma: what the guest driver shows to programs of the guest.
 *
 * mmap(PROT_READ, MAP_SHARED) of VNUMA_GD_SIZE bytes at offset 0 shows the driver's own
 * memory, not the host's: it changes only after the kernel's maps agree with it.
 * poll() reports POLLPRI (and POLLIN) when `generation` differs from the one at the last read();
 * read() returns the 8-byte generation. Each change also emits a
 * KOBJ_CHANGE uevent with VNUMA_GENERATION=<16 hex digits>.
 *
 * A program that only wants to know whether its view is stale loads `generation`
 * and compares it for change. One that reads more than one field loads
 * `sequence` (acquire), waits while it is odd, copies, and starts again when
 * `sequence` has changed.
 *
 * The rules for changing the layout are those of topology_channel.h.
 */
#ifndef VNUMA_GUEST_DEVICE_H
#define VNUMA_GUEST_DEVICE_H

#include <linux/types.h>

#define VNUMA_GD_MAGIC		0x3144474d554e5600ULL	/* "\0VNUMGD1" */
#define VNUMA_GD_VERSION_MAJOR	1
#define VNUMA_GD_VERSION_MINOR	1
#define VNUMA_GD_MAX_CPUS	4096
#define VNUMA_GD_SIZE		0x3000

/* vnuma_gd_page.mode: how the kernel's maps are changed */
#define VNUMA_GD_MODE_NONE	0	/* nothing can be applied */
#define VNUMA_GD_MODE_FAST	1	/* in place, without CPU hotplug */
#define VNUMA_GD_MODE_SAFE	2	/* by taking the CPU offline and online */

/* vnuma_gd_page.distances */
#define VNUMA_GD_DISTANCES_SAME		0	/* the kernel had them already */
#define VNUMA_GD_DISTANCES_APPLIED	1	/* the kernel's table was changed */
#define VNUMA_GD_DISTANCES_UNSUPPORTED	2	/* published, but this kernel keeps its own */

/* vnuma_gd_page.cpu_node of a CPU that the kernel does not have */
#define VNUMA_GD_NO_NODE	0xffff

struct vnuma_gd_page {
	__u64 magic;
	__u16 version_major;
	__u16 version_minor;
	__u32 page_size;	/* sizeof(struct vnuma_gd_page) */
	__u64 generation;	/* last one applied, see cpus_unapplied; 0: none yet */
	__u32 sequence;		/* odd while the driver writes */
	__u32 mode;		/* VNUMA_GD_MODE_* */
	__u64 updates;		/* generations applied since the driver was loaded */
	__u64 refused;		/* malformed or torn publications */
	__u64 interrupt_ns;	/* CLOCK_MONOTONIC of the last interrupt ... */
	__u64 applied_ns;	/* ... and when all maps agreed */
	__u32 nr_nodes;		/* nodes that the host names are below this */
	__u32 nr_cpus;		/* entries of cpu_node in use */
	__u32 distances;	/* VNUMA_GD_DISTANCES_* */
	__s32 last_error;	/* 0 or -errno of the last publication */
	__u32 cpus_unapplied;	/* since 1.1: online CPUs that are not on their published node */
	__u32 reserved0;
	__u64 reserved[4];
	__u16 cpu_node[VNUMA_GD_MAX_CPUS];	/* by the kernel's CPU number */
};

#endif /* VNUMA_GUEST_DEVICE_H */
