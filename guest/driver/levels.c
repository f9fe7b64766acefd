// SPDX-License-Identifier: GPL-2.0
/*
 * The scheduler's NUMA levels, published whole.
 *
 * The scheduler has a level for each distance between nodes, and for each level and
 * node the CPUs that are so near (sched_domains_numa_masks, kernel/sched/topology.c).
 * Whoever spreads interrupts or queues over CPUs reads these masks without a lock, and
 * more than once (sched_numa_find_nth_cpu(), sched_numa_hop_mask()). These readers take
 * for granted that the last level has all CPUs.
 *
 * The kernel changes the masks in place when a CPU comes or goes, and has none for a
 * grace period when a node gets its first CPU or loses its last. A reader then finds
 * fewer CPUs than there are, or none. Moves are more frequent than CPU hotplug. So the
 * masks are made anew for a move, beside those in use, and replace them by one pointer.
 *
 * There are masks for all online nodes. The kernel makes none for nodes without CPUs,
 * and would have to make all of them anew when a CPU comes to one. Domains are built for the
 * levels of nodes with CPUs alone, as the kernel does: one that is built and then found to be
 * superfluous leaves its marks on those below (sd_parent_degenerate(), imb_numa_nr).
 */
#include <linux/bitmap.h>
#include <linux/cpumask.h>
#include <linux/nodemask.h>
#include <linux/rcupdate.h>
#include <linux/sched/topology.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/topology.h>

#include "vnuma.h"

#define NR_DISTANCES	256

#if defined(CONFIG_SCHED_DEBUG) || KERNEL_VERSION(6, 15, 0) <= LINUX_VERSION_CODE
#define VNUMA_LEVELS_HAVE_NAMES
#endif

/* As kernel/sched/sched.h has them. */
enum numa_topology_type {
	NUMA_DIRECT,
	NUMA_GLUELESS_MESH,
	NUMA_BACKPLANE,
};

/**
 * struct vnuma_levels - a set of levels, before it is in use or after that
 * @rcu: frees what was in use
 * @nodes: for which there are masks. Another one may come online at any time
 * @nr: how many
 * @length: of @masks and @distances, at least @nr; what is beyond is as the last one
 * @masks: by level and node; NULL for a node that is not online
 * @distances: of the levels
 * @nr_node: how many @node_distances
 * @node_distances: those between nodes, where the scheduler can have others; else NULL
 * @wide_masks: those that are in use now, as long as these are
 * @wide_distances: likewise
 * @topology: the scheduler's list of levels, with room for all
 * @nr_below: how many of that list are below a node
 * @numa: one of that list
 */
struct vnuma_levels {
	struct rcu_head rcu;
	nodemask_t nodes;
	int nr;
	int length;
	struct cpumask ***masks;
	int *distances;
	int nr_node;
	int *node_distances;
	struct cpumask ***wide_masks;
	int *wide_distances;
	struct sched_domain_topology_level *topology;
	int nr_below;
	struct sched_domain_topology_level numa;
};

/* Never freed, as the kernel's domains refer to it after the module is unloaded. */
static char *level_name;

/*
 * The grace period after which no reader has a number of levels, or of distances, that was
 * larger once. sched_numa_hop_mask() loads that number before the masks.
 */
static unsigned long since_fewer;
static bool were_fewer;

/* The kernel's pointer to what readers find by RCU. Call with sched_domains_mutex held. */
#define in_use(pointer)								\
	rcu_dereference_protected(*vnuma_symbols.pointer,			\
				  lockdep_is_held(vnuma_symbols.sched_domains_mutex))

/**
 * vnuma_levels_complete - have all online nodes masks, with all CPUs in the last one?
 *
 * The kernel may have rebuilt them since the last publication: when a CPU comes or goes, or
 * when it gives up taking one offline, for which there is no notification. It does not add a
 * CPU that comes online to the masks of nodes without CPUs. Call with cpus_read_lock() and
 * sched_domains_mutex held.
 */
bool vnuma_levels_complete(void)
{
	struct cpumask ***masks = in_use(sched_domains_numa_masks);
	int nr = *vnuma_symbols.sched_domains_numa_levels, node;

	if (!masks || !nr)
		return false;
	for_each_online_node(node)
		if (!masks[nr - 1][node] ||
		    !cpumask_subset(cpu_online_mask, masks[nr - 1][node]))
			return false;
	return true;
}

/* As the scheduler sees it: the architecture may group nodes. */
static int scheduler_distance(int from, int to)
{
	if (vnuma_symbols.arch_sched_node_distance)
		return vnuma_symbols.arch_sched_node_distance(from, to);
	return node_distance(from, to);
}

/** vnuma_levels_have_own_distances - are the scheduler's distances others than the table's? */
bool vnuma_levels_have_own_distances(void)
{
	int from, to;

	for_each_online_node(from)
		for_each_online_node(to)
			if (scheduler_distance(from, to) != node_distance(from, to))
				return true;
	return false;
}

/*
 * Distances of levels, ascending. @topology: with the distances that are about to be
 * written, NULL: they stay. The array is as long as @least, or longer.
 */
static int *unique_distances(const struct vnuma_model *topology,
			     const nodemask_t *nodes,
			     int (*distance_of)(int from, int to), int least,
			     int *nr)
{
	int from, to, i = 0, distance, nr_named = 0, *distances;
	DECLARE_BITMAP(seen, NR_DISTANCES) = { };

	if (topology)
		nr_named = topology->nr_nodes;
	for_each_node_mask(from, *nodes) {
		for_each_node_mask(to, *nodes) {
			if (from < nr_named && to < nr_named)
				distance = topology->distance[from][to];
			else
				distance = distance_of(from, to);
			if (distance >= LOCAL_DISTANCE && distance < NR_DISTANCES)
				__set_bit(distance, seen);
		}
	}
	*nr = bitmap_weight(seen, NR_DISTANCES);
	least = max(least, *nr);
	distances = kcalloc(least, sizeof(*distances), GFP_KERNEL);
	if (!distances)
		return NULL;
	for_each_set_bit(distance, seen, NR_DISTANCES)
		distances[i++] = distance;
	for (; i < least; i++)
		distances[i] = distances[i - 1];
	return distances;
}

static void free_masks(struct cpumask ***masks, int nr)
{
	int level, node;

	for (level = 0; masks && level < nr; level++) {
		for (node = 0; masks[level] && node < nr_node_ids; node++)
			kfree(masks[level][node]);
		kfree(masks[level]);
	}
	kfree(masks);
}

static struct cpumask ***new_masks(const nodemask_t *nodes, int nr, int length)
{
	struct cpumask ***masks;
	int level, node;

	masks = kcalloc(length, sizeof(*masks), GFP_KERNEL);
	if (!masks)
		return NULL;
	for (level = 0; level < nr; level++) {
		masks[level] = kcalloc(nr_node_ids, sizeof(**masks), GFP_KERNEL);
		if (!masks[level])
			goto failed;
		for_each_node_mask(node, *nodes) {
			masks[level][node] = kzalloc(cpumask_size(), GFP_KERNEL);
			if (!masks[level][node])
				goto failed;
		}
	}
	for (; level < length; level++)
		masks[level] = masks[nr - 1];
	return masks;
failed:
	free_masks(masks, nr);
	return NULL;
}

static void free_levels(struct vnuma_levels *levels)
{
	free_masks(levels->masks, levels->nr);
	kfree(levels->distances);
	kfree(levels->node_distances);
	kfree(levels->wide_masks);
	kfree(levels->wide_distances);
	kfree(levels->topology);
	kfree(levels);
}

static void free_by_rcu(struct rcu_head *rcu)
{
	free_levels(container_of(rcu, struct vnuma_levels, rcu));
}

/*
 * What sched_init_numa() appends to the list of those below a node. Which ones is known when
 * the CPUs have moved, see fill_topology().
 */
static bool make_topology(struct vnuma_levels *levels)
{
	const struct sched_domain_topology_level *below =
		*vnuma_symbols.sched_domain_topology_saved;
	const struct sched_domain_topology_level *now =
		*vnuma_symbols.sched_domain_topology;
	struct sched_domain_topology_level *numa = &levels->numa;
	int own = 0;

	while (below[own].mask)
		own++;
	levels->nr_below = own;
	/* The first is the node alone. Without another one there is no NUMA level now. */
	*numa = now[own];
	if (now[own + 1].mask) {
		*numa = now[own + 1];
	} else {
		if (!level_name)
			level_name = kstrdup("NUMA", GFP_KERNEL);
		if (!level_name)
			return false;
		numa->sd_flags = vnuma_symbols.cpu_numa_flags;
#ifdef SDTL_OVERLAP
		numa->flags = SDTL_OVERLAP;
#endif
#ifdef VNUMA_LEVELS_HAVE_NAMES
		numa->name = level_name;
#endif
	}
	levels->topology = kcalloc(own + levels->nr + 1, sizeof(*now), GFP_KERNEL);
	if (!levels->topology)
		return false;
	memcpy(levels->topology, now, (own + 1) * sizeof(*now));
	return true;
}

/* So that there is always one that is long enough for whatever number of levels a reader finds. */
static bool make_wide(struct vnuma_levels *levels, int now)
{
	struct cpumask ***masks = in_use(sched_domains_numa_masks);
	int *distances = in_use(sched_domains_numa_distance);
	int level;

	if (!masks || !now || levels->nr <= now)
		return true;
	levels->wide_masks = kcalloc(levels->nr, sizeof(*masks), GFP_KERNEL);
	levels->wide_distances = kcalloc(levels->nr, sizeof(*distances), GFP_KERNEL);
	if (!levels->wide_masks || !levels->wide_distances)
		return false;
	for (level = 0; level < levels->nr; level++) {
		levels->wide_masks[level] = masks[min(level, now - 1)];
		levels->wide_distances[level] = distances[min(level, now - 1)];
	}
	return true;
}

/**
 * vnuma_levels_prepare - allocate all that a publication may need
 * @topology: with the distances that will be written; NULL if they stay
 *
 * Call with sched_domains_mutex held. Return: NULL if there is no memory now, or was none
 * when the kernel made its own levels.
 */
struct vnuma_levels *vnuma_levels_prepare(const struct vnuma_model *topology)
{
	struct vnuma_levels *levels = kzalloc(sizeof(*levels), GFP_KERNEL);
	int now = *vnuma_symbols.sched_domains_numa_levels;

	if (!levels)
		return NULL;
	if (!*vnuma_symbols.sched_domain_topology_saved)
		goto failed;
	levels->nodes = node_states[N_ONLINE];
	levels->distances = unique_distances(topology, &levels->nodes,
					     scheduler_distance, now,
					     &levels->nr);
	levels->length = max(levels->nr, now);
	if (!levels->distances)
		goto failed;
	if (vnuma_symbols.sched_numa_node_distance) {
		int nodes_now = *vnuma_symbols.sched_numa_node_levels;

		levels->node_distances = unique_distances(topology, &levels->nodes,
							  __node_distance,
							  nodes_now,
							  &levels->nr_node);
		if (!levels->node_distances)
			goto failed;
	}
	levels->masks = new_masks(&levels->nodes, levels->nr, levels->length);
	if (!levels->masks || !make_wide(levels, now) || !make_topology(levels))
		goto failed;
	return levels;
failed:
	free_levels(levels);
	return NULL;
}

/** vnuma_levels_drop - of vnuma_levels_prepare(), and not wanted; may be NULL */
void vnuma_levels_drop(struct vnuma_levels *levels)
{
	if (levels)
		free_levels(levels);
}

static void fill(struct vnuma_levels *levels)
{
	int level, node, other;

	for (level = 0; level < levels->nr; level++)
		for_each_node_mask(node, levels->nodes)
			for_each_node_mask(other, levels->nodes)
				if (scheduler_distance(node, other) <=
				    levels->distances[level])
					cpumask_or(levels->masks[level][node],
						   levels->masks[level][node],
						   cpumask_of_node(other));
}

/* Nodes with CPUs, as the maps are now: N_CPU follows. */
static nodemask_t nodes_with_cpus(const struct vnuma_levels *levels)
{
	nodemask_t nodes = NODE_MASK_NONE;
	int node;

	for_each_node_mask(node, levels->nodes)
		if (!cpumask_empty(cpumask_of_node(node)))
			node_set(node, nodes);
	return nodes;
}

static bool are_apart(const nodemask_t *nodes, int distance)
{
	int from, to;

	for_each_node_mask(from, *nodes)
		for_each_node_mask(to, *nodes)
			if (scheduler_distance(from, to) == distance)
				return true;
	return false;
}

static void fill_topology(struct vnuma_levels *levels)
{
	struct sched_domain_topology_level *next = levels->topology + levels->nr_below + 1;
	nodemask_t nodes = nodes_with_cpus(levels);
	int level;

	for (level = 1; level < levels->nr; level++) {
		if (!are_apart(&nodes, levels->distances[level]))
			continue;
		*next = levels->numa;
		next->numa_level = level;
		next++;
	}
}

/* init_numa_topology_type(): is there a node between the first two that are farthest apart? */
static enum numa_topology_type type_of(const nodemask_t *nodes, int most)
{
	int a, b, c;

	for_each_node_mask(a, *nodes) {
		for_each_node_mask(b, *nodes) {
			if (node_distance(a, b) < most)
				continue;
			for_each_node_mask(c, *nodes)
				if (node_distance(a, c) < most &&
				    node_distance(b, c) < most)
					return NUMA_GLUELESS_MESH;
			return NUMA_BACKPLANE;
		}
	}
	return NUMA_DIRECT;
}

/* As sched_init_numa() finds it, for nodes with CPUs. */
static void set_type(const struct vnuma_levels *levels)
{
	nodemask_t nodes = nodes_with_cpus(levels);
	int a, b, most = LOCAL_DISTANCE;
	bool direct = true;

	for_each_node_mask(a, nodes)
		for_each_node_mask(b, nodes)
			most = max(most, node_distance(a, b));
	for_each_node_mask(a, nodes)
		for_each_node_mask(b, nodes)
			direct &= a == b || node_distance(a, b) == most;
	WRITE_ONCE(*vnuma_symbols.sched_max_numa_distance, most);
	*vnuma_symbols.sched_numa_topology_type =
		direct ? NUMA_DIRECT : type_of(&nodes, most);
}

/*
 * Some readers load the masks and then how many levels there are, and others the number
 * first. So there are at least as many masks as any of these numbers says. Where the levels
 * become more, the masks that are in use are lengthened before. Where they become fewer, the
 * new masks are as many as the old ones, and the masks after those wait for the readers that
 * have the old number.
 */
static void widen(struct vnuma_levels *levels)
{
	if (levels->wide_masks) {
		rcu_assign_pointer(*vnuma_symbols.sched_domains_numa_distance,
				   levels->wide_distances);
		rcu_assign_pointer(*vnuma_symbols.sched_domains_numa_masks,
				   levels->wide_masks);
		synchronize_rcu();
		/* Who finds so many levels finds the masks for them. */
		smp_store_release(vnuma_symbols.sched_domains_numa_levels,
				  levels->nr);
	}
}

/* The arrays that are in use now are long enough for both numbers. */
static void set_number(int *number, int now)
{
	if (now == *number)
		return;
	synchronize_rcu();
	were_fewer |= now < *number;
	WRITE_ONCE(*number, now);
	since_fewer = get_state_synchronize_rcu();
}

/**
 * vnuma_levels_publish - replace the levels by those of the maps as they are now
 * @levels: of vnuma_levels_prepare()
 *
 * Call with sched_domains_mutex held. The domains must be built anew after that. Waits for
 * grace periods only if the number of levels changes, or did so the last time.
 */
void vnuma_levels_publish(struct vnuma_levels *levels)
{
	struct vnuma_symbols *kernel = &vnuma_symbols;
	struct vnuma_levels old = {
		.nr = *kernel->sched_domains_numa_levels,
		.masks = in_use(sched_domains_numa_masks),
		.distances = in_use(sched_domains_numa_distance),
	};

	fill(levels);
	fill_topology(levels);
	if (were_fewer)
		cond_synchronize_rcu(since_fewer);
	were_fewer = false;
	widen(levels);
	if (kernel->sched_numa_node_distance) {
		old.node_distances = in_use(sched_numa_node_distance);
		rcu_assign_pointer(*kernel->sched_numa_node_distance,
				   levels->node_distances);
	}
	rcu_assign_pointer(*kernel->sched_domains_numa_distance, levels->distances);
	rcu_assign_pointer(*kernel->sched_domains_numa_masks, levels->masks);
	set_type(levels);
	if (kernel->sched_numa_node_distance)
		set_number(kernel->sched_numa_node_levels, levels->nr_node);
	set_number(kernel->sched_domains_numa_levels, levels->nr);
	swap(*kernel->sched_domain_topology, levels->topology);
	/* One array for both, where the kernel made it. */
	if (old.node_distances == old.distances)
		old.node_distances = NULL;
	levels->nr = old.nr;
	levels->masks = old.masks;
	levels->distances = old.distances;
	levels->node_distances = old.node_distances;
	call_rcu(&levels->rcu, free_by_rcu);
}

/** vnuma_levels_finish - for unloading, when no publication can come any more */
void vnuma_levels_finish(void)
{
	rcu_barrier();
}
