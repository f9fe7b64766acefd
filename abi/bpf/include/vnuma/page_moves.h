/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the BPF program that times the kernel's moves of pages shares with user space.
 * Both ends are built together, so it carries no version; tests/layout.rs compares it
 * with the Rust mirror.
 */
#ifndef VNUMA_PAGE_MOVES_H
#define VNUMA_PAGE_MOVES_H

/* Indices of the array `moves`, of 64-bit numbers. */
#define VNUMA_PAGE_MOVES_THREAD		0	/* its number in the initial PID namespace */
#define VNUMA_PAGE_MOVES_LONGEST_NS	1	/* since user space set it to 0 */
#define VNUMA_PAGE_MOVES_BEGUN_NS	2	/* CLOCK_MONOTONIC; 0: none is under way */
#define VNUMA_PAGE_MOVES_DEPTH		3	/* moves that are under way, one in the other */
#define VNUMA_PAGE_MOVES_NUMBERS	4

#endif /* VNUMA_PAGE_MOVES_H */
