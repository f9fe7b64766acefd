/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the memory of jemalloc's arenas comes from.
 *
 * An arena gets its memory from regions of its own, one piece behind the other:
 *
 *	│ piece │   piece   │ piece │    nobody's yet    │	REGION, aligned to its size
 *
 * So huge pages reach across its pieces, and none has pieces of two arenas, which may go to different nodes.
 */
#ifndef VNUMA_ALLOC_REGIONS_H
#define VNUMA_ALLOC_REGIONS_H

#include <linux/mempolicy.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "kernel.h"

#define LONG_BITS	(8 * sizeof(unsigned long))
#define PAGE		4096UL
/* Memory of an arena is mapped by so much: some huge pages. What is not used takes addresses only. */
#define REGION		(16UL << 20)
/* jemalloc has no more. */
#define ARENAS		4096

static _Atomic uintptr_t next_of[ARENAS];	/* what is free of an arena's newest region; 0, or its end: nothing */

/* Memory that nobody has touched yet comes from a node, whoever touches it. */
static void place(const struct vnuma *topology, void *memory, size_t size, int node)
{
	unsigned long mask[VNUMA_MAX_NODES / LONG_BITS] = { 0 };
	struct vnuma_nodes nodes;
	int saved = errno;

	/*
	 * From all nodes, this one first: if it is full, or has no memory at all, no allocation fails. With this
	 * policy AutoNUMA goes on to move pages to the threads that use them, with MPOL_PREFERRED it does not.
	 * If nobody says which nodes there are, memory comes from where it is touched first, as without this.
	 */
	if (!vnuma_read_nodes(topology, &nodes) &&
	    (syscall(SYS_mbind, memory, size, MPOL_BIND | MPOL_F_NUMA_BALANCING, nodes.memory.bits,
		     VNUMA_MAX_NODES + 1UL, 0) ||
	     syscall(SYS_set_mempolicy_home_node, memory, size, (unsigned long)node, 0UL))) {
		/* Before Linux 5.17. If this is refused as well, it is as if nobody had said. */
		mask[node / LONG_BITS] = 1UL << (node % LONG_BITS);
		syscall(SYS_mbind, memory, size, MPOL_PREFERRED, mask, VNUMA_MAX_NODES + 1UL, 0);
	}
	errno = saved;
}

/* Memory of a node, or of none (VNUMA_NO_NODE); 0: there is none to be had. The alignment is a power of two, and more than a page. */
static uintptr_t map_aligned(const struct vnuma *topology, size_t size, size_t alignment, int node)
{
	uintptr_t mapped, start;
	void *memory = mmap(NULL, size + alignment, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		return 0;
	mapped = (uintptr_t)memory;
	start = (mapped + alignment - 1) & -alignment;
	if (start > mapped)
		munmap(memory, start - mapped);
	if (start < mapped + alignment)
		munmap((void *)(start + size), mapped + alignment - start);
	/* Else it is of the thread that touches it first, which is on the arena's node, wherever that will be. */
	if (node != VNUMA_NO_NODE && !balances())
		place(topology, (void *)start, size, node);
	return start;
}

/* The next piece of the arena's region, or of a new one. Any thread may be here at any time. */
static void *take(const struct vnuma *topology, unsigned int arena, int node, size_t size)
{
	uintptr_t next = atomic_load_explicit(&next_of[arena], memory_order_acquire), region;

	while (1) {
		if (size <= -next % REGION) {
			if (atomic_compare_exchange_weak(&next_of[arena], &next, next + size))
				return (void *)next;
			continue;
		}
		region = map_aligned(topology, REGION, REGION, node);
		if (!region)
			return NULL;
		if (atomic_compare_exchange_strong(&next_of[arena], &next, region + size))
			return (void *)region;
		/* Another thread was faster. */
		munmap((void *)region, REGION);
	}
}

#endif /* VNUMA_ALLOC_REGIONS_H */
