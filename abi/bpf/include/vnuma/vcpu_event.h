/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Record that the BPF program of the monitor puts into its ring buffer. Both ends
 * are built together, so it carries no version; tests/layout.rs compares it with
 * the Rust mirror. BPF programs get the fixed-width types from their own headers.
 */
#ifndef VNUMA_VCPU_EVENT_H
#define VNUMA_VCPU_EVENT_H

#define VNUMA_VCPU_MIGRATED	1	/* the thread is put on another CPU */
#define VNUMA_VCPU_AFFINITY	2	/* its allowed CPUs changed */
#define VNUMA_VCPU_EXITED	3	/* it has ended and is not watched any more */

struct vnuma_vcpu_event {
	__u64 time_ns;		/* CLOCK_MONOTONIC */
	__u32 tid;		/* in the initial PID namespace */
	__u32 kind;		/* VNUMA_VCPU_* */
	__u32 cpu;		/* that it goes to, or is on */
	__u32 reserved;		/* 0 */
};

/*
 * The array `watched` has bits for each thread id that there can be (PID_MAX_LIMIT of
 * include/linux/threads.h), packed into 64-bit words: 0, or what a move of the thread to
 * another node does.
 */
#define VNUMA_VCPU_PIDS		0x400000
#define VNUMA_VCPU_BITS		2
#define VNUMA_VCPU_WAKES	1	/* its record wakes who takes records */
#define VNUMA_VCPU_WAITS	2	/* its record waits until something else does */
#define VNUMA_VCPU_PASSED	3	/* nothing: only its end makes a record */

/*
 * Entries of the array `masks`, in which the thread id modulo this has what the allowed CPUs
 * were in the last record of them, in short, or 0.
 */
#define VNUMA_VCPU_MASKS	0x10000

/* Indices of the array `counts`, which has a counter for each CPU. */
#define VNUMA_VCPU_COUNT_REPORTED	0	/* records put into the ring buffer */
#define VNUMA_VCPU_COUNT_DROPPED	1	/* records that found it full */
#define VNUMA_VCPU_COUNTS		2

#endif /* VNUMA_VCPU_EVENT_H */
