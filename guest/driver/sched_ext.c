// SPDX-License-Identifier: GPL-2.0
/*
 * Schedulers of sched_ext while CPUs change their node.
 *
 * The kernel keeps two things of them by node, and finds a CPU's by the node that the CPU
 * is on now (kernel/sched/ext/):
 *
 *	idle masks	of schedulers that ask for them (SCX_OPS_BUILTIN_IDLE_PER_NODE). A CPU
 *			that moves while it is idle would stay in the mask of its old node. A
 *			search there takes it, clears it in the mask of its new node and searches
 *			again, for ever, with interrupts off (pick_idle_cpu_in_node()).
 *	global queues	one for each node, which is served by the CPUs of that node. Tasks that
 *			wait in it when its last CPU goes would wait until the kernel ends the
 *			scheduler, and so would those that may run on no other CPU than one that
 *			goes.
 *
 * So the maps are written while all CPUs are stopped, if there are such masks. A stopped CPU
 * is not idle, and puts itself into the mask of its node when it is again. Nor is a mask of
 * cores changed just then, which the kernel does with a read and a write.
 *
 * And the scheduler is bypassed meanwhile, as the kernel does during a suspend. All tasks
 * leave its queues and the global ones, and are queued anew afterwards.
 *
 * A CPU that is not online may be in a mask as well, from when it went.
 *
 * No scheduler comes or goes while the scheduler domains are rebuilt either. A CPU is in the
 * default root domain for a moment then, where the kernel adds up the bandwidth of deadline
 * servers at each rebuild and takes none back (rq_attach_root()). One that starts just then is
 * refused with -EBUSY, and one that ends warns and leaves CPUs without a fair server
 * (dl_server_attach_bw(), dl_server_swap_bw()).
 */
#include <linux/cpumask.h>
#include <linux/jump_label.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/rcupdate.h>

#include "vnuma.h"

#ifdef VNUMA_SCHED_EXT

/* As struct scx_idle_cpus of kernel/sched/ext/idle.c. */
struct vnuma_idle_masks {
	cpumask_var_t cpu;
	cpumask_var_t smt;
};

/* What is done while all CPUs are stopped. */
struct stopped {
	const struct cpumask *moved;
	int (*write)(void *data);
	void *data;
};

/**
 * vnuma_sched_ext_lock - until vnuma_sched_ext_unlock() no scheduler comes or goes
 *
 * Taken before cpus_read_lock(), as the kernel does.
 */
void vnuma_sched_ext_lock(void)
{
	if (vnuma_symbols.scx_enable_mutex)
		mutex_lock(vnuma_symbols.scx_enable_mutex);
}

/** vnuma_sched_ext_unlock - after vnuma_sched_ext_lock() */
void vnuma_sched_ext_unlock(void)
{
	if (vnuma_symbols.scx_enable_mutex)
		mutex_unlock(vnuma_symbols.scx_enable_mutex);
}

/**
 * vnuma_sched_ext_bypass - have the kernel schedule by itself, or no longer
 * @bypass: true before CPUs move, false afterwards
 *
 * Call with vnuma_sched_ext_lock() held from the one to the other.
 */
void vnuma_sched_ext_bypass(bool bypass)
{
	struct scx_sched *root;

	if (!vnuma_symbols.scx_enable_mutex || !vnuma_symbols.scx_root ||
	    !vnuma_symbols.scx_bypass)
		return;
	root = rcu_dereference_protected(*vnuma_symbols.scx_root,
					 lockdep_is_held(vnuma_symbols.scx_enable_mutex));
	if (root)
		vnuma_symbols.scx_bypass(root, bypass);
}

static bool has_masks(void)
{
	return vnuma_symbols.scx_builtin_idle_per_node &&
	       vnuma_symbols.scx_idle_node_masks &&
	       vnuma_symbols.stop_machine_cpuslocked &&
	       static_key_enabled(vnuma_symbols.scx_builtin_idle_per_node);
}

static int write_stopped(void *data)
{
	struct vnuma_idle_masks **masks = *vnuma_symbols.scx_idle_node_masks;
	const struct stopped *stopped = data;
	int node;

	for_each_node(node) {
		cpumask_andnot(masks[node]->cpu, masks[node]->cpu, stopped->moved);
		cpumask_andnot(masks[node]->smt, masks[node]->smt, stopped->moved);
	}
	return stopped->write ? stopped->write(stopped->data) : 0;
}

/**
 * vnuma_sched_ext_write - write the maps of CPUs so that idle masks stay right
 * @moved: the CPUs
 * @write: does so, without sleeping; returns 0
 * @data: for it
 *
 * Call with vnuma_sched_ext_lock() and cpus_read_lock() held, in this order.
 */
void vnuma_sched_ext_write(const struct cpumask *moved, int (*write)(void *data),
			   void *data)
{
	struct stopped stopped = { moved, write, data };

	if (has_masks())
		vnuma_symbols.stop_machine_cpuslocked(write_stopped, &stopped, NULL);
	else
		write(data);
}

/**
 * vnuma_sched_ext_forget - take a CPU that comes up out of all idle masks
 * @cpu: is in none of them until it has become idle
 *
 * From a hotplug callback before the CPU starts. No scheduler comes or goes then, as that
 * needs cpus_read_lock().
 */
void vnuma_sched_ext_forget(int cpu)
{
	struct stopped stopped = { .moved = cpumask_of(cpu) };

	if (has_masks())
		vnuma_symbols.stop_machine_cpuslocked(write_stopped, &stopped, NULL);
}

#else

void vnuma_sched_ext_lock(void)
{
}

void vnuma_sched_ext_unlock(void)
{
}

void vnuma_sched_ext_bypass(bool bypass)
{
}

void vnuma_sched_ext_write(const struct cpumask *moved, int (*write)(void *data),
			   void *data)
{
	write(data);
}

void vnuma_sched_ext_forget(int cpu)
{
}

#endif
