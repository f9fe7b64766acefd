// SPDX-License-Identifier: GPL-2.0
/*
 * Virtual time at many places, also where it wraps: what is before what is the same everywhere.
 * Then limits of what a change of a share makes of it, of turns and of pauses.
 * Prints what is wrong.
 */
#include <linux/types.h>
#include <stdbool.h>
#include <stdio.h>

#include "../src/bpf/order.h"

#define expect(what) do {						\
		if (!(what))						\
			printf("%d: " #what "\n", __LINE__);		\
	} while (0)

static void compare(__u64 at)
{
	static const __u64 steps[] = { 1, 1000, MAX_AHEAD_NS, 1ULL << 62 };
	__u64 step;
	unsigned int i;

	for (i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
		step = steps[i];
		expect(is_before(at, at + step) && !is_before(at + step, at));
		expect(!is_before(at, at));
		expect(ahead_of(at + step, at) == step && !ahead_of(at, at + step));
		expect(within(at + step, at, 5, 7) == at + (step < 7 ? step : 7));
		expect(within(at - step, at, 5, 7) == at - (step < 5 ? step : 5));
	}
}

static void rescale(void)
{
	__u64 share, ahead, there, back;

	for (share = 1; share <= WHOLE; share *= 2) {
		/* A slice is a slice. */
		ahead = rescaled(scaled(5000000, WHOLE), WHOLE, share);
		there = scaled(5000000, share);
		expect(ahead <= MAX_AHEAD_NS);
		expect(ahead == (there < MAX_AHEAD_NS ? there : MAX_AHEAD_NS));
		back = rescaled(ahead, share, WHOLE);
		expect(back == (there < MAX_AHEAD_NS ? 5000000 : back) && back <= 5000000);
		expect(rescaled(MAX_AHEAD_NS, share, share) <= MAX_AHEAD_NS);
	}
}

/* After a slice a thread may be yielded to once more, unless that was far more than its share. */
static void yield_once(void)
{
	__u64 share, turn, after;

	for (share = 1; share <= WHOLE; share *= 2) {
		turn = scaled(5000000, share);
		after = within(BEFORE_WRAP_NS + turn, BEFORE_WRAP_NS, turn, MAX_AHEAD_NS);
		expect(is_near(BEFORE_WRAP_NS, BEFORE_WRAP_NS, turn));
		expect(is_near(after, BEFORE_WRAP_NS, turn) == (turn <= MAX_AHEAD_NS / 2));
	}
}

static void pause(void)
{
	__u32 waiting;

	/* A 200th of the CPU's time. */
	expect(late_pause(0, 1) == 200 * LATE_SLICE_NS);
	expect(late_pause(1000000, 1) == 200 * 1000000);
	for (waiting = 1; waiting < 100000; waiting++) {
		/* All have their turn in time, however late the timers are. */
		expect(waiting * late_pause(~0ULL, waiting) <= LATE_ROUND_NS);
		expect(late_pause(~0ULL, waiting) >= late_pause(0, waiting));
	}
}

int main(void)
{
	__u64 part;

	for (part = 0; part < 64; part++) {
		compare(part << 58);
		compare((part << 58) - 1);
	}
	rescale();
	yield_once();
	pause();
	return 0;
}
