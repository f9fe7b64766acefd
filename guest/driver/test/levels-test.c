// SPDX-License-Identifier: GPL-2.0
/*
 * The scheduler's NUMA levels, levels.c as it is, in user space: whatever moves and whatever the
 * distances are, a reader without a lock finds all CPUs at any moment. The kernel is its variables.
 * What is freed too early or read beyond its end is found by the address sanitizer.
 */
#include <limits.h>
#include <linux/kernel.h>

#define expect(condition)							\
	do {									\
		if (!(condition)) {						\
			fprintf(stderr, "%s:%d: not so: %s (seed %u)\n",	\
				__FILE__, __LINE__, #condition, seed);		\
			exit(1);						\
		}								\
	} while (0)

#define NR_CPUS		16
#define NR_NODES	5
#define ROUNDS		4000
#define GFP_KERNEL	0
#define LOCAL_DISTANCE	10
#define N_ONLINE	0

static unsigned int seed;

struct cpumask {
	unsigned long bits;
};

static nodemask_t node_states[1];
static struct cpumask all_cpus = { (1UL << NR_CPUS) - 1 };
static const struct cpumask *cpu_online_mask = &all_cpus;

static struct cpumask node_cpus[NR_NODES];
static u8 distance_table[NR_NODES][NR_NODES];
static const int nr_node_ids = NR_NODES;
/* The one that fails from now on, 0: none. */
static unsigned int failing_allocation;

static void *allocate(size_t count, size_t size)
{
	if (failing_allocation && !--failing_allocation)
		return NULL;
	return calloc(count, size);
}

#define kzalloc(size, flags)		allocate(1, size)
#define kcalloc(count, size, flags)	allocate(count, size)
#define kfree(memory)			free((void *)(memory))
#define kstrdup(text, flags)		strdup(text)
#define cpumask_size()			sizeof(struct cpumask)
#define cpumask_of_node(node)		(&node_cpus[node])
#define for_each_online_node(node)	for_each_node_mask(node, node_states[N_ONLINE])
#define for_each_node_mask(node, mask)						\
	for ((node) = 0; (node) < NR_NODES; (node)++)				\
		if ((mask).bits >> (node) & 1)
#define node_set(node, mask)		((mask).bits |= 1UL << (node))
#define NODE_MASK_NONE			((nodemask_t){ 0 })
#define cpumask_empty(mask)		(!(mask)->bits)
#define cpumask_subset(a, b)		(!((a)->bits & ~(b)->bits))
#define node_distance(a, b)		((int)distance_table[a][b])
#define swap(a, b)							\
	do { __typeof__(a) kept = (a); (a) = (b); (b) = kept; } while (0)
#define container_of(pointer, type, member)				\
	((type *)((char *)(pointer) - offsetof(type, member)))
#define DECLARE_BITMAP(name, bits)	unsigned char name[bits]
#define __set_bit(bit, map)		((map)[bit] = 1)
#define for_each_set_bit(bit, map, size)				\
	for ((bit) = 0; (bit) < (size); (bit)++)			\
		if ((map)[bit])

static int bitmap_weight(const unsigned char *map, int size)
{
	int i, weight = 0;

	for (i = 0; i < size; i++)
		weight += map[i];
	return weight;
}

static int __node_distance(int from, int to)
{
	return distance_table[from][to];
}

static void cpumask_or(struct cpumask *out, const struct cpumask *a, const struct cpumask *b)
{
	out->bits = a->bits | b->bits;
}

struct rcu_head {
	struct rcu_head *next;
	void (*func)(struct rcu_head *head);
};

struct sched_domain_topology_level {
	void *mask;
	int (*sd_flags)(void);
	int numa_level;
	char *name;
};

static void assigned(void);
static void synchronize_rcu(void);
static void call_rcu(struct rcu_head *head, void (*func)(struct rcu_head *head));
static unsigned long get_state_synchronize_rcu(void);
static void cond_synchronize_rcu(unsigned long since);

/* What it runs with is of the kernel's, so each of these is a moment at which it can be read. */
#define rcu_assign_pointer(pointer, value)	do { (pointer) = (value); assigned(); } while (0)
#define WRITE_ONCE(variable, value)		do { (variable) = (value); assigned(); } while (0)
#undef smp_store_release
#define smp_store_release(pointer, value)	do { *(pointer) = (value); assigned(); } while (0)
#define rcu_dereference_protected(pointer, held)	(pointer)
#define rcu_barrier				synchronize_rcu

#include "../levels.c"

struct vnuma_symbols vnuma_symbols;

static int nr_levels, *distances, most, nr_node_levels, *node_distances;
static unsigned int type;
static struct cpumask ***masks;
static struct sched_domain_topology_level *now, *below;
static struct sched_domain_topology_level smt[2] = { { .mask = smt } };

/* What readers may have loaded since the last grace period began. */
#define MOST_SEEN	256
static struct cpumask ***seen_masks[MOST_SEEN];
static int seen_levels[MOST_SEEN], seen_node_levels[MOST_SEEN], seen;
static int *seen_distances[MOST_SEEN], *seen_node_distances[MOST_SEEN];
/* Nodes that readers know to have CPUs (N_CPU) when they load these masks, or knew before. */
static nodemask_t seen_nodes[MOST_SEEN], with_cpus;
static struct rcu_head *waiting;
static unsigned long grace_periods;

/* N_CPU, masks and then how many there are: sched_numa_find_nth_cpu(). @node: one that has CPUs. */
static void find_all(struct cpumask ***of, int nr, int node)
{
	expect(of[nr - 1][node] && of[nr - 1][node]->bits == all_cpus.bits);
}

/* In any order, as sched_numa_hop_mask() does. */
static void read_all(struct cpumask ***of, int nr)
{
	int level, node;

	for (level = 0; level < nr; level++)
		for (node = 0; node < NR_NODES; node++)
			expect(!of[level][node] ||
			       !(of[level][node]->bits & ~all_cpus.bits));
}

/* find_numa_distance(), by the distances of levels until 6.17. */
static void read_distances(const int *of, int nr)
{
	int i;

	for (i = 0; i < nr; i++)
		expect(of[i] >= LOCAL_DISTANCE);
}

static void assigned(void)
{
	int i, node;

	if (!nr_levels)
		return;
	expect(masks && seen < MOST_SEEN);
	seen_masks[seen] = masks;
	seen_nodes[seen] = with_cpus;
	if (seen)
		seen_nodes[seen].bits |= seen_nodes[seen - 1].bits;
	seen_distances[seen] = distances;
	seen_node_distances[seen] = node_distances;
	seen_node_levels[seen] = nr_node_levels;
	seen_levels[seen++] = nr_levels;
	for (i = 0; i < seen; i++) {
		read_distances(seen_distances[i], nr_levels);
		read_distances(distances, seen_levels[i]);
		read_distances(seen_node_distances[i], nr_node_levels);
		read_distances(node_distances, seen_node_levels[i]);
		for_each_node_mask(node, seen_nodes[i])
			find_all(seen_masks[i], nr_levels, node);
		read_all(seen_masks[i], nr_levels);
		read_all(masks, seen_levels[i]);
	}
}

static void synchronize_rcu(void)
{
	seen = 0;
	grace_periods++;
	while (waiting) {
		struct rcu_head *head = waiting;

		waiting = head->next;
		head->func(head);
	}
	assigned();
}

static unsigned long get_state_synchronize_rcu(void)
{
	return grace_periods + 1;
}

static void cond_synchronize_rcu(unsigned long since)
{
	if (grace_periods < since)
		synchronize_rcu();
}

static void call_rcu(struct rcu_head *head, void (*func)(struct rcu_head *head))
{
	head->func = func;
	head->next = waiting;
	waiting = head;
}

/* CPUs are on nodes that are online; these are some of all. */
static void random_nodes(void)
{
	int cpu, node;

	for (node = 0; node < NR_NODES; node++)
		node_cpus[node].bits = 0;
	for (cpu = 0; cpu < NR_CPUS; cpu++) {
		do {
			node = rand() % NR_NODES;
		} while (!(node_states[N_ONLINE].bits >> node & 1));
		node_cpus[node].bits |= 1UL << cpu;
	}
}

static void set_cpu_nodes(void)
{
	int node;

	for (node = 0; node < NR_NODES; node++) {
		with_cpus.bits &= ~(1UL << node);
		if (node_cpus[node].bits)
			with_cpus.bits |= 1UL << node;
	}
}

/* A node without CPUs comes, or goes: that takes longer than a grace period. */
static void change_nodes(void)
{
	int node = rand() % NR_NODES;

	if (node_cpus[node].bits || with_cpus.bits >> node & 1)
		return;
	if (node_states[N_ONLINE].bits >> node & 1)
		synchronize_rcu();
	node_states[N_ONLINE].bits ^= 1UL << node;
}

static void random_model(struct vnuma_model *model)
{
	int from, to, kinds = 1 + rand() % 7;

	model->nr_nodes = NR_NODES;
	for (from = 0; from < NR_NODES; from++) {
		model->distance[from][from] = LOCAL_DISTANCE;
		for (to = 0; to < from; to++)
			model->distance[from][to] = model->distance[to][from] =
				11 + rand() % kinds;
	}
}

static void write_distances(const struct vnuma_model *model)
{
	int from, to;

	for (from = 0; from < NR_NODES; from++)
		for (to = 0; to < NR_NODES; to++)
			distance_table[from][to] = model->distance[from][to];
}

/* Levels of these nodes, by the maps as they are now. */
static void compare(nodemask_t nodes)
{
	int level, node, other, count = 0, farthest = LOCAL_DISTANCE;
	bool apart[NR_DISTANCES] = { };

	for_each_node_mask(node, nodes) {
		for (level = 0; level < nr_levels; level++) {
			unsigned long cpus = 0;

			for (other = 0; other < NR_NODES; other++)
				if (node_distance(node, other) <= distances[level])
					cpus |= node_cpus[other].bits;
			expect(masks[level][node]->bits == cpus);
		}
		for (other = 0; other < NR_NODES; other++)
			if (node_cpus[node].bits && node_cpus[other].bits) {
				farthest = max(farthest, node_distance(node, other));
				apart[node_distance(node, other)] = true;
			}
	}
	for (level = 0; level < nr_levels; level++)
		expect(distances[level] == node_distances[level] &&
		       (!level || distances[level] > distances[level - 1]));
	expect(nr_node_levels == nr_levels && most == farthest);
	/* SMT, the node alone, and one for each other distance between nodes that have CPUs. */
	expect(now[count++].mask && now[count].mask && !now[count].numa_level);
	for (level = 1; level < nr_levels; level++)
		if (apart[distances[level]])
			expect(now[++count].mask && now[count].numa_level == level);
	expect(!now[++count].mask);
	expect(nr_levels > 2 || type == NUMA_DIRECT);
}

static int numa_flags(void)
{
	return 1;
}

/* What the kernel does when a node gets its first CPU: sched_reset_numa(), sched_init_numa(). */
static void kernel_builds(void)
{
	int level, node, other, nr = nr_levels;

	nr_levels = 0;
	if (distances != node_distances)
		free(node_distances);
	free(distances);
	synchronize_rcu();
	for (level = 0; masks && level < nr; level++) {
		for (node = 0; node < NR_NODES; node++)
			free(masks[level][node]);
		free(masks[level]);
	}
	free(masks);
	free(now);
	set_cpu_nodes();
	distances = unique_distances(NULL, &with_cpus, __node_distance, 0, &nr);
	node_distances = distances;
	nr_node_levels = nr;
	masks = calloc(nr, sizeof(*masks));
	now = calloc(nr + 2, sizeof(*now));
	now[0] = smt[0];
	for (level = 0; level < nr; level++) {
		now[level + 1] = (struct sched_domain_topology_level){ .mask = smt, .numa_level = level };
		masks[level] = calloc(NR_NODES, sizeof(**masks));
		for_each_node_mask(node, with_cpus) {
			masks[level][node] = calloc(1, sizeof(***masks));
			for_each_node_mask(other, with_cpus)
				if (node_distance(node, other) <= distances[level])
					masks[level][node]->bits |= node_cpus[other].bits;
		}
	}
	nr_levels = nr;
	assigned();
}

static void boot(void)
{
	static struct vnuma_model model;

	below = smt;
	vnuma_symbols = (struct vnuma_symbols){
		.sched_domains_numa_levels = &nr_levels,
		.sched_domains_numa_distance = &distances,
		.sched_domains_numa_masks = &masks,
		.sched_max_numa_distance = &most,
		.sched_numa_topology_type = &type,
		.sched_domain_topology = &now,
		.sched_domain_topology_saved = &below,
		.cpu_numa_flags = numa_flags,
		.sched_numa_node_levels = &nr_node_levels,
		.sched_numa_node_distance = &node_distances,
	};
	node_states[N_ONLINE].bits = 1 | rand() % (1 << NR_NODES);
	random_model(&model);
	write_distances(&model);
	random_nodes();
	kernel_builds();
}

/* As apply_fast.c does it. */
static void publish(bool other_distances)
{
	static struct vnuma_model model;
	struct vnuma_levels *levels;
	nodemask_t nodes;

	if (!vnuma_levels_complete()) {
		levels = vnuma_levels_prepare(NULL);
		expect(levels);
		vnuma_levels_publish(levels);
		expect(vnuma_levels_complete());
	}
	if (other_distances)
		random_model(&model);
	/* Whichever allocation fails, nothing is changed and nothing is lost. */
	if (rand() % 4 == 0) {
		failing_allocation = 1 + rand() % 40;
		vnuma_levels_drop(vnuma_levels_prepare(other_distances ? &model : NULL));
		failing_allocation = 0;
	}
	levels = vnuma_levels_prepare(other_distances ? &model : NULL);
	expect(levels);
	if (other_distances)
		write_distances(&model);
	nodes = node_states[N_ONLINE];
	random_nodes();
	/* Also before it is published. */
	if (rand() % 4 == 0)
		change_nodes();
	vnuma_levels_publish(levels);
	set_cpu_nodes();
	assigned();
	compare(nodes);
}

int main(void)
{
	int round;

	for (seed = 1; seed <= 4; seed++) {
		srand(seed);
		boot();
		for (round = 0; round < ROUNDS; round++) {
			publish(rand() % 3 == 0);
			if (rand() % 4 == 0)
				change_nodes();
			if (rand() % 8 == 0)
				kernel_builds();
			/* Now and then there is a grace period of somebody else's. */
			if (rand() % 8 == 0 || seen > MOST_SEEN / 2)
				synchronize_rcu();
		}
		vnuma_levels_finish();
		free_masks(masks, nr_levels);
		free(distances);
		if (node_distances != distances)
			free(node_distances);
		free(now);
		masks = NULL;
		distances = NULL;
		node_distances = NULL;
		now = NULL;
		nr_levels = 0;
		seen = 0;
	}
	free(level_name);
	printf("levels: 4 times %d publications, of all of which a reader finds all CPUs at any moment\n",
	       ROUNDS);
	return 0;
}
