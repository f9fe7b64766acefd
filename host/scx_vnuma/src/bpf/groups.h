/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Control groups: which share of a CPU a thread has, and how long it may run (cpu.weight,
 * cpu.max).
 */
#ifndef SCX_VNUMA_GROUPS_H
#define SCX_VNUMA_GROUPS_H

/* Levels of control groups that are told from each other, from the root. */
#define MAX_LEVELS	16
/* How long what is known of the groups above one is used. */
#define KNOWN_NS	1000000ULL

struct {
	__uint(type, MAP_TYPE_CGRP_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct group);
} groups SEC(".maps");

static struct group *get_group(struct cgroup *cgrp)
{
	return bpf_cgrp_storage_get(&groups, cgrp, NULL, 0);
}

/*
 * The control group that a thread counts in. What is nested deeper than MAX_LEVELS counts in the
 * group at that level above it: a user to whom a group is delegated can nest more below it.
 */
static struct cgroup *group_of(struct task_struct *p)
{
	struct cgroup *own = scx_bpf_task_cgroup(p), *above;

	if (!own || own->level < MAX_LEVELS)
		return own;
	above = bpf_cgroup_ancestor(own, MAX_LEVELS - 1);
	bpf_cgroup_release(own);
	return above;
}

/* Tells its group, and those above, that a thread is runnable or is not any more. */
static void join(struct task_struct *p, struct thread *t, bool in)
{
	__u32 weight = in ? p->scx.weight : t->in_group, i;
	struct cgroup *own, *cgrp;
	struct group *g;
	bool more;
	int level;

	if (in == !!t->in_group)
		return;
	t->in_group = in ? weight : 0;
	own = group_of(p);
	if (!own)
		return;
	level = own->level;
	g = get_group(own);
	more = g && change_users(g, weight, in, &weight);
	bpf_for(i, 1, MAX_LEVELS) {
		if (!more)
			break;
		cgrp = bpf_cgroup_ancestor(own, level - i);
		if (!cgrp)
			break;
		g = get_group(cgrp);
		more = g && change_users(g, weight, in, &weight);
		bpf_cgroup_release(cgrp);
	}
	bpf_cgroup_release(own);
}

/*
 * A group with what depends on those above it. They are gone through once in KNOWN_NS, not at each
 * event: a host can have many levels and many events.
 */
static struct group *know(struct cgroup *own, __u64 now)
{
	struct group *g = get_group(own), *other;
	__u64 share = WHOLE, weight;
	struct cgroup *cgrp;
	int level = own->level;
	bool limited;
	__u32 i;

	if (!g || now - g->known_ns < KNOWN_NS)
		return g;
	weight = g->weight;
	limited = has_quota(g);
	bpf_for(i, 1, MAX_LEVELS) {
		cgrp = bpf_cgroup_ancestor(own, level - i);
		if (!cgrp)
			break;
		other = get_group(cgrp);
		if (other)
			share = part_of(share, weight, other);
		weight = other ? other->weight : 0;
		limited = limited || (other && has_quota(other));
		bpf_cgroup_release(cgrp);
	}
	g->share = share;
	g->limited = limited;
	g->known_ns = now;
	return g;
}

/* When a cpu.max changed last. */
static __u64 limits_ns;

/* Has a thread no cpu.max, as was found after the last change of any? */
static bool is_unlimited(struct thread *t)
{
	return !t->limited && t->limited_ns > *(volatile __u64 *)&limits_ns;
}

/* Notes whether a thread has a cpu.max. The time first: it is not to be later than what it is of. */
static void note_limit(struct thread *t, struct group *g)
{
	t->limited_ns = *(volatile __u64 *)&g->known_ns;
	t->limited = *(volatile bool *)&g->limited;
}

/* The share of a CPU that a thread has beside all others that are runnable. */
static __u64 share_of(struct task_struct *p, struct thread *t, __u64 now)
{
	__u64 share = WHOLE, weight = t->in_group ?: p->scx.weight;
	struct cgroup *own = group_of(p);
	struct group *g;

	if (!own)
		return WHOLE;
	g = know(own, now);
	if (g) {
		share = part_of(g->share, weight, g);
		note_limit(t, g);
	}
	bpf_cgroup_release(own);
	return share ?: 1;
}

/* Takes time from the cpu.max of all groups of a thread, and notes until when it has to wait. */
static void take_time(struct task_struct *p, struct thread *t, __u64 ns, __u64 now)
{
	struct cgroup *own, *cgrp;
	__u64 latest = 0, until;
	struct group *g;
	__u32 i;
	int level;

	/* Most have none. */
	if (is_unlimited(t)) {
		t->until_ns = 0;
		return;
	}
	own = group_of(p);
	if (!own)
		return;
	level = own->level;
	g = know(own, now);
	if (g)
		note_limit(t, g);
	if (g && !t->limited)
		level = -1;
	bpf_for(i, 0, MAX_LEVELS) {
		cgrp = bpf_cgroup_ancestor(own, level - i);
		if (!cgrp)
			break;
		g = get_group(cgrp);
		until = g ? take(g, ns, now) : 0;
		if (until > latest)
			latest = until;
		bpf_cgroup_release(cgrp);
	}
	bpf_cgroup_release(own);
	/* Threads of the kernel, and those that end, do not return to where a thread waits. */
	t->until_ns = p->flags & (PF_KTHREAD | PF_EXITING) ? 0 : latest;
}

/*
 * A thread waits from now on, if it does not already. Any user can have a thread queued anew at any
 * time, by another affinity or priority. That is no new beginning for the kernel's watchdog.
 */
static void begin_wait(struct thread *t, __u64 now)
{
	if (!t->since_ns)
		t->since_ns = now;
	if (!t->queued_ns)
		t->queued_ns = now;
}

/* Until when a thread waits for a cpu.max: not for too long in all. 0: it does not. */
static __u64 throttled_until(struct thread *t, __u64 now)
{
	__u64 most;

	if (!t->until_ns)
		return 0;
	if (!t->since_ns)
		t->since_ns = now;
	most = t->since_ns + MAX_WAIT_NS;
	if (now >= most)
		return 0;
	return t->until_ns < most ? t->until_ns : most;
}

/* Another weight: groups beside it that are busy feel it at once. */
static void set_weight(struct cgroup *cgrp, struct group *g, __u32 weight)
{
	struct cgroup *above;
	struct group *parent;
	__u32 before, users;

	bpf_spin_lock(&g->lock);
	g->weight = weight;
	before = g->in_parent;
	users = g->users;
	if (users)
		g->in_parent = weight;
	bpf_spin_unlock(&g->lock);
	if (!users)
		return;
	above = bpf_cgroup_ancestor(cgrp, cgrp->level - 1);
	if (!above)
		return;
	parent = get_group(above);
	if (parent) {
		bpf_spin_lock(&parent->lock);
		parent->active += (__u64)weight - before;
		bpf_spin_unlock(&parent->lock);
	}
	bpf_cgroup_release(above);
}

static void set_bandwidth(struct group *g, __u64 period_us, __u64 quota_us, __u64 burst_us)
{
	bool had = has_quota(g);

	g->period_ns = period_us * 1000;
	g->burst_ns = burst_us * 1000;
	g->quota_ns = quota_us == UNLIMITED ? UNLIMITED : quota_us * 1000;
	g->left_ns = quota_us == UNLIMITED ? 0 : g->quota_ns;
	g->refill_ns = bpf_ktime_get_ns() + g->period_ns;
	g->known_ns = 0;
	/*
	 * Who finds the limit that was does so at an earlier time. One who has read it just before
	 * finds the other one when it gets a CPU, or at its next tick (share_of()).
	 */
	if (had || has_quota(g))
		limits_ns = bpf_ktime_get_ns();
}

#endif
