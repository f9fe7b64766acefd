// SPDX-License-Identifier: Apache-2.0
/* Any file can be named as a program: what it holds is looked at and never trusted. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "program.h"

/* The kernel takes as many as fit into 64 KiB. */
#define MAX_HEADERS	(65536 / sizeof(Elf64_Phdr))
/* What a program exports is a few names, or some thousand if it has plug-ins. */
#define MAX_SYMBOLS	(1UL << 20)

static void other(struct vnuma_program *out, const char *format, ...)
{
	va_list arguments;

	out->kind = VNUMA_PROGRAM_OTHER;
	va_start(arguments, format);
	vsnprintf(out->reason, sizeof(out->reason), format, arguments);
	va_end(arguments);
}

/* The kernel looks at so much of a file. */
#define START	256

/* "#! /bin/sh -e\n", as the kernel reads it: what is behind the end of a file that is shorter is zero, and ends the name, too. */
static void examine_script(struct vnuma_program *out, const char line[START], size_t length)
{
	size_t from = 2, to;

	while (from < length && (line[from] == ' ' || line[from] == '\t'))
		from++;
	to = from;
	/* strchr() finds the end of its string, too. */
	while (to < length && !strchr(" \t\n", line[to]))
		to++;
	if (to == from || to == START) {
		other(out, "a script without an interpreter");
		return;
	}
	out->kind = VNUMA_PROGRAM_SCRIPT;
	memcpy(out->interpreter, line + from, to - from);
	out->interpreter[to - from] = '\0';
}

/* The dynamic linker of another C library takes none of the libraries, and may refuse to start with them. */
static bool is_for_glibc(const Elf64_Phdr *part, vnuma_read_fn read_at, void *context)
{
	static const char linker[] = "/ld-linux-x86-64.so.2";
	char name[256];
	size_t length = part->p_filesz;

	/* Its end is a zero. */
	if (length < sizeof(linker) || length > sizeof(name) ||
	    read_at(context, name, length, part->p_offset) != (ssize_t)length)
		return false;
	return !memcmp(name + length - sizeof(linker), linker, sizeof(linker));
}

static void examine_elf(struct vnuma_program *out, const Elf64_Ehdr *header, vnuma_read_fn read_at,
			void *context)
{
	unsigned int i;

	if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != EM_X86_64) {
		other(out, "not an x86-64 program (class %u, machine %u)",
		      header->e_ident[EI_CLASS], header->e_machine);
		return;
	}
	if (header->e_type != ET_EXEC && header->e_type != ET_DYN) {
		other(out, "not a program (e_type is %u)", header->e_type);
		return;
	}
	if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum > MAX_HEADERS) {
		other(out, "not a program (e_phentsize is %u, e_phnum %u)", header->e_phentsize,
		      header->e_phnum);
		return;
	}
	for (i = 0; i < header->e_phnum; i++) {
		Elf64_Phdr part;

		if (read_at(context, &part, sizeof(part), header->e_phoff + i * sizeof(part)) !=
		    sizeof(part)) {
			other(out, "its program headers are cut off");
			return;
		}
		if (part.p_type != PT_INTERP)
			continue;
		if (!is_for_glibc(&part, read_at, context)) {
			other(out, "its dynamic linker is not glibc's");
			return;
		}
		out->kind = VNUMA_PROGRAM_DYNAMIC;
		return;
	}
	other(out, "statically linked");
}

void vnuma_examine(struct vnuma_program *out, vnuma_read_fn read_at, void *context)
{
	union {
		char text[START];
		Elf64_Ehdr header;
	} start;
	ssize_t length;

	memset(out, 0, sizeof(*out));
	memset(&start, 0, sizeof(start));
	length = read_at(context, &start, sizeof(start), 0);
	if (length < 0)
		other(out, "cannot be read");
	else if (length >= 2 && !memcmp(start.text, "#!", 2))
		examine_script(out, start.text, (size_t)length);
	else if (length >= (ssize_t)sizeof(start.header) &&
		 !memcmp(start.header.e_ident, ELFMAG, SELFMAG))
		examine_elf(out, &start.header, read_at, context);
	else
		other(out, "neither an ELF file nor a script");
}

static bool has_word(const char *word, vnuma_read_fn read_at, void *context)
{
	/* Pieces of a file, each with the end of the one before in front of it. */
	char piece[64 << 10];
	size_t length = strlen(word), kept = 0;
	uint64_t offset = 0;
	ssize_t count;

	while ((count = read_at(context, piece + kept, sizeof(piece) - kept, offset)) > 0) {
		size_t have = kept + (size_t)count;

		if (memmem(piece, have, word, length))
			return true;
		offset += (uint64_t)count;
		kept = have < length ? have : length - 1;
		memmove(piece, piece + have - kept, kept);
	}
	return false;
}

const char *vnuma_missing_word(const char *const *words, vnuma_read_fn read_at, void *context)
{
	for (; *words; words++)
		if (!has_word(*words, read_at, context))
			return *words;
	return NULL;
}

static bool read_section(Elf64_Shdr *out, const Elf64_Ehdr *header, uint64_t index, vnuma_read_fn read_at, void *context)
{
	return index < header->e_shnum &&
	       read_at(context, out, sizeof(*out), header->e_shoff + index * sizeof(*out)) == sizeof(*out);
}

/* Is it one of these symbols? `start` is where their names are. */
static bool is_among(const char *name, const Elf64_Sym *symbols, size_t count, uint64_t start, vnuma_read_fn read_at,
		     void *context)
{
	size_t length = strlen(name) + 1, i;
	char found[64];

	if (length > sizeof(found))
		return false;
	for (i = 0; i < count; i++)
		if (symbols[i].st_shndx != SHN_UNDEF &&
		    read_at(context, found, length, start + symbols[i].st_name) == (ssize_t)length &&
		    !memcmp(found, name, length))
			return true;
	return false;
}

bool vnuma_exports(const char *name, vnuma_read_fn read_at, void *context)
{
	Elf64_Shdr symbols = { 0 }, names;
	Elf64_Sym some[512];
	Elf64_Ehdr header;
	uint64_t i, count;

	if (read_at(context, &header, sizeof(header), 0) != sizeof(header) || header.e_shentsize != sizeof(symbols))
		return false;
	for (i = 0; symbols.sh_type != SHT_DYNSYM; i++)
		if (!read_section(&symbols, &header, i, read_at, context))
			return false;
	if (!read_section(&names, &header, symbols.sh_link, read_at, context))
		return false;
	count = symbols.sh_size / sizeof(*some);
	for (i = 0; i < count && i < MAX_SYMBOLS; i += sizeof(some) / sizeof(*some)) {
		size_t size = count - i < sizeof(some) / sizeof(*some) ? (count - i) * sizeof(*some) : sizeof(some);

		if (read_at(context, some, size, symbols.sh_offset + i * sizeof(*some)) != (ssize_t)size)
			return false;
		if (is_among(name, some, size / sizeof(*some), names.sh_offset, read_at, context))
			return true;
	}
	return false;
}
