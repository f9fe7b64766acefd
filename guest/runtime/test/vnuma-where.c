// SPDX-License-Identifier: Apache-2.0
/*
 * For tests in a guest: on which nodes memory of another process is, a count of pages for each node.
 *
 *	vnuma-where PID ADDRESS LENGTH [ADDRESS LENGTH]...
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NODES	2
#define PAGE	4096UL
#define AT_ONCE	512

static unsigned long counts[NODES];

static int count(int pid, unsigned long at, unsigned long end)
{
	void *pages[AT_ONCE];
	int status[AT_ONCE], i, n;

	for (at &= -PAGE; at < end; at += n * PAGE) {
		for (n = 0; n < AT_ONCE && at + n * PAGE < end; n++)
			pages[n] = (void *)(at + n * PAGE);
		/* Where pages are is asked without nodes to move them to (move_pages(2)). */
		if (syscall(SYS_move_pages, pid, (unsigned long)n, pages, NULL, status, 0))
			return -1;
		for (i = 0; i < n; i++)
			if (status[i] >= 0 && status[i] < NODES)
				counts[status[i]]++;
	}
	return 0;
}

int main(int argc, char **argv)
{
	int i;

	if (argc < 4 || argc % 2) {
		fputs("vnuma-where PID ADDRESS LENGTH [ADDRESS LENGTH]...\n", stderr);
		return 2;
	}
	for (i = 2; i < argc; i += 2) {
		unsigned long at = strtoul(argv[i], NULL, 0);

		if (count(atoi(argv[1]), at, at + strtoul(argv[i + 1], NULL, 0))) {
			perror(argv[1]);
			return 1;
		}
	}
	for (i = 0; i < NODES; i++)
		printf("%s%lu", i ? " " : "", counts[i]);
	putchar('\n');
	return 0;
}
