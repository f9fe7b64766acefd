// SPDX-License-Identifier: Apache-2.0
/*
 * What the kernel's files say of nodes. Nothing here allocates memory or uses stdio, so that it
 * may run in a signal handler or below an allocator.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "calls.h"
#include "internal.h"

#define SYSTEM		"/sys/devices/system"
#define NODES		"/sys/devices/system/node"
#define CPUS_ONLINE	"/sys/devices/system/cpu/online"
/* More than the list of every second of 4096 CPUs needs, or the distances of 1024 nodes. */
#define TEXT_MAX	12288
/* The kernel refuses (EPERM) to go on with a list that has changed since its first page. */
#define TRIES		3

/* root, then `path`, with the first '#' of it replaced by `node`. */
static bool make_path(char *out, const struct vnuma *v, const char *path, int node)
{
	size_t used = strlen(v->root);
	char digits[12];
	int count = 0;

	if (used + strlen(path) + sizeof(digits) >= PATH_MAX)
		return false;
	memcpy(out, v->root, used);
	for (; *path; path++) {
		if (*path != '#') {
			out[used++] = *path;
			continue;
		}
		do {
			digits[count++] = (char)('0' + node % 10);
			node /= 10;
		} while (node > 0);
		while (count > 0)
			out[used++] = digits[--count];
	}
	out[used] = '\0';
	return true;
}

/* The whole file. Its length, or -errno. */
static ssize_t read_text(const struct vnuma *v, const char *path, int node, char *text)
{
	char name[PATH_MAX];
	ssize_t used = 0, count;
	int fd;

	if (!make_path(name, v, path, node))
		return -ENAMETOOLONG;
	fd = vnuma_call_open(name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	do {
		count = vnuma_call_read(fd, text + used, (size_t)(TEXT_MAX - used));
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			used = -errno;
		else
			used += count;
	} while (count != 0 && used >= 0 && used < TEXT_MAX);
	vnuma_call_close(fd);
	return used == TEXT_MAX ? -E2BIG : used;
}

static int read_list(const struct vnuma *v, const char *path, int node, uint32_t limit,
		     vnuma_range_fn each, void *context)
{
	char text[TEXT_MAX];
	ssize_t length = 0;
	int try;

	for (try = 0; try < TRIES; try++) {
		length = read_text(v, path, node, text);
		if (length != -EPERM)
			break;
	}
	if (length < 0)
		return (int)length;
	return vnuma_parse_list(text, (size_t)length, limit, each, context);
}

static int add_nodes(void *context, uint32_t first, uint32_t last)
{
	struct vnuma_node_set *set = context;
	uint32_t node;

	for (node = first; node <= last; node++)
		set->bits[node / 64] |= UINT64_C(1) << (node % 64);
	return 0;
}

/* Is there a sysfs at all? A program may have another root by now. */
static bool has_sysfs(const struct vnuma *v)
{
	char name[PATH_MAX];

	return make_path(name, v, SYSTEM, 0) && !access(name, F_OK);
}

/* Nodes that a file lists. A kernel without NUMA has node 0 and none of the files. */
static int read_nodes(const struct vnuma *v, const char *path, struct vnuma_node_set *set)
{
	int err;

	memset(set, 0, sizeof(*set));
	err = read_list(v, path, 0, VNUMA_MAX_NODES, add_nodes, set);
	if (err == -ENOENT && has_sysfs(v)) {
		set->bits[0] = 1;
		return 0;
	}
	return err;
}

struct filling {
	uint16_t *node_of_cpu;
	uint32_t nr_cpus;
	uint16_t node;
};

static int add_cpus(void *context, uint32_t first, uint32_t last)
{
	struct filling *filling = context;
	uint32_t cpu;

	for (cpu = first; cpu <= last; cpu++)
		filling->node_of_cpu[cpu] = filling->node;
	if (last >= filling->nr_cpus)
		filling->nr_cpus = last + 1;
	return 0;
}

int vnuma_sysfs_cpus(const struct vnuma *v, uint16_t *node_of_cpu, uint32_t *nr_cpus)
{
	struct filling filling = { .node_of_cpu = node_of_cpu };
	struct vnuma_node_set online;
	bool any = false;
	int node, err;

	memset(node_of_cpu, 0xff, VNUMA_MAX_CPUS * sizeof(*node_of_cpu));
	err = read_nodes(v, NODES "/online", &online);
	if (err)
		return err;
	for (node = 0; node < VNUMA_MAX_NODES; node++) {
		if (!vnuma_node_isset(&online, node))
			continue;
		filling.node = (uint16_t)node;
		err = read_list(v, NODES "/node#/cpulist", node, VNUMA_MAX_CPUS, add_cpus,
				&filling);
		if (err && err != -ENOENT)
			return err;
		any |= !err;
	}
	if (!any) {
		filling.node = 0;
		err = read_list(v, CPUS_ONLINE, 0, VNUMA_MAX_CPUS, add_cpus, &filling);
		if (err)
			return err;
	}
	*nr_cpus = filling.nr_cpus;
	return 0;
}

int vnuma_distance(const struct vnuma *v, int from, int to)
{
	int saved = errno, position = 0, node, err;
	struct vnuma_node_set online;
	char text[TEXT_MAX];
	ssize_t length;

	if (from < 0 || to < 0 || from >= VNUMA_MAX_NODES || to >= VNUMA_MAX_NODES)
		return -EINVAL;
	err = read_nodes(v, NODES "/online", &online);
	if (err)
		goto out;
	err = -ENODEV;
	if (!vnuma_node_isset(&online, from) || !vnuma_node_isset(&online, to))
		goto out;
	/* The file has a value for each online node. */
	for (node = 0; node < to; node++)
		position += vnuma_node_isset(&online, node);
	length = read_text(v, NODES "/node#/distance", from, text);
	if (length == -ENOENT && from == to)
		err = 10;
	else if (length < 0)
		err = (int)length;
	else
		err = vnuma_parse_distance(text, (size_t)length, (unsigned int)position);
out:
	errno = saved;
	return err;
}

int vnuma_read_nodes(const struct vnuma *v, struct vnuma_nodes *out)
{
	int saved = errno, try, err;

	for (try = 0; try < TRIES; try++) {
		out->generation = vnuma_generation(v);
		err = read_nodes(v, NODES "/has_cpu", &out->cpus);
		if (!err)
			err = read_nodes(v, NODES "/has_memory", &out->memory);
		if (err || out->generation == vnuma_generation(v))
			break;
		err = -EAGAIN;
	}
	errno = saved;
	return err;
}
