// SPDX-License-Identifier: Apache-2.0
/* Which arena a thread uses when it or its CPU's node has changed. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <sched.h>
#include <sys/wait.h>

#include "alloc-test.h"

#define THREADS	128
#define LOOK_FIRST	8
#define PER_NODE	64
#define PER_CPU	4

/* A thread stays where it is while there is no arena for it, and tries again after the next change. */
void gets_an_arena_later(void)
{
	unsigned int first;

	move_cpus(page, 0, 1);
	first = allocated_in();
	no_more_arenas = 1;
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	no_more_arenas = 0;
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	move_cpus(page, 1, 1);
	expect(allocated_in() != first);
}

void follows(void)
{
	unsigned int first, second;

	move_cpus(page, 0, 1);
	first = allocated_in();
	expect(first != 0);
	move_cpus(page, 1, 1);
	errno = E2BIG;
	kept = malloc(100000);
	expect_equal(errno, E2BIG);
	free(kept);
	second = allocated_in();
	expect(second != 0 && second != first);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	schedule_on(1);
	expect_equal(thread_arena(), second);
	/* A CPU of no node: where it was. */
	move_cpus(page, VNUMA_GD_NO_NODE, 1);
	expect_equal(allocated_in(), second);
}

/* Nodes of the CPUs that may be used, of which each second one was on node 1 at the start. */
static unsigned int nodes_at_start(void)
{
	unsigned int cpu, seen = 0;
	cpu_set_t allowed;

	expect_equal(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed))
			seen |= 1U << cpu % 2;
	return seen == 3 ? 2 : 1;
}

/* Arenas of a node: they are divided, but for the first one. */
static unsigned int slots(void)
{
	unsigned int each = (automatic() - 1) / nodes_at_start();

	return each < PER_CPU ? PER_CPU : each < PER_NODE ? each : PER_NODE;
}

/* A thread that shares an arena with the one that was first, as that many came between, until it may end. */
static void *stays(void *step)
{
	pthread_barrier_t *steps = step;

	allocated_in();
	pthread_barrier_wait(steps);
	pthread_barrier_wait(steps);
	return NULL;
}

static void *nothing(void *unused)
{
	allocated_in();
	return unused;
}

/* With AutoNUMA an arena goes where its thread's CPU goes, but not if the thread was scheduled elsewhere. */
void comes_along(void)
{
	unsigned int first, second, i, status;
	void *hooks[2];
	pthread_barrier_t steps;
	pthread_t thread;
	pid_t child;

	move_cpus(page, 0, 1);
	first = allocated_in();
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	schedule_on(1);
	second = allocated_in();
	expect(second != first);
	/* Both change places, and with them where they get memory. */
	hooks[0] = hooks_of(first);
	hooks[1] = hooks_of(second);
	expect(hooks[0] != hooks[1]);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), second);
	expect(hooks_of(second) == hooks[0] && hooks_of(first) == hooks[1]);
	schedule_on(1);
	expect_equal(allocated_in(), first);
	schedule_on(0);
	expect_equal(allocated_in(), second);
	/* Not while another thread uses it, and it does so until it ends. */
	for (i = 1; i < slots(); i++) {
		expect_equal(pthread_create(&thread, NULL, nothing, NULL), 0);
		expect_equal(pthread_join(thread, NULL), 0);
	}
	pthread_barrier_init(&steps, NULL, 2);
	expect_equal(pthread_create(&thread, NULL, stays, &steps), 0);
	pthread_barrier_wait(&steps);
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	/* Nor to a node where another thread is; in a child there is none. */
	child = fork();
	if (!child) {
		move_cpus(page, 0, 1);
		_exit(allocated_in() != first);
	}
	expect_equal(waitpid(child, (int *)&status, 0), child);
	expect_equal(status, 0);
	expect_equal(allocated_in(), second);
	pthread_barrier_wait(&steps);
	expect_equal(pthread_join(thread, NULL), 0);
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), second);
	/* It can be switched off at any time. */
	put("/proc/sys/kernel/numa_balancing", "0\n");
	move_cpus(page, 0, 1);
	expect(allocated_in() != second);
	put("/proc/sys/kernel/numa_balancing", "1\n");
}

static void *arena_of_thread(void *arena)
{
	*(unsigned int *)arena = allocated_in();
	return NULL;
}

/* Threads share a node's arenas, and have none of another node. */
void threads_share(void)
{
	unsigned int seen[2][THREADS], node, i, j;
	pthread_t threads[THREADS];

	for (node = 0; node < 2; node++) {
		unsigned int different = 0;

		move_cpus(page, (uint16_t)node, 1);
		for (i = 0; i < THREADS; i++)
			expect_equal(pthread_create(&threads[i], NULL, arena_of_thread, &seen[node][i]), 0);
		for (i = 0; i < THREADS; i++)
			expect_equal(pthread_join(threads[i], NULL), 0);
		for (i = 0; i < THREADS; i++) {
			for (j = 0; j < i && seen[node][j] != seen[node][i]; j++)
				;
			different += j == i;
		}
		expect_equal(different, slots());
	}
	for (i = 0; i < THREADS; i++)
		for (j = 0; j < THREADS; j++)
			expect(seen[0][i] != seen[1][j]);
	/* Those that jemalloc has anyway, as far as there are as many. */
	for (i = 0; i < THREADS; i++)
		expect(seen[0][i] && seen[1][i] && (2 * slots() >= automatic() ||
						    (seen[0][i] < automatic() && seen[1][i] < automatic())));
}

/* A program may put hooks of its own before those that it finds, with what they need behind them or nothing. */
void *copies_hooks(void *unused)
{
	void **own = own_hooks(hooks_of(allocated_in()));
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("arenas.create", &arena, &size, &own, sizeof(own)), 0);
	expect_equal(mallctl("thread.arena", NULL, NULL, &arena, size), 0);
	kept = malloc(100000);
	expect(kept);
	expect_equal(arena_of(kept), arena);
	return unused;
}

static void *is_elsewhere(void *unused)
{
	expect(allocated_in() > 1);
	return unused;
}

void leaves_hooks(void)
{
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), 1);
	in_a_thread(is_elsewhere);
	expect(hooks_of(1) == hooks_of_program);
}

void keeps_hooks(void)
{
	loses_hooks = 1;
	move_cpus(page, 0, 1);
	expect(hooks_of(allocated_in()) != hooks_of(0));
	expect_equal(loses_hooks, 0);
}

/* A program that chooses a thread's arena keeps that one, before the thread's first call and later. */
void *chooses(void *unused)
{
	unsigned int mine, i;
	size_t size = sizeof(mine);

	move_cpus(page, 0, 1);
	for (i = 0; i < 2; i++) {
		expect_equal(mallctl("arenas.create", &mine, &size, NULL, 0), 0);
		expect_equal(mallctl("thread.arena", NULL, NULL, &mine, size), 0);
		expect_equal(mallctl("thread.tcache.flush", NULL, NULL, NULL, 0), 0);
		expect_equal(allocated_in(), mine);
		schedule_on(1);
		expect_equal(allocated_in(), mine);
		move_cpus(page, 0, 1);
		expect_equal(allocated_in(), mine);
	}
	return unused;
}

void *chooses_later(void *unused)
{
	move_cpus(page, 0, 1);
	expect(allocated_in() < automatic());
	return chooses(unused);
}

void *binds_itself_first(void *unused)
{
	unsigned int before, i;

	move_cpus(page, 0, 1);
	before = allocated_in();
	/* Nobody says so. */
	move_cpus(page, 1, 0);
	for (i = 0; i < LOOK_FIRST; i++) {
		kept = malloc(1);
		free(kept);
	}
	expect(allocated_in() != before);
	return unused;
}

/* Where jemalloc has too few arenas for all nodes, or each is a CPU's, others are created. */
void has_created_ones(void)
{
	unsigned int first, second;

	move_cpus(page, 0, 1);
	first = allocated_in();
	move_cpus(page, 1, 1);
	second = allocated_in();
	expect(first != second && first >= automatic() && second >= automatic());
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	allocates();
}
