// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Maps the region and checks its header: whatever the rest of the plugin
 * indexes with is bounded here.
 */
#include "plugin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_SETS	0x100000
#define MAX_WAYS	64
/* A region of VNUMA_LC_MAX_CPUS; BARs of ivshmem are powers of two. */
#define MAX_SIZE	0x100000

struct vnuma_lc_header config;
struct vnuma_lc_header *header;
struct vnuma_lc_devices *devices;

static int refuse(const char *path, const char *field, __u64 value)
{
	fprintf(stderr, "counters: %s: %s is %#llx\n", path, field,
		(unsigned long long)value);
	return -1;
}

static bool bad_sets(__u32 sets)
{
	return !sets || sets > MAX_SETS || sets % 16;
}

static bool bad_ways(__u32 ways)
{
	return !ways || ways > MAX_WAYS;
}

static int check_caches(const char *path)
{
	if (config.sample_shift != VNUMA_LC_SAMPLED &&
	    config.sample_shift != VNUMA_LC_FULL)
		return refuse(path, "sample_shift", config.sample_shift);
	if (bad_sets(config.l2_sets))
		return refuse(path, "l2_sets", config.l2_sets);
	if (bad_sets(config.llc_sets))
		return refuse(path, "llc_sets", config.llc_sets);
	if (bad_ways(config.l2_ways))
		return refuse(path, "l2_ways", config.l2_ways);
	if (bad_ways(config.llc_ways))
		return refuse(path, "llc_ways", config.llc_ways);
	if (config.second_sets && bad_sets(config.second_sets))
		return refuse(path, "second_sets", config.second_sets);
	if (config.second_sets && bad_ways(config.second_ways))
		return refuse(path, "second_ways", config.second_ways);
	return 0;
}

static int check_nodes(const char *path)
{
	__u64 end = 0;
	__u32 i;

	if (!config.nr_nodes || config.nr_nodes > VNUMA_LC_MAX_NODES)
		return refuse(path, "nr_nodes", config.nr_nodes);
	if (!config.nr_ranges || config.nr_ranges > VNUMA_LC_MAX_RANGES)
		return refuse(path, "nr_ranges", config.nr_ranges);
	for (i = 0; i < config.nr_cpus; i++)
		if (config.cpu_node[i] >= config.nr_nodes)
			return refuse(path, "cpu_node", config.cpu_node[i]);
	for (i = 0; i < config.nr_ranges; i++) {
		const struct vnuma_lc_range *range = &config.ranges[i];

		if (range->node >= config.nr_nodes)
			return refuse(path, "ranges.node", range->node);
		if (range->start < end || range->start % CHUNK_SIZE)
			return refuse(path, "ranges.start", range->start);
		if (range->end <= range->start || range->end % CHUNK_SIZE || range->end >> 46)
			return refuse(path, "ranges.end", range->end);
		end = range->end;
	}
	return 0;
}

static int check(const char *path, __u64 size, int qemu_cpus)
{
	if (config.magic != VNUMA_LC_MAGIC)
		return refuse(path, "magic", config.magic);
	if (config.version_major != VNUMA_LC_VERSION_MAJOR)
		return refuse(path, "version_major", config.version_major);
	if (config.region_size != size)
		return refuse(path, "region_size", config.region_size);
	if (config.nr_cpus != (__u32)qemu_cpus ||
	    config.nr_cpus > VNUMA_LC_MAX_CPUS ||
	    VNUMA_LC_CPUS_OFFSET + (__u64)config.nr_cpus * VNUMA_LC_PAGE_SIZE > size)
		return refuse(path, "nr_cpus", config.nr_cpus);
	if (check_caches(path))
		return -1;
	return check_nodes(path);
}

static int make_cpus(__u8 *region)
{
	__u32 i;

	cpus = calloc(config.nr_cpus, sizeof(*cpus));
	if (!cpus)
		return -1;
	for (i = 0; i < config.nr_cpus; i++) {
		cpus[i].page = (void *)(region + VNUMA_LC_CPUS_OFFSET +
					(size_t)i * VNUMA_LC_PAGE_SIZE);
		cpus[i].count = &cpus[i].page->mode[VNUMA_LC_KERNEL];
		cpus[i].node = config.cpu_node[i];
		memset(cpus[i].filter, 0xff, sizeof(cpus[i].filter));
		memset(cpus[i].pages, 0xff, sizeof(cpus[i].pages));
	}
	return 0;
}

int config_load(const char *path, int qemu_cpus)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct stat stat;
	__u8 *region;

	if (fd < 0 || fstat(fd, &stat)) {
		perror(path);
		return -1;
	}
	if (stat.st_size < VNUMA_LC_CPUS_OFFSET || stat.st_size > MAX_SIZE)
		return refuse(path, "size", stat.st_size);
	region = mmap(NULL, stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (region == MAP_FAILED) {
		perror(path);
		return -1;
	}
	header = (void *)region;
	devices = (void *)(region + VNUMA_LC_DEVICES_OFFSET);
	memcpy(&config, region, sizeof(config));
	if (check(path, stat.st_size, qemu_cpus))
		return -1;
	return make_cpus(region);
}
