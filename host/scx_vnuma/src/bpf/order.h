/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Arithmetic of virtual time, and of the turns of threads that have waited for too long. Virtual
 * time wraps after some hours of a thread with the least share, so two of its values are compared
 * by the sign of their difference. tests/order.c runs it, too.
 */
#ifndef SCX_VNUMA_ORDER_H
#define SCX_VNUMA_ORDER_H

/* Share of a thread that has no other beside it. */
#define WHOLE		(1ULL << 20)

/*
 * How far a thread may be ahead of its queue. One with a small share is far ahead after a slice,
 * and that is how it gets no more. It does not wait for all of that (serve_late()).
 */
#define MAX_AHEAD_NS	10000000000000ULL

/* A queue begins so long before its virtual time wraps, so that each run of tests sees it wrap. */
#define BEFORE_WRAP_NS	30000000000ULL

/*
 * How long a thread waits in a queue that is served, for how long it runs then, and which part of
 * the CPU's time all such turns have. More if so many wait that not each would have one within
 * LATE_ROUND_NS: the kernel ends a scheduler that has a thread wait for 30 s, or for 21 s one that
 * reads what RCU protects.
 */
#define LATE_NS		2000000000ULL
#define LATE_SLICE_NS	250000ULL
#define LATE_PART	200
#define LATE_ROUND_NS	5000000000ULL
/* What a turn is charged with at most: on a machine that stands still it may be any time. */
#define LATE_MOST_NS	(40 * LATE_SLICE_NS)
/* Turns that another class left no time for are made up for, of this time. */
#define LATE_CREDIT_NS	2000000000ULL

static __always_inline bool is_before(__u64 vtime, __u64 other)
{
	return (__s64)(vtime - other) < 0;
}

/* How far one is ahead of the other; 0: it is not. */
static __always_inline __u64 ahead_of(__u64 vtime, __u64 other)
{
	return is_before(other, vtime) ? vtime - other : 0;
}

/* Virtual time that a thread with a share has used. */
static __always_inline __u64 scaled(__u64 ns, __u64 share)
{
	return ns * WHOLE / (share ?: WHOLE);
}

/*
 * Is a thread ahead of its queue by a turn at most? A turn of one with next to no share is more
 * than any can be ahead, so after one it is not.
 */
static __always_inline bool is_near(__u64 vtime, __u64 of, __u64 turn)
{
	return ahead_of(vtime, of) <= (turn < MAX_AHEAD_NS / 2 ? turn : MAX_AHEAD_NS / 2);
}

/* Virtual time as near to another one as these limits say. */
static __always_inline __u64 within(__u64 vtime, __u64 of, __u64 behind, __u64 ahead)
{
	if (is_before(vtime, of - behind))
		return of - behind;
	return is_before(of + ahead, vtime) ? of + ahead : vtime;
}

/*
 * How far ahead a thread is with another share: what it had more than others stays the same. The
 * product stays below 2^64, as MAX_AHEAD_NS is below 2^44.
 */
static __always_inline __u64 rescaled(__u64 ahead, __u64 before, __u64 share)
{
	__u64 now = scaled((ahead >> 4) * (before ?: WHOLE) / WHOLE, share) << 4;

	return now < MAX_AHEAD_NS ? now : MAX_AHEAD_NS;
}

/* The pause after a turn, if so many threads have waited for too long. */
static __always_inline __u64 late_pause(__u64 ran, __u32 waiting)
{
	__u64 pause, most = LATE_ROUND_NS / (waiting ?: 1);

	if (ran < LATE_SLICE_NS)
		ran = LATE_SLICE_NS;
	if (ran > LATE_MOST_NS)
		ran = LATE_MOST_NS;
	pause = LATE_PART * ran;
	return pause < most ? pause : most;
}

#endif
