// SPDX-License-Identifier: Apache-2.0
/* Texts of sysfs and the page of the driver. What they hold is taken or refused, never trusted. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>

#include "internal.h"

/* Distances are bytes in the kernel. */
#define MAX_DISTANCE	255

int vnuma_check_page(const struct vnuma_gd_page *page, char *problem, size_t size)
{
	if (page->magic != VNUMA_GD_MAGIC) {
		snprintf(problem, size, "magic is %#llx, not %#llx",
			 (unsigned long long)page->magic, VNUMA_GD_MAGIC);
		return -EBADMSG;
	}
	/* A minor version only appends. */
	if (page->version_major != VNUMA_GD_VERSION_MAJOR) {
		snprintf(problem, size, "version_major is %u, this library reads %u",
			 page->version_major, VNUMA_GD_VERSION_MAJOR);
		return -EPROTONOSUPPORT;
	}
	if (page->page_size < sizeof(*page)) {
		snprintf(problem, size, "page_size is %u, version 1 has at least %zu",
			 page->page_size, sizeof(*page));
		return -EBADMSG;
	}
	if (page->nr_cpus == 0 || page->nr_cpus > VNUMA_GD_MAX_CPUS) {
		snprintf(problem, size, "nr_cpus is %u, not 1 to %u", page->nr_cpus,
			 VNUMA_GD_MAX_CPUS);
		return -EBADMSG;
	}
	return 0;
}

/* A decimal number. How many characters it has, or 0: there is none, or it is not below `limit`. */
static size_t parse_number(const char *text, size_t length, uint32_t limit, uint32_t *out)
{
	uint32_t value = 0;
	size_t at = 0;

	while (at < length && text[at] >= '0' && text[at] <= '9') {
		value = value * 10 + (uint32_t)(text[at] - '0');
		/* Limits are small: the value cannot wrap before it is seen to be too large. */
		if (value >= limit)
			return 0;
		at++;
	}
	*out = value;
	return at;
}

static size_t without_newline(const char *text, size_t length)
{
	return length > 0 && text[length - 1] == '\n' ? length - 1 : length;
}

int vnuma_parse_list(const char *text, size_t length, uint32_t limit,
		     vnuma_range_fn each, void *context)
{
	size_t at = 0;

	length = without_newline(text, length);
	while (at < length) {
		uint32_t first, last;
		size_t digits = parse_number(text + at, length - at, limit, &first);

		if (digits == 0)
			return -EBADMSG;
		at += digits;
		last = first;
		if (at < length && text[at] == '-') {
			at++;
			digits = parse_number(text + at, length - at, limit, &last);
			if (digits == 0 || last < first)
				return -EBADMSG;
			at += digits;
		}
		if (each(context, first, last))
			return -EBADMSG;
		if (at == length)
			break;
		/* A comma, and something behind it. */
		if (text[at] != ',' || at + 1 == length)
			return -EBADMSG;
		at++;
	}
	return 0;
}

static size_t skip_spaces(const char *text, size_t length, size_t at)
{
	while (at < length && text[at] == ' ')
		at++;
	return at;
}

int vnuma_parse_distance(const char *text, size_t length, unsigned int index)
{
	unsigned int found = 0;
	size_t at;

	length = without_newline(text, length);
	/* The kernel begins with one if node 0 is not online. */
	at = skip_spaces(text, length, 0);
	while (at < length) {
		uint32_t value;
		size_t digits = parse_number(text + at, length - at, MAX_DISTANCE + 1, &value);

		if (digits == 0)
			return -EBADMSG;
		at += digits;
		if (at < length && text[at] != ' ')
			return -EBADMSG;
		if (found++ == index)
			return (int)value;
		at = skip_spaces(text, length, at);
	}
	return -ENODEV;
}
