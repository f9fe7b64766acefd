// SPDX-License-Identifier: Apache-2.0
/*
 * The overlay before the real libnuma, whose files of sysfs are made up: a mount namespace puts a
 * folder where /sys/devices/system/node is. Without the right to do so it is skipped.
 *
 *	numa-test OVERLAY HOTSPOT_OVERLAY REAL_LIBNUMA
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/wait.h>

#include "map.h"
#include "seccomp.h"
#include "tree.h"

struct bitmask {
	unsigned long size;
	unsigned long *maskp;
};

struct nodemask {
	unsigned long n[2];
};

/* Of a program that is linked to libnuma as programs are. */
extern struct bitmask *numa_all_nodes_ptr, *numa_no_nodes_ptr;
/* Of the versions that came later, so that the program needs these. */
int numa_num_possible_cpus(void);
void numa_set_membind_balancing(struct bitmask *mask);
int numa_has_preferred_many(void);
int numa_available(void);
int numa_max_node(void);
struct bitmask *numa_allocate_cpumask(void);
struct bitmask *numa_allocate_nodemask(void);
struct bitmask *numa_bitmask_setbit(struct bitmask *mask, unsigned int bit);
struct bitmask *numa_bitmask_clearall(struct bitmask *mask);
void numa_bitmask_free(struct bitmask *mask);
int numa_bitmask_isbitset(const struct bitmask *mask, unsigned int bit);
int numa_node_to_cpus(int node, struct bitmask *mask);
int numa_node_of_cpu(int cpu);
int numa_distance(int from, int to);
int numa_run_on_node(int node);
int numa_run_on_node_mask(struct bitmask *mask);
int numa_run_on_node_mask_all(struct bitmask *mask);
struct bitmask *numa_get_run_node_mask(void);
void numa_bind(struct bitmask *mask);
void numa_error(char *where);

static int with_overlay, told;

/* What is true now, and what the real library says that has been asked before. */
#define expect_now(seen, now, before)	expect_equal(seen, with_overlay ? (now) : (before))

/* A bit for each CPU that the thread may run on. */
static unsigned long affinity(void)
{
	unsigned long bits = 0;
	cpu_set_t set;
	int cpu;

	expect_equal(sched_getaffinity(0, sizeof(set), &set), 0);
	for (cpu = 0; cpu < 64; cpu++)
		bits |= CPU_ISSET(cpu, &set) ? 1UL << cpu : 0;
	return bits;
}

static void everywhere(void)
{
	expect_equal(numa_run_on_node(-1), 0);
}

/* Node 0 has CPU 0, node 1 has CPU 1; or the other way round. */
static void swap(int swapped)
{
	put(NODES "/node0/cpulist", swapped ? "1\n" : "0\n");
	put(NODES "/node1/cpulist", swapped ? "0\n" : "1\n");
	put(NODES "/node0/cpumap", swapped ? "00000002\n" : "00000001\n");
	put(NODES "/node1/cpumap", swapped ? "00000001\n" : "00000002\n");
	put(NODES "/node0/distance", swapped ? "10 31\n" : "10 21\n");
}

static unsigned long cpus_of(int node)
{
	struct bitmask *mask = numa_allocate_cpumask();

	expect_equal(numa_node_to_cpus(node, mask), 0);
	return mask->maskp[0];
}

static void *old_version(const char *name)
{
	void *symbol = dlvsym(RTLD_DEFAULT, name, "libnuma_1.1");

	expect(symbol != NULL);
	return symbol;
}

/* Each function by itself after a change: none may live on what another one has refreshed. */
static void queries_are_true_after_a_change(void)
{
	int (*node_to_cpus_v1)(int node, unsigned long *buffer, int length) =
		old_version("numa_node_to_cpus");
	int (*run_on_node_mask_v1)(const struct nodemask *mask) = old_version("numa_run_on_node_mask");
	struct nodemask (*get_run_node_mask_v1)(void) = old_version("numa_get_run_node_mask");
	void (*bind_v1)(const struct nodemask *mask) = old_version("numa_bind");
	struct bitmask *first = numa_bitmask_setbit(numa_allocate_nodemask(), 0);
	struct nodemask first_v1 = { { 1 } };
	unsigned long buffer[128] = { 0 };

	/* All is asked once, so that the real library has it. */
	expect_equal(cpus_of(0), 1);
	expect_equal(cpus_of(1), 2);
	expect_equal(numa_node_of_cpu(0), 0);
	expect_equal(numa_distance(0, 1), 21);
	expect_equal(node_to_cpus_v1(0, buffer, sizeof(buffer)), 0);
	expect_equal(buffer[0], 1);
	/* Each twice, so that none lives on what the one before has had read anew. */
#define twice(call, seen)					\
	do {							\
		swap(0);					\
		call;						\
		expect_equal(seen, 1);				\
		swap(1);					\
		call;						\
		expect_now(seen, 2, 1);				\
	} while (0)
	twice(, cpus_of(0));
	twice(, numa_node_of_cpu(0) + 1);
	twice(, numa_distance(0, 1) == 21 ? 1 : 2);
	twice(node_to_cpus_v1(0, buffer, sizeof(buffer)), buffer[0]);
	twice(numa_run_on_node(0), affinity());
	twice(numa_run_on_node_mask(first), affinity());
	twice(numa_run_on_node_mask_all(first), affinity());
	twice(run_on_node_mask_v1(&first_v1), affinity());
	twice(numa_bind(first), affinity());
	twice(bind_v1(&first_v1), affinity());
	swap(0);
	/* Of the nodes that the kernel allows, those that the thread's CPUs are on. */
	expect_equal(numa_run_on_node(0), 0);
	expect(numa_bitmask_isbitset(numa_get_run_node_mask(), 0));
	swap(1);
	expect_now(numa_bitmask_isbitset(numa_get_run_node_mask(), 0), 0, 1);
	swap(0);
	expect_equal(get_run_node_mask_v1().n[0] & 1, 1);
	swap(1);
	expect_now(get_run_node_mask_v1().n[0] & 1, 0, 1);
	everywhere();
	swap(0);
}

static void errors_are_those_of_the_real_library(void)
{
	struct bitmask *mask = numa_allocate_cpumask();

	errno = 0;
	expect_equal(numa_node_to_cpus(numa_max_node() + 1, mask), -1);
	expect_equal(errno, ERANGE);
	errno = 0;
	expect_equal(numa_node_of_cpu(1 << 20), -1);
	expect_equal(errno, EINVAL);
	expect_equal(numa_distance(0, 99), 0);
	expect_equal(numa_distance(0, -1), 0);
	errno = 0;
	expect_equal(numa_run_on_node(1 << 20), -1);
	expect_equal(errno, EINVAL);
	if (!with_overlay)
		return;
	expect_equal(numa_node_to_cpus(-1, mask), -1);
	expect_equal(errno, ERANGE);
}

/* Every symbol of the real library, with its version, as a program that opens libnuma looks it up. */
static void all_symbols_are_found(const char *real)
{
	void *handle = dlopen("libnuma.so.1", RTLD_LAZY);
	void *direct = dlopen(real, RTLD_LAZY);
	char command[PATH_MAX + 64], name[256], symbol_version[64];
	int count = 0, other = 0;
	FILE *list;

	expect(handle && direct);
	snprintf(command, sizeof(command),
		 "nm -D --defined-only '%s' | sed -n 's/.* [BDTV] \\(.*[^@]\\)@@*\\(.*\\)/\\1 \\2/p'", real);
	list = popen(command, "r");
	expect(list != NULL);
	while (fscanf(list, "%255s %63s", name, symbol_version) == 2) {
		void *found = dlvsym(handle, name, symbol_version);

		if (!found) {
			fprintf(stderr, "not found: %s of %s\n", name, symbol_version);
			exit(1);
		}
		other += found != dlvsym(direct, name, symbol_version);
		count++;
	}
	pclose(list);
	expect(count > 90);
	/* Twelve functions, those with two versions counted twice. */
	expect_equal(other, with_overlay ? 12 : 0);
	/* The program's copy of a variable is the one that the real library fills. */
	expect(numa_bitmask_isbitset(numa_all_nodes_ptr, 0));
}

static void *ask_on(void *stop)
{
	while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED))
		numa_run_on_node(0);
	return NULL;
}

static void a_child_does_not_wait_for_its_parents_threads(void)
{
	int stop = 0, status, round;
	pthread_t thread;

	expect_equal(pthread_create(&thread, NULL, ask_on, &stop), 0);
	for (round = 0; round < 50; round++) {
		pid_t pid = fork();

		expect(pid >= 0);
		if (pid == 0) {
			alarm(60);
			expect_equal(numa_run_on_node(0), 0);
			_exit(0);
		}
		expect_equal(waitpid(pid, &status, 0), pid);
		expect_equal(status, 0);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
}

static int asks_when_told, forks_when_told;
static pid_t forked;

/* In place of libnuma's own, as a program may have it. */
void numa_error(char *where)
{
	(void)where;
	told++;
	if (asks_when_told) {
		numa_node_of_cpu(0);
		cpus_of(0);
	}
	if (forks_when_told)
		forked = fork();
}

static void *ask_once(void *unused)
{
	expect_equal(numa_run_on_node(0), 0);
	return unused;
}

static void ask_by_a_thread(void)
{
	pthread_t thread;

	expect_equal(pthread_create(&thread, NULL, ask_once, NULL), 0);
	expect_equal(pthread_join(thread, NULL), 0);
}

static void a_program_may_ask_when_it_is_told_of_an_error(void)
{
	struct bitmask *none = numa_allocate_nodemask();
	int status;

	asks_when_told = 1;
	for (forks_when_told = 0; forks_when_told < 2; forks_when_told++) {
		told = 0;
		forked = -1;
		expect_equal(numa_run_on_node_mask(none), -1);
		expect_equal(told, 1);
		if (!forked)
			alarm(60);
		/* Nothing is left locked, in a child neither. */
		ask_by_a_thread();
		if (!forked)
			_exit(0);
	}
	asks_when_told = forks_when_told = 0;
	expect_equal(waitpid(forked, &status, 0), forked);
	expect_equal(status, 0);
	numa_bitmask_free(none);
}

/* What it is asked while a cancellation is pending, one at a time: each may be where the thread ends. */
static void (*volatile asked)(void);

static void ask_run_on_node(void)
{
	numa_run_on_node(0);
}

static void ask_cpus(void)
{
	cpus_of(0);
}

static void ask_node_of_cpu(void)
{
	numa_node_of_cpu(0);
}

static void ask_distance(void)
{
	numa_distance(0, 1);
}

static void ask_run_node_mask(void)
{
	numa_bitmask_free(numa_get_run_node_mask());
}

static void *ask_while_cancelled(void *unused)
{
	expect_equal(pthread_cancel(pthread_self()), 0);
	asked();
	asked = NULL;
	pthread_testcancel();
	return unused;
}

static void a_thread_is_not_cancelled_with_the_lock(void)
{
	static void (*const all[])(void) = {
		ask_run_on_node, ask_cpus, ask_node_of_cpu, ask_distance, ask_run_node_mask,
	};
	pthread_t thread;
	void *result;
	size_t i;

	for (i = 0; with_overlay && i < sizeof(all) / sizeof(*all); i++) {
		asked = all[i];
		expect_equal(pthread_create(&thread, NULL, ask_while_cancelled, NULL), 0);
		expect_equal(pthread_join(thread, &result), 0);
		expect(result == PTHREAD_CANCELED);
		expect(!asked);
		/* It would wait for ever. */
		all[i]();
	}
}

/* After chroot(), say. */
static int hide_sysfs(void)
{
	return hide("/sys");
}

static int forbid_files(void)
{
	refuse_files();
	return 0;
}

/* Without sysfs it knows what it has read before, with and without the overlay. */
static void what_was_read_is_known_without_sysfs(int (*lose)(void))
{
	int status, node, distance;
	pid_t pid = fork();

	expect(pid >= 0);
	if (pid == 0) {
		distance = numa_distance(0, 1);
		expect(distance > 10);
		expect_equal(numa_run_on_node(0), 0);
		expect_equal(numa_run_on_node(1), 0);
		node = numa_node_of_cpu(1);
		expect(node >= 0);
		if (lose())
			_exit(77);
		expect_equal(numa_run_on_node(0), 0);
		expect_equal(affinity(), cpus_of(0));
		expect_equal(numa_node_of_cpu(1), node);
		expect_equal(numa_distance(0, 1), distance);
		expect_equal(numa_distance(0, 99), 0);
		expect_equal(numa_distance(0, -1), 0);
		_exit(0);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("libnuma overlay: skipped, sysfs cannot be hidden here\n");
	else
		expect_equal(status, 0);
}

/* What a program is told that may open no file, by any library, from its start on. */
static int tell(void)
{
	struct bitmask *mask = numa_allocate_cpumask(), *nodes;
	int round, node, result;

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("available %d, last node %d\n", numa_available(), numa_max_node());
	for (round = 0; round < 2; round++) {
		for (node = 0; node < 3; node++) {
			numa_bitmask_clearall(mask);
			errno = 0;
			result = numa_node_to_cpus(node, mask);
			printf("node %d: %d %#lx, errno %d\n", node, result, mask->maskp[0], errno);
			printf("distance %d %d\n", numa_distance(0, node), numa_distance(node, 1));
			result = numa_run_on_node(node);
			printf("run there: %d %#lx, told %d\n", result, affinity(), told);
			nodes = numa_get_run_node_mask();
			printf("runs on nodes %#lx\n", nodes ? nodes->maskp[0] : 0);
		}
		printf("CPUs are on %d %d\n", numa_node_of_cpu(0), numa_node_of_cpu(1 << 20));
		result = numa_run_on_node_mask(numa_all_nodes_ptr);
		printf("run on a mask: %d, told %d\n", result, told);
		result = numa_run_on_node_mask_all(numa_all_nodes_ptr);
		printf("all: %d, told %d\n", result, told);
		numa_bind(numa_all_nodes_ptr);
		printf("bound: %#lx, told %d\n", affinity(), told);
	}
	return 0;
}

static void be_there_before(int argc, char **argv)
{
	if (argc > 1)
		refuse_from_start(argv[1]);
}

/* Called before the constructors of all libraries. */
static void (*const first)(int argc, char **argv) __attribute__((section(".preinit_array"), used)) = be_there_before;

/* With 3 nodes and 8 CPUs, as hotspot.h draws them. */
static void cpus_of_the_map_are_of_the_node(void)
{
	static const int alone[3][8] = {
		{ 0, 0, 0, 3, 3, 3, 6, 6 }, { 1, 1, 1, 4, 4, 4, 7, 7 }, { 2, 2, 2, 5, 5, 5, 2, 2 },
	};
	int cpu, node;

	for (cpu = 0; cpu < 8; cpu++) {
		for (node = 0; node < 3; node++) {
			expect_equal(vnuma_map_cpu(cpu, node, 3, 8, 0), alone[node][cpu]);
			expect_equal(vnuma_map_cpu(cpu, node, 3, 8, 1), node);
		}
	}
}

#define MADE_UP_CPUS	8

/* Where the thread is. Below 0: where the kernel says. */
static int made_up_cpu = -1, made_up_node;

/* In place of the C library's: the machine may have too few CPUs for a table in which it matters how they are told apart. */
long sysconf(int name)
{
	static long (*real)(int name);

	if (name == _SC_NPROCESSORS_CONF && getenv("HOTSPOT"))
		return MADE_UP_CPUS;
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "sysconf");
	return real(name);
}

int getcpu(unsigned int *cpu, unsigned int *node)
{
	if (made_up_cpu < 0)
		return (int)syscall(SYS_getcpu, cpu, node, NULL);
	*cpu = (unsigned int)made_up_cpu;
	if (node)
		*node = (unsigned int)made_up_node;
	return 0;
}

/*
 * A thread is told a CPU of its node: of its neighbours, or for ZGC that of all threads of the node. Any other node than
 * the two came later, and has no CPU of the table.
 */
static int cpu_that_is_told(int cpu, int node, bool shared)
{
	if (node > 1)
		return cpu;
	return shared ? node : cpu / 2 * 2 + node;
}

/* On any CPU of any node. */
static void threads_are_told_cpus_of_their_node(int (*get_cpu)(void), bool shared)
{
	for (made_up_node = 0; made_up_node < 2; made_up_node++) {
		for (made_up_cpu = 0; made_up_cpu < MADE_UP_CPUS; made_up_cpu++) {
			int cpu = get_cpu();

			expect_equal(cpu, cpu_that_is_told(made_up_cpu, made_up_node, shared));
			expect_equal(cpus_of(made_up_node) >> cpu & 1, 1);
		}
	}
	/* made_up_node is 2. */
	made_up_cpu = 5;
	expect_equal(get_cpu(), 5);
	made_up_cpu = -1;
}

/* With the overlay for ParallelGC and ZGC: a map that stays, and a CPU of it for the node of the thread. */
static int check_hotspot(void)
{
	const char *asked = getenv("VNUMA_SHARED_CPUS");
	bool shared = asked && strcmp(asked, "0");
	unsigned int here, node;
	long nr_cpus = sysconf(_SC_NPROCESSORS_CONF);
	int (*get_cpu)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sched_getcpu");
	int (*node_to_cpus_v1)(int node, unsigned long *buffer, int length) =
		old_version("numa_node_to_cpus");
	unsigned long even = 0, odd = 0, buffer[128];
	struct bitmask *mask;
	int cpu, swapped;
	cpu_set_t one;

	cpus_of_the_map_are_of_the_node();
	for (cpu = 0; cpu < nr_cpus && cpu < 64; cpu++)
		*(cpu % 2 ? &odd : &even) |= 1UL << cpu;
	for (swapped = 0; swapped < 2; swapped++) {
		swap(swapped);
		expect_equal(cpus_of(0), even);
		expect_equal(cpus_of(1), odd);
		memset(buffer, 0xff, sizeof(buffer));
		expect_equal(node_to_cpus_v1(1, buffer, sizeof(buffer)), 0);
		expect_equal(buffer[0], odd);
		expect_equal(buffer[127], 0);
		/* What HotSpot's table is not made of is true. */
		expect_equal(numa_node_of_cpu(0), swapped);
		expect_equal(numa_node_of_cpu(1), !swapped);
		expect_equal(numa_distance(0, 1), swapped ? 31 : 21);
	}
	threads_are_told_cpus_of_their_node(get_cpu, shared);
	/* Of the node that the kernel says, whatever the files say. Which one that is differs from server to server. */
	for (cpu = 0; cpu < 2; cpu++) {
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		expect_equal(sched_setaffinity(0, sizeof(one), &one), 0);
		expect_equal(getcpu(&here, &node), 0);
		expect_equal(get_cpu(), cpu_that_is_told(cpu, (int)node, shared));
		/* Though it is bound to a CPU. */
		mask = numa_get_run_node_mask();
		expect(numa_bitmask_isbitset(mask, 0) && numa_bitmask_isbitset(mask, 1));
		numa_bitmask_free(mask);
	}
	printf("libnuma overlay: a map that stays for %s ... ok\n", shared ? "ZGC" : "ParallelGC");
	return 0;
}

static int check(const char *real)
{
	void (*volatile balancing)(struct bitmask *mask) = numa_set_membind_balancing;

	alarm(120);
	expect(balancing && numa_num_possible_cpus() > 0 && numa_has_preferred_many() >= 0);
	if (numa_available() < 0) {
		printf("libnuma overlay: skipped, the kernel has no NUMA\n");
		return 0;
	}
	if (sysconf(_SC_NPROCESSORS_ONLN) < 2) {
		printf("libnuma overlay: skipped, it needs two CPUs\n");
		return 0;
	}
	if (with_overlay && getenv("HOTSPOT"))
		return check_hotspot();
	queries_are_true_after_a_change();
	errors_are_those_of_the_real_library();
	all_symbols_are_found(real);
	a_child_does_not_wait_for_its_parents_threads();
	a_thread_is_not_cancelled_with_the_lock();
	a_program_may_ask_when_it_is_told_of_an_error();
	what_was_read_is_known_without_sysfs(hide_sysfs);
	what_was_read_is_known_without_sysfs(forbid_files);
	printf("libnuma overlay: %s ok\n",
	       with_overlay ? "answers what is true now ..." : "the real one does not ...");
	return 0;
}

static void make_two_nodes(void)
{
	make_tree();
	put(NODES "/online", "0-1\n");
	put(NODES "/possible", "0-1\n");
	put(NODES "/has_cpu", "0-1\n");
	put(NODES "/has_memory", "0\n");
	put(NODES "/node0/meminfo", "Node 0 MemTotal: 1000000 kB\nNode 0 MemFree: 500000 kB\n");
	put(NODES "/node1/meminfo", "Node 1 MemTotal: 0 kB\nNode 1 MemFree: 0 kB\n");
	put(NODES "/node1/distance", "21 10\n");
	removed(NODES "/node3/cpulist");
	removed(NODES "/node3/distance");
	expect_equal(rmdir(in_tree(NODES "/node3")), 0);
	swap(0);
}

/* Warnings come among answers, by the same file. */
static void run_refused(const char *self, const char *overlay, const char *output)
{
	pid_t pid = fork();
	int status;

	expect(pid >= 0);
	if (pid == 0) {
		if (overlay)
			setenv("LD_PRELOAD", overlay, 1);
		put(output, "");
		expect(freopen(in_tree(output), "a", stdout));
		dup2(1, 2);
		execl(self, self, "no files", NULL);
		_exit(127);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	expect_equal(status, 0);
}

/* Does the program see and say the same as without the overlay? */
static int tells_the_same(const char *self, const char *overlay)
{
	char *command;

	run_refused(self, NULL, "/told-before");
	run_refused(self, overlay, "/told-now");
	expect(asprintf(&command, "cd '%s' && grep -q bound told-before && diff -u told-before told-now >&2", tree) > 0);
	return !system(command);
}

static int run(const char *self, const char *overlay, const char *real)
{
	int status;
	pid_t pid = fork();

	expect(pid >= 0);
	if (pid == 0) {
		if (overlay)
			setenv("LD_PRELOAD", overlay, 1);
		execl(self, self, overlay ? "now" : "before", real, NULL);
		_exit(127);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	return status;
}

int main(int argc, char **argv)
{
	int failed;

	if (argc == 2 && !strcmp(argv[1], "no files"))
		return tell();
	expect(argc >= 3);
	with_overlay = !strcmp(argv[1], "now");
	if (with_overlay || !strcmp(argv[1], "before")) {
		snprintf(tree, sizeof(tree), "%s", getenv("TREE"));
		return check(argv[2]);
	}
	make_two_nodes();
	setenv("TREE", tree, 1);
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount(in_tree(NODES), NODES, NULL, MS_BIND, NULL)) {
		printf("libnuma overlay: skipped, nothing can be mounted here: %s\n", strerror(errno));
		remove_tree();
		return 0;
	}
	expect_equal(argc, 4);
	failed = run(argv[0], argv[1], argv[3]) || run(argv[0], NULL, argv[3]);
	failed = failed || !tells_the_same(argv[0], argv[1]) || !tells_the_same(argv[0], argv[2]);
	setenv("HOTSPOT", "1", 1);
	failed = failed || run(argv[0], argv[2], argv[3]);
	setenv("VNUMA_SHARED_CPUS", "0", 1);
	failed = failed || run(argv[0], argv[2], argv[3]);
	setenv("VNUMA_SHARED_CPUS", "1", 1);
	failed = failed || run(argv[0], argv[2], argv[3]);
	remove_tree();
	return failed;
}
