/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef VNUMA_SCHED_H
#define VNUMA_SCHED_H

/*
 * Maps that scx_vnuma, the scheduler of vCPU threads, shares with whoever decides where
 * these threads belong (vnumad). They are pinned in /sys/fs/bpf/vnuma:
 *
 *	header		array of one struct vnuma_sched_header
 *	assignments	hash, thread id to struct vnuma_sched_assignment
 *	counts		per-CPU array of __u64, by VNUMA_SCHED_COUNT_*
 *
 * The scheduler writes the header before it pins the maps. From then on whoever decides
 * writes heartbeat_ns and steal, and nothing else of it. Whoever opens the maps checks
 * magic, version and sizes first. A change of any layout here needs another
 * VNUMA_SCHED_VERSION: both sides are built from one tree, so that neither reads another
 * version.
 */

#include <linux/types.h>

#define VNUMA_SCHED_MAGIC	0x764e756d	/* "vNum" */
#define VNUMA_SCHED_VERSION	3

/* CPUs and nodes that the layouts have room for. */
#define VNUMA_SCHED_MAX_CPUS	8192
#define VNUMA_SCHED_MAX_NODES	64
#define VNUMA_SCHED_MAX_THREADS	65536

/* Words of a mask of CPUs. */
#define VNUMA_SCHED_MASK_WORDS	128

/* vnuma_sched_assignment.flags: the thread has a place, the CPUs of the mask. */
#define VNUMA_SCHED_PLACED	1

/* vnuma_sched_assignment.pressure: not counted. */
#define VNUMA_SCHED_NO_PRESSURE	0

/*
 * vnuma_sched_header.steal: which thread that waits is taken by a CPU without one. In all
 * cases one that has waited for starve_ns comes first.
 *
 *	PRESSURE	of the CPU's own node first, then of the nearest; there of the
 *			longest queue; there the one with the least pressure
 *	BLIND		the first one of the next CPU by number that has any, whatever
 *			its node
 *	PLACE		the same, but a thread with a place only by CPUs of that
 */
#define VNUMA_SCHED_STEAL_PRESSURE	0
#define VNUMA_SCHED_STEAL_BLIND		1
#define VNUMA_SCHED_STEAL_PLACE		2

struct vnuma_sched_header {
	__u32 magic;
	__u32 version;
	__u32 header_size;	/* of this struct */
	__u32 assignment_size;	/* of struct vnuma_sched_assignment */
	__u32 full;		/* 1: all threads are scheduled, not only SCHED_EXT */
	__u32 steal;		/* VNUMA_SCHED_STEAL_*; others count as PRESSURE */
	__u64 instance;		/* differs with each start of the scheduler */
	__u64 heartbeat_ns;	/* CLOCK_MONOTONIC of the last sign of life; 0: none */
	__u64 keep_ns;		/* places hold so long after the heartbeat */
	__u64 starve_ns;	/* a thread that waits longer is stolen whatever its pressure */
	__u64 slice_ns;		/* time that a thread runs before others have their turn */
};

/* What is decided of a thread. */
struct vnuma_sched_assignment {
	__u64 epoch;		/* another one: the thread is taken to its place, once */
	__u32 pid;		/* process of the thread, whose number may be reused */
	__u32 flags;		/* VNUMA_SCHED_PLACED */
	__u32 pressure;		/* LLC references in a million instructions */
	__u32 reserved;		/* 0 */
	__u64 cpus[VNUMA_SCHED_MASK_WORDS];
};

/* The host, by position of its nodes. Not pinned: only the scheduler uses it. */
struct vnuma_sched_topology {
	__u32 nr_nodes;
	__u32 reserved;					/* 0 */
	__u16 node_of[VNUMA_SCHED_MAX_CPUS];		/* node of each CPU; nr_nodes: none */
	/* CPUs that have no tick while they run one thread (nohz_full). */
	__u64 tickless[VNUMA_SCHED_MAX_CPUS / 64];
	/* Of each node all nodes, the nearest first. */
	__u8 nearest[VNUMA_SCHED_MAX_NODES * VNUMA_SCHED_MAX_NODES];
};

/* Why the scheduler has ended, as the kernel says. Not pinned. */
struct vnuma_sched_exit {
	__u32 kind;		/* enum scx_exit_kind; 0: it has not */
	__u32 reserved;		/* 0 */
	__u64 code;
	char reason[64];
	char message[256];
};

/* Indexes of counts. */
#define VNUMA_SCHED_COUNT_PLACED	0	/* threads taken to their place */
#define VNUMA_SCHED_COUNT_LOCAL		1	/* stolen within a node */
#define VNUMA_SCHED_COUNT_REMOTE	2	/* stolen from another node */
#define VNUMA_SCHED_COUNT_STARVED	3	/* of both, because they had waited too long */
#define VNUMA_SCHED_COUNT_KEPT		4	/* ran on, being behind others */
#define VNUMA_SCHED_COUNT_THROTTLED	5	/* waits for a cpu.max */
#define VNUMA_SCHED_COUNT_PREEMPTED	6	/* took a CPU as it woke */
#define VNUMA_SCHED_COUNTS		7

#endif
