// SPDX-License-Identifier: GPL-2.0
/*
 * Safe mode: CPUs change their node by going offline and coming online again.
 *
 * For kernels on which fast mode misses a symbol; only exported ones are used here.
 * Going down, the kernel takes the CPU out of everything that knows its node. Coming
 * up it puts it where the firmware's table says (srat_detect_node(),
 * arch/x86/kernel/cpu/), and then asks our callback, which runs on the CPU before it
 * is active, to put it where the host says:
 *
 *	remove_cpu	scheduler, node_to_cpumask_map, N_CPU: the kernel
 *	add_cpu
 *	  CPU starts	all maps, with the node of the firmware: the kernel
 *	  callback	all maps and N_CPU, with the node of the host: maps.c
 *	  CPU active	scheduler's NUMA levels, masks and domains: the kernel
 *	  afterwards	sysfs links: the kernel, as the node changed meanwhile
 *
 * CPU hotplug widens the affinity of tasks that may run nowhere else (affinity.c) and
 * empties cgroup-v1 cpusets for good, so those are refused. A CPU that cannot be taken
 * offline stays where it is: the others move, and the publication is not acknowledged. Nor
 * is it while one does not come up again, which is tried until it does.
 *
 * remove_cpu() takes lock_device_hotplug(), which ACPI holds while it adds or removes
 * the channel's device: nobody may wait for vnuma_safe_apply() in a probe or a removal.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/cgroup.h>
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/irqflags.h>
#include <linux/nodemask.h>
#include <linux/rcupdate.h>
#include <linux/topology.h>

#include "compat.h"
#include "vnuma.h"

/* Somebody else's hotplug of the same CPU, or a driver that is busy for a moment. */
#define TRIES		5
#define RETRY_MS	20
/* Before the driver is unloaded: hotplug is refused during a suspend, or while ACPI probes. */
#define LAST_TRIES	10
#define LAST_RETRY_MS	1000

/* CPUs that are not on the node that the kernel gives them when they come up. */
static struct cpumask away;
/* CPUs that were taken offline here and did not come up again. One thread at a time uses it. */
static struct cpumask taken_down;

static bool share_cache(int cpu, int other)
{
	u32 llc = vnuma_llc_id(cpu);

	return llc != BAD_APICID && vnuma_llc_id(other) == llc;
}

/*
 * The kernel has just found which CPUs this one shares a core and caches with, on the node of the
 * firmware. Scheduler domains of these must lie within a node. A publication is checked against
 * CPUs that are online (check()), and this one may not have been.
 */
static bool may_be_on(int cpu, int node)
{
	int other;

	for_each_online_cpu(other) {
		if (other == cpu || cpu_to_node(other) == node)
			continue;
		if (!share_cache(cpu, other) &&
		    !cpumask_test_cpu(other, topology_sibling_cpumask(cpu)))
			continue;
		pr_warn("CPU %d stays on node %d: it shares a core or a cache with CPU %d, which is not on node %d\n",
			cpu, cpu_to_node(cpu), other, node);
		return false;
	}
	return true;
}

/**
 * vnuma_safe_came_online - put a CPU that comes up on its published node
 * @cpu: this CPU, not active yet
 * @node: NUMA_NO_NODE if the host published none
 */
void vnuma_safe_came_online(int cpu, int node)
{
	struct vnuma_move move = {
		.cpu = cpu,
		.from = cpu_to_node(cpu),
		.to = cpu_to_node(cpu),
	};
	unsigned long flags;

	/* A CPU that was not there yet may be published on a node that is not. */
	if (vnuma_topology_has_node(node) && node != move.from && may_be_on(cpu, node))
		move.to = node;
	if (move.to != move.from)
		cpumask_set_cpu(cpu, &away);
	else
		cpumask_clear_cpu(cpu, &away);
	/*
	 * Also if the node is right: what getcpu reads was set from the node that the
	 * CPU had before it went down, and only then the kernel asked for the node.
	 */
	local_irq_save(flags);
	vnuma_maps_write(&move);
	vnuma_maps_switch();
	local_irq_restore(flags);
	if (cpumask_empty(cpumask_of_node(move.from)))
		node_clear_state(move.from, N_CPU);
	node_set_state(move.to, N_CPU);
}

/* A cpuset of version 1 that loses its last CPU stays empty, its tasks move out. */
static bool have_v1_cpusets(void)
{
#ifdef CONFIG_CPUSETS
	return !static_key_enabled(&cpuset_cgrp_subsys_on_dfl_key.key);
#else
	return false;
#endif
}

/*
 * The kernel compares the nodes of CPUs that share a cache while the CPU is still
 * where the firmware says, and the masks of shared caches are not exported.
 */
static int check_caches(int cpu, struct vnuma_reason *why)
{
	int other;

	for_each_online_cpu(other)
		if (other != cpu && share_cache(cpu, other))
			return vnuma_fail(why, -EOPNOTSUPP,
					  "CPU %d shares a cache with CPU %d, which safe mode cannot part",
					  cpu, other);
	return 0;
}

static int check(const struct vnuma_model *topology,
		 struct vnuma_reason *why)
{
	int err = vnuma_topology_check(topology, why);
	int cpu;

	if (err)
		return err;
	for_each_online_cpu(cpu) {
		if (!vnuma_topology_is_unapplied(topology, cpu))
			continue;
		if (have_v1_cpusets())
			return vnuma_fail(why, -EOPNOTSUPP,
					  "CPU %d cannot be taken offline: cpusets of cgroup v1 are mounted and would lose it",
					  cpu);
		err = check_caches(cpu, why);
		if (err)
			return err;
	}
	return 0;
}

static int retried(int (*step)(unsigned int cpu), int cpu)
{
	int try, err;

	for (try = 0; try < TRIES; try++) {
		if (try)
			msleep(RETRY_MS << try);
		err = step(cpu);
		if (err != -EBUSY)
			return err;
	}
	return err;
}

/* A CPU of @taken_down. Somebody else may have brought it up, or removed it. */
static int bring_up(int cpu)
{
	int err = get_cpu_device(cpu) ? retried(add_cpu, cpu) : 0;

	if (err >= 0)
		cpumask_clear_cpu(cpu, &taken_down);
	return err;
}

static int take_down(int cpu)
{
	int err = vnuma_affinities_save();

	return err ?: retried(remove_cpu, cpu);
}

/* Return: 0 if the CPU came up again, with the node that the callback gave it. */
static int replug(int cpu)
{
	int err;

	/* CPU 0, see arch_register_cpu(); isolated ones with nohz_full= as well. */
	if (!cpu_is_hotpluggable(cpu))
		return -EPERM;
	vnuma_sched_ext_lock();
	vnuma_sched_ext_bypass(true);
	err = take_down(cpu);
	/* 1: somebody else took it offline; it moves when it is brought up again. */
	if (!err) {
		cpumask_set_cpu(cpu, &taken_down);
		err = bring_up(cpu);
		if (err < 0)
			pr_err("CPU %d stays offline for now: it did not come up again (%d)\n",
			       cpu, err);
	}
	vnuma_sched_ext_bypass(false);
	vnuma_sched_ext_unlock();
	vnuma_affinities_restore(cpu);
	return min(err, 0);
}

static void count_unapplied(struct vnuma_unapplied *unapplied, int cpu, int err)
{
	unapplied->cpus++;
	unapplied->cpu = cpu;
	unapplied->error = err;
}

static void move_unapplied(const struct vnuma_model *topology,
			   struct vnuma_unapplied *unapplied)
{
	int cpu, err;

	for_each_possible_cpu(cpu) {
		if (!cpu_online(cpu) || !vnuma_topology_is_unapplied(topology, cpu))
			continue;
		err = replug(cpu);
		if (cpumask_test_cpu(cpu, &taken_down))
			continue;
		if (err || (cpu_online(cpu) && vnuma_topology_is_unapplied(topology, cpu)))
			count_unapplied(unapplied, cpu, err ?: -EAGAIN);
	}
	for_each_cpu(cpu, &taken_down)
		count_unapplied(unapplied, cpu, -EBUSY);
}

/**
 * vnuma_safe_bring_up - try once more to bring up what was taken offline here
 *
 * For a work of the queue that vnuma_safe_apply() is a work of, before it, whether or not
 * there is a publication to apply.
 */
void vnuma_safe_bring_up(void)
{
	int cpu;

	for_each_cpu(cpu, &taken_down)
		if (bring_up(cpu) >= 0)
			pr_info("CPU %d is no longer kept offline\n", cpu);
}

/** vnuma_safe_has_offline - is there any that vnuma_safe_bring_up() should try again soon? */
bool vnuma_safe_has_offline(void)
{
	return !cpumask_empty(&taken_down);
}

/**
 * vnuma_safe_apply - move the CPUs of a publication, one after the other
 * @queue: ordered; what calls this is a work of it
 * @topology: checked; stays in use until the next call
 * @old: the one before, no longer in use
 * @unapplied: zeroed; which CPUs could not be moved
 * @why: filled if the publication is refused
 *
 * Return: 0, or -errno with nothing changed.
 */
int vnuma_safe_apply(struct workqueue_struct *queue,
		     struct vnuma_model *topology,
		     struct vnuma_model **old,
		     struct vnuma_unapplied *unapplied,
		     struct vnuma_reason *why)
{
	int err;

	cpus_read_lock();
	err = check(topology, why);
	if (!err)
		*old = vnuma_topology_set_current(topology);
	cpus_read_unlock();
	if (err)
		return err;
	if (vnuma_distances_differ(topology))
		pr_info_once("this kernel keeps its own distances: safe mode does not change them\n");
	/* Each CPU costs some grace periods. */
	rcu_expedite_gp();
	move_unapplied(topology, unapplied);
	rcu_unexpedite_gp();
	vnuma_affinities_settle(queue);
	return 0;
}

/**
 * vnuma_safe_undo - put all CPUs where the firmware says
 *
 * For unloading. A CPU that comes up when the callback is gone gets that node in all
 * maps but those of getcpu. The current topology must name no CPU any more, and no update
 * may come.
 */
void vnuma_safe_undo(void)
{
	int cpu, try, err;

	vnuma_affinities_cancel();
	for_each_cpu(cpu, &away) {
		if (!cpu_online(cpu))
			continue;
		err = have_v1_cpusets() ? -EOPNOTSUPP : replug(cpu);
		if (err)
			pr_warn("CPU %d stays on node %d (%d)\n", cpu,
				cpu_to_node(cpu), err);
	}
	for (try = 0; try < LAST_TRIES && vnuma_safe_has_offline(); try++) {
		msleep(LAST_RETRY_MS);
		vnuma_safe_bring_up();
	}
	for_each_cpu(cpu, &taken_down)
		pr_err("CPU %d stays offline\n", cpu);
	vnuma_affinities_finish();
}
