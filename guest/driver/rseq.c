// SPDX-License-Identifier: GPL-2.0
/*
 * rseq's node_id of the threads of a CPU that moved.
 *
 * Up to 6.18 the kernel writes the ids into a thread's rseq area after each context
 * switch. Since then a thread that stays on its CPU keeps what was written
 * last (rseq_sched_switch_event(), include/linux/rseq.h): the kernel does not expect a CPU's
 * node to change. So each thread of a moved CPU is marked: its ids have changed, as
 * __set_task_cpu() marks one that migrates. Only a thread that runs needs its CPU for
 * that, and the interrupt that sets the CPU's own node has usually found it already.
 */
#include "compat.h"
#include "vnuma.h"

#if defined(CONFIG_RSEQ) && LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)

#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/smp.h>

/* The thread that the interrupt for the node found on this CPU; only compared. */
static DEFINE_PER_CPU(struct task_struct *, interrupted);

/* Before the interrupt is sent, and after the CPU's node is written. */
void vnuma_rseq_expect(int cpu)
{
	WRITE_ONCE(per_cpu(interrupted, cpu), NULL);
}

/* In that interrupt. */
void vnuma_rseq_switch(void)
{
	this_cpu_write(interrupted, current);
	/* Who sees it after vnuma_rseq_expect() has the new node written below. */
	smp_mb();
	rseq_force_update();
}

static bool was_interrupted(const struct task_struct *thread,
			    const struct cpumask *moved)
{
	int cpu;

	for_each_cpu(cpu, moved)
		if (READ_ONCE(per_cpu(interrupted, cpu)) == thread)
			return true;
	return false;
}

/* The kernel holds locks that keep a thread which does not run from running. */
static int mark_if_off_cpu(struct task_struct *thread, void *unused)
{
	if (READ_ONCE(thread->on_cpu))
		return false;
	rseq_sched_set_ids_changed(thread);
	return true;
}

static bool marked_off_cpu(struct task_struct *thread)
{
	return vnuma_symbols.task_call_func &&
	       vnuma_symbols.task_call_func(thread, mark_if_off_cpu, NULL);
}

/*
 * On the moved CPU with interrupts off. Its threads do not run now, so they do not clear the
 * flag at the same time on their way to user mode. One that migrates away is
 * marked by that.
 */
static void mark_running(void *info)
{
	const struct vnuma_rseq_running *running = info;
	int i;

	for (i = 0; i < running->nr; i++) {
		struct task_struct *thread = running->threads[i];

		if (thread == current)
			rseq_force_update();
		else if (task_cpu(thread) == smp_processor_id())
			rseq_sched_set_ids_changed(thread);
	}
}

/**
 * vnuma_rseq_finish - mark what ran while vnuma_rseq_mark() looked
 * @moved: as there; each has taken the interrupt or is idle
 * @running: from there; empty afterwards
 *
 * Usually the interrupt has found the thread, or it has left the CPU since. If not,
 * its CPU is interrupted once more, which takes long if the vCPU has just moved.
 */
void vnuma_rseq_finish(const struct cpumask *moved,
		       struct vnuma_rseq_running *running)
{
	int i, left = 0;

	for (i = 0; i < running->nr; i++) {
		struct task_struct *thread = running->threads[i];

		if (was_interrupted(thread, moved) || marked_off_cpu(thread))
			put_task_struct(thread);
		else
			running->threads[left++] = thread;
	}
	running->nr = left;
	if (left)
		on_each_cpu_mask(moved, mark_running, running, true);
	for (i = 0; i < left; i++)
		put_task_struct(running->threads[i]);
	running->nr = 0;
}

/**
 * vnuma_rseq_mark - have node_id written again
 * @moved: online CPUs whose node has changed already
 * @running: filled with threads that run now, for vnuma_rseq_finish()
 *
 * A thread that is created or that migrates meanwhile sees the new node anyway. A
 * thread that does not run is marked at once. So whoever is scheduled after this and
 * before the interrupt is marked, and the one that the interrupt finds is, too.
 */
void vnuma_rseq_mark(const struct cpumask *moved,
		     struct vnuma_rseq_running *running)
{
	struct task_struct *process, *thread;

	running->nr = 0;
	if (cpumask_empty(moved))
		return;
	rcu_read_lock();
	for_each_process_thread(process, thread) {
		if (!READ_ONCE(thread->rseq.event.has_rseq) ||
		    !cpumask_test_cpu(task_cpu(thread), moved) ||
		    marked_off_cpu(thread))
			continue;
		if (running->nr == VNUMA_RSEQ_RUNNING)
			vnuma_rseq_finish(moved, running);
		running->threads[running->nr++] = get_task_struct(thread);
	}
	rcu_read_unlock();
}

#else

void vnuma_rseq_expect(int cpu)
{
}

void vnuma_rseq_switch(void)
{
}

void vnuma_rseq_mark(const struct cpumask *moved,
		     struct vnuma_rseq_running *running)
{
}

void vnuma_rseq_finish(const struct cpumask *moved,
		       struct vnuma_rseq_running *running)
{
}

#endif

/** vnuma_rseq_came_online - mark the threads of a CPU before tasks run on it */
void vnuma_rseq_came_online(int cpu)
{
	struct vnuma_rseq_running running;

	vnuma_rseq_expect(cpu);
	vnuma_rseq_mark(cpumask_of(cpu), &running);
	vnuma_rseq_finish(cpumask_of(cpu), &running);
}
