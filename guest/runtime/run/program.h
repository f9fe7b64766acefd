/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of a program say of how it is started, and of what it asks for. */
#ifndef VNUMA_RUN_PROGRAM_H
#define VNUMA_RUN_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Reads at an offset as pread() does: a file, or the input of a test. */
typedef ssize_t (*vnuma_read_fn)(void *context, void *buffer, size_t size, uint64_t offset);

enum vnuma_kind {
	VNUMA_PROGRAM_DYNAMIC = 1,	/* the dynamic linker starts it and loads what LD_PRELOAD names */
	VNUMA_PROGRAM_SCRIPT,		/* `interpreter` is started instead */
	VNUMA_PROGRAM_OTHER,		/* nothing can be preloaded, `reason` says why */
};

struct vnuma_program {
	enum vnuma_kind kind;
	char interpreter[256];
	char reason[128];
};

void vnuma_examine(struct vnuma_program *out, vnuma_read_fn read_at, void *context);

/* The first of some words, up to NULL, that a file does not have; NULL: it has all of them. */
const char *vnuma_missing_word(const char *const *words, vnuma_read_fn read_at, void *context);

/*
 * Does an ELF file define what libraries find by that name? The dynamic linker takes the program's first. Without a table of sections,
 * which nothing needs to start it, nobody knows.
 */
bool vnuma_exports(const char *name, vnuma_read_fn read_at, void *context);

#endif /* VNUMA_RUN_PROGRAM_H */
