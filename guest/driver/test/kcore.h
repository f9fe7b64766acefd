/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Variables of the running kernel: where they are by /proc/kallsyms, what is in them by
 * /proc/kcore. Both need root, and a kernel that is not locked down.
 */
#ifndef KCORE_H
#define KCORE_H

#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define KCORE_SEGMENTS	64

static Elf64_Phdr kcore_segments[KCORE_SEGMENTS];
static int kcore_nr_segments;
static int kcore_file = -1;

static bool kcore_open(void)
{
	Elf64_Ehdr header;
	int file = open("/proc/kcore", O_RDONLY | O_CLOEXEC);

	if (file < 0)
		return false;
	if (pread(file, &header, sizeof(header), 0) != sizeof(header) ||
	    memcmp(header.e_ident, ELFMAG, SELFMAG) ||
	    header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum > KCORE_SEGMENTS ||
	    pread(file, kcore_segments, header.e_phnum * sizeof(Elf64_Phdr), header.e_phoff) !=
	    (ssize_t)(header.e_phnum * sizeof(Elf64_Phdr))) {
		close(file);
		return false;
	}
	kcore_nr_segments = header.e_phnum;
	kcore_file = file;
	return true;
}

/* Of virtual memory of the kernel. */
static bool kcore_read(uint64_t address, void *to, size_t size)
{
	int i;

	for (i = 0; i < kcore_nr_segments; i++) {
		const Elf64_Phdr *segment = &kcore_segments[i];
		uint64_t into = address - segment->p_vaddr;

		if (segment->p_type == PT_LOAD && address >= segment->p_vaddr &&
		    into < segment->p_memsz && segment->p_memsz - into >= size)
			return pread(kcore_file, to, size, segment->p_offset + into) ==
			       (ssize_t)size;
	}
	return false;
}

/* Where symbols are that were looked up since the boot: the kernel makes all of its list anew for each reader. */
#define KCORE_SYMBOLS	"/run/vnuma-check.symbols"

static uint64_t find_symbol(const char *path, const char *wanted)
{
	uint64_t address, found = 0;
	FILE *file = fopen(path, "r");
	char line[512], name[256];

	while (file && !found && fgets(line, sizeof(line), file))
		if (strstr(line, wanted) &&
		    sscanf(line, "%" SCNx64 " %*c %255s", &address, name) == 2 &&
		    !strcmp(name, wanted))
			found = address;
	if (file)
		fclose(file);
	return found;
}

/* 0: the kernel has no such symbol, or shows no addresses. */
static uint64_t kernel_symbol(const char *wanted)
{
	uint64_t found = find_symbol(KCORE_SYMBOLS, wanted);
	FILE *file;

	if (found)
		return found;
	found = find_symbol("/proc/kallsyms", wanted);
	file = found ? fopen(KCORE_SYMBOLS, "a") : NULL;
	if (file) {
		fprintf(file, "%" PRIx64 " T %s\n", found, wanted);
		fclose(file);
	}
	return found;
}

#endif
