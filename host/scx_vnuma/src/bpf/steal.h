/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Stealing: what a CPU runs whose own queue is empty. It goes by Algorithm 2 of "vProbe:
 * Scheduling Virtual Machines on NUMA Systems" (CLUSTER 2016): from its own node first, from
 * the longest queue there, the thread with the least LLC access pressure; then from the other
 * nodes, the nearest first. Whoever decides may want another way (VNUMA_SCHED_STEAL_*). A
 * thread that has waited too long is stolen before all others.
 *
 * A thread whose CPU another class has is rescued by CPUs that are not idle, too: it goes to their
 * queues, where it waits as its share says. One that waits too long in a queue that is served has
 * turns of its own (late.h).
 *
 * Any user can have any number of threads wait, so a bounded number is looked at: the first
 * ones of a queue, which have had least of their share.
 */
#ifndef SCX_VNUMA_STEAL_H
#define SCX_VNUMA_STEAL_H

/* Queues of a node that are tried for one theft, the longest ones. */
#define TRIES		8

/* Threads that are looked at in a queue, in all for one theft, and for one rescue. */
#define LOOKED_AT	64
#define LOOKED_AT_IN_ALL 1024
#define LOOKED_AT_TO_RESCUE 512

/* A CPU that chooses a thread has done so after this time. */
#define CHOOSES_NS	2000000ULL

/* A search for a thread. */
struct search {
	__u64 now;
	__u64 rank;	/* of the one that was chosen last */
	__u32 left;	/* threads that may still be looked at */
};

/* Does a CPU take threads without regard to nodes and pressure? */
static bool is_blind(struct vnuma_sched_header *h)
{
	return h->steal == VNUMA_SCHED_STEAL_BLIND || h->steal == VNUMA_SCHED_STEAL_PLACE;
}

/*
 * May a CPU take a thread? The kernel ends a scheduler that gives one to a CPU where it may
 * not run (task_can_run_on_remote_rq() in kernel/sched/ext.c).
 */
static bool may_take(struct task_struct *p, __s32 cpu)
{
	if (!bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
		return false;
	return !p->migration_disabled || scx_bpf_task_cpu(p) == cpu;
}

/* Does this kernel leave a thread's migration alone while a BPF program runs on its CPU? */
static bool programs_migrate;

/*
 * May a thread run only on its own CPU? As is_bpf_migration_disabled() in the kernel: with
 * preemptible RCU the thread that runs cannot migrate for as long as this program runs.
 */
static bool is_pinned(struct task_struct *p)
{
	if (p->migration_disabled == 1 && p == bpf_get_current_task_btf())
		return programs_migrate;
	return p->migration_disabled;
}

/* How long a thread has waited. It may have been queued by another CPU after `now` was read. */
static __u64 waits(struct thread *t, __u64 now)
{
	__u64 queued_ns = t->queued_ns;

	return queued_ns && now > queued_ns ? now - queued_ns : 0;
}

#include "late.h"

/*
 * The thread of a queue that a CPU may run and is to steal; 0 if there is none. Lower ranks
 * come first: those that have waited too long, the longest one first, then by pressure or as
 * they are queued. Each thread that is looked at is one of those that are left.
 */
static __u32 choose(__u64 victim, __s32 cpu, struct vnuma_sched_header *h, struct search *s)
{
	__u32 looks = zero;
	struct task_struct *p;
	struct thread *t;
	__u64 this, waited;
	__u32 best = 0;

	s->rank = ~0ULL;
	bpf_for_each(scx_dsq, p, victim, 0) {
		if (!s->left || looks >= LOOKED_AT)
			break;
		looks++;
		s->left--;
		if (!may_take(p, cpu))
			continue;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (!t)
			continue;
		waited = waits(t, s->now);
		if (waited >= h->starve_ns)
			this = BIT_ULL(62) - (waited & (BIT_ULL(61) - 1));
		else if (h->steal == VNUMA_SCHED_STEAL_PLACE && !within_place(t, cpu, h, s->now))
			continue;
		else
			this = BIT_ULL(63) | (is_blind(h) ? 0 : t->pressure);
		if (this < s->rank) {
			s->rank = this;
			best = p->pid;
		}
	}
	return best;
}

static bool take_from(__u64 victim, __s32 cpu, struct vnuma_sched_header *h, struct search *s)
{
	__u32 tid = choose(victim, cpu, h, s), looks = zero;
	struct task_struct *p;
	bool moved = false;

	if (!tid)
		return false;
	bpf_for_each(scx_dsq, p, victim, 0) {
		/* Others may have come before it. */
		if (looks++ >= 2 * LOOKED_AT)
			break;
		if (p->pid != tid)
			continue;
		/* Its CPUs may be others since it was chosen. */
		if (may_take(p, cpu))
			moved = scx_bpf_dsq_move(&___it, p, SCX_DSQ_LOCAL, 0);
		break;
	}
	if (moved && !(s->rank >> 63))
		count(VNUMA_SCHED_COUNT_STARVED);
	return moved;
}

/* Those that wait too long for a CPU come before those that wait for it. */
static bool steal_from(__u32 victim, __s32 cpu, struct vnuma_sched_header *h, struct search *s)
{
	if (scx_bpf_dsq_nr_queued(LATE | victim) > 0 && take_from(LATE | victim, cpu, h, s))
		return true;
	return take_from(victim, cpu, h, s);
}

/*
 * Has a thread of a CPU just gone to sleep? It is about to choose another one. Who steals that would
 * wait for the CPU: for its lock, and on a virtual machine for it to have a CPU. Others may wait there
 * as well, so who has no other work looks again when that is over.
 */
static bool chooses(__u32 victim, __u32 cpu, __u64 now)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &victim);
	struct queue *own = bpf_map_lookup_elem(&queues, &cpu);

	if (!queue || !own || queue->charged_ns || queue->taken ||
	    now >= queue->served_ns + CHOOSES_NS)
		return false;
	own->again_ns = now + CHOOSES_NS;
	set_alarm(own->again_ns, now);
	return true;
}

static __noinline __u32 node_of(struct vnuma_sched_topology *host, __u32 cpu)
{
	return cpu < MAX_CPUS ? host->node_of[cpu] : MAX_NODES;
}

/*
 * The longest queue of a node that is shorter than a limit, as its length and, in the lower half,
 * 0xffff less the number of its CPU: of two that are as long the lower number comes first. 0: none.
 */
static __noinline __u32 longest_on(struct vnuma_sched_topology *host, __u32 node, __u32 cpu,
				   __u32 limit, __u64 now)
{
	__u32 best = 0, victim, rank, i, bit;
	__s32 length;
	__u64 word;

	bpf_for(i, 0, nr_words()) {
		word = word_at(i);
		if (!word)
			continue;
		bpf_for(bit, 0, BITS) {
			victim = i * BITS + bit;
			if (!(word >> bit & 1) || victim == cpu || node_of(host, victim) != node)
				continue;
			length = length_if_any(victim);
			if (!length || chooses(victim, cpu, now))
				continue;
			rank = ((__u32)(length > 0xffff ? 0xffff : length) << 16) |
			       (0xffff - victim);
			if (rank < limit && rank > best)
				best = rank;
		}
	}
	return best;
}

/* Steals from the longest queues of a node. */
static bool steal_on(struct vnuma_sched_topology *host, __u32 node, __s32 cpu,
		     struct vnuma_sched_header *h, struct search *s)
{
	__u32 try, best = ~0U;
	bool stolen = false;

	bpf_for(try, 0, TRIES) {
		best = longest_on(host, node, cpu, best, s->now);
		if (best)
			stolen = steal_from(0xffff - (best & 0xffff), cpu, h, s);
		if (stolen || !best)
			break;
	}
	return stolen;
}

/* Does nothing of ours run on a CPU although it may, and has not for too long? */
static bool is_stalled(__u32 cpu, struct vnuma_sched_header *h, __u64 now)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);

	return queue && !queue->charged_ns && queue->served_ns + h->starve_ns <= now;
}

/* Moves a thread that waits for another CPU to the queue of this one. */
static bool bring(__u32 tid, __u64 victim, __s32 cpu, struct vnuma_sched_header *h)
{
	__u32 looks = zero;
	struct task_struct *p;
	bool moved = false;
	struct thread *t;

	bpf_for_each(scx_dsq, p, victim, 0) {
		/* Others may have come before it. */
		if (looks++ >= 2 * LOOKED_AT)
			break;
		if (p->pid != tid)
			continue;
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (!t || !may_take(p, cpu))
			break;
		come_to(t, cpu, h->slice_ns);
		set_waited_for(cpu);
		scx_bpf_dsq_move_set_vtime(&___it, t->vtime);
		moved = scx_bpf_dsq_move_vtime(&___it, p, cpu, 0);
		break;
	}
	return moved;
}

/*
 * Brings the thread that has waited longest for a CPU that another class has, if that is too
 * long: no other CPU may be idle. What it had no time to look at comes first the next time.
 */
static void rescue(__s32 cpu, struct vnuma_sched_header *h, __u64 now)
{
	struct search s = { .now = now, .left = LOOKED_AT_TO_RESCUE + zero };
	__u32 key = cpu, first, i, tid, found = 0;
	__u64 least = BIT_ULL(63), best = 0, from;
	__s32 victim;
	struct queue *own = bpf_map_lookup_elem(&queues, &key);

	/* The search passes over all queues, so it is not made each time. */
	if (!own || now - own->searched_ns < h->starve_ns / 4 || !is_any_waited_for())
		return;
	own->searched_ns = now;
	first = own->searched;
	if (first >= nr_cpus)
		first = 0;
	bpf_for(i, 0, nr_cpus) {
		victim = first + i < nr_cpus ? first + i : first + i - nr_cpus;
		if (victim == cpu || !length_if_any(victim) || !is_stalled(victim, h, now))
			continue;
		own->searched = victim;
		if (!s.left)
			break;
		from = (__u32)victim;
		if (scx_bpf_dsq_nr_queued(LATE | from) > 0)
			from |= LATE;
		tid = choose(from, cpu, h, &s);
		if (tid && s.rank < least) {
			least = s.rank;
			best = from;
			found = tid;
		}
	}
	if (found && bring(found, best, cpu, h))
		count(VNUMA_SCHED_COUNT_STARVED);
}

/* As Xen's Credit scheduler does: the CPUs after this one by number, whatever their node. */
static void steal_blindly(struct vnuma_sched_topology *host, __s32 cpu,
			  struct vnuma_sched_header *h, struct search *s)
{
	__s32 i, victim;

	bpf_for(i, 1, nr_cpus) {
		victim = cpu + i < nr_cpus ? cpu + i : cpu + i - nr_cpus;
		if (!length_if_any(victim) || chooses(victim, cpu, s->now))
			continue;
		if (!steal_from(victim, cpu, h, s))
			continue;
		count(node_of(host, victim) == node_of(host, cpu) ? VNUMA_SCHED_COUNT_LOCAL :
								   VNUMA_SCHED_COUNT_REMOTE);
		return;
	}
}

static void steal(__s32 cpu, struct vnuma_sched_header *h, __u64 now)
{
	struct vnuma_sched_topology *host;
	struct search s = { .now = now, .left = LOOKED_AT_IN_ALL + zero };
	__u32 first = 0, node, other, i;

	host = bpf_map_lookup_elem(&topology, &first);
	if (!host || cpu < 0 || !is_any_waited_for())
		return;
	node = node_of(host, cpu);
	if (node >= host->nr_nodes || node >= MAX_NODES)
		return;
	if (is_blind(h)) {
		steal_blindly(host, cpu, h, &s);
		return;
	}
	if (steal_on(host, node, cpu, h, &s)) {
		count(VNUMA_SCHED_COUNT_LOCAL);
		return;
	}
	bpf_for(i, 0, host->nr_nodes) {
		if (i >= MAX_NODES)
			break;
		other = host->nearest[(node * MAX_NODES + i) & (MAX_NODES * MAX_NODES - 1)];
		if (other == node)
			continue;
		if (steal_on(host, other, cpu, h, &s)) {
			count(VNUMA_SCHED_COUNT_REMOTE);
			return;
		}
	}
}

#endif
