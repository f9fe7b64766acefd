/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Directed yields: a vCPU that waits for another one, such as the holder of a lock, gives its CPU
 * away to that. KVM asks for it, of its own accord or for the guest (KVM_HC_SCHED_YIELD and
 * KVM_HC_KICK_CPU).
 *
 * yield() may not move threads, so it leaves a note with the CPU that is to run the thread, and
 * dispatch() there obeys. The time is charged as any other, so a thread gets no more than its
 * share by this, only earlier: at most a slice of its virtual time.
 */
#ifndef SCX_VNUMA_YIELD_H
#define SCX_VNUMA_YIELD_H

/* Is a thread behind the one that runs on a CPU? */
static bool is_behind(struct thread *t, struct queue *queue, __u64 by, __u64 now)
{
	__u64 since;

	/* What runs is read without a lock: an error costs a switch, or a wait. */
	if (!queue->charged_ns)
		return false;
	since = now > queue->charged_ns ? now - queue->charged_ns : 0;
	return is_before(t->vtime + by, queue->runs_vtime + scaled(since, queue->runs_share));
}

/* Has a CPU run a thread next, which waits in the queue of the same CPU or of another one. */
static void run_next(struct queue *queue, struct task_struct *p, struct thread *t)
{
	queue->next_at = t->cpu;
	queue->next = p->pid;
}

/*
 * Gives the CPU of one thread to another one. The CPU for which that waits runs it, if it has had
 * less than the thread there; otherwise the CPU that is given away does, within its place.
 */
static bool yield_to(struct task_struct *from, struct task_struct *to,
		     struct vnuma_sched_header *h, __u64 now)
{
	struct thread *t = bpf_task_storage_get(&threads, to, NULL, 0);
	__u32 here = scx_bpf_task_cpu(from), there;
	struct queue *own = bpf_map_lookup_elem(&queues, &here), *queue;

	if (!t || !own || t->until_ns)
		return false;
	there = t->cpu;
	queue = bpf_map_lookup_elem(&queues, &there);
	if (!queue || !is_near(t->vtime, queue->vtime, used(t, h->slice_ns)))
		return false;
	if (here != there && is_behind(t, queue, 0, now)) {
		run_next(queue, to, t);
		scx_bpf_kick_cpu(there, SCX_KICK_PREEMPT);
		return true;
	}
	if (!may_take(to, here) || !within_place(t, here, h, now))
		return false;
	run_next(own, to, t);
	return true;
}

static bool take_waiting(__u64 dsq, __s32 cpu, __u32 tid)
{
	struct task_struct *p;
	bool moved = false;
	__u32 looks = zero;

	bpf_for_each(scx_dsq, p, dsq, 0) {
		if (looks++ >= LOOKED_AT_TO_RESCUE)
			break;
		if (p->pid != tid)
			continue;
		if (may_take(p, cpu))
			moved = scx_bpf_dsq_move(&___it, p, SCX_DSQ_LOCAL, 0);
		break;
	}
	return moved;
}

/* Runs the thread that a CPU was given away to, if that still waits, also if it does for long. */
static bool serve_yield(__s32 cpu)
{
	__u32 key = cpu, tid, at;
	struct queue *own = bpf_map_lookup_elem(&queues, &key);

	if (!own || !own->next)
		return false;
	tid = own->next;
	own->next = 0;
	at = own->next_at;
	if (take_waiting(at, cpu, tid))
		return true;
	return scx_bpf_dsq_nr_queued(LATE | at) > 0 && take_waiting(LATE | at, cpu, tid);
}

#endif
