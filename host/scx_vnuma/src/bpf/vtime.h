/* SPDX-License-Identifier: GPL-2.0 */
/* Virtual time: what orders the queues. */
#ifndef SCX_VNUMA_VTIME_H
#define SCX_VNUMA_VTIME_H

/* A thread may be behind its queue by so many slices when it comes from another one. */
#define MAX_BEHIND	10

/*
 * How far a thread may be ahead of its queue. One with a small share is far ahead after a slice,
 * and that is how it gets no more. It does not wait for all of that (serve_lagging()), unless more
 * wait than are looked at: then it is the virtual time of a wait that the kernel's watchdog bears.
 */
#define MAX_AHEAD_NS	1000000000000ULL
#define LONG_QUEUE	512

/* Virtual time that a thread has used. */
static __u64 used(struct thread *t, __u64 ns)
{
	return ns * WHOLE / (t->share ?: WHOLE);
}

/* Virtual time of a thread in the queue of a CPU that it comes to. */
static void come_to(struct thread *t, __u32 cpu, __u64 slice)
{
	struct queue *to = bpf_map_lookup_elem(&queues, &cpu);
	struct queue *from;
	__u64 ahead = 0, turn = used(t, slice);
	__u64 most = turn * MAX_BEHIND;
	__u32 last = t->cpu;

	if (!to)
		return;
	if (last != cpu) {
		from = bpf_map_lookup_elem(&queues, &last);
		if (from && t->vtime > from->vtime)
			ahead = t->vtime - from->vtime;
		t->vtime = to->vtime + (ahead < most ? ahead : most);
		t->cpu = cpu;
	}
	/* Who has slept is served soon, but not for all the time that it slept. */
	if (t->vtime + turn < to->vtime)
		t->vtime = to->vtime - turn;
	most = scx_bpf_dsq_nr_queued(cpu) < LONG_QUEUE ? MAX_AHEAD_NS : MAX_WAIT_NS;
	if (t->vtime > to->vtime + most)
		t->vtime = to->vtime + most;
}

/* Virtual time of the first thread that waits in the queue of a CPU; the latest if none does. */
static __u64 first_vtime(__s32 cpu)
{
	struct task_struct *p;
	__u64 vtime = ~0ULL;
	struct thread *first;

	bpf_for_each(scx_dsq, p, cpu, 0) {
		first = bpf_task_storage_get(&threads, p, NULL, 0);
		if (first)
			vtime = first->vtime;
		break;
	}
	return vtime;
}

/*
 * The time of a queue is that of the thread that is behind most, be it that one runs or waits:
 * one that was stolen may be ahead of all that wait, and who wakes comes before these.
 */
static void pass_to(struct queue *queue, __s32 cpu, __u64 vtime)
{
	__u64 first = first_vtime(cpu);

	if (first < vtime)
		vtime = first;
	if (queue->vtime < vtime)
		queue->vtime = vtime;
}

#endif
