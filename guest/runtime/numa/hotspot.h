/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HotSpot's ParallelGC (-XX:+UseNUMA) reads once which CPUs a node has, and asks
 * sched_getcpu() whenever a thread needs a new piece of eden. Both get a map of CPUs that never
 * changes, in which every node has CPUs, so that sched_getcpu() can name a node:
 *
 *	CPU of the map	0 1 2 3 4 5 6 7		with 3 nodes; CPU N is on the node N % 3
 *	node		a b c a b c a b
 *
 * A thread on CPU 4, which is on node c now, is told CPU 5: the CPU of that node among its
 * neighbours. Nodes are counted when the program starts.
 *
 * ZGC asks only once, and again when it has seen another thread on the CPU that it was told. For it threads of a
 * node share a CPU of the map (SHARED), so that it asks whenever another thread of the node has allocated.
 */
#ifndef VNUMA_HOTSPOT_H
#define VNUMA_HOTSPOT_H

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "map.h"

/* vnuma-run sets it. 0: threads are told CPUs as ParallelGC's are. */
#define SHARED	"VNUMA_SHARED_CPUS"

static struct {
	int nr_nodes;			/* 0: there is no map */
	int nr_cpus;
	int shared;
	int nodes[VNUMA_MAX_NODES];	/* by their index */
	int index[VNUMA_MAX_NODES];	/* by their number, -1: none */
} map;

/* Nodes that have CPUs or memory. One is none to choose among, and each needs a CPU. */
static void make_map(const struct vnuma *v)
{
	const char *shared = getenv(SHARED);
	long nr_cpus = sysconf(_SC_NPROCESSORS_CONF);
	struct vnuma_nodes nodes;
	int node, count = 0;

	if (!v || vnuma_read_nodes(v, &nodes))
		return;
	for (node = 0; node < VNUMA_MAX_NODES; node++) {
		int there = vnuma_node_isset(&nodes.cpus, node) ||
			    vnuma_node_isset(&nodes.memory, node);

		map.index[node] = there ? count : -1;
		if (there)
			map.nodes[count++] = node;
	}
	map.nr_cpus = (int)nr_cpus;
	map.shared = shared && strcmp(shared, "0");
	map.nr_nodes = count >= 2 && nr_cpus >= count ? count : 0;
}

/* The node's CPUs in the map. 0: there is none, or no such node. */
static int mapped_cpus(int node, unsigned long *mask, size_t bits)
{
	const size_t long_bits = 8 * sizeof(*mask);
	size_t cpu;

	if (!map.nr_nodes || node < 0 || node >= VNUMA_MAX_NODES || map.index[node] < 0)
		return 0;
	memset(mask, 0, (bits + long_bits - 1) / long_bits * sizeof(*mask));
	for (cpu = (size_t)map.index[node]; cpu < (size_t)map.nr_cpus && cpu < bits;
	     cpu += (size_t)map.nr_nodes)
		mask[cpu / long_bits] |= 1UL << (cpu % long_bits);
	return 1;
}

/*
 * Where the program may run: on all nodes. CPUs that it is bound to may go to any of them, and a node may be
 * without CPUs just now. HotSpot 25 uses no nodes unless it may run on all those that it may have memory of.
 */
static void add_mapped_nodes(unsigned long *mask, size_t bits)
{
	const size_t long_bits = 8 * sizeof(*mask);
	int i;

	for (i = 0; i < map.nr_nodes; i++)
		if ((size_t)map.nodes[i] < bits)
			mask[(size_t)map.nodes[i] / long_bits] |= 1UL << ((size_t)map.nodes[i] % long_bits);
}

/* The CPU of the map that is on the node where the thread runs now. */
static int mapped_cpu(void)
{
	unsigned int cpu, node;

	if (getcpu(&cpu, &node))
		return -1;
	if (!map.nr_nodes || node >= VNUMA_MAX_NODES || map.index[node] < 0)
		return (int)cpu;
	return vnuma_map_cpu((int)cpu, map.index[node], map.nr_nodes, map.nr_cpus, map.shared);
}

#endif /* VNUMA_HOTSPOT_H */
