/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Threads that have waited for too long in a queue that is served, as their share is very small, so
 * many wait, or another class has most of the CPU. They are set apart in a second queue of the CPU,
 * the one that has waited longest first, and each gets the CPU for a moment. All such turns have a
 * 200th of the CPU's time, and more only if so many wait that the kernel's watchdog would end the
 * scheduler otherwise.
 */
#ifndef SCX_VNUMA_LATE_H
#define SCX_VNUMA_LATE_H

/* Time between two looks for such threads in a queue. */
#define APART_NS	500000000ULL

/* Threads that are looked at then. No user may have more. */
#define LOOKED_AT_TO_SET_APART (1U << 17)

/* The queue in which a thread waits for a CPU. */
static __u64 queue_of(struct thread *t, __u32 cpu, __u64 now)
{
	return waits(t, now) < LATE_NS ? cpu : LATE | cpu;
}

/*
 * Sets those apart that have waited for too long. All are looked at: any user can have any number
 * of threads wait at any place of the queue.
 */
static void set_apart(__u32 cpu, __u64 now)
{
	struct queue *own = bpf_map_lookup_elem(&queues, &cpu);
	__u32 looks = zero;
	struct task_struct *p;
	struct thread *t;

	if (!own || now < own->apart_ns + APART_NS)
		return;
	own->apart_ns = now;
	bpf_for_each(scx_dsq, p, cpu, 0) {
		if (looks++ >= LOOKED_AT_TO_SET_APART)
			break;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (!t || waits(t, now) < LATE_NS)
			continue;
		scx_bpf_dsq_move_set_vtime(&___it, t->queued_ns);
		scx_bpf_dsq_move_vtime(&___it, p, LATE | cpu, 0);
	}
}

/* Runs the thread that has waited for the CPU longest for a moment, if that is too long. */
static bool serve_late(__u32 cpu, __u64 now)
{
	struct queue *own = bpf_map_lookup_elem(&queues, &cpu);
	__u32 looks = zero;
	struct task_struct *p;
	struct thread *t;
	bool moved = false;
	__s32 late;

	if (!own || now < own->late_from_ns || !is_waited_for(cpu))
		return false;
	late = scx_bpf_dsq_nr_queued(LATE | cpu);
	if (late <= 0)
		return false;
	if (own->late_from_ns + LATE_CREDIT_NS < now)
		own->late_from_ns = now - LATE_CREDIT_NS;
	own->late_from_ns += late_pause(0, late);
	bpf_for_each(scx_dsq, p, LATE | cpu, 0) {
		if (looks++ >= LOOKED_AT)
			break;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (!t || !may_take(p, cpu))
			continue;
		t->late_ns = now;
		moved = scx_bpf_dsq_move(&___it, p, SCX_DSQ_LOCAL, 0);
		break;
	}
	return moved;
}

/* The turn of such a thread is over. It may have been longer, as a timer may be late. */
static void end_late(struct queue *queue, struct thread *t, __u32 cpu, __u64 now)
{
	__s32 late = scx_bpf_dsq_nr_queued(LATE | cpu);
	__u32 others = late > 0 ? late : 0;
	__u64 pause = late_pause(now - t->late_ns, others);

	queue->late_from_ns += pause - late_pause(0, others);
	if (queue->late_from_ns > now + pause)
		queue->late_from_ns = now + pause;
	t->late_ns = 0;
}

/* Runs the thread that waits for a CPU and is behind most. */
static bool run_first(__u32 cpu)
{
	struct thread *first, *late;

	if (scx_bpf_dsq_nr_queued(LATE | cpu) <= 0)
		return scx_bpf_dsq_move_to_local(cpu);
	first = first_in(cpu);
	late = first_in(LATE | cpu);
	if (late && (!first || is_before(late->vtime, first->vtime)))
		return scx_bpf_dsq_move_to_local(LATE | cpu) || scx_bpf_dsq_move_to_local(cpu);
	return scx_bpf_dsq_move_to_local(cpu) || scx_bpf_dsq_move_to_local(LATE | cpu);
}

#endif
