// SPDX-License-Identifier: GPL-2.0
/*
 * For tests of vnuma.ko: does without pause what drivers do that spread their queues and
 * interrupts over CPUs, and counts what they would stumble over. One thread per CPU; what it
 * found is in /sys/module/vnuma_readers/parameters/.
 *
 * With rebuild_ms= it reads nothing, and has each rebuild of scheduler domains take longer.
 */
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/err.h>
#include <linux/kprobes.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/nodemask.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/topology.h>
#include <linux/version.h>
#include <linux/workqueue.h>

/* Written by several threads, and only ever compared with 0. */
static unsigned long rounds;
module_param(rounds, ulong, 0444);
MODULE_PARM_DESC(rounds, "rounds of all threads so far");

static unsigned long no_cpu;
module_param(no_cpu, ulong, 0444);
MODULE_PARM_DESC(no_cpu, "calls of cpumask_local_spread() that found no CPU");

static unsigned long no_hops;
module_param(no_hops, ulong, 0444);
MODULE_PARM_DESC(no_hops, "nodes with CPUs for which there were no masks of the scheduler");

static unsigned long lost_cpus;
module_param(lost_cpus, ulong, 0444);
MODULE_PARM_DESC(lost_cpus, "masks of the last hop without all CPUs");

static unsigned int slow_every = 256;
module_param(slow_every, uint, 0444);
MODULE_PARM_DESC(slow_every, "in each so manyth round a workqueue and a thread are made, too");

static unsigned int rebuild_ms;
module_param(rebuild_ms, uint, 0444);
MODULE_PARM_DESC(rebuild_ms, "instead, a rebuild of scheduler domains takes so much longer while CPUs are in none");

static struct task_struct **threads;

static void spread(int node)
{
	unsigned int i, nr = num_online_cpus();

	for (i = 0; i < nr; i++)
		if (cpumask_local_spread(i, node) >= nr_cpu_ids)
			no_cpu++;
}

/* As for_each_numa_hop_mask() does it. CPU hotplug has other rules, and is not looked for. */
static void hop(int node)
{
#if KERNEL_VERSION(6, 3, 0) <= LINUX_VERSION_CODE
	const struct cpumask *mask, *last = NULL;
	unsigned int hops;

	rcu_read_lock();
	for (hops = 0;; hops++) {
		mask = sched_numa_hop_mask(node, hops);
		if (IS_ERR_OR_NULL(mask))
			break;
		last = mask;
	}
	if (!last && node_state(node, N_CPU))
		no_hops++;
	if (last && node_state(node, N_CPU) &&
	    !cpumask_subset(cpu_online_mask, last))
		lost_cpus++;
	rcu_read_unlock();
#endif
}

static int nothing(void *unused)
{
	return 0;
}

/* What drivers do when they are bound, and which reads the same maps. */
static void slow(int node)
{
	struct workqueue_struct *queue;
	struct task_struct *thread;

	queue = alloc_workqueue("vnuma-readers", WQ_UNBOUND, 0);
	if (queue)
		destroy_workqueue(queue);
	thread = kthread_create_on_node(nothing, NULL, node, "vnuma-readers");
	if (!IS_ERR(thread))
		kthread_stop(thread);
}

static int read_maps(void *unused)
{
	unsigned int round = 0;
	int node;

	while (!kthread_should_stop()) {
		cpus_read_lock();
		for_each_online_node(node) {
			spread(node);
			hop(node);
		}
		cpus_read_unlock();
		spread(NUMA_NO_NODE);
		if (++round % slow_every == 0)
			slow(first_online_node);
		rounds++;
		cond_resched();
	}
	return 0;
}

static void stop(void)
{
	int i;

	for (i = 0; i < nr_cpu_ids; i++)
		if (threads[i])
			kthread_stop(threads[i]);
	kfree(threads);
}

static int hold_up(struct kprobe *probe, struct pt_regs *regs)
{
	mdelay(rebuild_ms);
	return 0;
}

/* Its CPUs have left their old domains, and are in the default root domain. */
static struct kprobe rebuild = {
	.symbol_name = "build_sched_domains",
	.pre_handler = hold_up,
};

static int __init start(void)
{
	struct task_struct *thread;
	int cpu;

	if (rebuild_ms)
		return register_kprobe(&rebuild);
	threads = kcalloc(nr_cpu_ids, sizeof(*threads), GFP_KERNEL);
	if (!threads)
		return -ENOMEM;
	for_each_online_cpu(cpu) {
		thread = kthread_run(read_maps, NULL, "vnuma-readers/%d", cpu);
		if (IS_ERR(thread)) {
			stop();
			return PTR_ERR(thread);
		}
		/* What it is for must not starve the test itself. */
		set_user_nice(thread, 10);
		threads[cpu] = thread;
	}
	return 0;
}

static void __exit end(void)
{
	if (rebuild_ms)
		unregister_kprobe(&rebuild);
	else
		stop();
}

module_init(start);
module_exit(end);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("reads the maps of CPUs and nodes without pause");
