// SPDX-License-Identifier: Apache-2.0
/*
 * HotSpot refuses to start when it is told of two collectors. Options are looked for anywhere in a text, whoever will
 * take it apart: a shell ("sh -c"), another launcher ("-J-XX:+UseG1GC"), a script. Java VMs that PROGRAM starts inherit
 * what vnuma-run sets, so that an option which is for one of these matters as well.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "java.h"

#define OPTION	"-X"
#define FLAG	"-XX:"
/* HotSpot has had eight collectors. */
#define MAX_CHOSEN	16

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/* Options of Java 8 that set a collector's flag. */
static const struct {
	const char *option;
	const char *flag;
	bool on;
} others[] = {
	{ "-Xconcgc", "UseConcMarkSweepGC", true },
	{ "-Xincgc", "UseConcMarkSweepGC", true },
	{ "-Xnoconcgc", "UseConcMarkSweepGC", false },
	{ "-Xnoincgc", "UseConcMarkSweepGC", false },
};

/* Variables that a Java VM reads. The launcher puts the second one before the arguments, and the third one counts most. */
static const char *const variables[] = { "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS" };

/*
 * How flags of pages start, behind the sign if they have one. Parts of the cache for code have whole pages: with huge ones
 * some sizes are too small, and a Java VM does not start.
 */
static const char *const about_pages[] = { "UseLargePages", "UseTransparentHugePages", "UseHugeTLBFS", "UseSHM",
					   "LargePageSizeInBytes", "SegmentedCodeCache", "ReservedCodeCacheSize",
					   "NonNMethodCodeHeapSize", "ProfiledCodeHeapSize", "NonProfiledCodeHeapSize" };

struct choices {
	const char *const *ours;
	struct vnuma_chosen chosen[MAX_CHOSEN];
	int count;
};

static bool ends_with(const char *name, const char *end)
{
	size_t length = strlen(name), of_end = strlen(end);

	return length >= of_end && !strcmp(name + length - of_end, end);
}

/* "UseG1GC", but not "UseMaximumCompactionOnSystemGC". The last one sets UseParallelGC. */
static bool is_collector(const char *name)
{
	return (!strncmp(name, "Use", 3) && ends_with(name, "GC") && !ends_with(name, "SystemGC")) ||
	       !strcmp(name, "AggressiveHeap");
}

static bool is_ours(const struct choices *choices, const char *name)
{
	const char *const *ours;

	for (ours = choices->ours; *ours; ours++)
		if (!strcmp(*ours, name))
			return true;
	return false;
}

/* Of options that set one flag the last one counts. */
static void set_flag(struct choices *choices, const struct vnuma_chosen *option, bool on)
{
	struct vnuma_chosen *at = choices->chosen, *end = at + choices->count;

	while (at < end && strcmp(at->flag, option->flag))
		at++;
	if (!on && at < end) {
		choices->count--;
		memmove(at, at + 1, (size_t)(end - at - 1) * sizeof(*at));
	}
	if (on && at == end && choices->count < MAX_CHOSEN) {
		choices->count++;
		*at = *option;
	}
}

/* What follows "-XX:". */
static void read_flag(struct choices *choices, const char *text, const char *variable)
{
	struct vnuma_chosen option = { .variable = variable };
	size_t length;

	if (*text != '+' && *text != '-')
		return;
	length = strspn(text + 1, letters);
	if (length >= sizeof(option.flag))
		return;
	memcpy(option.flag, text + 1, length);
	snprintf(option.option, sizeof(option.option), FLAG "+%s", option.flag);
	if (is_collector(option.flag) && !is_ours(choices, option.flag))
		set_flag(choices, &option, *text == '+');
}

static void read_other(struct choices *choices, const char *text, const char *variable)
{
	size_t length = strlen(OPTION) + strspn(text + strlen(OPTION), letters), i;
	struct vnuma_chosen option = { .variable = variable };

	for (i = 0; i < sizeof(others) / sizeof(*others); i++) {
		if (length != strlen(others[i].option) || memcmp(text, others[i].option, length))
			continue;
		snprintf(option.option, sizeof(option.option), "%s", others[i].option);
		snprintf(option.flag, sizeof(option.flag), "%s", others[i].flag);
		set_flag(choices, &option, others[i].on);
	}
}

static void scan(struct choices *choices, const char *text, const char *variable)
{
	const char *at;

	for (at = strstr(text, OPTION); at; at = strstr(at + strlen(OPTION), OPTION)) {
		if (!strncmp(at, FLAG, strlen(FLAG)))
			read_flag(choices, at + strlen(FLAG), variable);
		else
			read_other(choices, at, variable);
	}
}

static void scan_variable(struct choices *choices, const char *name)
{
	const char *value = getenv(name);

	if (value)
		scan(choices, value, name);
}

bool vnuma_other_collector(char *const *arguments, const char *const *ours, struct vnuma_chosen *out)
{
	struct choices choices = { .ours = ours };

	/* In this order it reads them. */
	scan_variable(&choices, variables[0]);
	scan_variable(&choices, variables[1]);
	for (; *arguments; arguments++)
		scan(&choices, *arguments, NULL);
	scan_variable(&choices, variables[2]);
	if (choices.count)
		*out = choices.chosen[0];
	return choices.count;
}

static bool names_pages(const char *text)
{
	const char *at;
	size_t i;

	for (at = text ? strstr(text, FLAG) : NULL; at; at = strstr(at, FLAG)) {
		at += strlen(FLAG);
		at += *at == '+' || *at == '-';
		for (i = 0; i < sizeof(about_pages) / sizeof(*about_pages); i++)
			if (!strncmp(at, about_pages[i], strlen(about_pages[i])))
				return true;
	}
	return false;
}

bool vnuma_chooses_pages(char *const *arguments)
{
	size_t i;

	for (i = 0; i < sizeof(variables) / sizeof(*variables); i++)
		if (names_pages(getenv(variables[i])))
			return true;
	for (; *arguments; arguments++)
		if (names_pages(*arguments))
			return true;
	return false;
}
