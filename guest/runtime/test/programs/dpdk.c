// SPDX-License-Identifier: Apache-2.0
/*
 * For tests in a guest: memory of DPDK's allocator, which gives a thread memory of its own node. See README.md.
 *
 *	dpdk OPTIONS-OF-EAL
 *
 * DPDK's headers are not needed for so few functions.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NEW	(8UL << 20)
#define AGAIN	(4UL << 20)

int rte_eal_init(int argc, char **argv);
const char *rte_version(void);
void *rte_malloc(const char *type, size_t size, unsigned int align);
void rte_free(void *memory);

static void *take(size_t size)
{
	void *memory = rte_malloc(NULL, size, 0);

	if (!memory) {
		fputs("rte_malloc: no memory\n", stderr);
		exit(1);
	}
	memset(memory, 1, size);
	printf("%#lx %zu\n", (unsigned long)memory, size);
	return memory;
}

int main(int argc, char **argv)
{
	void *again = NULL;
	char line[16];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (rte_eal_init(argc, argv) < 0) {
		fputs("rte_eal_init failed\n", stderr);
		return 1;
	}
	printf("%d %s\n", getpid(), rte_version());
	while (fgets(line, sizeof(line), stdin)) {
		if (!strcmp(line, "new\n")) {
			take(NEW);
		} else if (!strcmp(line, "again\n")) {
			rte_free(again);
			again = take(AGAIN);
		} else {
			return 1;
		}
	}
	return 0;
}
