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
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "seccomp.h"
#include "tree.h"

#define CPUS	VNUMA_GD_MAX_CPUS
#define THREADS	128
#define LOOK_EVERY	1024
#define LOOK_FIRST	8
#define PER_NODE	64
#define PER_CPU	4
#define HUGE_PAGE	(2UL << 20)
/* Together some huge pages. */
#define PIECES		64
#define PIECE		(200UL << 10)

static volatile int no_more_arenas;
/* The next hooks are lost. */
static volatile int loses_hooks;
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

int mallctlnametomib(const char *name, size_t *mib, size_t *length);
int mallctlbymib(const size_t *mib, size_t length, void *old, size_t *old_size, void *new, size_t new_size);

/* The compiler must not leave out what is allocated for its own sake. */
static __thread void *volatile kept;

static struct vnuma_gd_page *page;

static unsigned int thread_arena(void)
{
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("thread.arena", &arena, &size, NULL, 0), 0);
	return arena;
}

/* That of a piece of memory, which a thread's cache may have kept. */
static unsigned int arena_of(void *memory)
{
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("arenas.lookup", &arena, &size, &memory, sizeof(memory)), 0);
	return arena;
}

/* The arena that a thread uses now, for large pieces and for those that its cache keeps. */
static unsigned int allocated_in(void)
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
static void schedule_on(uint16_t node)
{
	unsigned int i;

	move_cpus(page, node, 0);
	for (i = 0; i < LOOK_EVERY + 1; i++) {
		kept = malloc(1);
		free(kept);
	}
}

/* A thread stays where it is while there is no arena for it, and tries again after the next change. */
static void gets_an_arena_later(void)
{
	unsigned int first;

	move_cpus(page, 0, 1);
	first = allocated_in();
	no_more_arenas = 1;
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	no_more_arenas = 0;
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	move_cpus(page, 1, 1);
	expect(allocated_in() != first);
}

static void follows(void)
{
	unsigned int first, second;

	move_cpus(page, 0, 1);
	first = allocated_in();
	expect(first != 0);
	move_cpus(page, 1, 1);
	errno = E2BIG;
	kept = malloc(100000);
	expect_equal(errno, E2BIG);
	free(kept);
	second = allocated_in();
	expect(second != 0 && second != first);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	schedule_on(1);
	expect_equal(thread_arena(), second);
	/* A CPU of no node: where it was. */
	move_cpus(page, VNUMA_GD_NO_NODE, 1);
	expect_equal(allocated_in(), second);
}

/* Arenas that jemalloc has by itself. */
static unsigned int automatic(void)
{
	unsigned int arenas;
	size_t size = sizeof(arenas);

	expect_equal(mallctl("opt.narenas", &arenas, &size, NULL, 0), 0);
	return arenas;
}

/* Nodes of the CPUs that may be used, of which each second one was on node 1 at the start. */
static unsigned int nodes_at_start(void)
{
	unsigned int cpu, seen = 0;
	cpu_set_t allowed;

	expect_equal(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed))
			seen |= 1U << cpu % 2;
	return seen == 3 ? 2 : 1;
}

/* Arenas of a node: they are divided, but for the first one. */
static unsigned int slots(void)
{
	unsigned int each = (automatic() - 1) / nodes_at_start();

	return each < PER_CPU ? PER_CPU : each < PER_NODE ? each : PER_NODE;
}

/* A thread that shares an arena with the one that was first, as that many came between, until it may end. */
static void *stays(void *step)
{
	pthread_barrier_t *steps = step;

	allocated_in();
	pthread_barrier_wait(steps);
	pthread_barrier_wait(steps);
	return NULL;
}

static void *nothing(void *unused)
{
	allocated_in();
	return unused;
}

/* What gives an arena its memory, which all arenas of a node share. */
static void *hooks_of(unsigned int arena)
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

/* With AutoNUMA an arena goes where its thread's CPU goes, but not if the thread was scheduled elsewhere. */
static void comes_along(void)
{
	unsigned int first, second, i, status;
	void *hooks[2];
	pthread_barrier_t steps;
	pthread_t thread;
	pid_t child;

	move_cpus(page, 0, 1);
	first = allocated_in();
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	schedule_on(1);
	second = allocated_in();
	expect(second != first);
	/* Both change places, and with them where they get memory. */
	hooks[0] = hooks_of(first);
	hooks[1] = hooks_of(second);
	expect(hooks[0] != hooks[1]);
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), second);
	expect(hooks_of(second) == hooks[0] && hooks_of(first) == hooks[1]);
	schedule_on(1);
	expect_equal(allocated_in(), first);
	schedule_on(0);
	expect_equal(allocated_in(), second);
	/* Not while another thread uses it, and it does so until it ends. */
	for (i = 1; i < slots(); i++) {
		expect_equal(pthread_create(&thread, NULL, nothing, NULL), 0);
		expect_equal(pthread_join(thread, NULL), 0);
	}
	pthread_barrier_init(&steps, NULL, 2);
	expect_equal(pthread_create(&thread, NULL, stays, &steps), 0);
	pthread_barrier_wait(&steps);
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), first);
	/* Nor to a node where another thread is; in a child there is none. */
	child = fork();
	if (!child) {
		move_cpus(page, 0, 1);
		_exit(allocated_in() != first);
	}
	expect_equal(waitpid(child, (int *)&status, 0), child);
	expect_equal(status, 0);
	expect_equal(allocated_in(), second);
	pthread_barrier_wait(&steps);
	expect_equal(pthread_join(thread, NULL), 0);
	move_cpus(page, 1, 1);
	expect_equal(allocated_in(), second);
	/* It can be switched off at any time. */
	put("/proc/sys/kernel/numa_balancing", "0\n");
	move_cpus(page, 0, 1);
	expect(allocated_in() != second);
	put("/proc/sys/kernel/numa_balancing", "1\n");
}

static void *arena_of_thread(void *arena)
{
	*(unsigned int *)arena = allocated_in();
	return NULL;
}

static void in_a_thread(void *(*what)(void *unused))
{
	pthread_t thread;

	expect_equal(pthread_create(&thread, NULL, what, NULL), 0);
	expect_equal(pthread_join(thread, NULL), 0);
}

/* Threads share a node's arenas, and have none of another node. */
static void threads_share(void)
{
	unsigned int seen[2][THREADS], node, i, j;
	pthread_t threads[THREADS];

	for (node = 0; node < 2; node++) {
		unsigned int different = 0;

		move_cpus(page, (uint16_t)node, 1);
		for (i = 0; i < THREADS; i++)
			expect_equal(pthread_create(&threads[i], NULL, arena_of_thread, &seen[node][i]), 0);
		for (i = 0; i < THREADS; i++)
			expect_equal(pthread_join(threads[i], NULL), 0);
		for (i = 0; i < THREADS; i++) {
			for (j = 0; j < i && seen[node][j] != seen[node][i]; j++)
				;
			different += j == i;
		}
		expect_equal(different, slots());
	}
	for (i = 0; i < THREADS; i++)
		for (j = 0; j < THREADS; j++)
			expect(seen[0][i] != seen[1][j]);
	/* Those that jemalloc has anyway, as far as there are as many. */
	for (i = 0; i < THREADS; i++)
		expect(seen[0][i] && seen[1][i] && (2 * slots() >= automatic() ||
						    (seen[0][i] < automatic() && seen[1][i] < automatic())));
}

/* Hooks of the program's own. */
static void **own_hooks(void *const *like)
{
	char *pages = mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void **own = (void **)(pages + 4096) - HOOKS;

	expect(pages != MAP_FAILED && !mprotect(pages + 4096, 4096, PROT_NONE));
	memcpy(own, like, HOOKS * sizeof(void *));
	return own;
}

/* A program may put hooks of its own before those that it finds, with what they need behind them or nothing. */
static void *copies_hooks(void *unused)
{
	void **own = own_hooks(hooks_of(allocated_in()));
	unsigned int arena;
	size_t size = sizeof(arena);

	expect_equal(mallctl("arenas.create", &arena, &size, &own, sizeof(own)), 0);
	expect_equal(mallctl("thread.arena", NULL, NULL, &arena, size), 0);
	kept = malloc(100000);
	expect(kept);
	expect_equal(arena_of(kept), arena);
	return unused;
}

/* Arena 1 has hooks of the program's since before this library. */
static void **hooks_of_program;

static void *is_elsewhere(void *unused)
{
	expect(allocated_in() > 1);
	return unused;
}

static void leaves_hooks(void)
{
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), 1);
	in_a_thread(is_elsewhere);
	expect(hooks_of(1) == hooks_of_program);
}

static void keeps_hooks(void)
{
	loses_hooks = 1;
	move_cpus(page, 0, 1);
	expect(hooks_of(allocated_in()) != hooks_of(0));
	expect_equal(loses_hooks, 0);
}

/* A program that chooses a thread's arena keeps that one, before the thread's first call and later. */
static void *chooses(void *unused)
{
	unsigned int mine, i;
	size_t size = sizeof(mine);

	move_cpus(page, 0, 1);
	for (i = 0; i < 2; i++) {
		expect_equal(mallctl("arenas.create", &mine, &size, NULL, 0), 0);
		expect_equal(mallctl("thread.arena", NULL, NULL, &mine, size), 0);
		expect_equal(mallctl("thread.tcache.flush", NULL, NULL, NULL, 0), 0);
		expect_equal(allocated_in(), mine);
		schedule_on(1);
		expect_equal(allocated_in(), mine);
		move_cpus(page, 0, 1);
		expect_equal(allocated_in(), mine);
	}
	return unused;
}

static void *chooses_later(void *unused)
{
	move_cpus(page, 0, 1);
	expect(allocated_in() < automatic());
	return chooses(unused);
}

static void *binds_itself_first(void *unused)
{
	unsigned int before, i;

	move_cpus(page, 0, 1);
	before = allocated_in();
	/* Nobody says so. */
	move_cpus(page, 1, 0);
	for (i = 0; i < LOOK_FIRST; i++) {
		kept = malloc(1);
		free(kept);
	}
	expect(allocated_in() != before);
	return unused;
}

/* The mapping that an address is in. */
static void mapping_of(const void *address, unsigned long *start, unsigned long *end)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];

	expect(maps);
	*start = *end = 0;
	while (fgets(line, sizeof(line), maps) && (uintptr_t)address >= *end)
		expect_equal(sscanf(line, "%lx-%lx", start, end), 2);
	fclose(maps);
	expect((uintptr_t)address >= *start && (uintptr_t)address < *end);
}

/* What arenas of two nodes get in turn can be in huge pages wherever it is. */
static void lies_in_huge_pages(void)
{
	static void *pieces[2][PIECES];
	unsigned int i, node;

	for (i = 0; i < PIECES; i++) {
		for (node = 0; node < 2; node++) {
			move_cpus(page, (uint16_t)node, 1);
			pieces[node][i] = malloc(PIECE);
			expect(pieces[node][i]);
		}
	}
	for (i = 0; i < 2 * PIECES; i++) {
		void *piece = pieces[i % 2][i / 2];
		unsigned long start, end;

		mapping_of(piece, &start, &end);
		expect(start <= ((uintptr_t)piece & -HUGE_PAGE));
		expect(end >= (((uintptr_t)piece + PIECE + HUGE_PAGE - 1) & -HUGE_PAGE));
		free(piece);
	}
}

/* Pages that are free in an arena and have not gone back to the kernel. */
/* Pieces of a thread that has another arena of the same node. */
static void *pieces_of_other[PIECES];

static void *takes_pieces(void *unused)
{
	unsigned int i;

	for (i = 0; i < PIECES; i++)
		expect(pieces_of_other[i] = malloc(PIECE));
	return unused;
}

static int share_a_huge_page(const void *one, const void *other)
{
	uintptr_t first = (uintptr_t)one & -HUGE_PAGE, last = ((uintptr_t)one + PIECE - 1) & -HUGE_PAGE;

	return ((uintptr_t)other & -HUGE_PAGE) <= last && (((uintptr_t)other + PIECE - 1) & -HUGE_PAGE) >= first;
}

/* The arenas may go to different nodes, and the kernel moves whole huge pages. */
static void share_no_huge_page(void)
{
	static void *pieces[PIECES];
	unsigned int i, j;

	move_cpus(page, 0, 1);
	for (i = 0; i < PIECES; i++) {
		expect(pieces[i] = malloc(PIECE));
		if (i == PIECES / 2)
			in_a_thread(takes_pieces);
	}
	for (i = 0; i < PIECES; i++)
		for (j = 0; j < PIECES; j++)
			expect(!share_a_huge_page(pieces[i], pieces_of_other[j]));
	for (i = 0; i < PIECES; i++) {
		free(pieces[i]);
		free(pieces_of_other[i]);
	}
}

static size_t dirty_pages(unsigned int arena)
{
	uint64_t epoch = 1;
	size_t pages, size = sizeof(pages);
	char name[64];

	expect_equal(mallctl("epoch", NULL, NULL, &epoch, sizeof(epoch)), 0);
	snprintf(name, sizeof(name), "stats.arenas.%u.pdirty", arena);
	expect_equal(mallctl(name, &pages, &size, NULL, 0), 0);
	return pages;
}

/* What is free in an arena that its thread has left goes back to the kernel. */
static void leaves_nothing(void)
{
	static void *pieces[PIECES];
	ssize_t soon = 20, never = -1;
	unsigned int left, i;
	char name[64];

	move_cpus(page, 0, 1);
	left = allocated_in();
	snprintf(name, sizeof(name), "arena.%u.dirty_decay_ms", left);
	expect_equal(mallctl(name, NULL, NULL, &never, sizeof(never)), 0);
	for (i = 0; i < PIECES; i++)
		pieces[i] = malloc(PIECE);
	move_cpus(page, 1, 1);
	expect(allocated_in() != left);
	for (i = 0; i < PIECES; i++)
		free(pieces[i]);
	expect(dirty_pages(left) >= PIECES * PIECE / 4096);
	expect_equal(mallctl(name, NULL, NULL, &soon, sizeof(soon)), 0);
	/* It has to be used to notice that, and this thread does not use it. */
	for (i = 0; i < 1000 && dirty_pages(left); i++) {
		unsigned int j;

		usleep(1000);
		for (j = 0; j < LOOK_EVERY; j++) {
			kept = malloc(1);
			free(kept);
		}
	}
	expect_equal(dirty_pages(left), 0);
}

static int allocated_while_cancelled;

/* Moves to another node with a cancellation pending, and back to where other threads are. */
static void *allocate_while_cancelled(void *unused)
{
	void *memory;

	move_cpus(page, 0, 1);
	kept = malloc(100000);
	free(kept);
	expect_equal(pthread_cancel(pthread_self()), 0);
	move_cpus(page, 1, 1);
	kept = malloc(100000);
	/* From a region that is new, too. */
	memory = malloc(2 * PIECES * PIECE);
	allocated_while_cancelled = kept && memory;
	free(memory);
	free(kept);
	pthread_testcancel();
	return unused;
}

/* malloc() is no cancellation point: a thread that ended in it would leave locks held. */
static void is_not_cancelled(void)
{
	pthread_t thread;
	void *result;

	allocated_while_cancelled = 0;
	expect_equal(pthread_create(&thread, NULL, allocate_while_cancelled, NULL), 0);
	expect_equal(pthread_join(thread, &result), 0);
	expect(result == PTHREAD_CANCELED);
	expect(allocated_while_cancelled);
}

static void *allocate_once(void *unused)
{
	unsigned int arena = thread_arena();

	kept = malloc(100000);
	expect(kept && thread_arena() != arena);
	free(kept);
	return unused;
}

static sem_t expired;

static void expire(union sigval unused)
{
	(void)unused;
	expect(!sem_post(&expired));
}

/*
 * A thread of the smallest stack, of which the C library takes some for itself and for what is of the thread, and the thread that
 * waits for timers. Below the first one is nothing for so far that nothing else can be hit.
 */
static void needs_little_stack(void)
{
	struct itimerspec soon = { .it_value.tv_nsec = 1 };
	struct sigevent event = { .sigev_notify = SIGEV_THREAD, .sigev_notify_function = expire };
	pthread_attr_t attributes;
	pthread_t thread;
	timer_t timer;

	expect_equal(pthread_attr_init(&attributes), 0);
	expect_equal(pthread_attr_setstacksize(&attributes, (size_t)PTHREAD_STACK_MIN + 4096), 0);
	expect_equal(pthread_attr_setguardsize(&attributes, 1UL << 20), 0);
	expect_equal(pthread_create(&thread, &attributes, allocate_once, NULL), 0);
	expect_equal(pthread_join(thread, NULL), 0);

	expect_equal(sem_init(&expired, 0, 0), 0);
	expect_equal(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	expect_equal(timer_settime(timer, 0, &soon, NULL), 0);
	while (sem_wait(&expired))
		expect_equal(errno, EINTR);
	expect_equal(timer_delete(timer), 0);
}

/* C++'s new, by its names in the library: size, then alignment and nothrow as far as there are any. */
static const char *const names_of_new[] = {
	"_Znwm", "_Znam", "_ZnwmRKSt9nothrow_t", "_ZnamRKSt9nothrow_t", "_ZnwmSt11align_val_t", "_ZnamSt11align_val_t",
	"_ZnwmSt11align_val_tRKSt9nothrow_t", "_ZnamSt11align_val_tRKSt9nothrow_t",
};

static void *by_name(const char *name, size_t size)
{
	void *(*function)(size_t size, size_t second, size_t third);
	void *symbol = dlsym(RTLD_DEFAULT, name);

	expect(symbol);
	memcpy(&function, &symbol, sizeof(function));
	return function(size, 4096, 0);
}

static void (*(*set_handler)(void (*handler)(void)))(void);
static int handled;

static void handle(void)
{
	handled++;
	set_handler(NULL);
}

static void terminate(void)
{
	_exit(42);
}

static void new_follows(void)
{
	void (*(*set_terminate)(void (*handler)(void)))(void);
	volatile size_t huge = SIZE_MAX / 2;
	unsigned int there, i, status;
	pid_t child;

	for (i = 0; i < sizeof(names_of_new) / sizeof(*names_of_new); i++) {
		move_cpus(page, 0, 1);
		there = allocated_in();
		move_cpus(page, 1, 1);
		kept = by_name(names_of_new[i], 100000);
		expect(arena_of(kept) == thread_arena() && thread_arena() != there);
		free(kept);
	}
	*(void **)&set_handler = dlsym(RTLD_DEFAULT, "_ZSt15set_new_handlerPFvvE");
	*(void **)&set_terminate = dlsym(RTLD_DEFAULT, "_ZSt13set_terminatePFvvE");
	expect(set_handler && set_terminate);
	set_handler(handle);
	expect(!by_name("_ZnwmRKSt9nothrow_t", huge));
	expect_equal(handled, 1);
	/* An exception that nobody catches. */
	child = fork();
	if (!child) {
		set_terminate(terminate);
		by_name("_Znwm", huge);
		_exit(1);
	}
	expect_equal(waitpid(child, (int *)&status, 0), child);
	expect_equal(WEXITSTATUS(status), 42);
}

#define TIMES	1000

/*
 * jemalloc starts and ends threads of its own while the guest's topology changes. The C library allocates for a thread unless
 * one has ended before.
 */
static void has_threads_of_its_own(bool by_number)
{
	size_t mib[1], length = 1, i;

	expect_equal(mallctlnametomib("background_thread", mib, &length), 0);
	for (i = 0; i < TIMES; i++) {
		bool on = i % 2 == 0;

		move_cpus(page, (uint16_t)(i / 2 % 2), 1);
		if (by_number)
			expect_equal(mallctlbymib(mib, 1, NULL, NULL, &on, sizeof(on)), 0);
		else
			expect_equal(mallctl("background_thread", NULL, NULL, &on, sizeof(on)), 0);
		allocated_in();
	}
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

static void *volatile none;

/* The functions themselves do what the C library's do. */
static void allocates(void)
{
	volatile size_t huge = SIZE_MAX / 2;
	size_t i;
	char *memory;

	memory = calloc(1000, 3);
	for (i = 0; i < 3000; i++)
		expect_equal(memory[i], 0);
	memset(memory, 7, 3000);
	memory = realloc(memory, 300000);
	for (i = 0; i < 3000; i++)
		expect_equal(memory[i], 7);
	expect(malloc_usable_size(memory) >= 300000);
	expect_equal(malloc_usable_size(none), 0);
	free(memory);
	free(none);
	errno = 0;
	kept = malloc(huge);
	expect(!kept && errno == ENOMEM);
	errno = 0;
	kept = calloc(huge, 4);
	expect(!kept && errno == ENOMEM);
	errno = 0;
	kept = aligned_alloc(64, huge);
	expect(!kept && errno == ENOMEM);
	errno = 0;
	kept = aligned_alloc(48, 96);
	expect(!kept && errno == EINVAL);
	errno = E2BIG;
	expect_equal(posix_memalign((void **)&kept, 3, 8), EINVAL);
	expect_equal(posix_memalign((void **)&kept, 64, huge), ENOMEM);
	expect_equal(posix_memalign((void **)&kept, 4096, 0), 0);
	expect(errno == E2BIG && kept && (uintptr_t)kept % 4096 == 0);
	free(kept);
	kept = valloc(1);
	expect(kept && (uintptr_t)kept % 4096 == 0);
	free(kept);
	kept = malloc(0);
	expect(kept);
	free(kept);
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

/* Where jemalloc has too few arenas for all nodes, or each is a CPU's, others are created. */
static void has_created_ones(void)
{
	unsigned int first, second;

	move_cpus(page, 0, 1);
	first = allocated_in();
	move_cpus(page, 1, 1);
	second = allocated_in();
	expect(first != second && first >= automatic() && second >= automatic());
	move_cpus(page, 0, 1);
	expect_equal(allocated_in(), first);
	allocates();
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
