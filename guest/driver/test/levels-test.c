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
#define N_CPU		0

static unsigned int seed;

struct cpumask {
	unsigned long bits;
};

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
#define for_each_online_node(node)	for ((node) = 0; (node) < NR_NODES; (node)++)
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

/* What it runs with is of the kernel's, so each of these is a moment at which it can be read. */
#define rcu_assign_pointer(pointer, value)	do { (pointer) = (value); assigned(); } while (0)
#define WRITE_ONCE(variable, value)		do { (variable) = (value); assigned(); } while (0)
#undef smp_store_release
#define smp_store_release(pointer, value)	do { *(pointer) = (value); assigned(); } while (0)
#define rcu_barrier				synchronize_rcu

#include "../levels.c"

struct vnuma_symbols vnuma_symbols;

static int nr_levels, *distances, most, nr_node_levels, *node_distances;
static unsigned int type;
static struct cpumask ***masks;
static struct sched_domain_topology_level *now, *below;
static struct sched_domain_topology_level smt[2] = { { .mask = smt } };

/* What readers may have loaded since the last grace period began. */
#define MOST_SEEN	64
static struct cpumask ***seen_masks[MOST_SEEN];
static int seen_levels[MOST_SEEN], seen;
static struct rcu_head *waiting;
static unsigned long all_cpus;

/* As hop_cmp() and sched_numa_find_nth_cpu() do: masks first, then how many there are. */
static void read_all(struct cpumask ***of, int nr)
{
	int level, node;

	for (node = 0; node < NR_NODES; node++) {
		for (level = 0; level < nr; level++)
			expect(!(of[level][node]->bits & ~all_cpus));
		expect(of[nr - 1][node]->bits == all_cpus);
	}
}

static void assigned(void)
{
	int i;

	if (!nr_levels)
		return;
	expect(masks);
	expect(seen < MOST_SEEN);
	seen_masks[seen] = masks;
	seen_levels[seen++] = nr_levels;
	for (i = 0; i < seen; i++)
		read_all(seen_masks[i], nr_levels);
}

static void synchronize_rcu(void)
{
	seen = 0;
	while (waiting) {
		struct rcu_head *head = waiting;

		waiting = head->next;
		head->func(head);
	}
	assigned();
}

static void call_rcu(struct rcu_head *head, void (*func)(struct rcu_head *head))
{
	head->func = func;
	head->next = waiting;
	waiting = head;
}

bool vnuma_levels_complete(void);

static void random_nodes(void)
{
	int cpu, node;

	for (node = 0; node < NR_NODES; node++)
		node_cpus[node].bits = 0;
	for (cpu = 0; cpu < NR_CPUS; cpu++)
		node_cpus[rand() % NR_NODES].bits |= 1UL << cpu;
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

/* What the kernel's own levels would be. */
static void compare(void)
{
	int level, node, other, count = 0;

	for (node = 0; node < NR_NODES; node++) {
		for (level = 0; level < nr_levels; level++) {
			unsigned long cpus = 0;

			for (other = 0; other < NR_NODES; other++)
				if (node_distance(node, other) <= distances[level])
					cpus |= node_cpus[other].bits;
			expect(masks[level][node]->bits == cpus);
		}
	}
	for (level = 0; level < nr_levels; level++)
		expect(distances[level] == node_distances[level] &&
		       (!level || distances[level] > distances[level - 1]));
	expect(nr_node_levels == nr_levels && most == distances[nr_levels - 1]);
	expect(vnuma_levels_complete());
	while (now[count].mask) {
		expect(count < 1 || now[count].numa_level == count - 1);
		count++;
	}
	/* SMT, the node alone, and one for each other distance. */
	expect(count == 1 + nr_levels);
	expect(nr_levels > 2 || type == NUMA_DIRECT);
}

static int numa_flags(void)
{
	return 1;
}

/* Levels as the kernel makes them at boot, for the nodes that have CPUs: here without masks. */
static void boot(void)
{
	static struct vnuma_model model;

	random_model(&model);
	write_distances(&model);
	random_nodes();
	now = calloc(3, sizeof(*now));
	now[0] = smt[0];
	now[1] = (struct sched_domain_topology_level){ .mask = smt, .name = smt[0].name };
	below = smt;
	distances = calloc(1, sizeof(*distances));
	node_distances = distances;
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
}

static void publish(bool other_distances)
{
	static struct vnuma_model model;
	struct vnuma_levels *levels;

	if (other_distances)
		random_model(&model);
	/* None of what fails changes anything; without memory nothing is lost. */
	if (rand() % 4 == 0) {
		failing_allocation = 1 + rand() % 8;
		levels = vnuma_levels_prepare(other_distances ? &model : NULL);
		expect(!levels || !failing_allocation || failing_allocation <= 8);
		vnuma_levels_drop(levels);
		failing_allocation = 0;
	}
	levels = vnuma_levels_prepare(other_distances ? &model : NULL);
	expect(levels);
	if (other_distances)
		write_distances(&model);
	random_nodes();
	vnuma_levels_publish(levels);
	compare();
}

int main(void)
{
	int round;

	all_cpus = (1UL << NR_CPUS) - 1;
	for (seed = 1; seed <= 4; seed++) {
		srand(seed);
		boot();
		publish(false);
		for (round = 0; round < ROUNDS; round++) {
			publish(rand() % 3 == 0);
			if (seen > MOST_SEEN / 2)
				synchronize_rcu();
		}
		vnuma_levels_finish();
		free_masks(masks, nr_levels);
		free(distances);
		free(node_distances);
		free(now);
		masks = NULL;
		nr_levels = 0;
		nr_node_levels = 0;
		seen = 0;
	}
	free(level_name);
	printf("levels: 4 times %d publications, of all of which a reader finds all CPUs at any moment\n",
	       ROUNDS);
	return 0;
}
