/* SPDX-License-Identifier: Apache-2.0 */
/* A folder that looks like /sys and /dev of a machine with NUMA, and checks that say what is. */
#ifndef VNUMA_TEST_TREE_H
#define VNUMA_TEST_TREE_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vnuma/guest_device.h>

#define NODES	"/sys/devices/system/node"

#define expect_equal(seen, expected)						\
	do {									\
		long long seen_ = (long long)(seen), expected_ = (long long)(expected);	\
		if (seen_ != expected_) {					\
			fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__,	\
				__LINE__, #seen, seen_, expected_);		\
			exit(1);						\
		}								\
	} while (0)
#define expect(condition)							\
	do {									\
		if (!(condition)) {						\
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__,	\
				#condition);					\
			exit(1);						\
		}								\
	} while (0)

/* One of the program, whichever of its files uses it. */
__attribute__((weak, visibility("hidden"))) char tree[PATH_MAX];

static inline const char *in_tree(const char *path)
{
	static char whole[2 * PATH_MAX];

	snprintf(whole, sizeof(whole), "%s%s", tree, path);
	return whole;
}

/* A new file, not the old one changed: nobody reads half of it. */
static inline void put_bytes(const char *path, const void *content, size_t size)
{
	char name[2 * PATH_MAX], fresh[2 * PATH_MAX + 8], *slash;
	int fd;

	snprintf(name, sizeof(name), "%s", in_tree(path));
	for (slash = strchr(name + strlen(tree) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		expect(!mkdir(name, 0700) || errno == EEXIST);
		*slash = '/';
	}
	snprintf(fresh, sizeof(fresh), "%s.new", name);
	fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	expect(fd >= 0);
	expect_equal(write(fd, content, size), size);
	close(fd);
	expect_equal(rename(fresh, name), 0);
}

static inline void put(const char *path, const char *text)
{
	put_bytes(path, text, strlen(text));
}

static inline void removed(const char *path)
{
	expect(!unlink(in_tree(path)) || errno == ENOENT);
}

/* From here on this process sees an empty folder there, as one in a container may. Not 0: it may not do so, errno says why. */
static inline int hide(const char *folder)
{
	return unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	       mount("none", folder, "tmpfs", 0, NULL);
}

/* Nodes 0, 1 and 3: node 1 has no CPU, node 3 no memory. */
static inline void make_tree(void)
{
	const char *folder = getenv("TMPDIR");

	snprintf(tree, sizeof(tree), "%s/vnuma-test-XXXXXX", folder ? folder : "/tmp");
	expect(mkdtemp(tree));
	put(NODES "/online", "0-1,3\n");
	put(NODES "/has_cpu", "0,3\n");
	put(NODES "/has_memory", "0-1\n");
	put(NODES "/node0/cpulist", "0-2,6\n");
	put(NODES "/node1/cpulist", "\n");
	put(NODES "/node3/cpulist", "3-5\n");
	put(NODES "/node0/distance", "10 20 31\n");
	put(NODES "/node1/distance", "20 10 32\n");
	put(NODES "/node3/distance", "31 32 10\n");
	put("/sys/devices/system/cpu/online", "0-6\n");
}

static inline void remove_tree(void)
{
	char command[PATH_MAX + 16];

	snprintf(command, sizeof(command), "rm -rf '%s'", tree);
	expect_equal(system(command), 0);
}

/* What the driver shows: CPU N is on node N % 2. */
static inline struct vnuma_gd_page *make_page(unsigned int nr_cpus)
{
	static union {
		struct vnuma_gd_page page;
		char bytes[VNUMA_GD_SIZE];
	} there;
	unsigned int cpu;

	memset(&there, 0, sizeof(there));
	there.page.magic = VNUMA_GD_MAGIC;
	there.page.version_major = VNUMA_GD_VERSION_MAJOR;
	there.page.version_minor = VNUMA_GD_VERSION_MINOR;
	there.page.page_size = sizeof(there.page);
	there.page.generation = 7;
	there.page.nr_nodes = 2;
	there.page.nr_cpus = nr_cpus;
	for (cpu = 0; cpu < VNUMA_GD_MAX_CPUS; cpu++)
		there.page.cpu_node[cpu] = cpu < nr_cpus ? cpu % 2 : VNUMA_GD_NO_NODE;
	return &there.page;
}

static inline void put_page(const struct vnuma_gd_page *page)
{
	put_bytes("/dev/vnuma", page, VNUMA_GD_SIZE);
}

/* The driver's side of it. */
static inline struct vnuma_gd_page *map_page(void)
{
	int fd = open(in_tree("/dev/vnuma"), O_RDWR);
	void *page;

	expect(fd >= 0);
	page = mmap(NULL, VNUMA_GD_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	expect(page != MAP_FAILED);
	close(fd);
	return page;
}

/* All CPUs are on this node now. The generation says so, or not. */
static inline void move_cpus(struct vnuma_gd_page *page, uint16_t node, int tell)
{
	unsigned int cpu;

	for (cpu = 0; cpu < VNUMA_GD_MAX_CPUS; cpu++)
		page->cpu_node[cpu] = node;
	if (tell)
		__atomic_add_fetch(&page->generation, 2, __ATOMIC_RELEASE);
}

#endif /* VNUMA_TEST_TREE_H */
