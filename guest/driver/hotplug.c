// SPDX-License-Identifier: GPL-2.0
/*
 * CPUs that come online later.
 *
 * The current topology outlives the update that brought it: a CPU that comes
 * online, or that ACPI adds with the node of its _PXM, is put where the host
 * said last.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/nodemask.h>
#include <linux/topology.h>

#include "vnuma.h"

static int prepare_state;
static int online_state;

/*
 * Before a CPU is brought up: the kernel then sets its masks, the vDSO's registers
 * and the scheduler's domains from the maps that are set here.
 */
static int prepare_cpu(unsigned int cpu)
{
	int node = vnuma_topology_node(vnuma_topology_current(), cpu);

	/* In safe mode it comes up on the node of the firmware, in any case. */
	vnuma_sched_ext_forget(cpu);
	if (node == NUMA_NO_NODE || node == cpu_to_node(cpu))
		return 0;
	if (!vnuma_topology_has_node(node)) {
		pr_warn("CPU %u stays on node %d: it is published on node %d, which is not online in this guest\n",
			cpu, cpu_to_node(cpu), vnuma_topology_domain(node));
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
	int node = vnuma_topology_node(vnuma_topology_current(), cpu);

	if (vnuma_mode == VNUMA_GD_MODE_SAFE)
		vnuma_safe_came_online(cpu, node);
	vnuma_rseq_came_online(cpu);
	vnuma_device_refresh_cpus();
	return 0;
}

/**
 * vnuma_hotplug_init - follow CPU hotplug
 *
 * Two states: maps are set before a CPU comes up, and /dev/vnuma is updated after.
 */
int vnuma_hotplug_init(void)
{
	int err;

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

/** vnuma_hotplug_exit - follow no more; the kernel keeps the maps by itself */
void vnuma_hotplug_exit(void)
{
	cpuhp_remove_state_nocalls(online_state);
	cpuhp_remove_state_nocalls(prepare_state);
}
