// SPDX-License-Identifier: GPL-2.0
/*
 * A publication of the host against what this guest is.
 *
 * The current topology outlives the update that brought it: a CPU that comes
 * online later, or that ACPI adds with the node of its _PXM, is put where the host
 * said last.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/bsearch.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/nodemask.h>
#include <linux/topology.h>
#include <asm/apic.h>
#include <asm/smp.h>

#include "vnuma.h"

/* Changed with cpus_read_lock() held, so stable in CPU hotplug callbacks. */
static struct vnuma_topology *current_topology;

static int prepare_state;
static int online_state;

static int compare_apic_id(const void *key, const void *element)
{
	u32 apic_id = *(const u32 *)key;
	u32 other = ((const struct vnuma_tc_vcpu *)element)->apic_id;

	return apic_id < other ? -1 : apic_id > other;
}

/**
 * vnuma_topology_node - the node that the host told for a CPU
 * @topology: may be NULL
 * @cpu: a possible CPU
 *
 * Return: a node below nr_nodes, or NUMA_NO_NODE if the host does not name this
 * CPU, which then stays where it is.
 */
int vnuma_topology_node(const struct vnuma_topology *topology, int cpu)
{
	u32 apic_id = cpu_physical_id(cpu);
	const struct vnuma_tc_vcpu *vcpu;

	if (!topology || apic_id == BAD_APICID || apic_id >= MAX_LOCAL_APIC)
		return NUMA_NO_NODE;
	vcpu = bsearch(&apic_id, topology->vcpu, topology->nr_vcpus,
		       sizeof(*vcpu), compare_apic_id);
	return vcpu ? vcpu->node : NUMA_NO_NODE;
}

/**
 * vnuma_topology_is_unapplied - is a CPU elsewhere than where the host told?
 * @topology: may be NULL
 * @cpu: a possible CPU
 */
bool vnuma_topology_is_unapplied(const struct vnuma_topology *topology, int cpu)
{
	int node = vnuma_topology_node(topology, cpu);

	return node != NUMA_NO_NODE && node != cpu_to_node(cpu);
}

/**
 * vnuma_topology_count_unapplied - how many online CPUs are
 *
 * Call with cpus_read_lock() held or from a hotplug callback.
 */
int vnuma_topology_count_unapplied(void)
{
	int cpu, count = 0;

	for_each_online_cpu(cpu)
		count += vnuma_topology_is_unapplied(current_topology, cpu);
	return count;
}

static int node_after(const struct vnuma_topology *topology, int cpu)
{
	int node = vnuma_topology_node(topology, cpu);

	return node == NUMA_NO_NODE ? cpu_to_node(cpu) : node;
}

/* numa=fake= puts one CPU on several nodes, which no move keeps true. */
static int count_nodes_of(int cpu)
{
	int node, count = 0;

	for_each_online_node(node)
		count += cpumask_test_cpu(cpu, cpumask_of_node(node));
	return count;
}

static int check_online_cpu(const struct vnuma_topology *topology, int cpu,
			    struct vnuma_reason *why)
{
	int node = node_after(topology, cpu);
	int sibling;

	if (count_nodes_of(cpu) != 1)
		return vnuma_fail(why, -EOPNOTSUPP,
				  "CPU %d is on %d nodes of this guest (numa=fake?)",
				  cpu, count_nodes_of(cpu));
	for_each_cpu(sibling, topology_sibling_cpumask(cpu))
		if (node_after(topology, sibling) != node)
			return vnuma_fail(why, -EOPNOTSUPP,
					  "CPUs %d and %d are threads of one core but told on nodes %d and %d",
					  cpu, sibling, node,
					  node_after(topology, sibling));
	return 0;
}

/**
 * vnuma_topology_check - can this guest take a publication over?
 * @topology: checked by itself already
 * @why: filled if not
 *
 * All is checked before anything is changed, so that a refused publication leaves
 * the old topology whole. Call with cpus_read_lock() held.
 */
int vnuma_topology_check(const struct vnuma_topology *topology,
			 struct vnuma_reason *why)
{
	int cpu, err;

	for_each_possible_cpu(cpu) {
		int node = vnuma_topology_node(topology, cpu);

		if (node == NUMA_NO_NODE)
			continue;
		if (node >= nr_node_ids || !node_online(node))
			return vnuma_fail(why, -ENXIO,
					  "CPU %d (APIC id %u) is told on node %d, which this guest does not have online",
					  cpu, (u32)cpu_physical_id(cpu),
					  node);
		if (!cpu_online(cpu))
			continue;
		err = check_online_cpu(topology, cpu, why);
		if (err)
			return err;
	}
	return 0;
}

/**
 * vnuma_topology_set_current - what CPUs that come online later are told by
 * @topology: accepted publication; NULL: nothing is told any more
 *
 * Call with cpus_read_lock() held. Return: the one before, no longer in use.
 */
struct vnuma_topology *
vnuma_topology_set_current(struct vnuma_topology *topology)
{
	struct vnuma_topology *old = current_topology;

	current_topology = topology;
	return old;
}

/*
 * Before a CPU is brought up: the kernel then sets its masks, the vDSO's registers
 * and the scheduler's domains from the maps that are set here.
 */
static int prepare_cpu(unsigned int cpu)
{
	int node = vnuma_topology_node(current_topology, cpu);

	if (node == NUMA_NO_NODE || node == cpu_to_node(cpu))
		return 0;
	if (node >= nr_node_ids || !node_online(node)) {
		pr_warn("CPU %u stays on node %d: node %d is not online\n", cpu,
			cpu_to_node(cpu), node);
		return 0;
	}
	/* In safe mode the kernel is about to ask the firmware's table. */
	if (vnuma_mode == VNUMA_GD_MODE_FAST)
		vnuma_fast_set_offline(cpu, node);
	return 0;
}

/*
 * On the CPU, before tasks can run on it. One that slept on it all the time may
 * find it on another node now.
 */
static int came_online(unsigned int cpu)
{
	if (vnuma_mode == VNUMA_GD_MODE_SAFE)
		vnuma_safe_came_online(cpu,
				       vnuma_topology_node(current_topology,
							   cpu));
	vnuma_rseq_moved(cpumask_of(cpu));
	vnuma_device_refresh_cpus();
	return 0;
}

/**
 * vnuma_hotplug_init - follow CPU hotplug
 * @first: the current topology until a publication is accepted
 *
 * Two states: maps are set before a CPU comes up, and /dev/vnuma is told after.
 */
int vnuma_hotplug_init(struct vnuma_topology *first)
{
	int err;

	current_topology = first;
	err = cpuhp_setup_state_nocalls(CPUHP_BP_PREPARE_DYN, "vnuma:prepare",
					prepare_cpu, NULL);
	if (err < 0)
		return err;
	prepare_state = err;
	err = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, "vnuma:online",
					came_online, NULL);
	if (err < 0) {
		cpuhp_remove_state_nocalls(prepare_state);
		return err;
	}
	online_state = err;
	return 0;
}

/**
 * vnuma_hotplug_exit - follow no more; the kernel keeps the maps by itself
 *
 * Return: the current topology, no longer in use.
 */
struct vnuma_topology *vnuma_hotplug_exit(void)
{
	cpuhp_remove_state_nocalls(online_state);
	cpuhp_remove_state_nocalls(prepare_state);
	return current_topology;
}
