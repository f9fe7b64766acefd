/* SPDX-License-Identifier: GPL-2.0 */
/* Where a thread belongs, as user space has decided. */
#ifndef SCX_VNUMA_PLACE_H
#define SCX_VNUMA_PLACE_H

/* Makes the mask of a new epoch. Without memory for it the next call tries again. */
static void take_assignment(struct task_struct *p, struct thread *t,
			    struct vnuma_sched_assignment *a)
{
	struct bpf_cpumask *mask = bpf_cpumask_create(), *before;

	if (!mask)
		return;
	t->epoch = a->epoch;
	t->placed = false;
	if (bpf_cpumask_populate(mask, a->cpus, sizeof(a->cpus)) ||
	    !bpf_cpumask_and(mask, (const struct cpumask *)mask, p->cpus_ptr)) {
		/* The operator allows no CPU of this place. */
		bpf_cpumask_release(mask);
		return;
	}
	before = bpf_kptr_xchg(&t->place, mask);
	if (before)
		bpf_cpumask_release(before);
	t->placed = true;
	t->apply = true;
}

/* Reads what is decided of a thread. The place is NULL if it has none, or none that counts. */
static const struct cpumask *place_of(struct task_struct *p, struct thread *t,
				      struct vnuma_sched_header *h, __u64 now)
{
	struct vnuma_sched_assignment *a;
	__u32 tid = p->pid;

	a = bpf_map_lookup_elem(&assignments, &tid);
	if (!a || a->pid != p->tgid) {
		t->pressure = VNUMA_SCHED_NO_PRESSURE;
		t->epoch = 0;
		t->placed = false;
		return NULL;
	}
	t->pressure = a->pressure;
	if (!(a->flags & VNUMA_SCHED_PLACED) || h->heartbeat_ns + h->keep_ns < now)
		return NULL;
	if (t->epoch != a->epoch)
		take_assignment(p, t, a);
	return t->placed ? (const struct cpumask *)t->place : NULL;
}

/* Is a CPU of the place of a thread? All are if it has none, or none that counts. */
static bool within_place(struct thread *t, __s32 cpu, struct vnuma_sched_header *h, __u64 now)
{
	counted_cpumask *place = t->place;

	if (!t->placed || !place || h->heartbeat_ns + h->keep_ns < now)
		return true;
	return bpf_cpumask_test_cpu(cpu, (const struct cpumask *)place);
}

#endif
