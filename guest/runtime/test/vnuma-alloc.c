// SPDX-License-Identifier: Apache-2.0
/*
 * For tests in a guest: a program on one CPU that allocates, writes and frees memory, and tells in a
 * line whenever it has changed on which node it is, and how much of what it has allocated last is there:
 *
 *	node=1 local=100
 *
 *	vnuma-alloc CPU			(ends with its input, or when nothing has changed for five minutes)
 *	vnuma-alloc CPU stay		(allocates once, and goes on to use that)
 *	vnuma-alloc CPU stay large	(the same, in a few objects of some MiB)
 *	vnuma-alloc CPU stay shared	(the same, in memory that it would share with its children)
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

/* More than jemalloc keeps for a thread, in pieces of whole pages. */
#define PIECES	256
#define SIZE	(64 << 10)
/* Rounds without a change until a line is printed. */
#define ROUNDS	8
/* Only ends what waits for a change that does not come. */
#define LIMIT_S	300

/* Together they are as much. */
#define LARGE_OBJECTS	4

static void *pieces[PIECES];
/* Pieces that are allocated at once. */
static int at_once = 1;
/* The shared memory that they are in, or NULL. */
static char *shared;

/* Of all pieces, the share that is on a node, in percent. */
static int share_on(int node)
{
	static int status[PIECES];
	int i, local = 0;

	/* Where pages are is asked without nodes to move them to (move_pages(2)). */
	if (syscall(SYS_move_pages, 0, (unsigned long)PIECES, pieces, NULL, status, 0))
		return -1;
	for (i = 0; i < PIECES; i++)
		local += status[i] == node;
	return local * 100 / PIECES;
}

static void allocate(void)
{
	int i;

	for (i = 0; i < PIECES; i++) {
		if (shared)
			pieces[i] = shared + (size_t)i * SIZE;
		else
			pieces[i] = i % at_once ? (char *)pieces[i - 1] + SIZE : malloc((size_t)at_once * SIZE);
		if (!pieces[i])
			exit(1);
		memset(pieces[i], i, SIZE);
	}
}

/* Each page, as AutoNUMA moves what is used. */
static void use(void)
{
	int i, at;

	for (i = 0; i < PIECES; i++)
		for (at = 0; at < SIZE; at += 4096)
			((volatile char *)pieces[i])[at]++;
}

static void release(void)
{
	int i;

	for (i = 0; i < PIECES; i += at_once)
		free(pieces[i]);
}

int main(int argc, char **argv)
{
	struct pollfd input = { .fd = STDIN_FILENO, .events = POLLIN };
	int stay = argc >= 3 && !strcmp(argv[2], "stay");
	int node, share, last_node = -2, last_share = -2, same = 0;
	time_t changed = time(NULL);
	struct vnuma *v;
	cpu_set_t one;

	if (argc == 4 && !strcmp(argv[3], "large"))
		at_once = PIECES / LARGE_OBJECTS;
	if (argc == 4 && !strcmp(argv[3], "shared")) {
		shared = mmap(NULL, (size_t)PIECES * SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (shared == MAP_FAILED)
			return 1;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	CPU_ZERO(&one);
	CPU_SET(argc >= 2 ? atoi(argv[1]) : 0, &one);
	if (sched_setaffinity(0, sizeof(one), &one) || vnuma_open(&v)) {
		perror("vnuma-alloc");
		return 1;
	}
	while (poll(&input, 1, 50) == 0) {
		if (!stay || !pieces[0])
			allocate();
		use();
		node = vnuma_current_node(v);
		share = share_on(node);
		if (!stay)
			release();
		same = node == last_node && share == last_share ? same + 1 : 0;
		last_node = node;
		last_share = share;
		if (same == 0)
			changed = time(NULL);
		if (same == ROUNDS)
			printf("node=%d local=%d\n", node, share);
		if (time(NULL) - changed > LIMIT_S) {
			fprintf(stderr, "node=%d local=%d, and nothing has changed for %d s\n",
				node, share, LIMIT_S);
			return 1;
		}
	}
	vnuma_close(v);
	return 0;
}
