// SPDX-License-Identifier: GPL-2.0
/*
 * cpumask_local_spread() of kernels up to 6.2, replaced.
 *
 * It reads a node's mask three times and calls BUG() if no CPU is left for it after the
 * third (lib/cpumask.c). A CPU that moves to that node in between, or any that goes
 * offline, is enough. It takes no lock, and may be preempted in between (preempt=full),
 * so that nothing that is done to the mask can prevent that. So its callers get another
 * one here, by a kprobe: functions of lib/ have no place for ftrace. Since 6.3 it reads
 * the scheduler's masks (levels.c).
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/version.h>

#include "vnuma.h"

#ifdef VNUMA_SPREAD

#include <linux/cpumask.h>
#include <linux/kprobes.h>
#include <linux/printk.h>
#include <linux/ptrace.h>
#include <linux/rcupdate.h>
#include <linux/topology.h>

/*
 * CPUs of the node first, then the others. Where the mask has changed between the two loops
 * there may be no @i-th one of the others any more: any online one is as good then.
 */
static unsigned int local_spread(unsigned int i, int node)
{
	const struct cpumask *local = cpu_all_mask;
	unsigned int cpu, last = 0;

	if (node != NUMA_NO_NODE)
		local = cpumask_of_node(node);
	i %= num_online_cpus();
	for_each_cpu_and(cpu, cpu_online_mask, local) {
		last = cpu;
		if (!i--)
			return cpu;
	}
	for_each_cpu(cpu, cpu_online_mask) {
		if (cpumask_test_cpu(cpu, local))
			continue;
		last = cpu;
		if (!i--)
			return cpu;
	}
	return last;
}

/* vnuma_spread_init() sees by it whether the probe works. */
static bool was_replaced;

static int replace(struct kprobe *probe, struct pt_regs *regs)
{
	WRITE_ONCE(was_replaced, true);
	instruction_pointer_set(regs, (unsigned long)local_spread);
	return 1;
}

/* A probe that has this is not optimized to a jump, which would ignore where replace() leads. */
static void ignore(struct kprobe *probe, struct pt_regs *regs,
		   unsigned long flags)
{
}

static struct kprobe replacement = {
	.symbol_name = "cpumask_local_spread",
	.pre_handler = replace,
	.post_handler = ignore,
};

static bool registered;

/** vnuma_spread_exit - no CPU moves any more */
void vnuma_spread_exit(void)
{
	if (!registered)
		return;
	registered = false;
	unregister_kprobe(&replacement);
	/* A task that was preempted in it. */
	synchronize_rcu_tasks();
}

/** vnuma_spread_init - before any CPU moves */
int vnuma_spread_init(void)
{
	int err = register_kprobe(&replacement);

	if (!err) {
		registered = true;
		/* Probes can be off as a whole (debugfs, kprobes/enabled). */
		cpumask_local_spread(0, NUMA_NO_NODE);
		if (!READ_ONCE(was_replaced)) {
			vnuma_spread_exit();
			err = -EOPNOTSUPP;
		}
	}
	if (err)
		pr_warn("cpumask_local_spread() of this kernel fails when CPUs move, and cannot be replaced (%d)\n",
			err);
	else
		/* A task that was preempted in the function that is replaced. */
		synchronize_rcu_tasks();
	return err;
}

#endif /* VNUMA_SPREAD */
