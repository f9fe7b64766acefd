// SPDX-License-Identifier: Apache-2.0
/*
 * Programs of dsm-run, written for MPI: the yardstick.
 *
 * They do the work of those in span/dsm-run/src/programs, in as many steps. Each program compares its result with that of a
 * sequential one. The time is that of the slowest process.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static void expect(const char *what, uint64_t found, uint64_t right)
{
	if (found == right)
		return;
	fprintf(stderr, "%s is %#llx, and %#llx is right\n", what, (unsigned long long)found,
		(unsigned long long)right);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *memory(size_t bytes)
{
	void *found = calloc(bytes ? bytes : 1, 1);

	if (!found)
		MPI_Abort(MPI_COMM_WORLD, 2);
	return found;
}

static uint64_t mix(uint64_t seed)
{
	uint64_t value = seed + 0x9e3779b97f4a7c15;

	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
	value = (value ^ value >> 27) * 0x94d049bb133111eb;
	return value ^ value >> 31;
}

static size_t first(size_t count, int part)
{
	return count * part / ranks;
}

/* The parts of all processes, in elements, as MPI_Allgatherv wants them. */
static void parts(size_t count, int *counts, int *starts)
{
	for (int part = 0; part < ranks; part++) {
		starts[part] = first(count, part);
		counts[part] = first(count, part + 1) - starts[part];
	}
}

/* A counter that goes round with the right to add to it. */
static void lock_counter(size_t rounds)
{
	int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
	uint64_t counter = 0;

	for (size_t round = 0; round < rounds; round++) {
		if (ranks > 1 && (rank > 0 || round > 0))
			MPI_Recv(&counter, 1, MPI_UINT64_T, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		counter++;
		if (ranks > 1)
			MPI_Send(&counter, 1, MPI_UINT64_T, to, 0, MPI_COMM_WORLD);
	}
	if (ranks > 1 && rank == 0)
		MPI_Recv(&counter, 1, MPI_UINT64_T, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	MPI_Bcast(&counter, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
	expect("the counter", counter, rounds * ranks);
}

/* Counters of their own: without shared memory there is nothing to share falsely. */
static void false_sharing(size_t rounds)
{
	volatile uint64_t own = 0;
	uint64_t mine, *all = memory(ranks * sizeof(*all));

	for (size_t round = 0; round < rounds; round++)
		own++;
	mine = own;
	MPI_Allgather(&mine, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, MPI_COMM_WORLD);
	for (int other = 0; other < ranks; other++)
		expect("a counter", all[other], rounds);
	free(all);
}

enum { DEGREE = 8, ITERATIONS = 10 };

static double next_rank(size_t vertex, size_t count, const double *last)
{
	double sum = 0;

	for (size_t edge = 0; edge < DEGREE; edge++)
		sum += last[mix(vertex * DEGREE + edge) % count];
	return 0.15 / count + 0.85 * sum / DEGREE;
}

static void pagerank(size_t count)
{
	double *last = memory(count * sizeof(*last)), *next = memory(count * sizeof(*next));
	int *counts = memory(ranks * sizeof(*counts)), *starts = memory(ranks * sizeof(*starts));
	size_t begin = first(count, rank), end = first(count, rank + 1);

	parts(count, counts, starts);
	for (size_t vertex = 0; vertex < count; vertex++)
		last[vertex] = 1.0 / count;
	for (int iteration = 0; iteration < ITERATIONS; iteration++) {
		for (size_t vertex = begin; vertex < end; vertex++)
			next[vertex] = next_rank(vertex, count, last);
		MPI_Allgatherv(next + begin, end - begin, MPI_DOUBLE, last, counts, starts, MPI_DOUBLE,
			       MPI_COMM_WORLD);
	}
	double *right = memory(count * sizeof(*right));

	for (size_t vertex = 0; vertex < count; vertex++)
		right[vertex] = 1.0 / count;
	for (int iteration = 0; iteration < ITERATIONS; iteration++) {
		for (size_t vertex = 0; vertex < count; vertex++)
			next[vertex] = next_rank(vertex, count, right);
		memcpy(right, next, count * sizeof(*right));
	}
	for (size_t vertex = 0; vertex < count; vertex++)
		expect("a rank", ((uint64_t *)last)[vertex], ((uint64_t *)right)[vertex]);
	free(right);
	free(last);
	free(next);
	free(counts);
	free(starts);
}

static void matrix(size_t side)
{
	size_t cells = side * side, begin = first(side, rank), end = first(side, rank + 1);
	uint64_t *a = memory(cells * 8), *b = memory(cells * 8), *c = memory(cells * 8);
	int *counts = memory(ranks * sizeof(*counts)), *starts = memory(ranks * sizeof(*starts));

	parts(side, counts, starts);
	for (int part = 0; part < ranks; part++) {
		counts[part] *= side;
		starts[part] *= side;
	}
	for (size_t cell = begin * side; cell < end * side; cell++) {
		a[cell] = mix(cell);
		b[cell] = mix(cell + cells);
	}
	MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_UINT64_T, b, counts, starts, MPI_UINT64_T, MPI_COMM_WORLD);
	for (size_t row = begin; row < end; row++)
		for (size_t column = 0; column < side; column++)
			for (size_t k = 0; k < side; k++)
				c[row * side + column] += a[row * side + k] * b[k * side + column];
	MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_UINT64_T, c, counts, starts, MPI_UINT64_T, MPI_COMM_WORLD);
	for (size_t cell = 0; cell < cells; cell++) {
		uint64_t sum = 0;

		for (size_t k = 0; k < side; k++)
			sum += mix(cell / side * side + k) * mix(k * side + cell % side + cells);
		expect("a sum", c[cell], sum);
	}
	free(a);
	free(b);
	free(c);
	free(counts);
	free(starts);
}

enum { MESSAGE = 64 };

/* Each process sends messages to the next. */
static void producer_consumer(size_t count)
{
	int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
	uint64_t out[MESSAGE], in[MESSAGE];

	for (size_t number = 0; number < count; number++) {
		for (uint64_t word = 0; word < MESSAGE; word++)
			out[word] = mix((uint64_t)rank << 40 | number << 8 | word);
		MPI_Sendrecv(out, MESSAGE, MPI_UINT64_T, to, 0, in, MESSAGE, MPI_UINT64_T, from, 0, MPI_COMM_WORLD,
			     MPI_STATUS_IGNORE);
		for (uint64_t word = 0; word < MESSAGE; word++)
			expect("a word of a message", in[word], mix((uint64_t)from << 40 | number << 8 | word));
	}
}

enum { BLOCK = 1024, VOCABULARY = 200 };

static size_t spelling(uint64_t number, char *out)
{
	uint64_t random = mix(number);
	size_t length = 0;

	for (uint64_t at = 0; at < random % 8; at++)
		out[length++] = 'a' + mix(random + at) % 26;
	out[length++] = 'a' + number / 26;
	out[length++] = 'a' + number % 26;
	return length;
}

static void fill_block(size_t number, char *text)
{
	size_t used = 0, length;
	char word[16];

	for (uint64_t index = 0;; index++) {
		length = spelling(mix((uint64_t)number << 16 | index) % VOCABULARY, word);
		if (used + length + 1 > BLOCK)
			break;
		memcpy(text + used, word, length);
		text[used + length] = ' ';
		used += length + 1;
	}
	memset(text + used, ' ', BLOCK - used);
}

static void count_words(const char *text, size_t bytes, uint64_t *counts)
{
	size_t begin = 0;

	for (size_t at = 0; at < bytes; at++) {
		if (text[at] != ' ')
			continue;
		if (at > begin)
			counts[(text[at - 2] - 'a') * 26 + text[at - 1] - 'a']++;
		begin = at + 1;
	}
}

/* Process 0 has the text, and sends each its part. */
static void word_count(size_t blocks)
{
	char *text = memory(rank == 0 ? blocks * BLOCK : 0);
	int *counts = memory(ranks * sizeof(*counts)), *starts = memory(ranks * sizeof(*starts));
	uint64_t mine[VOCABULARY] = { 0 }, all[VOCABULARY] = { 0 }, right[VOCABULARY] = { 0 };

	parts(blocks, counts, starts);
	for (int part = 0; part < ranks; part++) {
		counts[part] *= BLOCK;
		starts[part] *= BLOCK;
	}
	char *own = memory(counts[rank]), block[BLOCK];

	for (size_t number = 0; rank == 0 && number < blocks; number++)
		fill_block(number, text + number * BLOCK);
	MPI_Scatterv(text, counts, starts, MPI_CHAR, own, counts[rank], MPI_CHAR, 0, MPI_COMM_WORLD);
	count_words(own, counts[rank], mine);
	MPI_Allreduce(mine, all, VOCABULARY, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
	for (size_t number = 0; number < blocks; number++) {
		fill_block(number, block);
		count_words(block, BLOCK, right);
	}
	for (int word = 0; word < VOCABULARY; word++)
		expect("how often a word occurs", all[word], right[word]);
	free(text);
	free(own);
	free(counts);
	free(starts);
}

static uint64_t inside(size_t begin, size_t end)
{
	uint64_t hits = 0;

	for (size_t point = begin; point < end; point++) {
		uint64_t random = mix(point);
		unsigned __int128 x = random >> 32, y = mix(random) >> 32;

		hits += x * x + y * y < (unsigned __int128)1 << 64;
	}
	return hits;
}

static void pi(size_t points)
{
	uint64_t mine = inside(first(points, rank), first(points, rank + 1)), all;

	MPI_Allreduce(&mine, &all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
	expect("the number of points in the circle", all, inside(0, points));
}

static const struct {
	const char *name;
	void (*run)(size_t size);
} PROGRAMS[] = {
	{ "lock-counter", lock_counter },	{ "producer-consumer", producer_consumer },
	{ "matrix", matrix },			{ "pagerank", pagerank },
	{ "word-count", word_count },		{ "pi", pi },
	{ "false-sharing", false_sharing },
};

int main(int argc, char **argv)
{
	double begin, seconds, slowest;
	int found = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	MPI_Barrier(MPI_COMM_WORLD);
	begin = MPI_Wtime();
	for (size_t at = 0; argc == 3 && at < sizeof(PROGRAMS) / sizeof(*PROGRAMS); at++) {
		if (strcmp(argv[1], PROGRAMS[at].name))
			continue;
		found = 1;
		PROGRAMS[at].run(strtoull(argv[2], NULL, 10));
	}
	MPI_Barrier(MPI_COMM_WORLD);
	seconds = MPI_Wtime() - begin;
	MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
	if (rank == 0 && found)
		printf("right, %.6f s\n", slowest);
	else if (rank == 0)
		fprintf(stderr, "usage: programs PROGRAM SIZE\n");
	MPI_Finalize();
	return !found;
}
