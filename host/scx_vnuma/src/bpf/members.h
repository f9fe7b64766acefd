/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What is known of a control group: who counts in it, and what is left of its cpu.max. Several CPUs
 * do this at once. tests/members.c runs it, too.
 */
#ifndef SCX_VNUMA_MEMBERS_H
#define SCX_VNUMA_MEMBERS_H

/* A thread does not wait longer than this at once: the kernel's watchdog watches all. */
#define MAX_WAIT_NS	10000000000ULL
#define UNLIMITED	(~0ULL)

struct group {
	__u32 weight;
	__u32 in_parent;	/* its weight while it has runnable threads, as its parent has it */
	__u32 users;		/* its runnable threads, and its groups that have some */
	struct bpf_spin_lock lock;	/* of these and `active`, which change together */
	__u64 active;		/* weights of its users */
	__u64 quota_ns;		/* UNLIMITED: it has no cpu.max */
	__u64 period_ns;
	__u64 burst_ns;
	__s64 left_ns;		/* of the quota */
	__u64 refill_ns;	/* when it is filled up */
	__u64 known_ns;		/* when what follows was right; 0: never */
	__u64 share;		/* of a CPU that the group has beside those of all levels above */
	bool limited;		/* it has a cpu.max, or a group above it has */
};

/*
 * One more user of a group, or one less. Does that change whether it has any? Then the group above
 * has one more or less, of the weight that is returned.
 *
 * Several CPUs do so at once. Weights that were added are subtracted again whatever comes in
 * between: a sum that is wrong would stay so until the group has no user.
 */
static __always_inline bool change_users(struct group *g, __u32 weight, bool in, __u32 *in_parent)
{
	bool ends;

	bpf_spin_lock(&g->lock);
	if (in) {
		ends = !g->users++;
		g->active += weight;
		if (ends)
			g->in_parent = g->weight;
	} else {
		ends = !--g->users;
		g->active -= weight;
	}
	*in_parent = g->in_parent;
	bpf_spin_unlock(&g->lock);
	return ends;
}

/*
 * What one user with a weight has of the share of its group. While a weight changes the sum may be
 * less than nothing for a moment, as the weight and the sum are not changed at once.
 */
static __always_inline __u64 part_of(__u64 share, __u64 weight, struct group *g)
{
	__s64 active = g->active;

	return active > (__s64)weight ? share * weight / active : share;
}

static __always_inline bool has_quota(struct group *g)
{
	return g->quota_ns != UNLIMITED && g->period_ns;
}

/* What so many periods add to a quota that lacks so much: no more than that. */
static __always_inline __s64 filled_by(struct group *g, __u64 periods, __u64 lacks)
{
	return periods <= lacks / g->quota_ns ? periods * g->quota_ns : lacks;
}

/* Takes time from a group's cpu.max. Returns until when it has none left; 0: it has some. */
static __always_inline __u64 take(struct group *g, __u64 ns, __u64 now)
{
	__u64 refill_ns = g->refill_ns, periods, until;
	__s64 most, left;

	if (!has_quota(g))
		return 0;
	if (now >= refill_ns) {
		periods = (now - refill_ns) / g->period_ns + 1;
		if (__sync_val_compare_and_swap(&g->refill_ns, refill_ns,
						refill_ns + periods * g->period_ns) == refill_ns) {
			/* Others take from it meanwhile: nothing is written over. */
			most = g->quota_ns + g->burst_ns;
			left = g->left_ns;
			if (left < most && g->quota_ns)
				__sync_fetch_and_add(&g->left_ns,
						     filled_by(g, periods, most - left));
		}
	}
	if (ns)
		__sync_fetch_and_add(&g->left_ns, -(__s64)ns);
	left = g->left_ns;
	if (left > 0)
		return 0;
	/* What it has taken too much it lacks in the next periods. */
	until = g->refill_ns;
	if (g->quota_ns)
		until += (__u64)-left / g->quota_ns * g->period_ns;
	return until < now + MAX_WAIT_NS ? until : now + MAX_WAIT_NS;
}

#endif
