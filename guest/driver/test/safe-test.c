// SPDX-License-Identifier: GPL-2.0
/*
 * Safe mode, apply_safe.c as it is, in user space: CPUs that the kernel refuses to take offline or
 * to bring up again, and such as come online by themselves. The kernel is a table of CPUs.
 */
#include <limits.h>
#include <linux/kernel.h>

#define expect(condition)							\
	do {									\
		if (!(condition)) {						\
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__,	\
				__LINE__, #condition);				\
			exit(1);						\
		}								\
	} while (0)

#define NR_CPUS		8
#define NR_NODES	2
#define NUMA_NO_NODE	(-1)
#define BAD_APICID	0xffff
#define N_CPU		0

struct cpumask {
	unsigned long bits;
};

static struct {
	bool present;
	bool online;
	bool fixed;		/* it cannot be taken offline */
	int firmware;		/* its node when it comes up */
	int node;
	u32 llc;
	struct cpumask siblings;
	unsigned int refused_down;	/* so many times from now on */
	unsigned int refused_up;
} cpus[NR_CPUS];

static struct cpumask node_cpus[NR_NODES];
static int published[2][NR_CPUS];	/* by generation */
static const struct vnuma_model *current_topology;
static unsigned int slept_ms;
static bool sched_ext_locked, sched_ext_bypassed;

static bool cpumask_test_cpu(int cpu, const struct cpumask *mask)
{
	return mask->bits >> cpu & 1;
}

static void cpumask_set_cpu(int cpu, struct cpumask *mask)
{
	mask->bits |= 1UL << cpu;
}

static void cpumask_clear_cpu(int cpu, struct cpumask *mask)
{
	mask->bits &= ~(1UL << cpu);
}

#define for_each_if(cpu, condition)						\
	for ((cpu) = 0; (cpu) < NR_CPUS; (cpu)++)				\
		if (!(condition)) {						\
		} else
#define for_each_cpu(cpu, mask)		for_each_if(cpu, cpumask_test_cpu(cpu, mask))
#define for_each_online_cpu(cpu)	for_each_if(cpu, cpus[cpu].online)
#define for_each_possible_cpu(cpu)	for_each_if(cpu, true)
#define cpumask_empty(mask)		(!(mask)->bits)
#define cpumask_of_node(node)		(&node_cpus[node])
#define topology_sibling_cpumask(cpu)	(&cpus[cpu].siblings)
#define cpu_to_node(cpu)		(cpus[cpu].node)
#define cpu_online(cpu)			(cpus[cpu].online)
#define cpu_is_hotpluggable(cpu)	(!cpus[cpu].fixed)
#define node_set_state(node, state)	((void)(node))
#define node_clear_state(node, state)	((void)(node))
#define local_irq_save(flags)		((void)((flags) = 0))
#define local_irq_restore(flags)	((void)(flags))
#define cpus_read_lock()
#define cpus_read_unlock()
#define rcu_expedite_gp()
#define rcu_unexpedite_gp()
#define pr_info(...)			((void)0)
#define pr_info_once(...)		((void)0)
#define pr_warn(...)			((void)0)
#define pr_err(...)			((void)0)
#define msleep(ms)			((void)(slept_ms += (ms)))
/* What compat.h has. */
#define VNUMA_COMPAT_H
#define vnuma_llc_id(cpu)		(cpus[cpu].llc)

static void *get_cpu_device(int cpu)
{
	return cpus[cpu].present ? &cpus[cpu] : NULL;
}

static int add_cpu(unsigned int cpu);
static int remove_cpu(unsigned int cpu);

#include "../apply_safe.c"

bool vnuma_topology_has_node(int node)
{
	return node >= 0 && node < NR_NODES;
}

int vnuma_topology_node(const struct vnuma_model *topology, int cpu)
{
	return topology ? published[topology->generation][cpu] : NUMA_NO_NODE;
}

bool vnuma_topology_is_unapplied(const struct vnuma_model *topology, int cpu)
{
	int node = vnuma_topology_node(topology, cpu);

	return node != NUMA_NO_NODE && node != cpus[cpu].node;
}

int vnuma_topology_check(const struct vnuma_model *topology, struct vnuma_reason *why)
{
	(void)topology;
	(void)why;
	return 0;
}

struct vnuma_model *vnuma_topology_set_current(struct vnuma_model *topology)
{
	current_topology = topology;
	return NULL;
}

bool vnuma_distances_differ(const struct vnuma_model *topology)
{
	(void)topology;
	return false;
}

void vnuma_maps_write(const struct vnuma_move *move)
{
	cpus[move->cpu].node = move->to;
	cpumask_clear_cpu(move->cpu, &node_cpus[move->from]);
	cpumask_set_cpu(move->cpu, &node_cpus[move->to]);
}

void vnuma_maps_switch(void)
{
}

int vnuma_affinities_save(void)
{
	return 0;
}

void vnuma_affinities_restore(int cpu)
{
	(void)cpu;
}

void vnuma_affinities_settle(struct workqueue_struct *queue)
{
	(void)queue;
}

void vnuma_affinities_cancel(void)
{
}

void vnuma_affinities_finish(void)
{
}

void vnuma_sched_ext_lock(void)
{
	expect(!sched_ext_locked);
	sched_ext_locked = true;
}

void vnuma_sched_ext_unlock(void)
{
	expect(sched_ext_locked && !sched_ext_bypassed);
	sched_ext_locked = false;
}

void vnuma_sched_ext_bypass(bool bypass)
{
	expect(sched_ext_locked && sched_ext_bypassed != bypass);
	sched_ext_bypassed = bypass;
}

static int add_cpu(unsigned int cpu)
{
	expect(cpus[cpu].present);
	if (cpus[cpu].online)
		return 1;
	if (cpus[cpu].refused_up) {
		cpus[cpu].refused_up--;
		return -EBUSY;
	}
	cpus[cpu].online = true;
	cpus[cpu].node = cpus[cpu].firmware;
	cpumask_set_cpu(cpu, &node_cpus[cpus[cpu].node]);
	vnuma_safe_came_online(cpu, vnuma_topology_node(current_topology, cpu));
	return 0;
}

static int remove_cpu(unsigned int cpu)
{
	expect(cpus[cpu].present && !cpus[cpu].fixed);
	/* Tasks leave the queues of the node that it may leave. */
	expect(sched_ext_bypassed);
	if (!cpus[cpu].online)
		return 1;
	if (cpus[cpu].refused_down) {
		cpus[cpu].refused_down--;
		return -EBUSY;
	}
	cpus[cpu].online = false;
	cpumask_clear_cpu(cpu, &node_cpus[cpus[cpu].node]);
	return 0;
}

/* Even CPUs are on node 0, odd ones on node 1. No CPU shares anything, and the host says the same. */
static void reset(void)
{
	int cpu;

	memset(cpus, 0, sizeof(cpus));
	memset(node_cpus, 0, sizeof(node_cpus));
	away.bits = 0;
	taken_down.bits = 0;
	slept_ms = 0;
	current_topology = NULL;
	for (cpu = 0; cpu < NR_CPUS; cpu++) {
		cpus[cpu].present = true;
		cpus[cpu].online = true;
		cpus[cpu].fixed = cpu == 0;
		cpus[cpu].firmware = cpu % NR_NODES;
		cpus[cpu].node = cpu % NR_NODES;
		cpus[cpu].llc = cpu;
		cpumask_set_cpu(cpu, &cpus[cpu].siblings);
		cpumask_set_cpu(cpu, &node_cpus[cpu % NR_NODES]);
		published[0][cpu] = cpu % NR_NODES;
		published[1][cpu] = cpu % NR_NODES;
	}
}

/* A new one each time, as the driver has. Return: what is not applied. */
static struct vnuma_unapplied apply(u64 generation)
{
	static struct vnuma_model topologies[2] = { { .generation = 0 }, { .generation = 1 } };
	struct vnuma_unapplied unapplied = { };
	struct vnuma_model *old;
	struct vnuma_reason why;

	expect(!vnuma_safe_apply(NULL, &topologies[generation], &old, &unapplied, &why));
	return unapplied;
}

static void test_moves(void)
{
	struct vnuma_unapplied unapplied;

	reset();
	published[0][2] = 1;
	expect(!apply(0).cpus);
	expect(cpus[2].online && cpus[2].node == 1);
	/* CPU 0 stays, and somebody is busy with CPU 4 for too long. */
	published[1][0] = 1;
	published[1][4] = 1;
	cpus[4].refused_down = TRIES;
	unapplied = apply(1);
	expect(unapplied.cpus == 2 && cpus[4].online && cpus[4].node == 0);
	expect(!vnuma_safe_has_offline());
	unapplied = apply(1);
	expect(unapplied.cpus == 1 && unapplied.cpu == 0 && unapplied.error == -EPERM);
	expect(cpus[4].node == 1 && cpus[2].node == 0);
}

static void test_comes_up_later(void)
{
	struct vnuma_unapplied unapplied;

	reset();
	published[0][2] = 1;
	cpus[2].refused_up = TRIES - 1;
	expect(!apply(0).cpus && cpus[2].node == 1);

	published[1][4] = 1;
	cpus[4].refused_up = 2 * TRIES + 1;
	unapplied = apply(1);
	expect(unapplied.cpus == 1 && unapplied.cpu == 4 && unapplied.error == -EBUSY);
	expect(!cpus[4].online && vnuma_safe_has_offline());
	/* Nor is a later one complete, whatever it says of the CPU. */
	unapplied = apply(0);
	expect(unapplied.cpus == 1 && unapplied.cpu == 4);
	expect(cpus[2].node == 1);
	vnuma_safe_bring_up();
	expect(!cpus[4].online && vnuma_safe_has_offline());
	vnuma_safe_bring_up();
	expect(cpus[4].online && cpus[4].node == 0 && !vnuma_safe_has_offline());
	expect(!apply(1).cpus && cpus[4].node == 1);
}

static void test_is_left_to_others(void)
{
	reset();
	/* Taken offline by somebody else. */
	cpus[2].online = false;
	published[0][2] = 1;
	expect(!apply(0).cpus && !cpus[2].online && !vnuma_safe_has_offline());
	/* Brought up by somebody else, or removed. */
	published[1][4] = 1;
	published[1][6] = 1;
	cpus[4].refused_up = TRIES;
	cpus[6].refused_up = TRIES;
	expect(apply(1).cpus == 2 && vnuma_safe_has_offline());
	expect(!add_cpu(4) && cpus[4].node == 1);
	cpus[6].present = false;
	vnuma_safe_bring_up();
	expect(!vnuma_safe_has_offline());
	expect(cpus[4].online && !cpus[6].online && !cpus[2].online);
}

/* Published on a node that this guest does not have, before it was there. */
static void test_stays_on_a_node_that_is_there(void)
{
	reset();
	cpus[2].online = false;
	cpumask_clear_cpu(2, &node_cpus[0]);
	published[0][2] = NR_NODES + 1000;
	expect(!apply(0).cpus);
	expect(!add_cpu(2) && cpus[2].node == 0);
	cpus[2].online = false;
	published[0][2] = NUMA_NO_NODE;
	expect(!add_cpu(2) && cpus[2].node == 0);
}

static void test_undo(void)
{
	reset();
	published[0][2] = 1;
	published[0][4] = 1;
	published[0][6] = 1;
	cpus[4].refused_up = TRIES;
	expect(apply(0).cpus == 1);
	vnuma_topology_set_current(NULL);
	cpus[4].refused_up = 3 * TRIES;
	cpus[6].refused_up = 2 * TRIES;
	slept_ms = 0;
	vnuma_safe_undo();
	expect(!vnuma_safe_has_offline());
	expect(cpus[2].node == 0 && cpus[4].online && cpus[4].node == 0);
	expect(cpus[6].online && cpus[6].node == 0);
	/* It does not wait for ever. */
	reset();
	published[0][2] = 1;
	cpus[2].refused_up = UINT_MAX;
	expect(apply(0).cpus == 1);
	vnuma_topology_set_current(NULL);
	slept_ms = 0;
	vnuma_safe_undo();
	expect(!cpus[2].online && slept_ms < 30000);
}

/* It was published there while it was offline. */
static void test_keeps_core_and_cache(void)
{
	reset();
	cpus[2].online = false;
	cpumask_clear_cpu(2, &node_cpus[0]);
	cpumask_set_cpu(4, &cpus[2].siblings);
	published[0][2] = 1;
	expect(!apply(0).cpus);
	expect(!add_cpu(2) && cpus[2].node == 0);
	expect(vnuma_topology_is_unapplied(current_topology, 2));

	cpus[2].online = false;
	cpumask_clear_cpu(4, &cpus[2].siblings);
	cpus[2].llc = cpus[4].llc;
	expect(!add_cpu(2) && cpus[2].node == 0);

	/* Of a cache that has no number nobody knows who shares it. */
	cpus[2].online = false;
	cpus[2].llc = cpus[4].llc = BAD_APICID;
	expect(!add_cpu(2) && cpus[2].node == 1);

	/* To the others. */
	cpus[3].online = false;
	cpus[3].firmware = 0;
	cpus[3].llc = cpus[5].llc;
	cpumask_set_cpu(5, &cpus[3].siblings);
	expect(!add_cpu(3) && cpus[3].node == 1);
}

int main(void)
{
	test_moves();
	test_comes_up_later();
	test_is_left_to_others();
	test_stays_on_a_node_that_is_there();
	test_undo();
	test_keeps_core_and_cache();
	expect(!sched_ext_locked);
	printf("safe mode: ok\n");
	return 0;
}
