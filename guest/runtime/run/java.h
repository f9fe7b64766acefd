/* SPDX-License-Identifier: Apache-2.0 */
/* Which collector, and which pages, a Java VM is told to use by what it is started with. */
#ifndef VNUMA_RUN_JAVA_H
#define VNUMA_RUN_JAVA_H

#include <stdbool.h>

struct vnuma_chosen {
	char flag[64];			/* "UseG1GC" */
	char option[80];		/* by which it is set: "-XX:+UseG1GC" */
	const char *variable;		/* whose value has it; NULL: an argument */
};

/*
 * Is another collector chosen than by `ours`, names of HotSpot's flags up to NULL? By the arguments of the program, up to NULL, or
 * by the variables that a Java VM reads. One that is taken back behind ("-XX:-UseG1GC") is none.
 */
bool vnuma_other_collector(char *const *arguments, const char *const *ours, struct vnuma_chosen *out);

/* Is it told which pages to use, or not to use, or sizes that small pages were meant for? By the arguments of the program, up to NULL, or by those variables. */
bool vnuma_chooses_pages(char *const *arguments);

#endif /* VNUMA_RUN_JAVA_H */
