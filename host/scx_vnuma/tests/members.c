// SPDX-License-Identifier: GPL-2.0
/*
 * Two CPUs have threads join a group and leave it at once. While one is in, its weight is in the
 * sum; in the end nothing is. Prints what was wrong.
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

int main(int count, char **arguments)
{
	void *wrong[2] = { NULL, NULL };
	pthread_t thread;

	if (count != 2)
		return 2;
	times = strtoul(arguments[1], NULL, 10);
	if (pthread_create(&thread, NULL, come_and_go, NULL))
		return 1;
	wrong[0] = come_and_go(NULL);
	if (pthread_join(thread, &wrong[1]))
		return 1;
	printf("%lu wrong, users %u and %u, weights %llu and %llu\n",
	       (unsigned long)wrong[0] + (unsigned long)wrong[1], group.users, above.users,
	       group.active, above.active);
	return 0;
}
