/* SPDX-License-Identifier: GPL-2.0 */
/* What is known of a control group, and who counts in it. tests/members.c runs this, too. */
#ifndef SCX_VNUMA_MEMBERS_H
#define SCX_VNUMA_MEMBERS_H

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

#endif
