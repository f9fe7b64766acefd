// SPDX-License-Identifier: Apache-2.0
/* libvnuma on a folder that looks like a machine with NUMA. Needs neither NUMA nor a driver. */
#define _GNU_SOURCE
#include <grp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "../src/internal.h"
#include "seccomp.h"
#include "tree.h"

/* Only against hanging for ever. */
#define HANG_LIMIT_S	120
/* A child that may not do what the test needs. */
#define SKIPPED	77
#define NOBODY	65534

struct seen {
	uint32_t ranges[8][2];
	int count;
};

static int note(void *context, uint32_t first, uint32_t last)
{
	struct seen *seen = context;

	seen->ranges[seen->count][0] = first;
	seen->ranges[seen->count][1] = last;
	return ++seen->count == 8;
}

static void lists_are_read_whole_or_refused(void)
{
	static const char * const bad[] = {
		"x", "1,", ",1", "1,,2", "3-1", "1-", "-1", "1 2", "1\n2", "64", "0-64", "0x1",
		"99999999999999999999", "1,2,3,4,5,6,7,8,9", "\n\n", "1\t",
	};
	struct seen seen = { 0 };
	size_t i;

	expect_equal(vnuma_parse_list("0-2,6,63\n", 9, 64, note, &seen), 0);
	expect_equal(seen.count, 3);
	expect(seen.ranges[0][0] == 0 && seen.ranges[0][1] == 2);
	expect(seen.ranges[2][0] == 63 && seen.ranges[2][1] == 63);
	seen.count = 0;
	expect_equal(vnuma_parse_list("\n", 1, 64, note, &seen), 0);
	expect_equal(vnuma_parse_list("", 0, 64, note, &seen), 0);
	expect_equal(seen.count, 0);
	for (i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		seen.count = 0;
		if (vnuma_parse_list(bad[i], strlen(bad[i]), 64, note, &seen) != -EBADMSG) {
			fprintf(stderr, "not refused: \"%s\"\n", bad[i]);
			exit(1);
		}
	}
}

static void distances_are_read_whole_or_refused(void)
{
	static const char * const bad[] = { "10 x 20", "10,20,30", "10 256 30", "-1 -1 -1" };
	size_t i;

	expect_equal(vnuma_parse_distance("10 20 255\n", 10, 0), 10);
	expect_equal(vnuma_parse_distance("10 20 255\n", 10, 2), 255);
	expect_equal(vnuma_parse_distance("10 20 255\n", 10, 3), -ENODEV);
	expect_equal(vnuma_parse_distance("\n", 1, 0), -ENODEV);
	/* As the kernel writes it without node 0. */
	expect_equal(vnuma_parse_distance(" 10 20\n", 7, 0), 10);
	expect_equal(vnuma_parse_distance(" 10 20\n", 7, 1), 20);
	expect_equal(vnuma_parse_distance(" 10 20\n", 7, 2), -ENODEV);
	expect_equal(vnuma_parse_distance(" \n", 2, 0), -ENODEV);
	for (i = 0; i < sizeof(bad) / sizeof(*bad); i++)
		expect_equal(vnuma_parse_distance(bad[i], strlen(bad[i]), 2), -EBADMSG);
}

static struct vnuma *opened(enum vnuma_source source)
{
	struct vnuma *v;

	expect_equal(vnuma_open_at(&v, tree), 0);
	expect_equal(vnuma_source(v), source);
	expect((vnuma_device_problem(v)[0] == '\0') == (source == VNUMA_SOURCE_DEVICE));
	expect((vnuma_device_error(v) == 0) == (source == VNUMA_SOURCE_DEVICE));
	return v;
}

static void without_a_device_sysfs_answers(void)
{
	struct vnuma_cpus cpus;
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	uint64_t generation = vnuma_generation(v);

	expect_equal(vnuma_device_error(v), -ENOENT);
	expect(strstr(vnuma_device_problem(v), "/dev/vnuma: No such file"));
	expect_equal(vnuma_cpu_node(v, 0), 0);
	expect_equal(vnuma_cpu_node(v, 6), 0);
	expect_equal(vnuma_cpu_node(v, 5), 3);
	expect_equal(vnuma_cpu_node(v, 7), VNUMA_NO_NODE);
	expect_equal(vnuma_cpu_node(v, VNUMA_MAX_CPUS), VNUMA_NO_NODE);
	expect_equal(vnuma_cpu_node(v, UINT_MAX), VNUMA_NO_NODE);

	expect_equal(vnuma_refresh(v), 0);
	expect_equal(vnuma_generation(v), generation);
	put(NODES "/node0/cpulist", "0-1,6\n");
	put(NODES "/node1/cpulist", "2\n");
	expect_equal(vnuma_cpu_node(v, 2), 0);
	expect_equal(vnuma_refresh(v), 1);
	expect_equal(vnuma_cpu_node(v, 2), 1);
	expect_equal(*vnuma_generation_word(v), generation + 1);
	expect_equal(vnuma_copy_cpus(v, &cpus), 0);
	expect(cpus.count == 7 && cpus.node[2] == 1 && cpus.node[7] == VNUMA_NO_NODE);

	/* What cannot be read leaves what is known. */
	put(NODES "/node1/cpulist", "2-1\n");
	errno = 99;
	expect_equal(vnuma_refresh(v), -EBADMSG);
	expect_equal(errno, 99);
	expect_equal(vnuma_cpu_node(v, 2), 1);
	vnuma_close(v);
	vnuma_close(NULL);
}

static void a_kernel_without_numa_has_node_0(void)
{
	char moved[2 * PATH_MAX];
	struct vnuma_nodes nodes;
	struct vnuma *v;

	snprintf(moved, sizeof(moved), "%s", in_tree("/moved"));

	removed(NODES "/online");
	removed(NODES "/has_cpu");
	removed(NODES "/has_memory");
	removed(NODES "/node0/cpulist");
	removed(NODES "/node0/distance");
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_cpu_node(v, 6), 0);
	expect_equal(vnuma_cpu_node(v, 7), VNUMA_NO_NODE);
	expect_equal(vnuma_distance(v, 0, 0), 10);
	expect_equal(vnuma_distance(v, 0, 1), -ENODEV);
	expect_equal(vnuma_read_nodes(v, &nodes), 0);
	expect(vnuma_node_isset(&nodes.cpus, 0) && !vnuma_node_isset(&nodes.cpus, 1));
	/* A program without sysfs, as after chroot(), is told nothing, not that there is one node. */
	expect_equal(rename(in_tree("/sys"), moved), 0);
	expect_equal(vnuma_read_nodes(v, &nodes), -ENOENT);
	expect_equal(rename(moved, in_tree("/sys")), 0);
	vnuma_close(v);
	removed("/sys/devices/system/cpu/online");
	expect_equal(vnuma_open_at(&v, tree), -ENOENT);
}

static void nodes_that_gain_and_lose_are_named(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	struct vnuma_nodes before, after;
	struct vnuma_changes changes;

	expect_equal(vnuma_read_nodes(v, &before), 0);
	expect(vnuma_node_isset(&before.cpus, 3) && !vnuma_node_isset(&before.cpus, 1));
	expect(vnuma_node_isset(&before.memory, 1) && !vnuma_node_isset(&before.memory, 3));
	expect(!vnuma_node_isset(&before.cpus, -1));
	expect(!vnuma_node_isset(&before.cpus, VNUMA_MAX_NODES));
	put(NODES "/has_cpu", "0-1\n");
	put(NODES "/has_memory", "0,3\n");
	expect_equal(vnuma_read_nodes(v, &after), 0);
	vnuma_compare_nodes(&before, &after, &changes);
	expect_equal(changes.gained_cpus.bits[0], 1 << 1);
	expect_equal(changes.lost_cpus.bits[0], 1 << 3);
	expect_equal(changes.gained_memory.bits[0], 1 << 3);
	expect_equal(changes.lost_memory.bits[0], 1 << 1);
	/* That is no change of the topology. */
	expect_equal(vnuma_refresh(v), 0);
	expect_equal(vnuma_generation(v), before.generation);
	put(NODES "/has_cpu", "0-1024\n");
	expect_equal(vnuma_read_nodes(v, &after), -EBADMSG);
	vnuma_close(v);
}

/* The list is that of every second node, and so longer than those of any machine. */
static void a_list_of_nodes_that_is_too_long_is_refused(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	struct vnuma_nodes nodes;
	char list[4096];
	int node, used = 0;

	for (node = 0; node < VNUMA_MAX_NODES; node += 2) {
		used += snprintf(list + used, sizeof(list) - (size_t)used, "%s%d", node ? "," : "", node);
		put(NODES "/has_cpu", list);
		expect_equal(vnuma_read_nodes(v, &nodes), used < 512 ? 0 : -E2BIG);
	}
	expect(used > 512);
	put(NODES "/has_cpu", "0\n");
	expect_equal(vnuma_read_nodes(v, &nodes), 0);
	vnuma_close(v);
}

/* The root of a container may be deep. */
static void a_root_may_be_long(void)
{
	size_t length = strlen(tree);
	char root[PATH_MAX];
	struct vnuma_nodes nodes;
	struct vnuma *v;

	memcpy(root, tree, length);
	while (length < 3900) {
		memcpy(root + length, "/.", 2);
		length += 2;
	}
	root[length] = '\0';
	expect_equal(vnuma_open_at(&v, root), 0);
	expect_equal(vnuma_cpu_node(v, 5), 3);
	expect_equal(vnuma_read_nodes(v, &nodes), 0);
	expect_equal(vnuma_distance(v, 0, 3), 31);
	vnuma_close(v);
	memset(root, 'r', PATH_MAX - 1);
	root[PATH_MAX - 1] = '\0';
	expect_equal(vnuma_open_at(&v, root), -ENAMETOOLONG);
}

static void distances_are_those_of_now(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);

	/* Node 3 is the third that is online. */
	expect_equal(vnuma_distance(v, 0, 3), 31);
	expect_equal(vnuma_distance(v, 3, 1), 32);
	put(NODES "/node0/distance", "10 20 41\n");
	expect_equal(vnuma_distance(v, 0, 3), 41);
	expect_equal(vnuma_distance(v, 0, 2), -ENODEV);
	expect_equal(vnuma_distance(v, 2, 0), -ENODEV);
	expect_equal(vnuma_distance(v, 0, -1), -EINVAL);
	expect_equal(vnuma_distance(v, VNUMA_MAX_NODES, 0), -EINVAL);
	put(NODES "/node0/distance", "10 20\n");
	expect_equal(vnuma_distance(v, 0, 3), -ENODEV);
	/* As the kernel writes it when node 0 has gone. */
	put(NODES "/online", "1,3\n");
	put(NODES "/node1/distance", " 10 32\n");
	expect_equal(vnuma_distance(v, 1, 1), 10);
	expect_equal(vnuma_distance(v, 1, 3), 32);
	expect_equal(vnuma_distance(v, 0, 1), -ENODEV);
	vnuma_close(v);
}

static void the_page_of_the_driver_answers(void)
{
	struct vnuma_gd_page *page = make_page(6);
	struct vnuma_cpus cpus;
	struct vnuma *v;

	page->cpu_node[5] = 2000;
	/* A minor version that is newer only has more. */
	page->version_minor = 9;
	page->page_size += 64;
	put_page(page);
	page = map_page();
	v = opened(VNUMA_SOURCE_DEVICE);
	expect_equal(vnuma_generation(v), 7);
	expect_equal(vnuma_cpu_node(v, 1), 1);
	expect_equal(vnuma_cpu_node(v, 5), VNUMA_NO_NODE);
	expect_equal(vnuma_cpu_node(v, 6), VNUMA_NO_NODE);
	page->cpu_node[1] = 0;
	__atomic_store_n(&page->generation, 8, __ATOMIC_RELEASE);
	expect_equal(__atomic_load_n(vnuma_generation_word(v), __ATOMIC_ACQUIRE), 8);
	expect_equal(vnuma_cpu_node(v, 1), 0);
	expect_equal(vnuma_refresh(v), 0);
	expect_equal(vnuma_copy_cpus(v, &cpus), 0);
	expect(cpus.generation == 8 && cpus.count == 6 && cpus.node[3] == 1);
	expect(cpus.node[5] == VNUMA_NO_NODE && cpus.node[6] == VNUMA_NO_NODE);

	/* A driver that has gone in the middle of a change. */
	page->sequence = 1;
	expect_equal(vnuma_copy_cpus(v, &cpus), -EAGAIN);
	page->sequence = 2;
	expect_equal(vnuma_copy_cpus(v, &cpus), 0);
	/* The mapping outlives the name. */
	removed("/dev/vnuma");
	expect_equal(vnuma_cpu_node(v, 3), 1);
	expect_equal(vnuma_watch(v), -ENOENT);
	vnuma_close(v);
	munmap(page, VNUMA_GD_SIZE);
}

static void a_page_that_is_not_understood_is_named_and_not_used(void)
{
	static const struct {
		size_t offset;
		uint64_t value;
		size_t size;
		const char *reason;
	} cases[] = {
		{ offsetof(struct vnuma_gd_page, magic), 1, 8, "magic is 0x1" },
		{ offsetof(struct vnuma_gd_page, version_major), 2, 2, "version_major is 2" },
		{ offsetof(struct vnuma_gd_page, version_major), 0, 2, "version_major is 0" },
		{ offsetof(struct vnuma_gd_page, page_size), 64, 4, "page_size is 64" },
		{ offsetof(struct vnuma_gd_page, nr_cpus), 4097, 4, "nr_cpus is 4097" },
		{ offsetof(struct vnuma_gd_page, nr_cpus), 0, 4, "nr_cpus is 0" },
	};
	struct vnuma *v;
	size_t i;

	for (i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct vnuma_gd_page *page = make_page(6);

		memcpy((char *)page + cases[i].offset, &cases[i].value, cases[i].size);
		put_page(page);
		v = opened(VNUMA_SOURCE_SYSFS);
		if (!strstr(vnuma_device_problem(v), cases[i].reason)) {
			fprintf(stderr, "expected \"%s\": %s\n", cases[i].reason,
				vnuma_device_problem(v));
			exit(1);
		}
		expect_equal(vnuma_cpu_node(v, 5), 3);
		vnuma_close(v);
	}
	put_bytes("/dev/vnuma", make_page(6), VNUMA_GD_SIZE - 1);
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_device_error(v), -EBADMSG);
	vnuma_close(v);
	/* Nobody writes to it: opening it must not wait. */
	removed("/dev/vnuma");
	expect_equal(mkfifo(in_tree("/dev/vnuma"), 0600), 0);
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_device_error(v), -ENODEV);
	vnuma_close(v);
}

static bool skipped;

static void skip(const char *what)
{
	printf(" skipped, %s: %s\n", what, strerror(errno));
	fflush(stdout);
	_exit(SKIPPED);
}

/* For what a process cannot take back. */
static void in_a_child(void (*run)(struct vnuma *v), struct vnuma *v)
{
	pid_t pid = fork();
	int status;

	expect(pid >= 0);
	if (pid == 0) {
		run(v);
		_exit(0);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	skipped = WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED;
	expect(skipped || status == 0);
}

static void ask_as_nobody(struct vnuma *with_device)
{
	struct vnuma *v;

	/* Without root it is nobody's already. */
	if (geteuid() == 0 &&
	    (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) || setresuid(NOBODY, NOBODY, NOBODY)))
		skip("the test stays root");
	if (access(in_tree(NODES "/online"), R_OK))
		skip(in_tree(""));
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_device_error(v), -EACCES);
	expect(strstr(vnuma_device_problem(v), "/dev/vnuma: Permission denied"));
	expect_equal(vnuma_cpu_node(v, 5), 3);
	expect_equal(vnuma_refresh(v), 0);
	vnuma_close(v);
	/* What was opened before stays open, as in a program that gives up its rights. */
	expect_equal(vnuma_cpu_node(with_device, 3), 1);
	expect_equal(vnuma_watch(with_device), -EACCES);
}

static void a_device_that_may_not_be_read_is_named_and_not_used(void)
{
	char command[PATH_MAX + 32];
	struct vnuma *v;

	put_page(make_page(6));
	v = opened(VNUMA_SOURCE_DEVICE);
	snprintf(command, sizeof(command), "chmod -R a+rX '%s'", tree);
	expect_equal(system(command), 0);
	expect_equal(chmod(in_tree("/dev/vnuma"), 0), 0);
	in_a_child(ask_as_nobody, v);
	vnuma_close(v);
}

static void with_the_device_in_a_child(void (*run)(struct vnuma *v), unsigned int nr_cpus)
{
	struct vnuma *v;

	put_page(make_page(nr_cpus));
	v = opened(VNUMA_SOURCE_DEVICE);
	in_a_child(run, v);
	vnuma_close(v);
}

static void ask_without_dev(struct vnuma *with_device)
{
	struct vnuma_gd_page *page = map_page();
	struct vnuma_cpus cpus;
	struct vnuma *v;

	if (hide(in_tree("/dev")))
		skip("nothing can be mounted here");
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_device_error(v), -ENOENT);
	expect_equal(vnuma_cpu_node(v, 5), 3);
	vnuma_close(v);
	/* What was opened before goes on to follow. */
	move_cpus(page, 2, 1);
	expect_equal(vnuma_generation(with_device), 9);
	expect_equal(vnuma_copy_cpus(with_device, &cpus), 0);
	expect(cpus.generation == 9 && cpus.node[0] == 2);
	expect_equal(vnuma_refresh(with_device), 0);
	expect_equal(vnuma_watch(with_device), -ENOENT);
}

/* As in a container, or in one that a program enters while it runs. */
static void a_namespace_without_the_device_has_sysfs(void)
{
	with_the_device_in_a_child(ask_without_dev, 6);
}

static void ask_without_files(struct vnuma *with_device)
{
	struct vnuma_gd_page *page = map_page();
	int watch = vnuma_watch(with_device);
	struct vnuma *v, *other = NULL;
	struct vnuma_nodes nodes;
	struct vnuma_cpus cpus;

	expect(watch >= 0);
	removed("/dev/vnuma");
	v = opened(VNUMA_SOURCE_SYSFS);
	refuse_files();
	expect_equal(vnuma_open_at(&other, tree), -EPERM);
	expect(!other);
	/* The driver's page is there, and follows. */
	move_cpus(page, 2, 1);
	errno = E2BIG;
	expect_equal(vnuma_generation(with_device), 9);
	expect_equal(vnuma_cpu_node(with_device, 1), 2);
	expect_equal(vnuma_copy_cpus(with_device, &cpus), 0);
	expect(cpus.generation == 9 && cpus.node[1] == 2);
	expect_equal(vnuma_refresh(with_device), 0);
	expect_equal(vnuma_clear_watch(watch), 0);
	expect_equal(vnuma_distance(with_device, 0, 3), -EPERM);
	expect_equal(vnuma_read_nodes(with_device, &nodes), -EPERM);
	/* What was read is known. */
	expect_equal(vnuma_refresh(v), -EPERM);
	expect_equal(vnuma_cpu_node(v, 5), 3);
	expect_equal(vnuma_copy_cpus(v, &cpus), 0);
	expect(cpus.generation == 1 && cpus.node[5] == 3);
	expect_equal(errno, E2BIG);
	expect_equal(vnuma_watch(with_device), -EPERM);
}

/* As a program does that has opened what it needs, and lets seccomp forbid the rest. */
static void files_that_may_not_be_opened_leave_what_is_known(void)
{
	with_the_device_in_a_child(ask_without_files, 6);
}

static void ask_by_reading_only(struct vnuma *with_device)
{
	static struct vnuma_cpus cpus;
	int watch = vnuma_watch(with_device), node;

	expect(watch >= 0);
	allow_only_reading();
	expect_equal(vnuma_generation(with_device), 7);
	expect_equal(*vnuma_generation_word(with_device), 7);
	expect_equal(vnuma_cpu_node(with_device, 3), 1);
	node = vnuma_current_node(with_device);
	expect(node == 0 || node == 1);
	expect_equal(vnuma_copy_cpus(with_device, &cpus), 0);
	expect_equal(vnuma_refresh(with_device), 0);
	expect_equal(vnuma_clear_watch(watch), 0);
	expect_equal(vnuma_source(with_device), VNUMA_SOURCE_DEVICE);
	expect_equal(vnuma_device_error(with_device), 0);
	/* Before _exit() the address sanitizer makes another call. */
	syscall(SYS_exit, 0);
}

/* What docs/libvnuma.md says takes no system call, or read() alone. */
static void with_the_device_the_kernel_is_not_asked(void)
{
	with_the_device_in_a_child(ask_by_reading_only, VNUMA_GD_MAX_CPUS);
}

static void open_without_mapping(struct vnuma *unused)
{
	struct vnuma *v;

	(void)unused;
	refuse_shared_mappings();
	v = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(vnuma_device_error(v), -EPERM);
	expect(strstr(vnuma_device_problem(v), "/dev/vnuma: cannot be mapped: Operation not permitted"));
	expect_equal(vnuma_cpu_node(v, 5), 3);
	vnuma_close(v);
}

static void a_page_that_may_not_be_mapped_is_named_and_not_used(void)
{
	put_page(make_page(6));
	in_a_child(open_without_mapping, NULL);
}

struct writer {
	struct vnuma_gd_page *page;
	int stop;
};

/* As the driver writes: in each generation all CPUs are on one node. */
static void *write_generations(void *argument)
{
	struct writer *writer = argument;
	volatile struct vnuma_gd_page *page = writer->page;
	uint32_t cpu;

	while (!__atomic_load_n(&writer->stop, __ATOMIC_RELAXED)) {
		uint64_t generation = page->generation + 1;

		__atomic_store_n(&page->sequence, page->sequence + 1, __ATOMIC_RELAXED);
		__atomic_thread_fence(__ATOMIC_RELEASE);
		for (cpu = 0; cpu < page->nr_cpus; cpu++)
			page->cpu_node[cpu] = (uint16_t)(generation % 1000);
		__atomic_store_n(&page->generation, generation, __ATOMIC_RELEASE);
		__atomic_store_n(&page->sequence, page->sequence + 1, __ATOMIC_RELEASE);
		usleep(20);
	}
	return NULL;
}

static void a_copy_is_of_one_generation(void)
{
	struct writer writer = { 0 };
	uint64_t last = 0;
	struct vnuma_cpus cpus;
	pthread_t thread;
	struct vnuma *v;
	int copies = 0;
	uint32_t cpu;

	put_page(make_page(VNUMA_GD_MAX_CPUS));
	writer.page = map_page();
	for (cpu = 0; cpu < VNUMA_GD_MAX_CPUS; cpu++)
		writer.page->cpu_node[cpu] = 7;
	v = opened(VNUMA_SOURCE_DEVICE);
	expect_equal(pthread_create(&thread, NULL, write_generations, &writer), 0);
	while (copies < 2000) {
		if (vnuma_copy_cpus(v, &cpus))
			continue;
		expect(cpus.generation >= last);
		last = cpus.generation;
		for (cpu = 0; cpu < VNUMA_GD_MAX_CPUS; cpu++)
			expect_equal(cpus.node[cpu], cpus.generation % 1000);
		copies++;
	}
	__atomic_store_n(&writer.stop, 1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	expect(last > 7);
	vnuma_close(v);
	munmap(writer.page, VNUMA_GD_SIZE);
}

static void the_node_of_the_calling_thread(void)
{
	struct vnuma_gd_page *page = make_page(VNUMA_GD_MAX_CPUS);
	struct vnuma *v;
	cpu_set_t one;
	int cpu = sched_getcpu();

	expect(cpu >= 0);
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	expect_equal(sched_setaffinity(0, sizeof(one), &one), 0);
	page->cpu_node[cpu] = 77;
	put_page(page);
	v = opened(VNUMA_SOURCE_DEVICE);
	expect_equal(vnuma_current_node(v), 77);
	vnuma_close(v);
}

static void a_watch_wakes_and_does_not_block(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	struct pollfd poll_fd = { .events = POLLIN };

	poll_fd.fd = vnuma_watch(v);
	expect(poll_fd.fd >= 0);
	expect(fcntl(poll_fd.fd, F_GETFD) & FD_CLOEXEC);
	expect(fcntl(poll_fd.fd, F_GETFL) & O_NONBLOCK);
	/* Nothing is there yet. */
	expect_equal(vnuma_clear_watch(poll_fd.fd), 0);
	expect_equal(poll(&poll_fd, 1, HANG_LIMIT_S * 1000), 1);
	expect_equal(vnuma_clear_watch(poll_fd.fd), 0);
	expect_equal(poll(&poll_fd, 1, 0), 0);
	close(poll_fd.fd);
	expect_equal(vnuma_clear_watch(poll_fd.fd), -EBADF);
	vnuma_close(v);
}

static void a_child_uses_the_handle_of_its_parent(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	struct vnuma_cpus cpus;
	int status;
	pid_t pid;

	/* The fork() comes while another thread is at it, which the child does not have. */
	v->refreshing = getpid();
	put(NODES "/node1/cpulist", "8\n");
	pid = fork();
	expect(pid >= 0);
	if (pid == 0) {
		expect_equal(vnuma_copy_cpus(v, &cpus), 0);
		expect_equal(vnuma_refresh(v), 1);
		expect_equal(vnuma_cpu_node(v, 8), 1);
		expect_equal(vnuma_copy_cpus(v, &cpus), 0);
		_exit(0);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	expect_equal(status, 0);
	/* In the parent that thread is still at it. */
	expect_equal(vnuma_refresh(v), 0);
	expect_equal(vnuma_copy_cpus(v, &cpus), -EAGAIN);
	vnuma_close(v);
}

static int asked;

/* A cancellation is pending all the time, and comes at the first cancellation point. */
static void *ask_while_cancelled(void *handle)
{
	struct vnuma_nodes nodes;
	struct vnuma *other;

	expect_equal(pthread_cancel(pthread_self()), 0);
	expect_equal(vnuma_refresh(handle), 1);
	expect_equal(vnuma_read_nodes(handle, &nodes), 0);
	expect_equal(vnuma_distance(handle, 0, 3), 31);
	expect_equal(vnuma_clear_watch(-1), -EBADF);
	expect_equal(vnuma_open_at(&other, tree), 0);
	vnuma_close(other);
	asked = 1;
	pthread_testcancel();
	return NULL;
}

static void a_thread_is_not_cancelled_in_the_middle(void)
{
	struct vnuma *v = opened(VNUMA_SOURCE_SYSFS);
	struct vnuma_cpus cpus;
	pthread_t thread;
	void *result;

	put(NODES "/node1/cpulist", "8\n");
	expect_equal(pthread_create(&thread, NULL, ask_while_cancelled, v), 0);
	expect_equal(pthread_join(thread, &result), 0);
	expect(result == PTHREAD_CANCELED);
	expect_equal(vnuma_copy_cpus(v, &cpus), 0);
	expect_equal(asked, 1);
	put(NODES "/node1/cpulist", "9\n");
	expect_equal(vnuma_refresh(v), 1);
	vnuma_close(v);
}

static struct vnuma *in_signal;
static volatile int signals, copies;

static void on_signal(int number)
{
	static struct vnuma_nodes nodes;
	static struct vnuma_cpus cpus;
	int err;

	(void)number;
	vnuma_refresh(in_signal);
	err = vnuma_copy_cpus(in_signal, &cpus);
	/* It may have come into the middle of a refresh. */
	expect(err ? err == -EAGAIN : cpus.node[5] == 3);
	copies += !err;
	expect_equal(vnuma_read_nodes(in_signal, &nodes), 0);
	expect(vnuma_distance(in_signal, 0, 3) == 31);
	expect(vnuma_cpu_node(in_signal, 0) == 0);
	signals++;
}

/*
 * Each signal is asked for after the one before has been handled, so that what it interrupts goes on
 * however long the handler takes.
 */
static void a_signal_handler_may_ask(void)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	struct itimerval once = { 0 };
	int round, seen;

	in_signal = opened(VNUMA_SOURCE_SYSFS);
	expect_equal(sigaction(SIGALRM, &action, NULL), 0);
	for (round = 0; signals < 200 || !copies; round++) {
		seen = signals;
		once.it_value.tv_usec = 1 + round % 500;
		expect_equal(setitimer(ITIMER_REAL, &once, NULL), 0);
		do {
			/* In each second round it comes while nothing is refreshed. */
			if (round % 2)
				expect(vnuma_refresh(in_signal) >= 0);
			expect_equal(vnuma_cpu_node(in_signal, 5), 3);
		} while (signals == seen);
	}
	signal(SIGALRM, SIG_DFL);
	vnuma_close(in_signal);
}

#define TEST(name) { #name, name }

int main(void)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		TEST(lists_are_read_whole_or_refused),
		TEST(distances_are_read_whole_or_refused),
		TEST(without_a_device_sysfs_answers),
		TEST(a_kernel_without_numa_has_node_0),
		TEST(nodes_that_gain_and_lose_are_named),
		TEST(a_list_of_nodes_that_is_too_long_is_refused),
		TEST(a_root_may_be_long),
		TEST(distances_are_those_of_now),
		TEST(the_page_of_the_driver_answers),
		TEST(a_page_that_is_not_understood_is_named_and_not_used),
		TEST(a_device_that_may_not_be_read_is_named_and_not_used),
		TEST(a_namespace_without_the_device_has_sysfs),
		TEST(files_that_may_not_be_opened_leave_what_is_known),
		TEST(with_the_device_the_kernel_is_not_asked),
		TEST(a_page_that_may_not_be_mapped_is_named_and_not_used),
		TEST(a_copy_is_of_one_generation),
		TEST(the_node_of_the_calling_thread),
		TEST(a_watch_wakes_and_does_not_block),
		TEST(a_child_uses_the_handle_of_its_parent),
		TEST(a_thread_is_not_cancelled_in_the_middle),
		TEST(a_signal_handler_may_ask),
	};
	size_t i;

	for (i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
		printf("libvnuma: %s ...", tests[i].name);
		fflush(stdout);
		alarm(HANG_LIMIT_S);
		skipped = false;
		make_tree();
		tests[i].run();
		remove_tree();
		alarm(0);
		if (!skipped)
			printf(" ok\n");
	}
	return 0;
}
