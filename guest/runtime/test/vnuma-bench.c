// SPDX-License-Identifier: Apache-2.0
/*
 * What a look at the topology costs, beside sched_getcpu(): nanoseconds a call, the least of some
 * rounds. The page is a file unless the machine has /dev/vnuma. Fails if reading the generation
 * costs more than twice as much as sched_getcpu().
 */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>
#include <vnuma/vnuma.h>

#include "tree.h"

#define CALLS	2000000
#define ROUNDS	9

static volatile uint64_t sink;

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* The least of a call is in `best` then. */
#define MEASURE(name, call)							\
	do {									\
		best = 1e9;							\
		for (int round = 0; round < ROUNDS; round++) {			\
			double start = seconds();				\
			for (int i = 0; i < CALLS; i++)				\
				sink = (uint64_t)(call);			\
			double each = (seconds() - start) / CALLS * 1e9;	\
			best = each < best ? each : best;			\
		}								\
		printf("%-28s %7.2f ns\n", name, best);				\
	} while (0)

int main(void)
{
	const uint64_t *word;
	double best, getcpu, generation;
	struct vnuma *v;

	if (vnuma_open(&v) || vnuma_source(v) != VNUMA_SOURCE_DEVICE) {
		make_tree();
		put_page(make_page(64));
		expect_equal(vnuma_open_at(&v, tree), 0);
		remove_tree();
	}
	word = vnuma_generation_word(v);
	MEASURE("sched_getcpu()", sched_getcpu());
	getcpu = best;
	MEASURE("vnuma_generation()", vnuma_generation(v));
	generation = best;
	MEASURE("load of the word", __atomic_load_n(word, __ATOMIC_ACQUIRE));
	MEASURE("vnuma_cpu_node()", vnuma_cpu_node(v, 3));
	MEASURE("vnuma_current_node()", vnuma_current_node(v));
	vnuma_close(v);
	if (generation > 2 * getcpu) {
		fprintf(stderr, "vnuma_generation() takes %.2f ns, at most twice the %.2f ns of sched_getcpu() are wanted\n",
			generation, getcpu);
		return 1;
	}
	return 0;
}
