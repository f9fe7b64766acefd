// SPDX-License-Identifier: GPL-2.0
/*
 * Brings a publication of the host in line with this guest.
 *
 * The host names a node by its proximity domain, as ACPI and QEMU do. The kernel numbers nodes
 * as it finds their domains in the firmware's SRAT, and there CPUs come before memory
 * (acpi_map_pxm_to_node(), drivers/acpi/numa/srat.c): it calls that of the first CPU node 0.
 */
#include <linux/acpi.h>
#include <linux/bsearch.h>
#include <linux/cpu.h>
#include <linux/nodemask.h>
#include <linux/topology.h>
#include <asm/apic.h>
#include <asm/smp.h>

#include "vnuma.h"

/* Changed with cpus_read_lock() held, so stable in CPU hotplug callbacks. */
static struct vnuma_model *current_topology;

/* The number of a domain for which this guest has no node. No node has such a number. */
#define ABSENT(domain)	(MAX_NUMNODES + (domain))

/* Return: NUMA_NO_NODE if the firmware has not named this domain. */
static int node_of_domain(int domain)
{
#ifdef CONFIG_ACPI_NUMA
	return pxm_to_node(domain);
#else
	return NUMA_NO_NODE;
#endif
}

/*
 * There are none without an SRAT. All is on node 0 then, unless numa=fake= makes more. One that the
 * kernel has begun to read and then refused may leave some.
 */
static bool have_domains(void)
{
	int domain;

	for (domain = 0; domain < VNUMA_TC_MAX_NODES; domain++)
		if (node_of_domain(domain) != NUMA_NO_NODE)
			return true;
	return false;
}

/**
 * vnuma_topology_has_node - may a CPU be on a node of a topology?
 * @node: may also be NUMA_NO_NODE, or one that this guest does not have
 */
bool vnuma_topology_has_node(int node)
{
	return node >= 0 && node < nr_node_ids && node_online(node);
}

/** vnuma_topology_domain - what the host calls a node of a topology */
int vnuma_topology_domain(int node)
{
	int domain;

	if (node >= ABSENT(0))
		return node - ABSENT(0);
	for (domain = 0; domain < VNUMA_TC_MAX_NODES; domain++)
		if (node_of_domain(domain) == node)
			return domain;
	return node;
}

static u32 number_of(u32 domain)
{
	int node = node_of_domain(domain);

	return node < 0 || node >= VNUMA_TC_MAX_NODES ? ABSENT(domain) : node;
}

static void number_distances(struct vnuma_model *topology)
{
	/* Too large for a stack. */
	static u8 published[VNUMA_TC_MAX_NODES][VNUMA_TC_MAX_NODES];
	u32 from, to, a, b, nr = 1, nr_published = topology->nr_nodes;

	memcpy(published, topology->distance, sizeof(published));
	for (a = 0; a < VNUMA_TC_MAX_NODES; a++)
		for (b = 0; b < VNUMA_TC_MAX_NODES; b++)
			topology->distance[a][b] = node_distance(a, b);
	for (from = 0; from < nr_published; from++) {
		a = number_of(from);
		if (a >= ABSENT(0))
			continue;
		nr = max(nr, a + 1);
		for (to = 0; to < nr_published; to++) {
			b = number_of(to);
			if (b < ABSENT(0))
				topology->distance[a][b] = published[from][to];
		}
	}
	topology->nr_nodes = nr;
}

/**
 * vnuma_topology_number - give nodes the numbers that they have in this guest
 * @topology: as the host has published it, checked by itself already
 *
 * Call with update_mutex held. A node that this guest does not have gets a number that
 * vnuma_topology_check() refuses.
 */
void vnuma_topology_number(struct vnuma_model *topology)
{
	u32 i;

	if (!have_domains())
		return;
	number_distances(topology);
	for (i = 0; i < topology->nr_vcpus; i++)
		topology->vcpu[i].node = number_of(topology->vcpu[i].node);
	for (i = 0; i < topology->nr_devices; i++)
		topology->device[i].node = number_of(topology->device[i].node);
}

static int compare_apic_id(const void *key, const void *element)
{
	u32 apic_id = *(const u32 *)key;
	u32 other = ((const struct vnuma_tc_vcpu *)element)->apic_id;

	return apic_id < other ? -1 : apic_id > other;
}

/**
 * vnuma_topology_node - the node that the host published for a CPU
 * @topology: may be NULL
 * @cpu: a possible CPU
 *
 * Return: a node, or NUMA_NO_NODE if the host does not name this CPU, which then stays where
 * it is.
 */
int vnuma_topology_node(const struct vnuma_model *topology, int cpu)
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
 * vnuma_topology_is_unapplied - is a CPU not on its published node?
 * @topology: may be NULL
 * @cpu: a possible CPU
 */
bool vnuma_topology_is_unapplied(const struct vnuma_model *topology, int cpu)
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

static int node_after(const struct vnuma_model *topology, int cpu)
{
	int node = vnuma_topology_node(topology, cpu);

	return node == NUMA_NO_NODE ? cpu_to_node(cpu) : node;
}

/* numa=fake= puts one CPU on several nodes; a move could not keep that. */
static int count_nodes_of(int cpu)
{
	int node, count = 0;

	for_each_online_node(node)
		count += cpumask_test_cpu(cpu, cpumask_of_node(node));
	return count;
}

static int check_online_cpu(const struct vnuma_model *topology, int cpu,
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
					  "CPUs %d and %d are threads of one core but published on nodes %d and %d",
					  cpu, sibling, vnuma_topology_domain(node),
					  vnuma_topology_domain(node_after(topology, sibling)));
	return 0;
}

static int check_device(const struct vnuma_tc_device *device,
			struct vnuma_reason *why)
{
	if (vnuma_topology_has_node(device->node))
		return 0;
	return vnuma_fail(why, -ENXIO,
			  "device %04x:%02x:%02x.%u is published on node %d, which is not online in this guest",
			  device->segment, device->bus, device->devfn >> 3,
			  device->devfn & 7, vnuma_topology_domain(device->node));
}

/**
 * vnuma_topology_check - can this guest apply a publication?
 * @topology: of vnuma_topology_number()
 * @why: filled if not
 *
 * All is checked before anything is changed, so that a refused publication leaves
 * the old topology whole. Call with cpus_read_lock() held.
 */
int vnuma_topology_check(const struct vnuma_model *topology,
			 struct vnuma_reason *why)
{
	int cpu, err;
	u32 i;

	for (i = 0; i < topology->nr_devices; i++) {
		err = check_device(&topology->device[i], why);
		if (err)
			return err;
	}
	for_each_possible_cpu(cpu) {
		int node = vnuma_topology_node(topology, cpu);

		if (node == NUMA_NO_NODE)
			continue;
		if (!vnuma_topology_has_node(node))
			return vnuma_fail(why, -ENXIO,
					  "CPU %d (APIC id %u) is published on node %d, which is not online in this guest",
					  cpu, (u32)cpu_physical_id(cpu),
					  vnuma_topology_domain(node));
		if (!cpu_online(cpu))
			continue;
		err = check_online_cpu(topology, cpu, why);
		if (err)
			return err;
	}
	return 0;
}

/**
 * vnuma_topology_current - the topology for CPUs that come online, or NULL
 *
 * Call with cpus_read_lock() held or from a hotplug callback.
 */
const struct vnuma_model *vnuma_topology_current(void)
{
	return current_topology;
}

/**
 * vnuma_topology_set_current - set the topology for CPUs that come online later
 * @topology: accepted publication; NULL: none from now on
 *
 * Call with cpus_read_lock() held. Return: the one before, no longer in use.
 */
struct vnuma_model *
vnuma_topology_set_current(struct vnuma_model *topology)
{
	struct vnuma_model *old = current_topology;

	current_topology = topology;
	return old;
}
