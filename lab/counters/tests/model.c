// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The plugin's model without QEMU: accesses from a file, not from an emulated server.
 *
 *   model REGION CPUS ACCESSES
 *
 * An access is a 64-bit word: the address of a line with the CPU in bits 0 to 2
 * and the node of the memory in bits 3 to 5. What is counted is in the region.
 */
#include "../plugin/plugin.h"

#include <stdio.h>
#include <stdlib.h>

struct cpu *cpus;

int main(int argc, char **argv)
{
	int nr_cpus = argc == 4 ? atoi(argv[2]) : 0;
	__u64 words[4096];
	FILE *accesses;
	size_t count, i;

	if (nr_cpus < 1 || nr_cpus > 8) {
		fprintf(stderr, "model REGION CPUS ACCESSES\n");
		return 2;
	}
	accesses = fopen(argv[3], "rb");
	if (!accesses) {
		perror(argv[3]);
		return 1;
	}
	if (config_load(argv[1], nr_cpus) || cache_init())
		return 1;
	while ((count = fread(words, sizeof(*words), 4096, accesses)) > 0) {
		for (i = 0; i < count; i++) {
			__u64 cpu = words[i] & 7, line = (1ULL << LINE_SHIFT) - 1;
			struct access access = {
				.phys = words[i] & ~line,
				.node = words[i] >> 3 & 7,
			};

			if (cpu >= config.nr_cpus || access.node >= config.nr_nodes) {
				fprintf(stderr, "%s: access %#llx\n", argv[3], (unsigned long long)words[i]);
				return 1;
			}
			cache_access(&cpus[cpu], &access);
		}
	}
	return ferror(accesses) ? 1 : 0;
}
