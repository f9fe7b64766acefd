// SPDX-License-Identifier: Apache-2.0
/*
 * A node for each CPU, for HotSpot's G1 and nobody else in its process. The topology is made up: of two nodes, of which the
 * machine need have the first one only. That pages go to another node can be seen on a machine with nodes only: lab-scenario hotspot.
 *
 *	cpu-nodes-test OVERLAY LIBJVM	(the overlay built with VNUMA_TEST_ROOT)
 *	cpu-nodes-test java LIBRARIES COMMAND [ARGUMENT]...	(a Java VM with these libraries preloaded)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "seccomp.h"
#include "tree.h"

#define SIZE	(64UL << 10)

struct bitmask {
	unsigned long size;
	unsigned long *maskp;
};

int numa_available(void);
int numa_max_node(void);
int numa_num_configured_nodes(void);
int numa_node_to_cpus(int node, struct bitmask *mask);
struct bitmask *numa_allocate_cpumask(void);
struct bitmask *numa_get_membind(void);
extern struct bitmask *numa_all_nodes_ptr;

static struct {
	int (*max_node)(void);
	int (*configured_nodes)(void);
	int (*distance)(int from, int to);
	struct bitmask *(*variable)(const char *name);
	struct bitmask *(*mask)(const char *name);
	int (*node_to_cpus)(int node, struct bitmask *mask);
	void (*tonode_memory)(void *start, size_t size, int node);
	void (*interleave_memory)(void *start, size_t size, struct bitmask *mask);
	int (*node_of)(void *page);
	int (*cpu)(int frames);
} jvm;

static const char *tested;		/* one of the cases */

static void find(void *pointer, void *library, const char *name)
{
	void *symbol = dlsym(library, name);

	expect(symbol != NULL);
	memcpy(pointer, &symbol, sizeof(symbol));
}

static void open_jvm(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);

	expect(library != NULL);
	find(&jvm.max_node, library, "jvm_max_node");
	find(&jvm.configured_nodes, library, "jvm_configured_nodes");
	find(&jvm.distance, library, "jvm_distance");
	find(&jvm.variable, library, "jvm_variable");
	find(&jvm.mask, library, "jvm_mask");
	find(&jvm.node_to_cpus, library, "jvm_node_to_cpus");
	find(&jvm.tonode_memory, library, "jvm_tonode_memory");
	find(&jvm.interleave_memory, library, "jvm_interleave_memory");
	find(&jvm.node_of, library, "jvm_node_of");
	find(&jvm.cpu, library, "jvm_cpu");
}

/* The test runs on two CPUs. */
static void only_the_jvm_has_a_node_for_each_cpu(void)
{
	struct bitmask *cpus = numa_allocate_cpumask();
	int node;

	expect_equal(jvm.max_node(), 1);
	expect_equal(jvm.configured_nodes(), 2);
	expect_equal(jvm.variable("numa_all_nodes_ptr")->maskp[0], 3);
	expect_equal(jvm.variable("numa_nodes_ptr")->maskp[0], 3);
	expect_equal(jvm.mask("numa_get_membind")->maskp[0], 3);
	expect_equal(jvm.mask("numa_get_run_node_mask")->maskp[0], 3);
	expect_equal(jvm.distance(0, 0), 10);
	expect_equal(jvm.distance(0, 1), 20);
	for (node = 0; node < 2; node++) {
		expect_equal(jvm.node_to_cpus(node, cpus), 0);
		expect_equal(cpus->maskp[0] & 3, 1 << node);
	}
	/* As sched_getcpu() is right, what others see of CPUs is, too. The kernel has both CPUs on node 0, or each on its own. */
	expect_equal(numa_node_to_cpus(0, cpus), 0);
	expect_equal(cpus->maskp[0] & 1, 1);
	if (numa_max_node() == 0)
		expect_equal(cpus->maskp[0] & 3, 3);
	expect_equal(numa_max_node() + 1, numa_num_configured_nodes());
	expect_equal(numa_get_membind()->maskp[0], numa_all_nodes_ptr->maskp[0]);
	expect_equal(numa_all_nodes_ptr->maskp[0] & 1, 1);
}

static void run_on(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	expect_equal(sched_setaffinity(0, sizeof(one), &one), 0);
}

static void a_thread_is_told_its_cpu(void)
{
	int (*get_cpu)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sched_getcpu");
	cpu_set_t before;
	int cpu;

	expect_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	for (cpu = 0; cpu < 2; cpu++) {
		run_on(cpu);
		expect_equal(get_cpu(), cpu);
	}
	expect_equal(sched_setaffinity(0, sizeof(before), &before), 0);
}

/* JDK-8351500: it asks again from the same frame, or from further down, within one allocation. */
static void the_jvm_is_told_the_same_cpu_within_an_allocation(void)
{
	int (*get_cpu)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sched_getcpu");
	int here, there, i;
	cpu_set_t before;

	expect_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	run_on(0);
	jvm.cpu(2);
	expect_equal(jvm.cpu(1), 0);
	for (i = 0; i < 4; i++) {
		here = i % 2;
		there = !here;
		run_on(there);
		expect_equal(jvm.cpu(1), here);
		expect_equal(jvm.cpu(2), here);
		run_on(here);
		run_on(there);
		expect_equal(jvm.cpu(2), here);
		expect_equal(get_cpu(), there);
		expect_equal(jvm.cpu(1), there);
	}
	expect_equal(sched_setaffinity(0, sizeof(before), &before), 0);
}

/* The node that memory prefers. -1: it has no such policy. */
static int preferred(void *memory)
{
	unsigned long nodes[16] = { 0 };
	int mode = -1;

	expect_equal(syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof(nodes), memory, MPOL_F_ADDR), 0);
	return mode == MPOL_PREFERRED && nodes[0] ? __builtin_ctzl(nodes[0]) : -1;
}

/* For the overlay's thread looks at a file once a second. */
static int prefers_soon(void *memory, int node)
{
	int tries;

	for (tries = 0; preferred(memory) != node && tries < 600; tries++)
		usleep(100000);
	return preferred(memory) == node;
}

static char *map(size_t size)
{
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(memory != MAP_FAILED);
	return memory;
}

/* What node memory prefers that is dealt out to CPU 1 now. */
static int preferred_by_new(void)
{
	char *memory = map(SIZE);

	jvm.tonode_memory(memory, SIZE, 1);
	return preferred(memory);
}

/* Here a watch is a clock. */
static int watches(void)
{
	char path[64], what[64];
	int file, count = 0;

	for (file = 0; file < 256; file++) {
		ssize_t length;

		snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
		length = readlink(path, what, sizeof(what) - 1);
		if (length < 0)
			continue;
		what[length] = '\0';
		count += strstr(what, "timerfd") != NULL;
	}
	return count;
}

/* Memory is dealt out while no file can be opened: it is followed from the next time on. */
static void a_watch_that_fails_is_tried_again(void)
{
	struct rlimit before, none;

	expect_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = (struct rlimit){ 0, before.rlim_max };
	expect_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	jvm.tonode_memory(map(SIZE), SIZE, 0);
	expect_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
	expect_equal(watches(), 0);
}

static void memory_of_a_cpu_goes_with_it(void)
{
	struct vnuma_gd_page *page = map_page();
	char *memory = map(4 * SIZE);
	/* Not by address, and one of them twice. */
	static const int order[] = { 2, 0, 3, 1, 0 };
	size_t i;

	jvm.interleave_memory(memory, 4 * SIZE, jvm.mask("numa_get_membind"));
	/* CPU N has node N, of which the machine may have none; no memory is of a node that G1 does not have. */
	for (i = 0; i < sizeof(order) / sizeof(*order); i++)
		jvm.tonode_memory(memory + order[i] * SIZE, SIZE, order[i] % 2);
	jvm.tonode_memory(memory, SIZE, 2);
	jvm.tonode_memory(memory, SIZE, -1);
	memset(memory, 1, 4 * SIZE);
	expect_equal(preferred(memory), 0);
	expect_equal(preferred(memory + 2 * SIZE), 0);
	expect(preferred(memory + SIZE) != 0);
	/* G1 takes the node that it has dealt out. */
	expect_equal(jvm.node_of(memory), -ENOENT);
	move_cpus(page, 0, 1);
	expect(prefers_soon(memory + SIZE, 0) && prefers_soon(memory + 3 * SIZE, 0));
	/* What is dealt out now is there at once. */
	expect_equal(preferred_by_new(), 0);
	/* A CPU of no node: its memory is where it was. */
	move_cpus(page, VNUMA_GD_NO_NODE, 1);
	sleep(3);
	expect_equal(preferred(memory), 0);
	expect_equal(preferred_by_new(), 0);
	expect_equal(memory[4 * SIZE - 1], 1);
}

/* The device cannot be opened any more before there is memory to follow: that is where its CPU was at the start, and stays. */
static void memory_that_cannot_be_followed_is_placed(void)
{
	struct vnuma_gd_page *page = map_page();
	char *memory = map(2 * SIZE);
	int round;

	if (!strcmp(tested, "no files later")) {
		refuse_files();
	} else if (hide(in_tree("/dev"))) {
		printf("nodes of CPUs: skipped, the device cannot be hidden here: %s\n", strerror(errno));
		return;
	}
	for (round = 0; round < 2; round++) {
		jvm.tonode_memory(memory, SIZE, 0);
		jvm.tonode_memory(memory + SIZE, SIZE, 1);
		expect_equal(preferred(memory), 0);
		expect(preferred(memory + SIZE) != 0);
		expect_equal(watches(), 0);
		move_cpus(page, 0, 1);
	}
	memset(memory, 1, 2 * SIZE);
	expect_equal(jvm.max_node(), 1);
	expect_equal(jvm.distance(0, 1), 20);
	a_thread_is_told_its_cpu();
}

/* A process that has chosen nodes for its memory itself, or CPUs of one, or has no driver, gets those that there are. */
static void others_have_the_nodes_that_there_are(void)
{
	expect_equal(jvm.max_node(), numa_max_node());
	expect_equal(jvm.configured_nodes(), numa_num_configured_nodes());
	expect(jvm.variable("numa_all_nodes_ptr") == numa_all_nodes_ptr);
	jvm.tonode_memory(map(SIZE), SIZE, 0);
	expect_equal(watches(), 0);
	/* Neither library can read which nodes there are: nor is there the table that ParallelGC uses. */
	if (!strcmp(tested, "no files"))
		a_thread_is_told_its_cpu();
	else
		expect(jvm.variable("numa_nodes_ptr")->maskp[0] & 1);
}

static void be_there_before(int argc, char **argv)
{
	if (argc > 2)
		refuse_from_start(argv[2]);
}

/* Called before the constructors of all libraries. */
static void (*const first)(int argc, char **argv) __attribute__((section(".preinit_array"), used)) = be_there_before;

static int check(const char *library)
{
	alarm(200);
	open_jvm(library);
	if (!strcmp(tested, "no files later") || !strcmp(tested, "hidden")) {
		memory_that_cannot_be_followed_is_placed();
		return 0;
	}
	if (strcmp(tested, "cpus")) {
		others_have_the_nodes_that_there_are();
		return 0;
	}
	only_the_jvm_has_a_node_for_each_cpu();
	a_thread_is_told_its_cpu();
	the_jvm_is_told_the_same_cpu_within_an_allocation();
	/* None that children would share, or that the program may close, before there is a thread that waits for it. */
	expect_equal(watches(), 0);
	a_watch_that_fails_is_tried_again();
	memory_of_a_cpu_goes_with_it();
	expect_equal(watches(), 1);
	return 0;
}

static void run_on_first(int nr_cpus)
{
	cpu_set_t cpus;
	int cpu;

	CPU_ZERO(&cpus);
	for (cpu = 0; cpu < nr_cpus; cpu++)
		CPU_SET(cpu, &cpus);
	expect_equal(sched_setaffinity(0, sizeof(cpus), &cpus), 0);
}

static int run(const char *self, const char *overlay, const char *library)
{
	char libraries[2 * PATH_MAX];
	unsigned long first = 1;
	int status;
	pid_t pid = fork();

	expect(pid >= 0);
	if (pid == 0) {
		run_on_first(strcmp(tested, "one-cpu") ? 2 : 1);
		if (!strcmp(tested, "bound"))
			expect_equal(syscall(SYS_set_mempolicy, MPOL_BIND, &first, 64UL), 0);
		if (!strcmp(tested, "no-driver"))
			removed("/dev/vnuma");
		setenv("VNUMA_NODE_PER_CPU", strcmp(tested, "asked-not-to") ? "1" : "0", 1);
		/* It cannot be loaded later if no file may be opened. */
		snprintf(libraries, sizeof(libraries), "%s:%s", overlay, library);
		setenv("LD_PRELOAD", strcmp(tested, "no files") ? overlay : libraries, 1);
		execl(self, self, "check", tested, library, NULL);
		_exit(127);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	if (status)
		fprintf(stderr, "cpu-nodes-test: %s: status %#x\n", tested, status);
	return status;
}

/* Its exit status is the command's. */
static int run_java(const char *libraries, char **command)
{
	int status;
	pid_t pid;

	put_page(make_page(2));
	pid = fork();
	expect(pid >= 0);
	if (pid == 0) {
		run_on_first(2);
		setenv("VNUMA_NODE_PER_CPU", "1", 1);
		setenv("LD_PRELOAD", libraries, 1);
		execv(command[0], command);
		_exit(127);
	}
	expect_equal(waitpid(pid, &status, 0), pid);
	return status;
}

int main(int argc, char **argv)
{
	static const char *const cases[] = {
		"cpus", "bound", "one-cpu", "asked-not-to", "no files", "no page", "no files later", "hidden", "no-driver",
	};
	cpu_set_t allowed;
	int failed = 0;
	size_t i;

	if (argc == 4 && !strcmp(argv[1], "check")) {
		snprintf(tree, sizeof(tree), "%s", getenv("VNUMA_TEST_ROOT"));
		tested = argv[2];
		return check(argv[3]);
	}
	expect(argc == 3 || (argc > 3 && !strcmp(argv[1], "java")));
	if (numa_available() < 0) {
		printf("nodes of CPUs: skipped, the kernel has no NUMA\n");
		return 0;
	}
	if (sched_getaffinity(0, sizeof(allowed), &allowed) || !CPU_ISSET(0, &allowed) || !CPU_ISSET(1, &allowed)) {
		printf("nodes of CPUs: skipped, it needs CPUs 0 and 1\n");
		return 0;
	}
	make_tree();
	put(NODES "/has_cpu", "0-1\n");
	setenv("VNUMA_TEST_ROOT", tree, 1);
	for (i = 0; argc == 3 && i < sizeof(cases) / sizeof(*cases); i++) {
		tested = cases[i];
		put_page(make_page(2));
		failed |= run(argv[0], argv[1], argv[2]);
	}
	if (argc > 3)
		failed = run_java(argv[2], argv + 3);
	remove_tree();
	if (!failed)
		printf("nodes of CPUs: HotSpot's G1 has one for each ... ok\n");
	return failed != 0;
}
