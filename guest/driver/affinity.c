// SPDX-License-Identifier: GPL-2.0
/*
 * Affinities of tasks around taking a CPU offline and online.
 *
 * The kernel gives a task that may run on no other CPU all of them
 * (select_fallback_rq(), kernel/sched/core.c) and keeps it so. Here the affinities are
 * saved before and restored after. What the task or somebody else asks for meanwhile
 * wins; task_struct::user_cpus_ptr shows that:
 *
 *	from 6.2	what sched_setaffinity() was asked for. Widening frees it, so a
 *			widened task that has one was given it later. It is restored, too.
 *	before		x86 has no use for it, but sched_setaffinity() frees it. So it is
 *			set when the affinity is saved: one that is gone was freed by a
 *			later call.
 *
 * It is written with pi_lock held, by the kernel as well as here.
 *
 * Cpusets of cgroup v2 are no matter: the kernel keeps what they were configured to and
 * applies it again itself when the CPU is back.
 */
#include <linux/cgroup.h>
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/hash.h>
#include <linux/hashtable.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "vnuma.h"

#if KERNEL_VERSION(6, 2, 0) > LINUX_VERSION_CODE
#define IS_MARKED_BY_US	true
#else
#define IS_MARKED_BY_US	false
#endif

/* Tasks that fork faster than they are restored; what is left stays widened. */
#define PASSES	8

/*
 * A child is seen at the end of its fork() and has what its creator had at the start, which may be
 * the widened affinity long after the creator has its own again. So it is looked for again, after
 * a time that doubles from the first to the last of these.
 */
#define FIRST_LOOK_MS	20
#define LAST_LOOK_MS	2560
/* Longer than all delays together: bounds what is kept during moves that never pause. */
#define KEPT_NS		(10 * NSEC_PER_SEC)

/* Its start is noted a moment before it can be seen. */
#define START_SLACK_NS	(20 * NSEC_PER_MSEC)

/*
 * Records of a process that are looked at for one task of it, the latest first. A program
 * decides how many there are; what is not found stays widened.
 */
#define MOST_RECORDS	1024

#define RECORD_BITS	10

/**
 * struct saved - the affinity of a task
 * @list: in the order in which they were saved
 * @of_task: by task
 * @of_process: by process
 * @task: held
 * @since: boot time when it was saved
 * @judged: @lost is known
 * @lost: it was widened, and nobody set another one since
 * @restored: with that
 * @had_user: @user is what the task had asked for
 * @mask: where it was allowed to run
 * @user: as user_cpus_ptr
 * @widened: what the kernel gave instead
 */
struct saved {
	struct list_head list;
	struct hlist_node of_task;
	struct hlist_node of_process;
	struct task_struct *task;
	u64 since;
	bool judged;
	bool lost;
	bool restored;
	bool had_user;
	struct cpumask *mask;
	struct cpumask *user;
	struct cpumask *widened;
};

/*
 * Of the last CPU; of those before what was lost. Used by one thread at a time: the works of
 * the queue, and after them the unloading.
 */
static LIST_HEAD(records);
/* The same by task and by process, the latest first. */
static DEFINE_HASHTABLE(by_task, RECORD_BITS);
static DEFINE_HASHTABLE(by_process, RECORD_BITS);
static unsigned int next_look_ms;
static struct workqueue_struct *look_queue;

static void look(struct work_struct *work);
static DECLARE_DELAYED_WORK(look_work, look);

/* As alloc_user_cpus_ptr(): the kernel may free it by RCU. */
static struct cpumask *new_user_mask(const struct cpumask *mask, gfp_t gfp)
{
	struct cpumask *user;

	user = kmalloc(max_t(size_t, cpumask_size(), sizeof(struct rcu_head)),
		       gfp);
	if (user)
		cpumask_copy(user, mask);
	return user;
}

static struct saved *new_saved(struct task_struct *task)
{
	struct saved *saved;

	saved = kzalloc(sizeof(*saved) + 3 * cpumask_size(),
			GFP_ATOMIC | __GFP_NOWARN);
	if (!saved)
		return NULL;
	saved->mask = (void *)(saved + 1);
	saved->user = (void *)saved->mask + cpumask_size();
	saved->widened = (void *)saved->user + cpumask_size();
	saved->task = get_task_struct(task);
	saved->since = ktime_get_boottime_ns();
	return saved;
}

static unsigned long key_of_task(const struct task_struct *task)
{
	return (unsigned long)task;
}

static void add(struct saved *saved)
{
	list_add_tail(&saved->list, &records);
	hash_add(by_task, &saved->of_task, key_of_task(saved->task));
	hash_add(by_process, &saved->of_process, saved->task->tgid);
}

/* Kernel threads that are bound to a CPU are the kernel's own matter. */
static bool can_lose(const struct task_struct *task)
{
	return !(task->flags & (PF_NO_SETAFFINITY | PF_EXITING)) &&
	       !cpumask_subset(cpu_possible_mask, &task->cpus_mask);
}

static int save(struct task_struct *task)
{
	struct saved *saved = new_saved(task);
	struct cpumask *mark = NULL;
	unsigned long flags;
	int err = 0;

	if (!saved)
		return -ENOMEM;
	add(saved);
	if (IS_MARKED_BY_US) {
		mark = new_user_mask(&task->cpus_mask,
				     GFP_ATOMIC | __GFP_NOWARN);
		err = mark ? 0 : -ENOMEM;
	}
	raw_spin_lock_irqsave(&task->pi_lock, flags);
	cpumask_copy(saved->mask, &task->cpus_mask);
	if (task->user_cpus_ptr) {
		saved->had_user = true;
		cpumask_copy(saved->user, task->user_cpus_ptr);
	} else {
		swap(task->user_cpus_ptr, mark);
	}
	raw_spin_unlock_irqrestore(&task->pi_lock, flags);
	kfree(mark);
	return err;
}

static void drop(struct saved *saved)
{
	put_task_struct(saved->task);
	list_del(&saved->list);
	hash_del(&saved->of_task);
	hash_del(&saved->of_process);
	kfree(saved);
	cond_resched();
}

/**
 * vnuma_affinities_save - before a CPU is taken offline
 *
 * vnuma_affinities_restore() must follow, also after an error.
 */
int vnuma_affinities_save(void)
{
	struct task_struct *process, *thread;
	struct saved *saved, *next;
	u64 now = ktime_get_boottime_ns();
	int err = 0;

	list_for_each_entry_safe(saved, next, &records, list)
		if (!saved->lost || saved->since + KEPT_NS < now)
			drop(saved);
	rcu_read_lock();
	for_each_process_thread(process, thread) {
		if (!can_lose(thread))
			continue;
		err = save(thread);
		if (err)
			goto unlock;
	}
unlock:
	rcu_read_unlock();
	return err;
}

/* With pi_lock held. Has nobody set the affinity since it was saved? */
static bool is_untouched(const struct task_struct *task)
{
	return IS_MARKED_BY_US == !!task->user_cpus_ptr;
}

/*
 * A task is widened only if it may run on no other CPU. If it could when it was saved,
 * somebody had set it to just this CPU since then.
 */
static void mend(struct saved *saved, int cpu)
{
	int other;

	for_each_cpu_and(other, saved->mask, cpu_active_mask) {
		if (other == cpu)
			continue;
		cpumask_copy(saved->mask, cpumask_of(cpu));
		cpumask_copy(saved->user, cpumask_of(cpu));
		return;
	}
}

static void judge(struct saved *saved, int cpu)
{
	struct task_struct *task = saved->task;
	unsigned long flags;

	raw_spin_lock_irqsave(&task->pi_lock, flags);
	saved->lost = is_untouched(task) &&
		      !cpumask_equal(saved->mask, &task->cpus_mask) &&
		      (saved->had_user ||
		       cpumask_subset(cpu_possible_mask, &task->cpus_mask));
	raw_spin_unlock_irqrestore(&task->pi_lock, flags);
	saved->judged = true;
	if (saved->lost && saved->had_user && !IS_MARKED_BY_US)
		mend(saved, cpu);
}

/* Did a task begin when this affinity was saved, so that it may have what was widened? */
static bool may_be_from(const struct task_struct *task, const struct saved *saved)
{
	return task->start_boottime + START_SLACK_NS >= saved->since &&
	       (saved->lost || saved->had_user || IS_MARKED_BY_US);
}

/*
 * Whose affinity a task has that was created since, NULL if nobody's. The creator may have
 * slept and so lost nothing itself. A task with a copy of our mark had the creator's affinity
 * when it began. The last record is what the creator had last.
 */
static const struct saved *find_creator(struct task_struct *task)
{
	const struct task_struct *parent = rcu_dereference(task->real_parent);
	const struct saved *saved;
	int left = MOST_RECORDS;

	if (thread_group_leader(task)) {
		hash_for_each_possible(by_task, saved, of_task, key_of_task(parent))
			if (saved->task == parent && may_be_from(task, saved))
				return saved;
		return NULL;
	}
	hash_for_each_possible(by_process, saved, of_process, task->tgid) {
		if (saved->task->tgid != task->tgid)
			continue;
		if (may_be_from(task, saved))
			return saved;
		if (!--left)
			break;
	}
	return NULL;
}

static bool is_recorded(const struct task_struct *task)
{
	const struct saved *saved;

	hash_for_each_possible(by_task, saved, of_task, key_of_task(task))
		if (saved->task == task)
			return true;
	return false;
}

/*
 * Tasks that inherited all CPUs, or an affinity that they have lost since. Those that began
 * before the first record are most of all, and passed over at once.
 */
static bool add_children(void)
{
	struct task_struct *process, *thread;
	const struct saved *creator;
	struct saved *saved;
	bool added = false;
	u64 first;

	if (list_empty(&records))
		return false;
	first = list_first_entry(&records, struct saved, list)->since;
	rcu_read_lock();
	for_each_process_thread(process, thread) {
		if (thread->start_boottime + START_SLACK_NS < first ||
		    !is_untouched(thread) ||
		    !cpumask_subset(cpu_possible_mask, &thread->cpus_mask))
			continue;
		creator = find_creator(thread);
		if (!creator || is_recorded(thread))
			continue;
		saved = new_saved(thread);
		if (!saved)
			break;
		saved->judged = true;
		saved->lost = true;
		saved->had_user = creator->had_user;
		cpumask_copy(saved->mask, creator->mask);
		cpumask_copy(saved->user, creator->user);
		add(saved);
		added = true;
	}
	rcu_read_unlock();
	return added;
}

static void restore(struct saved *saved)
{
	struct task_struct *task = saved->task;
	struct cpumask *user = NULL, *mine = NULL;
	unsigned long flags;
	bool later;

	if (saved->restored || !saved->lost)
		return;
	saved->restored = true;
	if (!IS_MARKED_BY_US && saved->had_user)
		user = new_user_mask(saved->user, GFP_KERNEL);
	raw_spin_lock_irqsave(&task->pi_lock, flags);
	later = !is_untouched(task);
	if (!later && user) {
		mine = user;
		swap(task->user_cpus_ptr, user);
	}
	cpumask_copy(saved->widened, &task->cpus_mask);
	raw_spin_unlock_irqrestore(&task->pi_lock, flags);
	kfree(user);
	if (later)
		return;
	set_cpus_allowed_ptr(task, saved->mask);

	/* A call in between was narrowed to what was restored. */
	raw_spin_lock_irqsave(&task->pi_lock, flags);
	later = !IS_MARKED_BY_US && task->user_cpus_ptr != mine;
	raw_spin_unlock_irqrestore(&task->pi_lock, flags);
	if (later)
		set_cpus_allowed_ptr(task, saved->widened);
}

static bool is_in_root_cpuset(struct task_struct *task)
{
#ifdef CONFIG_CPUSETS
	return !task_css(task, cpuset_cgrp_id)->parent;
#else
	return true;
#endif
}

/* With pi_lock held. Was it refused the CPU because that was offline? */
static bool lacks(struct task_struct *task, int cpu)
{
	return task->user_cpus_ptr &&
	       cpumask_test_cpu(cpu, task->user_cpus_ptr) &&
	       !cpumask_test_cpu(cpu, &task->cpus_mask) &&
	       is_in_root_cpuset(task);
}

/*
 * Tasks that asked for @cpu among others while it was offline. The kernel gives it to
 * those in cpusets itself, and before 6.2 nothing records what was asked for.
 */
static void give_what_was_asked(int cpu)
{
	struct task_struct *process, *thread;
	struct saved *saved, *next;
	unsigned long flags;
	LIST_HEAD(list);
	bool is_due;

	if (IS_MARKED_BY_US || !cpu_active(cpu))
		return;
	rcu_read_lock();
	for_each_process_thread(process, thread) {
		raw_spin_lock_irqsave(&thread->pi_lock, flags);
		is_due = lacks(thread, cpu);
		raw_spin_unlock_irqrestore(&thread->pi_lock, flags);
		/* Without that lock: PREEMPT_RT allows no allocation with it. */
		saved = is_due ? new_saved(thread) : NULL;
		if (saved)
			list_add_tail(&saved->list, &list);
	}
	rcu_read_unlock();
	list_for_each_entry_safe(saved, next, &list, list) {
		set_cpus_allowed_ptr(saved->task, cpu_possible_mask);
		drop(saved);
	}
}

/* Children have copies. */
static void remove_marks(void)
{
	struct task_struct *process, *thread;
	struct cpumask *mark;
	unsigned long flags;

	rcu_read_lock();
	for_each_process_thread(process, thread) {
		mark = NULL;
		raw_spin_lock_irqsave(&thread->pi_lock, flags);
		swap(thread->user_cpus_ptr, mark);
		raw_spin_unlock_irqrestore(&thread->pi_lock, flags);
		kfree(mark);
	}
	rcu_read_unlock();
}

static void restore_all(void)
{
	struct saved *saved;
	int pass = 0;

	do {
		list_for_each_entry(saved, &records, list) {
			restore(saved);
			cond_resched();
		}
	} while (add_children() && ++pass < PASSES);
}

/**
 * vnuma_affinities_restore - when @cpu is online again, or stays offline
 * @cpu: the CPU
 */
void vnuma_affinities_restore(int cpu)
{
	struct saved *saved;

	list_for_each_entry(saved, &records, list) {
		if (!saved->judged)
			judge(saved, cpu);
		cond_resched();
	}
	restore_all();
	give_what_was_asked(cpu);
}

static void forget_all(void)
{
	struct saved *saved, *next;

	list_for_each_entry_safe(saved, next, &records, list)
		drop(saved);
	if (IS_MARKED_BY_US)
		remove_marks();
}

/* Return: whether another look is due. */
static bool look_again(void)
{
	restore_all();
	next_look_ms *= 2;
	if (next_look_ms <= LAST_LOOK_MS)
		return true;
	forget_all();
	return false;
}

static void look(struct work_struct *work)
{
	if (look_again())
		queue_delayed_work(look_queue, &look_work,
				   msecs_to_jiffies(next_look_ms));
}

/**
 * vnuma_affinities_settle - when all CPUs are online again
 * @queue: ordered; what calls this is a work of it
 */
void vnuma_affinities_settle(struct workqueue_struct *queue)
{
	if (list_empty(&records))
		return;
	look_queue = queue;
	next_look_ms = FIRST_LOOK_MS;
	mod_delayed_work(queue, &look_work, msecs_to_jiffies(next_look_ms));
}

/** vnuma_affinities_cancel - before the queue is destroyed */
void vnuma_affinities_cancel(void)
{
	cancel_delayed_work_sync(&look_work);
}

/** vnuma_affinities_finish - as vnuma_affinities_settle(), but waits for the end */
void vnuma_affinities_finish(void)
{
	if (list_empty(&records))
		return;
	next_look_ms = FIRST_LOOK_MS;
	do {
		msleep(next_look_ms);
	} while (look_again());
}
