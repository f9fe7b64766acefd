/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * QEMU's counter plugin: what its files share.
 *
 *   main.c     starts, instruments what is translated, counts
 *   config.c   maps the region and checks the header
 *   address.c  the physical address and the node of an access
 *   cache.c    L2, LLCs and the stream detector
 */
#ifndef VNUMA_PLUGIN_H
#define VNUMA_PLUGIN_H

#include "qemu_api.h"

#include <vnuma/lab_counters.h>

#define LINE_SHIFT	6
#define CHUNK_SIZE	0x200000

/* Lines that stand for the L1: a power of two, 32 KiB, found by virtual address */
#define FILTER_LINES	512
#define FILTER_EMPTY	UINT64_MAX

/* Pages whose physical address a CPU remembers: asking QEMU costs more than all else */
#define PAGE_SHIFT	12
#define PAGES		256

/* Pages in which a CPU's stream detector can follow a stream */
#define STREAM_PAGES	64
/* Lines in a row, up or down, before the next one counts as foreseen */
#define STREAM_RUN	2

#define likely(x)	__builtin_expect(!!(x), 1)
#define unlikely(x)	__builtin_expect(!!(x), 0)

struct stream {
	__u64 page;
	__u8 line;
	__s8 run;	/* lines in a row; below zero downwards */
};

/* What belongs to one emulated CPU; only its own thread touches it */
struct cpu {
	struct vnuma_lc_page *page;
	struct vnuma_lc_cpu *count;	/* of the page: whose code runs */
	__u32 *l2;		/* [sets][ways], most recently used first */
	__u64 rep;		/* the string instruction being repeated, or 0 */
	__u8 node;
	__u64 filter[FILTER_LINES];
	__u64 pages[PAGES];	/* by virtual page number */
	__u64 frames[PAGES];	/* physical address of the page | node */
	struct stream streams[STREAM_PAGES];
};

struct llc {
	__u32 *tags;		/* [sets][ways], most recently used first */
	__u8 *locks;		/* [sets] */
	__u32 ways;
};

struct access {
	__u64 phys;
	__u8 node;
};

/* The configuration: a copy of the header made before the server runs. */
extern struct vnuma_lc_header config;
/* The region itself. */
extern struct vnuma_lc_header *header;
extern struct vnuma_lc_devices *devices;
extern struct cpu *cpus;

/* One counter; each has a single writer, and readers elsewhere. */
static inline void add(__u64 *counter, __u64 amount)
{
	__atomic_store_n(counter, *counter + amount, __ATOMIC_RELAXED);
}

int config_load(const char *path, int qemu_cpus);

int address_init(int api_version, bool shortcut);
/* True and *access for memory; false for MMIO, which has been counted. */
bool address_of(struct cpu *cpu, qemu_plugin_meminfo_t info, __u64 vaddr,
		bool is_store, struct access *access);

int cache_init(void);
void cache_access(struct cpu *cpu, const struct access *access);

#endif /* VNUMA_PLUGIN_H */
