/* SPDX-License-Identifier: GPL-2.0 */
/* Virtual time: what orders the queues. */
#ifndef SCX_VNUMA_VTIME_H
#define SCX_VNUMA_VTIME_H

/* A thread may be behind its queue by so many slices when it comes from another one. */
#define MAX_BEHIND	10

/* Virtual time that a thread has used. */
static __u64 used(struct thread *t, __u64 ns)
{
	return scaled(ns, t->share);
}

/* Virtual time of a thread in the queue of a CPU that it comes to. */
static void come_to(struct thread *t, __u32 cpu, __u64 slice)
{
	struct queue *to = bpf_map_lookup_elem(&queues, &cpu);
	struct queue *from;
	__u64 ahead, turn = used(t, slice), most = turn * MAX_BEHIND;
	__u32 last = t->cpu;

	if (!to)
		return;
	if (last != cpu) {
		from = bpf_map_lookup_elem(&queues, &last);
		ahead = from ? ahead_of(t->vtime, from->vtime) : 0;
		t->vtime = to->vtime + (ahead < most ? ahead : most);
		t->cpu = cpu;
	}
	/* Who has slept is served soon, but not for all the time that it slept. */
	t->vtime = within(t->vtime, to->vtime, turn < MAX_AHEAD_NS ? turn : MAX_AHEAD_NS,
			  MAX_AHEAD_NS);
}

/* Another share of a thread that gets a CPU, or has it. */
static void set_share(struct thread *t, struct queue *queue, __u64 share)
{
	__u64 vtime = queue->vtime, ahead = ahead_of(t->vtime, vtime);

	if (ahead && t->share && share != t->share)
		t->vtime = vtime + rescaled(ahead, t->share, share);
	t->share = share;
}

/* The first thread of a queue; NULL: there is none. */
static struct thread *first_in(__u64 dsq)
{
	struct task_struct *p = scx_bpf_dsq_peek(dsq);

	return p ? bpf_task_storage_get(&threads, p, NULL, 0) : NULL;
}

/* Virtual time of the first thread that waits for a CPU. False: none does. */
static bool first_vtime(__u32 cpu, __u64 *vtime)
{
	struct thread *first, *late = NULL;

	if (!is_waited_for(cpu))
		return false;
	first = first_in(cpu);
	if (scx_bpf_dsq_nr_queued(LATE | cpu) > 0)
		late = first_in(LATE | cpu);
	if (late && (!first || is_before(late->vtime, first->vtime)))
		first = late;
	if (first)
		*vtime = first->vtime;
	return first;
}

/*
 * The time of a queue is that of the thread that is behind most, be it that one runs or waits:
 * one that was stolen may be ahead of all that wait, and who wakes comes before these.
 */
static void pass_to(struct queue *queue, __u32 cpu, __u64 vtime)
{
	__u64 first;

	if (first_vtime(cpu, &first) && is_before(first, vtime))
		vtime = first;
	if (is_before(queue->vtime, vtime))
		queue->vtime = vtime;
}

#endif
