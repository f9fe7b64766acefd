// SPDX-License-Identifier: GPL-2.0
/*
 * Two CPUs have threads join a group and leave it at once. While one is in, its weight is in the
 * sum; in the end nothing is. Then they charge it, while its cpu.max is refilled: in the end that
 * lacks what was taken and not refilled. Prints what was wrong.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static void bpf_spin_lock(struct bpf_spin_lock *lock)
{
	while (__sync_lock_test_and_set(&lock->val, 1))
		;
}

static void bpf_spin_unlock(struct bpf_spin_lock *lock)
{
	__sync_lock_release(&lock->val);
}

#include "../src/bpf/members.h"

#define WEIGHT	100

static struct group group = { .weight = 300 }, above = { .weight = 100 };
static unsigned long times;

static void join(bool in)
{
	__u32 weight = WEIGHT;

	if (change_users(&group, weight, in, &weight))
		change_users(&above, weight, in, &weight);
}

static void *come_and_go(void *unused)
{
	unsigned long wrong = 0, time;
	__u64 sum;

	(void)unused;
	for (time = 0; time < times; time++) {
		join(true);
		sum = *(volatile __u64 *)&group.active;
		wrong += sum < WEIGHT || sum > 2 * WEIGHT;
		join(false);
	}
	return (void *)wrong;
}

/* So deep in debt that it is never full. */
static struct group limited = { .quota_ns = 10, .period_ns = 20, .left_ns = -(1LL << 50) };
static __u64 clock_ns;

static void *charge(void *unused)
{
	unsigned long time;

	(void)unused;
	for (time = 0; time < times; time++)
		take(&limited, 7, __sync_fetch_and_add(&clock_ns, 1));
	return NULL;
}

static int run_twice(void *(*what)(void *), unsigned long *sum)
{
	void *here, *there;
	pthread_t thread;

	if (pthread_create(&thread, NULL, what, NULL))
		return 1;
	here = what(NULL);
	if (pthread_join(thread, &there))
		return 1;
	*sum = (unsigned long)here + (unsigned long)there;
	return 0;
}

/* A sum that is less than nothing, as a weight is changed just now. */
static struct group changing = { .active = -5 }, shared = { .active = 20 };

int main(int count, char **arguments)
{
	unsigned long wrong, none;
	__s64 refilled, lost;

	if (count != 2)
		return 2;
	if (part_of(100, 5, &changing) != 100 || part_of(100, 5, &shared) != 25)
		printf("a part of a group is wrong\n");
	times = strtoul(arguments[1], NULL, 10);
	if (run_twice(come_and_go, &wrong) || run_twice(charge, &none))
		return 1;
	refilled = limited.refill_ns / limited.period_ns * limited.quota_ns;
	lost = limited.left_ns + (1LL << 50) - refilled + 2 * 7 * (__s64)times;
	printf("%lu wrong, users %u and %u, weights %llu and %llu, lost %lld ns\n", wrong,
	       group.users, above.users, group.active, above.active, lost);
	return 0;
}
