// SPDX-License-Identifier: GPL-2.0
/*
 * Fast mode: CPUs change their node in place.
 *
 * CPU hotplug changes the same maps, in the same order, around taking a CPU down
 * and up; here the CPU goes on running, tasks keep their affinity, and CPU 0 can
 * move as well. The order, with the kernel's file for each step:
 *
 *	scx_enable_mutex, cpus_read_lock, mem_hotplug_lock, sched_domains_mutex
 *	distances, if the host publishes new ones		distances.c
 *	per moved CPU, if need be while all are stopped:	sched_ext.c; kernel/sched/ext/
 *	  cpu -> node, node -> cpus				maps.c; arch/x86/mm/numa.c
 *	  APIC id -> node					arch/x86/mm/numa.c
 *	on each of them, while the rest goes on: MSR_TSC_AUX
 *	and GDT entry of the vDSO's getcpu			maps.c; arch/x86/kernel/cpu/common.c
 *	caches shared within a node only			arch/x86/kernel/smpboot.c
 *	NUMA levels and masks, all at once			levels.c; kernel/sched/topology.c
 *	N_CPU of all nodes					mm/vmstat.c
 *	unlock
 *	one rebuild of the scheduler's domains, their debug
 *	files later (debug_files.c)				kernel/cgroup/cpuset.c
 *	rseq's node_id of the moved CPUs' threads		kernel/rseq.c
 *	sysfs links						drivers/base/node.c
 *
 * Scheduler domains that were built before the change stay in use until the rebuild.
 * They are wrong then, but whole.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/container_of.h>
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/mutex.h>
#include <linux/node.h>
#include <linux/nodemask.h>
#include <linux/percpu.h>
#include <linux/percpu-rwsem.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/topology.h>
#include <asm/processor.h>
#include <asm/smp.h>

#include "compat.h"
#include "vnuma.h"

static void set_apicid_node(int cpu, int node)
{
	u32 apic_id = cpu_physical_id(cpu);

	/* numa_cpu_node(): srat_detect_node() asks again when a CPU comes up. */
	if (apic_id < MAX_LOCAL_APIC)
		vnuma_symbols.apicid_to_node[apic_id] = node;
}

/**
 * vnuma_fast_set_offline - set the node of a CPU that is not online
 * @cpu: offline and not coming up, or just about to
 * @node: online node
 *
 * It is in no node's mask and in no scheduler domain; both are set from these
 * maps when it comes up. Call with cpus_read_lock() held or from a hotplug callback.
 */
void vnuma_fast_set_offline(int cpu, int node)
{
	per_cpu(x86_cpu_to_node_map, cpu) = node;
	set_cpu_numa_node(cpu, node);
	set_apicid_node(cpu, node);
}

/* What only the CPU that moves can do, and so is asked to do by an interrupt. */
struct node_switch {
	call_single_data_t data;
	unsigned int wanted;	/* so many times; written by updates */
	unsigned int done;	/* written by the CPU */
};

static DEFINE_PER_CPU(struct node_switch, node_switch);

static void switch_node(void *unused)
{
	struct node_switch *mine = this_cpu_ptr(&node_switch);
	unsigned int wanted;

	/* An update that finds @data in use has written its node already. */
	smp_mb();
	wanted = READ_ONCE(mine->wanted);
	vnuma_maps_switch();
	vnuma_rseq_switch();
	/* Pairs with has_switched(). */
	smp_store_release(&mine->done, wanted);
}

/* Call with cpus_read_lock() held; @cpu is online, and its maps are written. */
static void start_switch(int cpu)
{
	struct node_switch *its = per_cpu_ptr(&node_switch, cpu);

	vnuma_rseq_expect(cpu);
	WRITE_ONCE(its->wanted, its->wanted + 1);
	/* Pairs with switch_node(). */
	smp_mb();
	/* Busy: an earlier interrupt is still on its way, and will find this node. */
	smp_call_function_single_async(cpu, &its->data);
}

static bool has_switched(int cpu)
{
	const struct node_switch *its = per_cpu_ptr(&node_switch, cpu);

	/* Pairs with switch_node(). */
	return smp_load_acquire(&its->done) == READ_ONCE(its->wanted);
}

/*
 * A CPU that moves was often idle, and has to come back on another CPU of the host,
 * which takes longer than all the rest. An idle CPU is not waited for: it takes the
 * interrupt before it runs any task (do_idle()), so nobody sees the old node there.
 */
static void await_switches(const struct cpumask *moved)
{
	int cpu;

	for_each_cpu(cpu, moved) {
		while (!has_switched(cpu)) {
			if (vnuma_symbols.idle_cpu && vnuma_symbols.idle_cpu(cpu))
				break;
			cpu_relax();
			cond_resched();
		}
	}
}

/**
 * vnuma_fast_init - before the first update
 *
 * Kernels of which 6.12 is one leave pointers in a module's per-CPU data as zero.
 */
void vnuma_fast_init(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		INIT_CSD(&per_cpu_ptr(&node_switch, cpu)->data, switch_node,
			 NULL);
}

/** vnuma_fast_finish - for unloading, when no update can come any more */
void vnuma_fast_finish(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		while (!has_switched(cpu))
			msleep(20);
	vnuma_levels_finish();
}

static u32 llc_id(int cpu)
{
	return per_cpu_llc_id(cpu);
}

static u32 l2c_id(int cpu)
{
	return per_cpu_l2c_id(cpu);
}

/*
 * The scheduler's MC and CLS levels come from these masks and must lie within a
 * node (topology_span_sane(), kernel/sched/topology.c). CPUID may say that vCPUs on
 * different nodes share a cache, which is not true of the host then. So a CPU that
 * moved shares with those of its new node alone: only these, and those that it
 * shared with before, are looked at.
 *
 * Return: whether the CPU shares with others than before.
 */
static bool share_cache(cpumask_var_t __percpu *map, u32 (*id)(int cpu),
			int cpu)
{
	int node = cpu_to_node(cpu), other;
	bool changed = false;

	if (id(cpu) == BAD_APICID)
		return false;
	for_each_cpu(other, *per_cpu_ptr(map, cpu)) {
		if (other == cpu || cpu_to_node(other) == node)
			continue;
		cpumask_clear_cpu(cpu, *per_cpu_ptr(map, other));
		cpumask_clear_cpu(other, *per_cpu_ptr(map, cpu));
		changed = true;
	}
	for_each_cpu_and(other, cpumask_of_node(node), cpu_online_mask) {
		if (id(other) != id(cpu) || cpumask_test_cpu(other, *per_cpu_ptr(map, cpu)))
			continue;
		cpumask_set_cpu(cpu, *per_cpu_ptr(map, other));
		cpumask_set_cpu(other, *per_cpu_ptr(map, cpu));
		changed = true;
	}
	return changed;
}

#ifdef VNUMA_LLC_ID
/*
 * The rebuild of the domains gives a CPU without an id that of the CPUs that it shares the cache
 * with, or a new one (build_sched_domains(), kernel/sched/topology.c). Before, the scheduler
 * went by its domains. Call with sched_domains_mutex held.
 */
static void forget_llc_id(int cpu)
{
	int *its = per_cpu_ptr(vnuma_symbols.sd_llc_id, cpu), other;
	int id = *its;

	if (id < 0)
		return;
	WRITE_ONCE(*its, -1);
	for_each_possible_cpu(other)
		if (*per_cpu_ptr(vnuma_symbols.sd_llc_id, other) == id)
			return;
	cpumask_clear_cpu(id, *vnuma_symbols.sched_domains_llc_id_allocmask);
}
#else
static void forget_llc_id(int cpu)
{
}
#endif

/*
 * Call after the levels are published. A reader that finds that a node has CPUs looks for
 * them in the masks of that node (sched_numa_find_nth_cpu()).
 */
static void set_cpu_nodes(void)
{
	int node;

	for_each_online_node(node)
		if (!cpumask_empty(cpumask_of_node(node)))
			node_set_state(node, N_CPU);
	for_each_online_node(node)
		if (cpumask_empty(cpumask_of_node(node)))
			node_clear_state(node, N_CPU);
}

static bool find_move(const struct vnuma_model *topology, int cpu,
		      struct vnuma_move *move)
{
	move->cpu = cpu;
	move->from = cpu_to_node(cpu);
	move->to = vnuma_topology_node(topology, cpu);
	return move->to != NUMA_NO_NODE && move->to != move->from;
}

/* All CPUs may be stopped meanwhile. */
static int write_maps(void *data)
{
	const struct vnuma_model *topology = data;
	struct vnuma_move move;
	int cpu;

	for_each_possible_cpu(cpu) {
		if (!find_move(topology, cpu, &move))
			continue;
		if (cpu_online(cpu)) {
			vnuma_maps_write(&move);
			set_apicid_node(cpu, move.to);
		} else {
			vnuma_fast_set_offline(cpu, move.to);
		}
	}
	return 0;
}

/*
 * @moved: also those that are offline.
 * Return: whether a CPU that the scheduler knows moved.
 */
static bool change_maps(struct vnuma_model *topology, struct cpumask *moved)
{
	struct vnuma_move move;
	bool online = false;
	int cpu;

	for_each_possible_cpu(cpu)
		if (find_move(topology, cpu, &move))
			cpumask_set_cpu(cpu, moved);
	if (cpumask_empty(moved))
		return false;
	vnuma_sched_ext_bypass(true);
	vnuma_sched_ext_write(moved, write_maps, topology);
	vnuma_sched_ext_bypass(false);
	for_each_cpu_and(cpu, moved, cpu_online_mask)
		start_switch(cpu);
	for_each_cpu_and(cpu, moved, cpu_online_mask) {
		if (share_cache(vnuma_symbols.cpu_llc_shared_map, llc_id, cpu))
			forget_llc_id(cpu);
		share_cache(vnuma_symbols.cpu_l2c_shared_map, l2c_id, cpu);
		online = true;
	}
	return online;
}

/* A CPU's device, which cannot be unregistered before put_device(). */
static struct device *hold_cpu_device(int cpu)
{
	struct device *dev;

	/* ACPI adds and removes CPUs with the lock held for writing. */
	cpus_read_lock();
	dev = get_device(get_cpu_device(cpu));
	cpus_read_unlock();
	return dev;
}

/*
 * struct cpu::node_id is the node that the links name: register_cpu() and
 * change_cpu_under_node() (drivers/base/cpu.c) keep it so. The latter runs with the
 * device's lock held (device_online()), which is enough. lock_device_hotplug() must
 * not be taken: the hotplug of our own PCI function holds it (acpi_device_hotplug())
 * while it probes, where it waits for an update, or removes, where it waits for the
 * interrupt's thread.
 */
static void change_link(int cpu, struct device *dev)
{
	struct cpu *c = container_of(dev, struct cpu, dev);
	int node;

	device_lock(dev);
	node = cpu_to_node(cpu);
	if (device_is_registered(dev) && node != NUMA_NO_NODE &&
	    c->node_id != node) {
		vnuma_symbols.unregister_cpu_under_node(cpu, c->node_id);
		if (vnuma_symbols.register_cpu_under_node(cpu, node))
			pr_warn("CPU %d: no sysfs link to node %d\n", cpu, node);
		c->node_id = node;
	}
	device_unlock(dev);
}

/*
 * CPUs that did not move have the right links: whatever else changes their node, hotplug
 * of CPUs, corrects them itself.
 */
static void change_links(const struct cpumask *moved)
{
	int cpu;

	for_each_cpu(cpu, moved) {
		struct device *dev = hold_cpu_device(cpu);

		if (!dev)
			continue;
		change_link(cpu, dev);
		put_device(dev);
	}
}

/* What was changed, and so has to be built again. */
struct changes {
	cpumask_var_t moved;
	bool domains;
	bool distances;
};

/* Publishes what vnuma_levels_prepare() has returned, with the maps as they are now. */
static void change_levels(struct vnuma_levels *levels, struct changes *changes)
{
	vnuma_levels_publish(levels);
	/*
	 * Domains over the same CPUs count as unchanged unless the architecture says
	 * otherwise. Set under the mutex: a rebuild by someone else is then as good.
	 */
	WRITE_ONCE(*vnuma_symbols.x86_topology_update, true);
	changes->domains = true;
}

static int change_locked(struct vnuma_model *topology,
			 struct vnuma_model **old, struct changes *changes,
			 struct vnuma_reason *why)
{
	int err = vnuma_topology_check(topology, why);
	struct vnuma_levels *levels;
	nodemask_t nodes;
	bool distances;

	if (err)
		return err;
	/* Before a CPU comes to a node that the kernel made no masks for. */
	if (!vnuma_levels_complete()) {
		levels = vnuma_levels_prepare(NULL);
		if (!levels)
			goto no_memory;
		change_levels(levels, changes);
	}
	distances = vnuma_distances_can_write(topology, &nodes);
	levels = vnuma_levels_prepare(distances ? topology : NULL);
	if (!levels)
		goto no_memory;
	if (distances)
		vnuma_distances_write(topology, &nodes);
	if (change_maps(topology, changes->moved) || distances) {
		change_levels(levels, changes);
		set_cpu_nodes();
	} else {
		vnuma_levels_drop(levels);
	}
	changes->distances = distances;
	*old = vnuma_topology_set_current(topology);
	return 0;
no_memory:
	return vnuma_fail(why, -ENOMEM,
			  "no memory for the scheduler's NUMA levels");
}

/*
 * In the order of the kernel. A node goes offline with its last memory, unless a CPU is on it: it
 * must not while one is about to be (try_offline_node(), mm/memory_hotplug.c).
 */
static void lock_all(void)
{
	cpus_read_lock();
#ifdef CONFIG_MEMORY_HOTPLUG
	percpu_down_read(vnuma_symbols.mem_hotplug_lock);
#endif
	mutex_lock(vnuma_symbols.sched_domains_mutex);
}

static void unlock_all(void)
{
	mutex_unlock(vnuma_symbols.sched_domains_mutex);
#ifdef CONFIG_MEMORY_HOTPLUG
	percpu_up_read(vnuma_symbols.mem_hotplug_lock);
#endif
	cpus_read_unlock();
}

/**
 * vnuma_fast_apply - make the kernel's maps agree with a publication
 * @topology: checked; stays in use until the next call
 * @old: the one before, no longer in use
 * @why: filled if the publication is refused
 *
 * Return: 0, or -errno with nothing changed.
 */
int vnuma_fast_apply(struct vnuma_model *topology,
		     struct vnuma_model **old, struct vnuma_reason *why)
{
	struct vnuma_rseq_running running;
	struct changes changes = { };
	int err;

	if (!zalloc_cpumask_var(&changes.moved, GFP_KERNEL))
		return vnuma_fail(why, -ENOMEM, "no memory for a CPU mask");

	/* Another number of levels costs grace periods. */
	rcu_expedite_gp();
	vnuma_sched_ext_lock();
	lock_all();
	err = change_locked(topology, old, &changes, why);
	unlock_all();
	vnuma_rseq_mark(changes.moved, &running);
	if (changes.domains) {
		vnuma_debug_files_pause();
		vnuma_symbols.rebuild_sched_domains();
	}
	vnuma_sched_ext_unlock();
	rcu_unexpedite_gp();
	await_switches(changes.moved);
	vnuma_rseq_finish(changes.moved, &running);

	if (changes.distances)
		vnuma_distances_rebuild_zonelists();
	if (!err)
		change_links(changes.moved);
	free_cpumask_var(changes.moved);
	return err;
}
