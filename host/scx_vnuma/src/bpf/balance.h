/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Balancing. A share is one of the host's time, and each CPU shares its own among the threads that
 * it has. So groups get what they are to have only if all CPUs have about as much. A timer takes
 * threads that wait for CPUs with more to CPUs with less, within their places.
 *
 * What is as full as the other CPU would be then is left where it is: of three equal threads on two
 * CPUs one has a CPU for itself, as with the kernel's own scheduler.
 */
#ifndef SCX_VNUMA_BALANCE_H
#define SCX_VNUMA_BALANCE_H

/* Time between two rounds. */
#define BALANCE_NS	50000000ULL

/* CPUs from which a thread is taken in one round, at most. */
#define BALANCED_AT_ONCE 16

/* Threads of a queue that are added up, and of which one is taken: those that are behind most. */
#define LOOKED_AT_TO_ADD 64
#define LOOKED_AT_TO_BALANCE 8

/*
 * The fuller one of both CPUs has to have less than now by this part of the thread's share, and by
 * this part if the thread leaves its node.
 */
#define GAIN		4
#define REMOTE_GAIN	2

/* When the last round was, and the CPU that it ended with. */
static __u64 balanced_ns;
static __u32 balanced;

/* Where a thread is taken. */
struct move {
	__u64 gain;	/* times GAIN or REMOTE_GAIN */
	__u32 tid;	/* 0: none is */
	__u32 to;
};

/* Adds up the shares of the thread that a CPU runs and of those that wait for it. */
static __noinline void add_up(__u32 cpu)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	__u32 looks = zero;
	struct task_struct *p;
	struct thread *t;
	__u64 load;

	if (!queue)
		return;
	load = queue->charged_ns ? queue->runs_share : 0;
	bpf_for_each(scx_dsq, p, cpu, 0) {
		if (looks++ >= LOOKED_AT_TO_ADD)
			break;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (t)
			load += t->share;
	}
	queue->load = load;
}

/* The best CPU for a thread that waits for another one, if it is better than what was found. */
static void try_move(struct task_struct *p, struct thread *t, __u32 from, __u64 load,
		     struct vnuma_sched_header *h, __u64 now, struct move *best)
{
	__u32 first = 0, cpu, i, node;
	struct vnuma_sched_topology *host = bpf_map_lookup_elem(&topology, &first);
	struct queue *queue;
	__u64 share = t->share, more, gain;

	if (!host || !share || load <= share)
		return;
	node = node_of(host, from);
	bpf_for(i, 1, nr_cpus) {
		/* Not always the same of those that are as good. */
		cpu = from + i < nr_cpus ? from + i : from + i - nr_cpus;
		queue = bpf_map_lookup_elem(&queues, &cpu);
		/* A CPU without work steals, and from another class nothing is to be had. */
		if (!queue || !queue->charged_ns)
			continue;
		more = queue->load + share;
		if (more < load - share)
			more = load - share;
		if (more >= load)
			continue;
		gain = (load - more) * (node_of(host, cpu) == node ? GAIN : REMOTE_GAIN);
		if (gain < share || gain <= best->gain)
			continue;
		if (!may_take(p, cpu) || !within_place(t, cpu, h, now))
			continue;
		best->gain = gain;
		best->to = cpu;
		best->tid = p->pid;
	}
}

/* Takes one thread from the queue of a CPU to another one, if that is better. */
static __noinline void balance_from(__u32 from, struct vnuma_sched_header *h, __u64 now)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &from);
	struct move best = {};
	__u32 looks = zero;
	struct task_struct *p;
	struct thread *t;

	if (!queue)
		return;
	bpf_for_each(scx_dsq, p, from, 0) {
		if (looks++ >= LOOKED_AT_TO_BALANCE)
			break;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (t)
			try_move(p, t, from, queue->load, h, now, &best);
	}
	if (!best.tid)
		return;
	if (!bring(best.tid, from, best.to, h))
		return;
	add_up(from);
	add_up(best.to);
	call(best.to);
}

/* A round. The next one begins with other CPUs. */
static void balance(struct vnuma_sched_header *h, __u64 now)
{
	__u32 cpu, i, done = zero;

	/* Xen's Credit scheduler has no such thing. */
	if (now < balanced_ns + BALANCE_NS || !is_any_waited_for() ||
	    h->steal == VNUMA_SCHED_STEAL_BLIND)
		return;
	balanced_ns = now;
	bpf_for(cpu, 0, nr_cpus)
		add_up(cpu);
	bpf_for(i, 0, nr_cpus) {
		if (done >= BALANCED_AT_ONCE)
			break;
		cpu = balanced + 1 < nr_cpus ? balanced + 1 : 0;
		balanced = cpu;
		if (!is_waited_for(cpu))
			continue;
		done++;
		balance_from(cpu, h, now);
	}
}

#endif
