// SPDX-License-Identifier: Apache-2.0
/*
 * malloc() before mimalloc, by a topology that is made up: which blocks have new pages.
 *
 *	mimalloc-test LIBRARY MIMALLOC	(LIBRARY built with VNUMA_TEST_ROOT)
 *
 * The machine's memory is on its node 0. A thread whose CPU is said to be on node 1 finds all blocks on another node, and
 * new pages are no nearer. Where there are nodes vnuma-alloc shows that they are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>

#include "seccomp.h"
#include "tree.h"

#define CPUS	VNUMA_GD_MAX_CPUS
#define LARGE	(300UL << 10)
#define SMALL	(12UL << 10)
#define GIVEN	(256UL << 20)
#define SEGMENT	(32UL << 20)
#define GIVEN_BLOCK	(4UL << 20)
#define PAGE	4096UL
/* Node 3 has no memory. */
#define WITHOUT_MEMORY	3
#define MAX_PAUSE	1022
#define FILLED	16
/* Of so many blocks after a change the last one is looked at, and the next one is not. */
#define LOOKED	72

/* The compiler must not leave out what is allocated for its own sake. */
static __thread void *volatile kept;

static struct vnuma_gd_page *page;

static void *by_malloc(size_t size)
{
	return malloc(size);
}

static void *by_aligned_alloc(size_t size)
{
	return aligned_alloc(PAGE, size);
}

static void *by_memalign(size_t size)
{
	return memalign(PAGE, size);
}

static void *by_posix_memalign(size_t size)
{
	void *memory = NULL;

	expect_equal(posix_memalign(&memory, PAGE, size), 0);
	return memory;
}

static void *by_realloc(size_t size)
{
	return realloc(NULL, size);
}

static void *by_reallocarray(size_t size)
{
	return reallocarray(NULL, size / PAGE, PAGE);
}

/* C++'s, by their names in the library: size, then alignment and nothrow as far as there are any. */
static void *by_name(const char *name, size_t size, size_t second)
{
	void *(*function)(size_t size, size_t second, size_t third);
	void *symbol = dlsym(RTLD_DEFAULT, name);

	expect(symbol);
	memcpy(&function, &symbol, sizeof(function));
	return function(size, second, 0);
}

static void *by_new(size_t size)
{
	return by_name("_Znwm", size, 0);
}

static void *by_new_array(size_t size)
{
	return by_name("_Znam", size, 0);
}

static void *by_new_nothrow(size_t size)
{
	return by_name("_ZnwmRKSt9nothrow_t", size, 0);
}

static void *by_new_array_nothrow(size_t size)
{
	return by_name("_ZnamRKSt9nothrow_t", size, 0);
}

static void *by_new_aligned(size_t size)
{
	return by_name("_ZnwmSt11align_val_t", size, PAGE);
}

static void *by_new_array_aligned(size_t size)
{
	return by_name("_ZnamSt11align_val_t", size, PAGE);
}

static void *by_new_aligned_nothrow(size_t size)
{
	return by_name("_ZnwmSt11align_val_tRKSt9nothrow_t", size, PAGE);
}

static void *by_new_array_aligned_nothrow(size_t size)
{
	return by_name("_ZnamSt11align_val_tRKSt9nothrow_t", size, PAGE);
}

static void *(*const ways[])(size_t size) = {
	by_malloc, valloc, pvalloc, by_aligned_alloc, by_memalign, by_posix_memalign, by_realloc, by_reallocarray,
	by_new, by_new_array, by_new_nothrow, by_new_array_nothrow,
	by_new_aligned, by_new_array_aligned, by_new_aligned_nothrow, by_new_array_aligned_nothrow,
};

/* Writes some blocks and frees them: the next one is among them, whichever mimalloc takes. */
static char *blocks[FILLED];

static void fill(void *(*way)(size_t size), size_t size)
{
	int i;

	for (i = 0; i < FILLED; i++) {
		blocks[i] = way(size);
		expect(blocks[i]);
		memset(blocks[i], 7, size);
	}
	for (i = 0; i < FILLED; i++) {
		/* Else the compiler may leave out what is written and freed. */
		kept = blocks[i];
		free(kept);
	}
}

/* Has the next block, which was written before, new pages? mimalloc writes into the first page of what is free. */
static bool is_new(void *(*way)(size_t size), size_t size)
{
	volatile char *block = way(size);
	bool renewed = !block[2 * PAGE];

	expect_equal(block[size / 2], renewed ? 0 : 7);
	expect_equal(block[size - 2 * PAGE], renewed ? 0 : 7);
	free((void *)block);
	return renewed;
}

/* What is on another node, at once after a change; however it is allocated. */
static void renews(void)
{
	size_t i;

	for (i = 0; i < sizeof(ways) / sizeof(*ways); i++) {
		move_cpus(page, 0, 1);
		fill(ways[i], LARGE);
		expect(!is_new(ways[i], LARGE));
		move_cpus(page, 1, 1);
		errno = E2BIG;
		expect(is_new(ways[i], LARGE));
		expect_equal(errno, E2BIG);
		move_cpus(page, 0, 1);
		fill(ways[i], LARGE);
		expect(!is_new(ways[i], LARGE));
	}
	/* Small ones share pages. */
	fill(by_malloc, SMALL);
	move_cpus(page, 1, 1);
	expect(!is_new(by_malloc, SMALL));
	/* A change after which the node is the same, of which the thread knows by now that its pages are no nearer. */
	fill(by_malloc, LARGE);
	for (i = 0; i < 2; i++) {
		move_cpus(page, 1, 1);
		kept = malloc(LARGE);
		expect(!*((volatile char *)kept + 2 * PAGE));
		kept = memset(kept, 7, LARGE);
		free(kept);
	}
	/* AutoNUMA has taken the first pages along, or they are not there. */
	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	for (i = 0; i < FILLED; i++)
		expect_equal(madvise(blocks[i], PAGE, MADV_DONTNEED), 0);
	move_cpus(page, 1, 1);
	expect(is_new(by_malloc, LARGE));
	/* All blocks, from the first one on, although the next look would have been later. */
	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	move_cpus(page, 1, 1);
	for (i = 0; i < FILLED; i++) {
		blocks[i] = malloc(LARGE);
		expect(!*(volatile char *)(blocks[i] + 2 * PAGE));
	}
	for (i = 0; i < FILLED; i++)
		free(blocks[i]);
	/* A CPU of no node, or of one without memory: nothing is nearer. */
	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	move_cpus(page, WITHOUT_MEMORY, 1);
	expect(!is_new(by_malloc, LARGE));
	move_cpus(page, VNUMA_GD_NO_NODE, 1);
	expect(!is_new(by_malloc, LARGE));
	move_cpus(page, 1, 1);
	expect(is_new(by_malloc, LARGE));
}

/* The fewer blocks are elsewhere the fewer are looked at: after a change the first 64, then every second, and so on. */
static void looks_seldom(void)
{
	int i;

	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	for (i = FILLED; i < LOOKED; i++)
		expect(!is_new(by_malloc, LARGE));
	move_cpus(page, 1, 0);
	expect(!is_new(by_malloc, LARGE));
	expect(is_new(by_malloc, LARGE));
	move_cpus(page, 0, 0);
	for (i = 0; i < 128 * MAX_PAUSE; i++) {
		kept = malloc(LARGE);
		free(kept);
	}
	fill(by_malloc, LARGE);
	move_cpus(page, 1, 0);
	for (i = 0; i <= MAX_PAUSE && !is_new(by_malloc, LARGE); i++)
		;
	expect(i > FILLED && i <= MAX_PAUSE);
	/* Whether that helped is seen at once. If it did, looks become frequent. */
	fill(by_malloc, LARGE);
	move_cpus(page, 0, 0);
	for (i = 0; i < 128 * MAX_PAUSE; i++) {
		kept = malloc(LARGE);
		free(kept);
	}
	move_cpus(page, 1, 0);
	for (i = 0; i <= MAX_PAUSE; i++) {
		kept = malloc(LARGE);
		expect(kept);
		if (!*((volatile char *)kept + 2 * PAGE))
			break;
		free(kept);
	}
	expect(i <= MAX_PAUSE);
	kept = memset(kept, 7, LARGE);
	free(kept);
	move_cpus(page, 0, 0);
	expect(!is_new(by_malloc, LARGE));
	move_cpus(page, 1, 0);
	expect(is_new(by_malloc, LARGE));
}

/* Here new pages are on node 0, too, as if node 1 was full. */
static void gives_up(void)
{
	int i, renewed = 0;

	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	move_cpus(page, 1, 1);
	for (i = 0; i < 4 * MAX_PAUSE; i++) {
		char *block = malloc(LARGE);

		renewed += !*(volatile char *)(block + 2 * PAGE);
		kept = memset(block, 7, LARGE);
		free(kept);
	}
	expect(renewed > 64 && renewed < 400);
}

/* What is in a block stays, and what calloc() gives is zero. */
static void keeps_content(void)
{
	char *block, *grown;
	size_t i;

	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	move_cpus(page, 1, 1);
	block = calloc(LARGE / 100, 100);
	for (i = 0; i < LARGE / 100 * 100; i++)
		expect_equal(block[i], 0);
	memset(block, 5, LARGE / 100 * 100);
	fill(by_malloc, 4 * LARGE);
	move_cpus(page, 0, 1);
	move_cpus(page, 1, 1);
	grown = realloc(block, 4 * LARGE);
	for (i = 0; i < LARGE / 100 * 100; i++)
		expect_equal(grown[i], 5);
	expect_equal(grown[3 * LARGE], 0);
	/* Smaller, and as large as it is. */
	grown = realloc(grown, LARGE);
	expect_equal(grown[LARGE / 2], 5);
	grown = realloc(grown, LARGE);
	expect_equal(grown[LARGE / 2], 5);
	grown = realloc(grown, 10);
	expect_equal(grown[9], 5);
	free(grown);
}

/* Old blocks that have grown into new ones are freed. */
static void grows(void)
{
	struct rusage before, after;
	char *block;
	int i;

	getrusage(RUSAGE_SELF, &before);
	for (i = 0; i < 500; i++) {
		block = malloc(LARGE);
		expect(block);
		memset(block, 7, LARGE);
		kept = realloc(block, 2 * LARGE);
		expect(kept);
		free(kept);
	}
	getrusage(RUSAGE_SELF, &after);
	expect(after.ru_maxrss - before.ru_maxrss < 100 * (long)(LARGE >> 10));
}

/* A program can give mimalloc memory of its own, whose pages are not zero when they come back. */
static void uses_given_memory(void)
{
	bool (*give)(void *start, size_t size, bool committed, bool large, bool zero, int node);
	int fd = memfd_create("given", MFD_CLOEXEC);
	void *symbol = dlsym(RTLD_DEFAULT, "mi_manage_os_memory");
	char *start, *mapped, *block;
	size_t i;

	expect(symbol && fd >= 0);
	memcpy(&give, &symbol, sizeof(give));
	expect_equal(ftruncate(fd, GIVEN), 0);
	mapped = mmap(NULL, 2 * GIVEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	expect(mapped != MAP_FAILED);
	start = (char *)(((uintptr_t)mapped + GIVEN - 1) & -GIVEN);
	expect(mmap(start, GIVEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == start);
	/* But for what mimalloc 2.0.9 itself takes to be zero, the beginnings of its segments. */
	for (i = 0; i < GIVEN; i += SEGMENT)
		memset(start + i + SEGMENT / 32, 9, SEGMENT - SEGMENT / 32);
	expect(mmap(start, GIVEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == start);
	close(fd);
	expect(give(start, GIVEN, true, true, false, -1));
	/* What does not fit into memory that there is comes from there. */
	move_cpus(page, 0, 1);
	fill(by_malloc, GIVEN_BLOCK);
	move_cpus(page, 1, 1);
	block = calloc(1, GIVEN_BLOCK);
	expect(block > start && block < start + GIVEN);
	for (i = 0; i < GIVEN_BLOCK; i++)
		expect_equal(block[i], 0);
	free(block);
}

/* The functions themselves do what the C library's do. */
static void allocates(void)
{
	volatile size_t huge = SIZE_MAX / 2;

	errno = 0;
	kept = malloc(huge);
	expect(!kept && errno == ENOMEM);
	kept = calloc(huge, 4);
	expect(!kept);
	kept = malloc(LARGE);
	expect(!realloc(kept, huge) && !reallocarray(kept, huge, 4));
	free(kept);
	kept = aligned_alloc(PAGE, huge);
	expect(!kept);
	expect_equal(posix_memalign((void **)&kept, 3, 8), EINVAL);
	expect_equal(posix_memalign((void **)&kept, 64, huge), ENOMEM);
	kept = malloc(0);
	expect(kept);
	kept = realloc(kept, 0);
	free(kept);
}

static void *in_a_thread(void *unused)
{
	fill(by_malloc, LARGE);
	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	move_cpus(page, 1, 1);
	expect(is_new(by_malloc, LARGE));
	return unused;
}

static int allocated_while_cancelled;

static void *allocate_while_cancelled(void *unused)
{
	fill(by_malloc, LARGE);
	expect_equal(pthread_cancel(pthread_self()), 0);
	move_cpus(page, 1, 1);
	kept = malloc(LARGE);
	allocated_while_cancelled = kept != NULL;
	free(kept);
	pthread_testcancel();
	return unused;
}

/* malloc() is no cancellation point. */
static void is_not_cancelled(void)
{
	pthread_t thread;
	void *result;

	expect_equal(pthread_create(&thread, NULL, allocate_while_cancelled, NULL), 0);
	expect_equal(pthread_join(thread, &result), 0);
	expect(result == PTHREAD_CANCELED);
	expect(allocated_while_cancelled);
}

static void forks(void)
{
	int status;
	pid_t child;

	move_cpus(page, 0, 1);
	fill(by_malloc, LARGE);
	child = fork();
	if (!child) {
		move_cpus(page, 1, 1);
		_exit(!is_new(by_malloc, LARGE));
	}
	expect_equal(waitpid(child, &status, 0), child);
	expect_equal(status, 0);
}

static volatile int asked;

static void ask(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)info;
	asked++;
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EPERM;
}

/* On node 0 before the first change, too, it asks where blocks are. */
static void asks_on_the_first_node(void)
{
	struct sigaction action = { .sa_sigaction = ask, .sa_flags = SA_SIGINFO };

	expect_equal(sigaction(SIGSYS, &action, NULL), 0);
	answer(SYS_move_pages, SECCOMP_RET_TRAP);
	fill(by_malloc, LARGE);
	expect(asked);
}

static void is_left_alone(void)
{
	int i;

	fill(by_malloc, LARGE);
	for (i = 0; i < 100; i++) {
		move_cpus(page, (uint16_t)(i % 2), 1);
		errno = E2BIG;
		expect(!is_new(by_malloc, LARGE));
		expect_equal(errno, E2BIG);
	}
}

static void be_there_before(int argc, char **argv)
{
	if (argc > 1)
		refuse_from_start(argv[1]);
}

/* Called before the constructors of all libraries. */
static void (*const first)(int argc, char **argv) __attribute__((section(".preinit_array"), used)) = be_there_before;

/* What is preloaded, as its first argument says. */
static int preloaded(const char *how)
{
	pthread_t thread;

	snprintf(tree, sizeof(tree), "%s", getenv("VNUMA_TEST_ROOT"));
	if (!strcmp(how, "alone") || !strcmp(how, "no files") || !strcmp(how, "no page")) {
		fill(by_malloc, LARGE);
		expect(!is_new(by_malloc, LARGE));
		allocates();
		return 0;
	}
	page = map_page();
	if (!strcmp(how, "first")) {
		asks_on_the_first_node();
		return 0;
	}
	if (!strcmp(how, "given")) {
		uses_given_memory();
		return 0;
	}
	if (!strcmp(how, "balanced")) {
		is_left_alone();
		/* It can be switched off at any time. */
		put("/proc/sys/kernel/numa_balancing", "0\n");
		move_cpus(page, 1, 1);
		expect(is_new(by_malloc, LARGE));
		return 0;
	}
	if (!strcmp(how, "unseen")) {
		is_left_alone();
		return 0;
	}
	if (!strcmp(how, "refused") || !strcmp(how, "no files later")) {
		/* A container may refuse the one or the other. */
		if (!strcmp(how, "refused"))
			refuse(SYS_move_pages);
		else
			refuse_files();
		is_left_alone();
		allocates();
		return 0;
	}
	renews();
	looks_seldom();
	gives_up();
	keeps_content();
	grows();
	is_not_cancelled();
	forks();
	expect_equal(pthread_create(&thread, NULL, in_a_thread, NULL), 0);
	expect_equal(pthread_join(thread, NULL), 0);
	allocates();
	return 0;
}

/* Whatever runs on the node of its CPU here has memory of node 0. */
static void use_node_0(void)
{
	unsigned long node_0 = 1;

	syscall(SYS_set_mempolicy, MPOL_BIND, &node_0, 8 * sizeof(node_0));
}

/* Does the kernel say where pages are? */
static bool knows_where(void)
{
	void *pages[] = { tree };
	int where;

	return !syscall(SYS_move_pages, 0, 1UL, pages, NULL, &where, 0);
}

static int run(char **command, const char *root, char *how)
{
	char *arguments[] = { command[0], how, NULL }, *preload;
	pid_t child = fork();
	int status;

	if (!child) {
		expect(asprintf(&preload, "%s:%s", command[1], command[2]) > 0);
		use_node_0();
		setenv("LD_PRELOAD", preload, 1);
		setenv("VNUMA_TEST_ROOT", root, 1);
		/* By itself mimalloc gives back what is free after some time. */
		setenv("MIMALLOC_DECOMMIT_DELAY", "600000", 1);
		setenv("MIMALLOC_SEGMENT_DECOMMIT_DELAY", "600000", 1);
		setenv("MIMALLOC_PURGE_DELAY", "600000", 1);
		execv("/proc/self/exe", arguments);
		_exit(127);
	}
	expect_equal(waitpid(child, &status, 0), child);
	return status;
}

int main(int argc, char **argv)
{
	struct vnuma_gd_page *nodes;

	if (getenv("VNUMA_TEST_ROOT"))
		return preloaded(argv[1]);
	expect_equal(argc, 3);
	if (!knows_where()) {
		printf("mimalloc: skipped, move_pages(2): %s\n", strerror(errno));
		return 0;
	}
	make_tree();
	/* A kernel without AutoNUMA has other switches. */
	put("/proc/sys/kernel/ostype", "Linux\n");
	expect_equal(run(argv, tree, "alone"), 0);
	nodes = make_page(CPUS);
	nodes->nr_nodes = WITHOUT_MEMORY + 1;
	put_page(nodes);
	expect_equal(run(argv, tree, "follows"), 0);
	nodes->generation = 0;
	move_cpus(nodes, 0, 0);
	put_page(nodes);
	expect_equal(run(argv, tree, "first"), 0);
	put_page(nodes);
	expect_equal(run(argv, tree, "given"), 0);
	put_page(nodes);
	expect_equal(run(argv, tree, "refused"), 0);
	put_page(nodes);
	expect_equal(run(argv, tree, "no files"), 0);
	expect_equal(run(argv, tree, "no page"), 0);
	expect_equal(run(argv, tree, "no files later"), 0);
	put("/proc/sys/kernel/numa_balancing", "1\n");
	put_page(nodes);
	expect_equal(run(argv, tree, "balanced"), 0);
	/* It may be at work if nobody can say. */
	removed("/proc/sys/kernel/numa_balancing");
	removed("/proc/sys/kernel/ostype");
	expect_equal(rmdir(in_tree("/proc/sys/kernel")), 0);
	put_page(nodes);
	expect_equal(run(argv, tree, "unseen"), 0);
	remove_tree();
	puts("mimalloc: new pages for large blocks ... ok");
	return 0;
}
