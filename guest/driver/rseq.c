// SPDX-License-Identifier: GPL-2.0
/*
 * rseq's node_id of the threads of a CPU that moved.
 *
 * Up to 6.18 the kernel writes the ids into a thread's rseq area after each context
 * switch. Since then a thread that stays on its CPU keeps what was written
 * last (rseq_sched_switch_event(), include/linux/rseq.h): the kernel does not expect a CPU's
 * node to change. So each thread of a moved CPU is marked: its ids have changed, as
 * __set_task_cpu() marks one that migrates.
 */
#include "compat.h"
#include "vnuma.h"

#if defined(CONFIG_RSEQ) && LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)

#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/smp.h>

/* Threads per IPI: bounds the time with interrupts off and the stack. */
#define BATCH_SIZE	64

struct batch {
	int nr;
	struct task_struct *threads[BATCH_SIZE];
};

/*
 * On the moved CPU with interrupts off. Its threads do not run now, so they do not clear the
 * flag at the same time on their way to user mode. One that migrates away is
 * marked by that.
 */
static void mark_batch(void *info)
{
	const struct batch *batch = info;
	int i;

	for (i = 0; i < batch->nr; i++) {
		struct task_struct *thread = batch->threads[i];

		if (thread == current)
			rseq_force_update();
		else if (task_cpu(thread) == smp_processor_id())
			rseq_sched_set_ids_changed(thread);
	}
}

static void flush(struct batch *batch, const struct cpumask *moved)
{
	if (batch->nr)
		on_each_cpu_mask(moved, mark_batch, batch, true);
	batch->nr = 0;
}

/**
 * vnuma_rseq_moved - have node_id written again
 * @moved: online CPUs whose node has changed already
 *
 * A thread that is created or that migrates meanwhile sees the new node anyway.
 */
void vnuma_rseq_moved(const struct cpumask *moved)
{
	struct task_struct *process, *thread;
	struct batch batch = { .nr = 0 };

	if (cpumask_empty(moved))
		return;
	rcu_read_lock();
	for_each_process_thread(process, thread) {
		if (!READ_ONCE(thread->rseq.event.has_rseq) ||
		    !cpumask_test_cpu(task_cpu(thread), moved))
			continue;
		batch.threads[batch.nr++] = thread;
		if (batch.nr == BATCH_SIZE)
			flush(&batch, moved);
	}
	flush(&batch, moved);
	rcu_read_unlock();
}

#else

void vnuma_rseq_moved(const struct cpumask *moved)
{
}

#endif
