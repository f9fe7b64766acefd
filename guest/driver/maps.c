// SPDX-License-Identifier: GPL-2.0
/*
 * The maps from a CPU to its node and back that a module can write without a symbol
 * that is not exported. Both modes do: fast mode in between its other steps, safe
 * mode while the CPU comes up and the kernel takes those steps itself.
 */
#include <linux/cpumask.h>
#include <linux/rseq.h>
#include <linux/smp.h>
#include <linux/topology.h>
#include <asm/desc.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/segment.h>

#include "compat.h"
#include "vnuma.h"

/* setup_getcpu() of arch/x86/kernel/cpu/common.c, which is not callable. */
static void set_getcpu(int cpu, int node)
{
	unsigned long cpudata = vdso_encode_cpunode(cpu, node);
	struct desc_struct desc = {
		.limit0 = cpudata,
		.limit1 = cpudata >> 16,
		.type = 5,	/* read-only data, expand down, accessed */
		.dpl = 3,	/* visible to user code */
		.s = 1,		/* not a system segment */
		.p = 1,
		.d = 1,
	};

	if (boot_cpu_has(X86_FEATURE_RDTSCP) || boot_cpu_has(X86_FEATURE_RDPID))
		wrmsrq(MSR_TSC_AUX, cpudata);
	write_gdt_entry(get_cpu_gdt_rw(cpu), GDT_ENTRY_CPUNODE, &desc,
			DESCTYPE_S);
}

/**
 * vnuma_maps_write - put a CPU on a node, in the maps that are memory
 * @move: @to may be @from, which then is only made sure of
 *
 * From any CPU. Code that runs on the moved one may find another node from one
 * instruction to the next, as code that can be interrupted or migrated does anyway.
 */
void vnuma_maps_write(const struct vnuma_move *move)
{
	cpumask_set_cpu(move->cpu, node_to_cpumask_map[move->to]);
	/* The CPU is always among those of the node that it is said to be on. */
	smp_wmb();
	per_cpu(x86_cpu_to_node_map, move->cpu) = move->to;
	set_cpu_numa_node(move->cpu, move->to);
	if (move->from != move->to) {
		/* As above. */
		smp_wmb();
		cpumask_clear_cpu(move->cpu, node_to_cpumask_map[move->from]);
		vnuma_autonuma_moved(move->cpu);
	}
}

/**
 * vnuma_maps_switch - take over the node that vnuma_maps_write() wrote
 *
 * On the CPU that moves, with interrupts off.
 */
void vnuma_maps_switch(void)
{
	int cpu = smp_processor_id();

	set_getcpu(cpu, cpu_to_node(cpu));
	/*
	 * rseq's node_id is written on the way to user mode after a preemption only;
	 * the running task shall not have to wait for one. The others: rseq.c.
	 */
	rseq_force_update();
}
