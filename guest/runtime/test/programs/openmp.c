// SPDX-License-Identifier: Apache-2.0
/*
 * For tests in a guest: OpenMP's places, and memory that its thread on CPU 1 touches first. See README.md.
 *
 * Built with libgomp and with LLVM's library. The latter's header is not needed for so few functions.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE	(8UL << 20)
#define MAX_CPUS	64

int omp_get_num_places(void);
int omp_get_place_num(void);
int omp_get_place_num_procs(int place);
void omp_get_place_proc_ids(int place, int *ids);

static void *touched;

static void take_new(void)
{
	touched = NULL;
#pragma omp parallel
	{
		if (omp_get_place_num() == 1) {
			void *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (memory == MAP_FAILED)
				abort();
			memset(memory, 1, SIZE);
			touched = memory;
		}
	}
	printf("%#lx %lu\n", (unsigned long)touched, touched ? SIZE : 0);
}

static void show_places(void)
{
	int ids[MAX_CPUS], place, i, count;

	for (place = 0; place < omp_get_num_places(); place++) {
		count = omp_get_place_num_procs(place);
		if (count > MAX_CPUS)
			abort();
		omp_get_place_proc_ids(place, ids);
		for (i = 0; i < count; i++)
			printf("%s%d", i ? "," : place ? ";" : "", ids[i]);
	}
	putchar('\n');
}

int main(void)
{
	char line[16];

	setvbuf(stdout, NULL, _IOLBF, 0);
	/* All threads are there from here on. */
#pragma omp parallel
	__asm__ volatile("" ::: "memory");
	printf("%d %s\n", getpid(), VERSION);
	while (fgets(line, sizeof(line), stdin)) {
		if (!strcmp(line, "new\n"))
			take_new();
		else if (!strcmp(line, "places\n"))
			show_places();
		else
			return 1;
	}
	return 0;
}
