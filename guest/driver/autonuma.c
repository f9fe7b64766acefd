// SPDX-License-Identifier: GPL-2.0
/*
 * AutoNUMA is told that CPUs have moved.
 *
 * It takes pages to the threads that use them, but looks at the memory of a process the less often
 * the longer it has found nothing to do: up to a minute apart, and not at mappings that no thread
 * was seen to use lately. Nothing tells it that a CPU is on another node now. So the processes
 * that have threads on such CPUs become new to it, in the kernel's own terms (task_numa_work(),
 * kernel/sched/fair.c):
 *
 *	thread		no period yet: the next tick looks, and starts with the shortest one
 *	address space	the next look is due, and begins at its start
 *	mapping		looked at whoever uses it, as twice after it was made
 *
 * From there on the kernel does what it does for a new process, at its own pace and with its own
 * limits: scan_size_mb each scan_period_min_ms. Nothing has to be undone. Where AutoNUMA is off,
 * the fields have no meaning.
 *
 * The kernel writes these fields without locks, as hints. The exception are those of mappings,
 * which mmap_lock protects.
 */
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "vnuma.h"

static bool autonuma = true;
module_param(autonuma, bool, 0644);
MODULE_PARM_DESC(autonuma, "tell AutoNUMA to look at memory of threads whose CPU moved (default)");

#ifdef CONFIG_NUMA_BALANCING

/* Changes that follow each other sooner are told together: a look costs page faults. */
#define LEAST_MS	1000
/*
 * A look reaches scan_size_mb, and a page for which its node had no room just then stays until
 * the next one. So it is told so many times after a change.
 */
#define LOOKS	3
/* A process that is changing its mappings all the time is looked at without them. */
#define LOCK_TRIES	100

/**
 * struct told - an address space that has threads on a CPU that moved
 * @list: of those that are told together
 * @mm: held, but may be empty by now
 * @anew: the look begins at its start
 */
struct told {
	struct list_head list;
	struct mm_struct *mm;
	bool anew;
};

static void tell(struct work_struct *work);
static DECLARE_DELAYED_WORK(tell_work, tell);

/* Protects the following. Taken with interrupts off, which is why it is a raw one (PREEMPT_RT). */
static DEFINE_RAW_SPINLOCK(moved_lock);
/* CPUs that moved since it was told last, and before that by how often it was told. */
static struct cpumask moved[LOOKS];
static unsigned long last_told;
static bool was_told;
/* Address spaces so far. Written by the work only. */
static u64 count;

/* With RCU. */
static bool is_affected(struct task_struct *process, const struct cpumask *cpus)
{
	struct task_struct *thread;

	if (process->flags & PF_KTHREAD)
		return false;
	for_each_thread(process, thread)
		if (cpumask_test_cpu(task_cpu(thread), cpus))
			return true;
	return false;
}

/* The leader has none once it has ended, and other threads may go on then. With RCU. */
static struct mm_struct *grab_mm(struct task_struct *process)
{
	struct mm_struct *mm = NULL;
	struct task_struct *thread;

	for_each_thread(process, thread) {
		task_lock(thread);
		mm = thread->mm;
		if (mm)
			mmgrab(mm);
		task_unlock(thread);
		if (mm)
			break;
	}
	return mm;
}

/* Without memory for it the process is left to AutoNUMA's own pace. */
static void add(struct list_head *list, struct task_struct *process, bool anew)
{
	struct told *told = kmalloc(sizeof(*told), GFP_ATOMIC | __GFP_NOWARN);

	if (!told)
		return;
	told->anew = anew;
	told->mm = grab_mm(process);
	if (told->mm)
		list_add_tail(&told->list, list);
	else
		kfree(told);
}

/* All of them: whichever comes first looks for the others, too. */
static void tell_threads(struct task_struct *process)
{
	struct task_struct *thread;

	for_each_thread(process, thread) {
		u64 ran = READ_ONCE(thread->se.sum_exec_runtime);

		/* The time until it may look again, after a look that took long. */
		if (READ_ONCE(thread->node_stamp) > ran)
			WRITE_ONCE(thread->node_stamp, ran);
		WRITE_ONCE(thread->numa_scan_period, 0);
	}
}

static void tell_mappings(struct mm_struct *mm)
{
#if KERNEL_VERSION(6, 12, 0) <= LINUX_VERSION_CODE
	int sequence = READ_ONCE(mm->numa_scan_seq);
	struct vm_area_struct *vma;

	VMA_ITERATOR(vmi, mm, 0);

	for_each_vma(vmi, vma) {
		struct vma_numab_state *state = READ_ONCE(vma->numab_state);

		if (!state)
			continue;
		WRITE_ONCE(state->next_scan, jiffies);
		WRITE_ONCE(state->start_scan_seq, sequence);
		WRITE_ONCE(state->prev_scan_seq, sequence - 1);
	}
#endif
}

static void tell_address_space(struct mm_struct *mm, bool anew)
{
	int try;

	for (try = 0; try < LOCK_TRIES; try++) {
		if (mmap_read_trylock(mm)) {
			tell_mappings(mm);
			mmap_read_unlock(mm);
			break;
		}
		usleep_range(1000, 2000);
	}
	if (anew)
		WRITE_ONCE(mm->numa_scan_offset, 0);
	/* 0 means: never looked at. */
	WRITE_ONCE(mm->numa_next_scan, jiffies ?: 1);
	count++;
}

/* Which CPUs moved since then, and which before that. Is it told of any of them once more? */
static bool take(struct cpumask *first, struct cpumask *again)
{
	bool more = false;
	int look;

	raw_spin_lock_irq(&moved_lock);
	cpumask_copy(first, &moved[0]);
	cpumask_clear(again);
	for (look = LOOKS - 1; look > 0; look--) {
		cpumask_or(again, again, &moved[look]);
		cpumask_copy(&moved[look], &moved[look - 1]);
		more |= !cpumask_empty(&moved[look]);
	}
	cpumask_clear(&moved[0]);
	last_told = jiffies;
	was_told = true;
	raw_spin_unlock_irq(&moved_lock);
	return more;
}

static void tell(struct work_struct *work)
{
	static struct cpumask first, again;	/* of the work alone */
	struct task_struct *process;
	struct told *told, *next;
	LIST_HEAD(list);

	if (take(&first, &again))
		queue_delayed_work(system_long_wq, &tell_work, msecs_to_jiffies(LEAST_MS));
	rcu_read_lock();
	for_each_process(process) {
		bool anew = is_affected(process, &first);

		if (!anew && !is_affected(process, &again))
			continue;
		add(&list, process, anew);
		tell_threads(process);
	}
	rcu_read_unlock();
	list_for_each_entry_safe(told, next, &list, list) {
		if (mmget_not_zero(told->mm)) {
			tell_address_space(told->mm, told->anew);
			mmput(told->mm);
		}
		mmdrop(told->mm);
		kfree(told);
		cond_resched();
	}
}

/** vnuma_autonuma_moved - a CPU is on another node than before; may be called with any lock */
void vnuma_autonuma_moved(int cpu)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&moved_lock, flags);
	cpumask_set_cpu(cpu, &moved[0]);
	raw_spin_unlock_irqrestore(&moved_lock, flags);
}

/** vnuma_autonuma_tell - all that has moved agrees with the host */
void vnuma_autonuma_tell(void)
{
	unsigned long due = 0, now = jiffies;

	raw_spin_lock_irq(&moved_lock);
	if (!READ_ONCE(autonuma))
		memset(moved, 0, sizeof(moved));
	if (was_told && time_before(now, last_told + msecs_to_jiffies(LEAST_MS)))
		due = last_told + msecs_to_jiffies(LEAST_MS) - now;
	if (!cpumask_empty(&moved[0]))
		queue_delayed_work(system_long_wq, &tell_work, due);
	raw_spin_unlock_irq(&moved_lock);
}

/** vnuma_autonuma_count - address spaces that AutoNUMA was told to look at so far */
u64 vnuma_autonuma_count(void)
{
	return READ_ONCE(count);
}

/** vnuma_autonuma_exit - nothing is told any more */
void vnuma_autonuma_exit(void)
{
	cancel_delayed_work_sync(&tell_work);
}

#else

void vnuma_autonuma_moved(int cpu)
{
}

void vnuma_autonuma_tell(void)
{
}

u64 vnuma_autonuma_count(void)
{
	return 0;
}

void vnuma_autonuma_exit(void)
{
}

#endif /* CONFIG_NUMA_BALANCING */
