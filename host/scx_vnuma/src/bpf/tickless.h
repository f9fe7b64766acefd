/* SPDX-License-Identifier: GPL-2.0 */
/*
 * CPUs that have no tick while they run one thread (nohz_full), as hosts have for VMs that must not
 * be disturbed. The kernel stops the tick for a thread whose slice is without end, and decides that
 * when the thread gets the CPU. It still ticks once a second there, from another CPU.
 */
#ifndef SCX_VNUMA_TICKLESS_H
#define SCX_VNUMA_TICKLESS_H

/* May the thread that a CPU runs have it until another one comes? */
static bool needs_no_tick(struct thread *t, __u32 cpu)
{
	__u32 first = 0;
	struct vnuma_sched_topology *host = bpf_map_lookup_elem(&topology, &first);

	if (!host || !(host->tickless[cpu / BITS % WORDS] & bit_of(cpu)))
		return false;
	return !t->limited && !t->until_ns && !t->late_ns && !length_of(cpu);
}

/* The slice of a thread that goes on as no other wants its CPU. */
static __u64 lone_slice(__u32 cpu, struct vnuma_sched_header *h)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);

	return queue && queue->endless ? SCX_SLICE_INF : h->slice_ns;
}

/* A thread waits for a CPU that may be idle, or run a thread whose slice is without end. */
static void call(__u32 cpu)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);

	scx_bpf_kick_cpu(cpu, queue && queue->endless ? SCX_KICK_PREEMPT : SCX_KICK_IDLE);
}

/* Who comes is not to have what the others had before it came. */
static void end_endless(struct queue *queue, struct thread *t)
{
	queue->endless = false;
	if (is_before(queue->vtime, t->vtime))
		queue->vtime = t->vtime;
}

/* Once a second: has such a thread got a cpu.max, or another place? */
static void keep_endless(struct task_struct *p, struct thread *t, struct queue *queue, __u32 cpu,
			 __u64 now)
{
	struct vnuma_sched_header *h = get_header();
	const struct cpumask *place = h ? place_of(p, t, h, now) : NULL;

	if (is_before(queue->vtime, t->vtime))
		queue->vtime = t->vtime;
	if (t->limited || (place && t->apply && !bpf_cpumask_test_cpu(cpu, place)))
		scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

#endif
