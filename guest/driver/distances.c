// SPDX-License-Identifier: GPL-2.0
/*
 * Distances between nodes.
 *
 * node_distance() reads one table, which sysfs and NUMA balancing show and use as it
 * is. Two things are derived from it: the levels of the scheduler's NUMA domains
 * (levels.c) and the order in which an allocation falls back
 * to other nodes (build_all_zonelists(), mm/page_alloc.c, as after memory hotplug).
 *
 * The kernel's own needs are narrower than the channel's: its levels want symmetry,
 * and the domain of a node holds that node alone only if no other is as near as the
 * node itself. A table that misses them is not applied at all.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/nodemask.h>
#include <linux/topology.h>

#include "vnuma.h"

/* The table was changed since the module was loaded. */
static bool applied;

/* Nodes that both the host and this guest have. */
static nodemask_t common_nodes(const struct vnuma_model *topology)
{
	nodemask_t nodes = NODE_MASK_NONE;
	int node;

	for_each_online_node(node)
		if (node < topology->nr_nodes)
			node_set(node, nodes);
	return nodes;
}

/**
 * vnuma_distances_differ - does the host publish other distances than the kernel has?
 * @topology: checked publication
 */
bool vnuma_distances_differ(const struct vnuma_model *topology)
{
	nodemask_t nodes = common_nodes(topology);
	int from, to;

	for_each_node_mask(from, nodes)
		for_each_node_mask(to, nodes)
			if (topology->distance[from][to] !=
			    node_distance(from, to))
				return true;
	return false;
}

/* Why the kernel cannot have the distances of these nodes, or NULL. */
static const char *obstacle(const struct vnuma_model *topology,
			    const nodemask_t *nodes)
{
	int from, to;

	if (!vnuma_symbols.numa_distance || !vnuma_symbols.numa_distance_cnt ||
	    !vnuma_symbols.build_all_zonelists)
		return "a kernel symbol is missing";
	if (vnuma_levels_have_own_distances())
		return "its scheduler has distances of its own";
	for_each_node_mask(from, *nodes) {
		/* No table at all if the firmware has no SLIT. */
		if (from >= *vnuma_symbols.numa_distance_cnt)
			return "its table is too small";
		for_each_node_mask(to, *nodes) {
			u8 distance = topology->distance[from][to];

			if (from != to && distance <= VNUMA_TC_DISTANCE_LOCAL)
				return "two nodes are at the local distance";
			if (distance != topology->distance[to][from])
				return "they are not symmetric";
		}
	}
	return NULL;
}

/**
 * vnuma_distances_can_write - does the host publish other distances, and can the kernel have them?
 * @topology: checked publication
 * @nodes: filled with those that both have, for vnuma_distances_write()
 */
bool vnuma_distances_can_write(const struct vnuma_model *topology,
			       nodemask_t *nodes)
{
	const char *why;

	if (!vnuma_distances_differ(topology))
		return false;
	*nodes = common_nodes(topology);
	why = obstacle(topology, nodes);
	if (why)
		pr_info_once("this kernel keeps its own distances: %s\n", why);
	return !why;
}

/**
 * vnuma_distances_write - change the kernel's table
 * @topology: for which vnuma_distances_can_write()
 * @nodes: of that. Another one may have come online since
 *
 * Call with sched_domains_mutex held. What is derived from it must be built again.
 */
void vnuma_distances_write(const struct vnuma_model *topology,
			   const nodemask_t *nodes)
{
	u8 *table = *vnuma_symbols.numa_distance;
	int count = *vnuma_symbols.numa_distance_cnt;
	int from, to;

	for_each_node_mask(from, *nodes)
		for_each_node_mask(to, *nodes)
			WRITE_ONCE(table[from * count + to],
				   topology->distance[from][to]);
	applied = true;
}

/** vnuma_distances_rebuild_zonelists - after vnuma_distances_write() */
void vnuma_distances_rebuild_zonelists(void)
{
	/* All nodes; serialized by zonelist_update_seq. */
	vnuma_symbols.build_all_zonelists(NULL);
}

/**
 * vnuma_distances_state - VNUMA_GD_DISTANCES_* of the current publication
 * @topology: current publication
 */
u32 vnuma_distances_state(const struct vnuma_model *topology)
{
	if (vnuma_distances_differ(topology))
		return VNUMA_GD_DISTANCES_UNSUPPORTED;
	return applied ? VNUMA_GD_DISTANCES_APPLIED : VNUMA_GD_DISTANCES_SAME;
}
