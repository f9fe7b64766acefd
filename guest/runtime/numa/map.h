/* SPDX-License-Identifier: Apache-2.0 */
/* Which CPU of the map a thread is told that it is on. See hotspot.h. */
#ifndef VNUMA_MAP_H
#define VNUMA_MAP_H

/*
 * A CPU of the node among the neighbours of the real one, so that threads on several CPUs are told several. If
 * they share one, all threads of a node are told the same.
 */
static inline int vnuma_map_cpu(int cpu, int node, int nr_nodes, int nr_cpus, int shared)
{
	int found = shared ? node : cpu / nr_nodes * nr_nodes + node;

	return found < nr_cpus ? found : node;
}

#endif /* VNUMA_MAP_H */
