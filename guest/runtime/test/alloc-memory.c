// SPDX-License-Identifier: Apache-2.0
/* Where arenas get memory from and what they give back, and what is asked of malloc(), new and their kin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "alloc-test.h"

#define HUGE_PAGE	(2UL << 20)
/* Together some huge pages. */
#define PIECES		64
#define PIECE		(200UL << 10)

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
void lies_in_huge_pages(void)
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
void share_no_huge_page(void)
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

/* Pages that are free in an arena and have not gone back to the kernel. */
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
void leaves_nothing(void)
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
void is_not_cancelled(void)
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
void needs_little_stack(void)
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

void new_follows(void)
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
	/* An exception without a handler. */
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
void has_threads_of_its_own(bool by_number)
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

static void *volatile none;

/* The functions themselves do what the C library's do. */
void allocates(void)
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
