// SPDX-License-Identifier: Apache-2.0
/*
 * What libvnuma and vnuma-run parse, fed by libFuzzer. `make fuzz` builds it, `cargo xtask fuzz runtime-page`
 * runs it, and `make check` feeds it what is in fuzz/corpus/runtime-page.
 *
 * The first byte says what the rest is: a page, a list, distances or a program.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "../run/program.h"
#include "../src/internal.h"

#define LIMIT	4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int condition)
{
	if (!condition)
		abort();
}

static int check_range(void *context, uint32_t first, uint32_t last)
{
	uint32_t *count = context;

	require(first <= last && last < LIMIT);
	return ++*count > 100;
}

static void page(const uint8_t *data, size_t size)
{
	struct vnuma_gd_page page = { 0 };
	char problem[96] = "";
	size_t i, length;
	int err;

	/* Whole but for what the input says, so that checks behind the first are reached. */
	page.magic = VNUMA_GD_MAGIC;
	page.version_major = VNUMA_GD_VERSION_MAJOR;
	page.page_size = sizeof(page);
	page.nr_cpus = 1;
	for (i = 0; i + 1 < size; i += 2)
		((uint8_t *)&page)[data[i] % offsetof(struct vnuma_gd_page, cpu_node)] ^= data[i + 1];
	err = vnuma_check_page(&page, problem, sizeof(problem));
	length = strnlen(problem, sizeof(problem));
	require(length < sizeof(problem) && (length > 0) == (err != 0));
	if (err == 0)
		require(page.nr_cpus > 0 && page.nr_cpus <= VNUMA_GD_MAX_CPUS);
}

struct input {
	const char *bytes;
	size_t size;
};

static ssize_t read_input(void *context, void *buffer, size_t size, uint64_t offset)
{
	const struct input *input = context;
	size_t count;

	if (offset >= input->size)
		return 0;
	count = size < input->size - offset ? size : input->size - offset;
	memcpy(buffer, input->bytes + offset, count);
	return (ssize_t)count;
}

static void program(const char *bytes, size_t size)
{
	struct input input = { bytes, size };
	struct vnuma_program found;

	vnuma_examine(&found, read_input, &input);
	require(memchr(found.interpreter, 0, sizeof(found.interpreter)) != NULL);
	require(memchr(found.reason, 0, sizeof(found.reason)) != NULL);
	require((found.interpreter[0] != 0) == (found.kind == VNUMA_PROGRAM_SCRIPT));
	vnuma_exports("malloc", read_input, &input);
	require((found.reason[0] != 0) == (found.kind == VNUMA_PROGRAM_OTHER));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint32_t count = 0;
	char *text;
	int value;

	if (size == 0)
		return 0;
	/* Its own allocation, so that a read behind its end is caught. */
	text = malloc(size);
	memcpy(text, data + 1, size - 1);
	switch (data[0] % 4) {
	case 0:
		page(data + 1, size - 1);
		break;
	case 1:
		text = realloc(text, size - 1 ? size - 1 : 1);
		value = vnuma_parse_list(text, size - 1, LIMIT, check_range, &count);
		require(value <= 0);
		break;
	case 2:
		text = realloc(text, size - 1 ? size - 1 : 1);
		value = vnuma_parse_distance(text, size - 1, 3);
		require(value < 256);
		break;
	default:
		program(text, size - 1);
		break;
	}
	free(text);
	return 0;
}
