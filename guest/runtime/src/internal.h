/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of libvnuma share. Nothing here is exported. */
#ifndef VNUMA_INTERNAL_H
#define VNUMA_INTERNAL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <vnuma/guest_device.h>
#include <vnuma/vnuma.h>

#define VNUMA_ROOT_MAX	(PATH_MAX - 128)

/*
 * struct vnuma - a handle
 *
 * It is a mapping of its own, because an allocator may be what uses it.
 */
struct vnuma {
	const uint64_t *generation;
	const volatile struct vnuma_gd_page *page;	/* NULL: sysfs */
	int device_error;
	uint64_t own_generation;	/* sysfs: what `generation` names */
	int refreshing;			/* sysfs: pid of who reads, 0: nobody */
	uint32_t nr_cpus;		/* sysfs */
	uint16_t cpu_node[VNUMA_MAX_CPUS];	/* sysfs */
	char problem[PATH_MAX + 128];
	char root[VNUMA_ROOT_MAX];	/* without the slash at its end */
};

/*
 * Checks the page of a driver that may be older or newer than this library.
 * 0, or -errno with the field and its value in `problem`.
 */
int vnuma_check_page(const struct vnuma_gd_page *page, char *problem, size_t size);

/* One number or range of a list. Not 0: the list is bad. */
typedef int (*vnuma_range_fn)(void *context, uint32_t first, uint32_t last);

/* Reads a list of the kernel, "0-3,8\n". Numbers are below `limit`. 0 or -errno. */
int vnuma_parse_list(const char *text, size_t length, uint32_t limit,
		     vnuma_range_fn each, void *context);

/* Reads "10 20 21\n" and finds the value at `index`. It or -errno. */
int vnuma_parse_distance(const char *text, size_t length, unsigned int index);

/* Reads the CPUs of all nodes. 0 or -errno. */
int vnuma_sysfs_cpus(const struct vnuma *v, uint16_t *node_of_cpu, uint32_t *nr_cpus);

#endif /* VNUMA_INTERNAL_H */
