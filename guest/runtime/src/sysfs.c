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
/* More than the list of every second of 128 nodes needs. Allocators read it on any thread's stack. */
#define NODES_MAX	512
/* More than the longest path below a root. */
#define NAME_SIZE	64
/* The kernel refuses (EPERM) to go on with a list that has changed since its first page. */
#define TRIES		3

/* `path`, with the first '#' of it replaced by `node`. */
static void make_path(char *out, const char *path, int node)
{
	char digits[12];
	int count = 0;

	for (; *path; path++) {
		if (*path != '#') {
			*out++ = *path;
			continue;
		}
		do {
			digits[count++] = (char)('0' + node % 10);
			node /= 10;
		} while (node > 0);
		while (count > 0)
			*out++ = digits[--count];
	}
	*out = '\0';
}

/*
 * A file below the root; it or -errno. A root other than "/" is opened first: together with the path it would need a buffer of
 * its size, and threads with the smallest stacks come here.
 */
static int open_below(const struct vnuma *v, const char *path, int flags)
{
	int root, fd;

	if (!v->root[0]) {
		fd = vnuma_call_open(path, flags | O_CLOEXEC);
		return fd < 0 ? -errno : fd;
	}
	root = vnuma_call_open(v->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		return -errno;
	fd = vnuma_call_open_below(root, path + 1, flags | O_CLOEXEC);
	if (fd < 0)
		fd = -errno;
	vnuma_call_close(root);
	return fd;
}

/* The whole file, which is smaller than `size`. Its length, or -errno. */
static ssize_t read_once(const struct vnuma *v, const char *path, int node, char *text, ssize_t size)
{
	char name[NAME_SIZE];
	ssize_t used = 0, count;
	int fd;

	make_path(name, path, node);
	fd = open_below(v, name, O_RDONLY);
	if (fd < 0)
		return fd;
	do {
		count = vnuma_call_read(fd, text + used, (size_t)(size - used));
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			used = -errno;
		else
			used += count;
	} while (count != 0 && used >= 0 && used < size);
	vnuma_call_close(fd);
	return used == size ? -E2BIG : used;
}

static ssize_t read_text(const struct vnuma *v, const char *path, int node, char *text, ssize_t size)
{
	ssize_t length = 0;
	int try;

	for (try = 0; try < TRIES; try++) {
		length = read_once(v, path, node, text, size);
		if (length != -EPERM)
			break;
	}
	return length;
}

static int read_cpus(const struct vnuma *v, const char *path, int node, vnuma_range_fn each, void *context)
{
	char text[TEXT_MAX];
	ssize_t length = read_text(v, path, node, text, sizeof(text));

	if (length < 0)
		return (int)length;
	return vnuma_parse_list(text, (size_t)length, VNUMA_MAX_CPUS, each, context);
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
	int fd = open_below(v, SYSTEM, O_PATH);

	if (fd < 0)
		return false;
	vnuma_call_close(fd);
	return true;
}

/* Nodes that a file lists. A kernel without NUMA has node 0 and none of the files. */
static int read_nodes(const struct vnuma *v, const char *path, struct vnuma_node_set *set)
{
	char text[NODES_MAX];
	ssize_t length = read_text(v, path, 0, text, sizeof(text));

	memset(set, 0, sizeof(*set));
	if (length == -ENOENT && has_sysfs(v)) {
		set->bits[0] = 1;
		return 0;
	}
	if (length < 0)
		return (int)length;
	return vnuma_parse_list(text, (size_t)length, VNUMA_MAX_NODES, add_nodes, set);
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
		err = read_cpus(v, NODES "/node#/cpulist", node, add_cpus, &filling);
		if (err && err != -ENOENT)
			return err;
		any |= !err;
	}
	if (!any) {
		filling.node = 0;
		err = read_cpus(v, CPUS_ONLINE, 0, add_cpus, &filling);
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
	length = read_once(v, NODES "/node#/distance", from, text, sizeof(text));
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
