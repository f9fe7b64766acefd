/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How long a thread has a CPU before others have their turn. Slices may be shorter than a tick, so a
 * timer ends them.
 */
#ifndef SCX_VNUMA_SLICES_H
#define SCX_VNUMA_SLICES_H

/*
 * All threads of a queue have their turn within this time, if need be by shorter slices, but
 * not shorter than the least: the kernel's watchdog ends a scheduler that has a thread wait
 * too long, and any user can have thousands wait.
 */
#define TURN_NS		2000000000ULL
#define LEAST_SLICE_NS	250000ULL

/* How long a thread runs before others of the queue of its CPU have their turn. */
static __u64 slice_on(__s32 cpu, struct vnuma_sched_header *h)
{
	__s32 length = length_by_bit(cpu);
	__u64 slice = h->slice_ns, part;

	if (length <= 0)
		return slice;
	part = TURN_NS / (__u32)length;
	if (part < LEAST_SLICE_NS)
		part = LEAST_SLICE_NS;
	return part < slice ? part : slice;
}

/*
 * Ends slices that are shorter than a tick, and has CPUs look for work again. Returns when the next
 * one is to; 0: none is.
 */
static __u64 end_slices(__u64 now)
{
	__u64 next = 0, ends;
	struct queue *queue;
	__u32 cpu;

	bpf_for(cpu, 0, nr_cpus) {
		queue = bpf_map_lookup_elem(&queues, &cpu);
		if (!queue)
			continue;
		ends = queue->ends_ns;
		if (ends && ends <= now) {
			queue->ends_ns = 0;
			scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
		} else if (ends && (!next || ends < next)) {
			next = ends;
		}
		ends = queue->again_ns;
		if (ends && ends <= now) {
			queue->again_ns = 0;
			scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
		} else if (ends && (!next || ends < next)) {
			next = ends;
		}
	}
	return next;
}

/*
 * A thread gets a CPU, or goes on. One that had waited too long has a short turn, as others have
 * probably waited for as long: another class may have the CPU most of the time.
 *
 * What is left of a turn is not made more: the kernel also says that a thread stops and runs when its
 * priority or affinity changes, which it may do all the time.
 */
static void begin_slice(struct task_struct *p, struct thread *t, struct queue *queue,
			struct vnuma_sched_header *h)
{
	__u64 slice = slice_on(t->cpu, h), left;

	if (t->brief)
		slice = LATE_SLICE_NS;
	else if (t->until_ns)
		slice = LEAST_SLICE_NS;
	queue->ends_ns = 0;
	queue->endless = needs_no_tick(t, t->cpu) && scx_bpf_task_set_slice(p, SCX_SLICE_INF);
	if (queue->endless)
		return;
	left = p->scx.slice;
	if (left > slice) {
		if (!scx_bpf_task_set_slice(p, slice))
			return;
		left = slice;
	}
	if (left >= h->slice_ns)
		return;
	/* The kernel sees it at a tick, which may be much later. */
	queue->ends_ns = t->running_ns + left;
	set_alarm(queue->ends_ns, t->running_ns);
}

#endif
