// SPDX-License-Identifier: Apache-2.0
/*
 * Laplace's equation on a grid by Jacobi's method, with OpenMP: a program without memory management of its own. A thread has the same rows in
 * each sweep, and their memory since it has touched it first.
 *
 *	solver COLUMNS ROWS
 *
 * It serves its standard input, as bench/runtimes/src/guest.rs says. It looks there between two sweeps. An operation is a row of a sweep.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE	(2UL << 20)
/*
 * Where the second grid begins in its first huge page. If both began alike, a row and the one that is made of it would be at the same
 * place of what finds a page by the last bits of its number: sets of the caches, and the model's detector of streams
 * (lab/counters/plugin/cache.c), which would take the stores for no stream.
 */
#define SECOND_AT	(128UL << 10)

static size_t columns, rows;

/* So far behind the beginning of a huge page: programs with large arrays have them, as far as the guest has any. */
static double *map_grid(size_t at)
{
	size_t bytes = columns * rows * sizeof(double) + at;
	char *memory = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t skip;

	if (memory == MAP_FAILED) {
		perror("solver: memory");
		exit(1);
	}
	skip = (HUGE_PAGE - (size_t)memory % HUGE_PAGE) % HUGE_PAGE;
	madvise(memory + skip, bytes, MADV_HUGEPAGE);
	return (double *)(memory + skip + at);
}

/* 1 at the first row, 0 elsewhere: each thread touches the rows that are to be its own. */
static void fill(double *grid)
{
#pragma omp parallel for schedule(static)
	for (size_t i = 0; i < rows; i++)
		for (size_t j = 0; j < columns; j++)
			grid[i * columns + j] = i ? 0.0 : 1.0;
}

/* All but the border is the mean of its neighbours. */
static void sweep(double *restrict new, const double *restrict old)
{
#pragma omp parallel for schedule(static)
	for (size_t i = 0; i < rows; i++) {
		const double *row = old + i * columns;

		if (!i || i == rows - 1)
			continue;
		for (size_t j = 1; j < columns - 1; j++)
			new[i * columns + j] =
				0.25 * (row[j - columns] + row[j - 1] + row[j + 1] + row[j + columns]);
	}
}

/* A line of standard input; 0 at its end. Nothing is kept in a buffer, so that poll() knows what there is. */
static int read_line(char *line, size_t size)
{
	size_t length = 0;

	while (read(STDIN_FILENO, line + length, 1) == 1) {
		if (line[length] == '\n') {
			line[length] = '\0';
			return 1;
		}
		if (++length == size)
			break;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct pollfd input = { .fd = STDIN_FILENO, .events = POLLIN };
	unsigned long operations = 0;
	double *new, *old, *swap;
	int is_working = 0;
	char line[16];

	columns = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
	rows = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;
	if (columns < 3 || rows < 3) {
		fprintf(stderr, "usage: solver COLUMNS ROWS, 3 or more of each\n");
		return 2;
	}
	new = map_grid(0);
	old = map_grid(SECOND_AT);
	fill(new);
	fill(old);
	printf("0\n");
	fflush(stdout);
	for (;;) {
		if (is_working && !poll(&input, 1, 0)) {
			sweep(new, old);
			operations += rows;
			swap = old;
			old = new;
			new = swap;
			continue;
		}
		if (!read_line(line, sizeof(line)))
			break;
		is_working = !strcmp(line, "go");
		printf("%lu\n", is_working ? 0 : operations);
		fflush(stdout);
	}
	/* What it has found must not be left out. */
	return old[columns + 1] < 0.0;
}
