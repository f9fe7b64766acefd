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

#define FLAG	"-XX:"
/* HotSpot has had eight collectors. */
#define MAX_CHOSEN	16

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

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

/* Of options of one name the last one counts. */
static void set_flag(struct choices *choices, const char *name, bool on, const char *variable)
{
	struct vnuma_chosen *at = choices->chosen, *end = at + choices->count;

	while (at < end && strcmp(at->option + strlen(FLAG "+"), name))
		at++;
	if (!on && at < end) {
		choices->count--;
		memmove(at, at + 1, (size_t)(end - at - 1) * sizeof(*at));
	}
	if (on && at == end && choices->count < MAX_CHOSEN) {
		choices->count++;
		snprintf(at->option, sizeof(at->option), FLAG "+%s", name);
		at->variable = variable;
	}
}

static void scan(struct choices *choices, const char *text, const char *variable)
{
	char name[sizeof(choices->chosen->option) - sizeof(FLAG "+")];
	const char *at;

	for (at = strstr(text, FLAG); at; at = strstr(at, FLAG)) {
		size_t length;
		bool on;

		at += strlen(FLAG);
		on = *at == '+';
		if (!on && *at != '-')
			continue;
		length = strspn(at + 1, letters);
		if (length >= sizeof(name))
			continue;
		memcpy(name, at + 1, length);
		name[length] = '\0';
		if (is_collector(name) && !is_ours(choices, name))
			set_flag(choices, name, on, variable);
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

	/* In this order it reads them: the launcher puts the second one before the arguments. */
	scan_variable(&choices, "JAVA_TOOL_OPTIONS");
	scan_variable(&choices, "JDK_JAVA_OPTIONS");
	for (; *arguments; arguments++)
		scan(&choices, *arguments, NULL);
	scan_variable(&choices, "_JAVA_OPTIONS");
	if (choices.count)
		*out = choices.chosen[0];
	return choices.count;
}
