/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The counters of the lab's emulated server: what its cache model counts, for
 * the kernel of that server.
 *
 * The region is a file that QEMU's counter plugin maps and that the server sees
 * as BAR 2 of an ivshmem-plain device:
 *
 *   offset 0x0000                 struct vnuma_lc_header   host writes, once
 *   offset 0x1000                 struct vnuma_lc_devices  server writes
 *   offset 0x2000 + 0x1000 * cpu  struct vnuma_lc_page     plugin writes
 *
 * All values are little-endian. The host fills the header before QEMU starts
 * and the plugin takes its configuration from a copy of it, so nothing that the
 * server writes later can lead the plugin astray; of the devices' page it uses
 * numbers only after checking them. A counter is one aligned 8-byte word with one
 * writer, the thread of its CPU: it is read with one load and never goes back.
 * `cpu` is QEMU's index of the CPU, which is Linux's number of it.
 *
 * A second last-level cache may be modelled beside the first: of the same
 * accesses, with another size. It serves nobody; it is counted what it would miss.
 *
 * Counters of accesses that only the sampled sets see are raised in steps of
 * 1 << sample_shift. Costs are in 1/256 cycle (VNUMA_LC_COST_ONE).
 *
 * Changing the layout: a reader refuses an unknown VNUMA_LC_VERSION_MAJOR and
 * ignores the minor version. Reserved space that gets a meaning raises the minor
 * version; anything else raises the major version and changes the plugin, the kernel
 * module and lab-count at once, as they are always built from one checkout.
 */
#ifndef VNUMA_LAB_COUNTERS_H
#define VNUMA_LAB_COUNTERS_H

#include <linux/types.h>

#define VNUMA_LC_MAGIC		0x31434c414d554e56ULL	/* "VNUMALC1" */
#define VNUMA_LC_VERSION_MAJOR	4
#define VNUMA_LC_VERSION_MINOR	0

#define VNUMA_LC_PAGE_SIZE	0x1000
#define VNUMA_LC_DEVICES_OFFSET	0x1000
#define VNUMA_LC_CPUS_OFFSET	0x2000
#define VNUMA_LC_MAX_CPUS	254
#define VNUMA_LC_MAX_NODES	16
#define VNUMA_LC_MAX_CLASSES	8
#define VNUMA_LC_MAX_RANGES	32
#define VNUMA_LC_MAX_DEVICES	128
#define VNUMA_LC_NAME_SIZE	32
#define VNUMA_LC_LINE_SIZE	64
#define VNUMA_LC_COST_ONE	256

/* vnuma_lc_header.sample_shift: one set in 16, or all of them */
#define VNUMA_LC_SAMPLED	4
#define VNUMA_LC_FULL		0

/* vnuma_lc_header.status */
#define VNUMA_LC_STATUS_OFF	0	/* no plugin has started */
#define VNUMA_LC_STATUS_CHECKING 1	/* the shortcut is being compared */
#define VNUMA_LC_STATUS_SHORTCUT 2	/* addresses by QEMU's internal layout */
#define VNUMA_LC_STATUS_API	3	/* addresses by the plugin API alone */

/* Index into vnuma_lc_page.mode */
#define VNUMA_LC_KERNEL		0
#define VNUMA_LC_USER		1
#define VNUMA_LC_MODES		2

/*
 * Raw events of the perf PMU "cpu". Below VNUMA_LC_EVENT_CYCLES the event is the
 * index of a word of struct vnuma_lc_cpu.
 */
#define VNUMA_LC_EVENT_CYCLES	0x1000	/* modelled, with the header's costs */
#define VNUMA_LC_EVENT_DRAM	0x1100	/* + class: not streamed */
#define VNUMA_LC_EVENT_STREAMED	0x1200	/* + class: streamed */
#define VNUMA_LC_EVENT_SECOND_DRAM 0x1300	/* + class: the same two, */
#define VNUMA_LC_EVENT_SECOND_STREAMED 0x1400	/* were the second LLC the first */
#define VNUMA_LC_EVENT_MMIO_READ 0x1500	/* + class: reads of registers */
#define VNUMA_LC_EVENT_MMIO_WRITE 0x1600	/* + class: writes to registers */

/* Memory of a node, [start, end) in the server's physical addresses, 2 MiB aligned */
struct vnuma_lc_range {
	__u64 start;
	__u64 end;
	__u32 node;
	__u32 reserved;
};

struct vnuma_lc_header {
	__u64 magic;
	__u16 version_major;
	__u16 version_minor;
	__u32 region_size;
	__u32 nr_cpus;
	__u32 nr_nodes;
	__u32 nr_classes;	/* classes of distance between nodes */
	__u32 nr_ranges;
	__u32 sample_shift;	/* VNUMA_LC_SAMPLED or VNUMA_LC_FULL */
	__u32 l2_sets;		/* multiple of 16; one L2 per CPU */
	__u32 l2_ways;
	__u32 llc_sets;		/* multiple of 16; one LLC per node */
	__u32 llc_ways;
	__u32 second_sets;	/* of a second LLC per node; 0: there is none */
	__u32 second_ways;
	__u32 llc_hit_cost;	/* added to the base cycles, like all costs */
	__u32 status;		/* VNUMA_LC_STATUS_*, written by the plugin */
	__u32 api_version;	/* QEMU's plugin API, written by the plugin */
	__u64 compared;		/* addresses compared with the API's */
	__u64 mismatched;	/* of these, how many differed */
	char profile[VNUMA_LC_NAME_SIZE];	/* NUL-terminated */
	__u32 dram_cost[VNUMA_LC_MAX_CLASSES];
	__u32 streamed_cost[VNUMA_LC_MAX_CLASSES];
	__u32 mmio_read_cost[VNUMA_LC_MAX_CLASSES];
	__u32 mmio_write_cost[VNUMA_LC_MAX_CLASSES];
	__u8 class_of[VNUMA_LC_MAX_NODES][VNUMA_LC_MAX_NODES];	/* [CPU's][other's] */
	__u8 cpu_node[256];
	struct vnuma_lc_range ranges[VNUMA_LC_MAX_RANGES];
};

/* The server's PCI devices; `count` is written last */
struct vnuma_lc_devices {
	__u32 count;
	__u32 reserved;
	struct vnuma_lc_range ranges[VNUMA_LC_MAX_DEVICES];
};

struct vnuma_lc_cpu {
	__u64 instructions;	/* a repeated string instruction is one */
	__u64 base_cycles;	/* one per instruction and per line of a string */
	__u64 loads;		/* a string counts once per line */
	__u64 stores;
	__u64 llc_references;	/* missed the L2 */
	__u64 llc_streamed;	/* of these, those that a prefetcher foresees */
	__u64 llc_misses;
	__u64 llc_misses_streamed;
	__u64 mmio_other;	/* to no range of struct vnuma_lc_devices */
	__u64 second_misses;	/* llc_misses, were the second LLC the first */
	__u64 second_misses_streamed;
	__u64 reserved[5];
	__u64 dram[VNUMA_LC_MAX_NODES];		/* misses not streamed, by the memory's node */
	__u64 dram_streamed[VNUMA_LC_MAX_NODES];
	__u64 mmio_read[VNUMA_LC_MAX_NODES];	/* by the device's node */
	__u64 second_dram[VNUMA_LC_MAX_NODES];	/* dram, were the second LLC the first */
	__u64 second_dram_streamed[VNUMA_LC_MAX_NODES];
	__u64 mmio_write[VNUMA_LC_MAX_NODES];	/* by the device's node */
};

/*
 * What a CPU did, by whom: code in the upper half of the virtual addresses is a kernel's,
 * all other that of programs, inside VMs as outside. The sum is what the CPU did.
 */
struct vnuma_lc_page {
	struct vnuma_lc_cpu mode[VNUMA_LC_MODES];
};

#endif /* VNUMA_LAB_COUNTERS_H */
