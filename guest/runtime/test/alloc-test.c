// SPDX-License-Identifier: Apache-2.0
/*
 * malloc() before jemalloc, by a topology that is made up: which arena a thread uses when it or its
 * CPU's node has changed.
 *
 *	alloc-test LIBRARY	(built with VNUMA_TEST_ROOT)
 *
 * Where the memory of an arena really is can be seen on a machine with nodes only: vnuma-alloc.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "alloc-test.h"
#include "seccomp.h"

#define CPUS	VNUMA_GD_MAX_CPUS

volatile int no_more_arenas;
/* The next hooks are lost. */
volatile int loses_hooks;
/* The functions of extent_hooks_t, and nothing behind them. */
#define HOOKS	9

/* jemalloc's, but for arenas that it cannot make or give memory of a node; the library calls this one. */
__attribute__((visibility("default"))) int mallctl(const char *name, void *old, size_t *old_size, void *new,
						    size_t new_size)
{
	static int (*real)(const char *, void *, size_t *, void *, size_t);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "mallctl");
	if (no_more_arenas && (!strcmp(name, "arenas.create") || (new && strstr(name, ".extent_hooks"))))
		return EAGAIN;
	if (loses_hooks && new && strstr(name, ".extent_hooks")) {
		size_t size = sizeof(void *);
		void *hooks;

		/* As where another thread has made the arena meanwhile: it has jemalloc's. */
		loses_hooks = 0;
		return real("arena.0.extent_hooks", &hooks, &size, NULL, 0) || real(name, NULL, NULL, &hooks, size);
	}
	return real(name, old, old_size, new, new_size);
}

__thread void *volatile kept;

struct vnuma_gd_page *page;

unsigned int thread_arena(void)
{
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("thread.arena", &arena, &size, NULL, 0), 0);
	return arena;
}

/* That of a piece of memory, which a thread's cache may have kept. */
unsigned int arena_of(void *memory)
{
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("arenas.lookup", &arena, &size, &memory, sizeof(memory)), 0);
	return arena;
}

/* The arena that a thread uses now, for large pieces and for those that its cache keeps. */
unsigned int allocated_in(void)
{
	static const size_t sizes[] = { 100000, 64 };
	unsigned int arena, i;

	for (i = 0; i < 2; i++) {
		kept = malloc(sizes[i]);
		expect(kept);
		arena = arena_of(kept);
		free(kept);
		expect_equal(arena, thread_arena());
	}
	return arena;
}

/* As if the guest's scheduler had taken the thread there: nobody says so. */
void schedule_on(uint16_t node)
{
	unsigned int i;

	move_cpus(page, node, 0);
	for (i = 0; i < LOOK_EVERY + 1; i++) {
		kept = malloc(1);
		free(kept);
	}
}

/* Arenas that jemalloc has by itself. */
unsigned int automatic(void)
{
	unsigned int arenas;
	size_t size = sizeof(arenas);

	expect_equal(mallctl("opt.narenas", &arenas, &size, NULL, 0), 0);
	return arenas;
}

/* What gives an arena its memory, which all arenas of a node share. */
void *hooks_of(unsigned int arena)
{
	size_t size = sizeof(void *);
	char name[64];
	void *hooks;

	snprintf(name, sizeof(name), "arena.%u.extent_hooks", arena);
	expect_equal(mallctl(name, &hooks, &size, NULL, 0), 0);
	return hooks;
}

/* The node whose memory it gives: what follows the nine functions. */
static int node_of_hooks(const void *hooks)
{
	int node;

	memcpy(&node, (const char *)hooks + 9 * sizeof(void *), sizeof(node));
	return node;
}

static int kernel_node(void)
{
	unsigned int cpu, node;

	expect_equal(syscall(SYS_getcpu, &cpu, &node, NULL), 0);
	return (int)node;
}

void in_a_thread(void *(*what)(void *unused))
{
	pthread_t thread;

	expect_equal(pthread_create(&thread, NULL, what, NULL), 0);
	expect_equal(pthread_join(thread, NULL), 0);
}

/* Hooks of the program's own. */
void **own_hooks(void *const *like)
{
	char *pages = mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void **own = (void **)(pages + 4096) - HOOKS;

	expect(pages != MAP_FAILED && !mprotect(pages + 4096, 4096, PROT_NONE));
	memcpy(own, like, HOOKS * sizeof(void *));
	return own;
}

/* Arena 1 has hooks of the program's since before this library. */
void **hooks_of_program;

void *by_name(const char *name, size_t size)
{
	void *(*function)(size_t size, size_t second, size_t third);
	void *symbol = dlsym(RTLD_DEFAULT, name);

	expect(symbol);
	memcpy(&function, &symbol, sizeof(function));
	return function(size, 4096, 0);
}

static int allocates_before_fork;

/* Comes after the library's own handler, as it was there before: the last handler is called first. */
static void before_fork(void)
{
	if (!allocates_before_fork)
		return;
	move_cpus(page, 0, 1);
	kept = malloc(100000);
	free(kept);
	move_cpus(page, 1, 1);
	kept = malloc(100000);
	free(kept);
}

/* jemalloc's options: the environment is not there yet when it starts. */
__attribute__((visibility("default"))) const char *malloc_conf;

static void be_there_before(int argc, char **argv)
{
	if (argc > 1) {
		refuse_from_start(argv[1]);
		/* By itself it has as many as the machine has CPUs, and one on a machine with one. */
		malloc_conf = !strcmp(argv[1], "too few") ? "narenas:1" : !strcmp(argv[1], "few") ? "narenas:3" :
			      !strcmp(argv[1], "of CPUs") ? "narenas:16,percpu_arena:percpu" : "narenas:16";
	}
	/* jemalloc has its handler since the first allocation, and locks everything in it. */
	kept = malloc(1);
	free(kept);
	kept = by_name("_Znwm", 1);
	free(kept);
	thread_arena();
	if (argc > 1 && !strcmp(argv[1], "own hooks")) {
		unsigned int arena = 1;

		/* It is there first: before 5.3 jemalloc's own functions make none for hooks of others. */
		expect_equal(mallctl("thread.arena", NULL, NULL, &arena, sizeof(arena)), 0);
		expect_equal(mallctl("thread.tcache.flush", NULL, NULL, NULL, 0), 0);
		hooks_of_program = own_hooks(hooks_of(0));
		expect_equal(mallctl("arena.1.extent_hooks", NULL, NULL, &hooks_of_program, sizeof(void *)), 0);
	}
	pthread_atfork(before_fork, NULL, NULL);
}

/* Called before the constructors of all libraries. */
static void (*const first)(int argc, char **argv) __attribute__((section(".preinit_array"), used)) = be_there_before;

static void forks(void)
{
	unsigned int before, status;
	pid_t child;

	allocates_before_fork = 1;
	child = fork();
	if (!child)
		_exit(0);
	allocates_before_fork = 0;
	expect_equal(waitpid(child, (int *)&status, 0), child);
	expect_equal(status, 0);

	move_cpus(page, 0, 1);
	before = allocated_in();
	child = fork();
	if (!child) {
		move_cpus(page, 1, 1);
		_exit(allocated_in() == before);
	}
	expect_equal(waitpid(child, (int *)&status, 0), child);
	expect_equal(status, 0);
}

static pid_t running;

/* A thread may hang with all signals blocked. */
static void end_running(int signal_number)
{
	(void)signal_number;
	kill(running, SIGKILL);
}

static int run(char **command, const char *library, const char *root, char *how)
{
	char *arguments[] = { command[0], how, NULL };
	pid_t child = fork();
	int status;

	if (!child) {
		setenv("LD_PRELOAD", library, 1);
		setenv("VNUMA_TEST_ROOT", root, 1);
		execv("/proc/self/exe", arguments);
		_exit(127);
	}
	/* A hang is a failure. */
	running = child;
	signal(SIGALRM, end_running);
	alarm(120);
	expect_equal(waitpid(child, &status, 0), child);
	alarm(0);
	return status;
}

/* What is preloaded, as its first argument says. */
static int preloaded(const char *how)
{
	static const struct {
		const char *how;
		void (*test)(void);
	} alone[] = {
		{ "small stacks", needs_little_stack },
		{ "too few", has_created_ones },
		{ "of CPUs", has_created_ones },
		{ "apart", share_no_huge_page },
		{ "few", threads_share },
		{ "own hooks", leaves_hooks },
		{ "lost hooks", keeps_hooks },
	};
	size_t i;

	snprintf(tree, sizeof(tree), "%s", getenv("VNUMA_TEST_ROOT"));
	if (!strcmp(how, "alone") || !strcmp(how, "no files")) {
		/* Without a topology it is jemalloc's own arena. */
		kept = malloc(100000);
		expect_equal(arena_of(kept), thread_arena());
		expect(hooks_of(thread_arena()) == hooks_of(0));
		allocates();
		return 0;
	}
	if (!strcmp(how, "by kernel") || !strcmp(how, "no page")) {
		kept = malloc(100000);
		expect(hooks_of(thread_arena()) != hooks_of(0));
		expect_equal(node_of_hooks(hooks_of(thread_arena())), kernel_node());
		allocates();
		return 0;
	}
	page = map_page();
	/* A container may refuse it. */
	if (!strcmp(how, "refused"))
		refuse(SYS_mbind);
	if (!strcmp(how, "no files later"))
		refuse_files();
	if (!strcmp(how, "unseen") || !strcmp(how, "no files later")) {
		unsigned int arena;

		move_cpus(page, 0, 1);
		arena = allocated_in();
		move_cpus(page, 1, 1);
		expect_equal(allocated_in(), arena);
		allocates();
		return 0;
	}
	if (!strcmp(how, "balanced")) {
		comes_along();
		in_a_thread(chooses);
		in_a_thread(chooses_later);
		is_not_cancelled();
		allocates();
		return 0;
	}
	if (!strcmp(how, "by name") || !strcmp(how, "by number")) {
		has_threads_of_its_own(!strcmp(how, "by number"));
		return 0;
	}
	for (i = 0; i < sizeof(alone) / sizeof(*alone); i++) {
		if (!strcmp(how, alone[i].how)) {
			alone[i].test();
			return 0;
		}
	}
	gets_an_arena_later();
	follows();
	threads_share();
	in_a_thread(copies_hooks);
	in_a_thread(chooses);
	in_a_thread(chooses_later);
	in_a_thread(binds_itself_first);
	lies_in_huge_pages();
	leaves_nothing();
	is_not_cancelled();
	new_follows();
	forks();
	allocates();
	return 0;
}

int main(int argc, char **argv)
{
	/* Each begins with a page on which each second CPU is on the second node. */
	static char *const by_page[] = {
		"follows", "too few", "of CPUs", "apart", "few", "own hooks", "lost hooks", "by name", "by number", "refused",
	};
	struct vnuma_gd_page *two_nodes;
	size_t i;

	expect_equal(argc, 2);
	if (getenv("VNUMA_TEST_ROOT"))
		return preloaded(argv[1]);
	make_tree();
	expect_equal(run(argv, argv[1], "/nonexistent", "alone"), 0);
	/* A kernel without AutoNUMA has other switches. The files of the nodes may be older than what the kernel knows. */
	put("/proc/sys/kernel/ostype", "Linux\n");
	put(NODES "/node0/cpulist", "\n");
	put(NODES "/node3/cpulist", "0-4095\n");
	expect_equal(run(argv, argv[1], tree, "by kernel"), 0);
	two_nodes = make_page(CPUS);
	for (i = 0; i < sizeof(by_page) / sizeof(*by_page); i++) {
		put_page(two_nodes);
		expect_equal(run(argv, argv[1], tree, by_page[i]), 0);
	}
	put_page(two_nodes);
	expect_equal(run(argv, argv[1], tree, "no files"), 0);
	expect_equal(run(argv, argv[1], tree, "no page"), 0);
	expect_equal(run(argv, argv[1], tree, "no files later"), 0);
	put("/proc/sys/kernel/numa_balancing", "0\n");
	put_page(two_nodes);
	expect_equal(run(argv, argv[1], tree, "small stacks"), 0);
	put("/proc/sys/kernel/numa_balancing", "1\n");
	put_page(two_nodes);
	expect_equal(run(argv, argv[1], tree, "balanced"), 0);
	/* It may be at work if nobody can say. */
	removed("/proc/sys/kernel/numa_balancing");
	removed("/proc/sys/kernel/ostype");
	expect_equal(rmdir(in_tree("/proc/sys/kernel")), 0);
	put_page(two_nodes);
	expect_equal(run(argv, argv[1], tree, "unseen"), 0);
	remove_tree();
	puts("jemalloc: arenas of nodes ... ok");
	return 0;
}
