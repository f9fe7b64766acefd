// SPDX-License-Identifier: Apache-2.0
/*
 * malloc() of a program that vnuma-run starts with --allocator mimalloc. It stands before mimalloc, which gives a thread
 * what the thread has freed before, wherever that is.
 *
 *	program ──▶ malloc() here ──▶ malloc() of mimalloc
 *	                └─ a large block that is on another node: its pages go back to the kernel
 *
 * Nothing is in a block that is allocated, so that its pages can be new ones, which come from the node of the thread that
 * touches them. Each block costs that once. Small blocks share pages with others that are in use.
 *
 * With AutoNUMA nothing of that is done. The kernel takes all that a thread uses after its CPU, and the driver tells it to look
 * for that at once. Whatever is done to memory beside it slows both down.
 *
 * It is preloaded before mimalloc, from which everything else comes. What is used of mimalloc is its documented interface.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

#include "kernel.h"

#ifndef ROOT
#define ROOT	NULL
#endif

#define PAGE		4096UL
/* From this size on a block has enough pages of its own for looking at them to cost little beside writing them. */
#define LARGE		(16UL << 10)
/* Large blocks that are not looked at between two, at most: not the same ones of a program that repeats itself. */
#define MAX_PAUSE	1022
/* So many are looked at one after the other. */
#define AT_FIRST	64

/* mimalloc.h */
void *mi_malloc(size_t size);
void *mi_calloc(size_t count, size_t size);
void *mi_realloc(void *memory, size_t size);
void *mi_reallocarray(void *memory, size_t count, size_t size);
void mi_free(void *memory);
size_t mi_usable_size(const void *memory);
int mi_posix_memalign(void **out, size_t alignment, size_t size);
void *mi_aligned_alloc(size_t alignment, size_t size);
void *mi_memalign(size_t alignment, size_t size);
void *mi_valloc(size_t size);
void *mi_pvalloc(size_t size);
void *mi_new(size_t size);
void *mi_new_nothrow(size_t size);
void *mi_new_aligned(size_t size, size_t alignment);
void *mi_new_aligned_nothrow(size_t size, size_t alignment);

static struct vnuma *topology;		/* NULL: not to be had, mimalloc works by itself */
static const uint64_t unknown;
static const uint64_t *generation = &unknown;

/* Of a thread. Zero at first, so that its first large block is looked at. */
static __thread struct {
	uint64_t generation;
	void *renewed;		/* a page that has gone back; NULL: none */
	uint32_t left;		/* blocks until the next one is looked at */
	uint32_t pause;		/* between the last two, by AT_FIRST */
	int asked;		/* 1 + the node that has_memory is about; 0: none yet */
	bool has_memory;
} own __attribute__((tls_model("initial-exec")));

/*
 * Fewer and fewer are looked at, but all of the first ones: blocks that are elsewhere may come behind many that are not, and
 * of a few that are left each would be found by chance only.
 */
static void back_off(void)
{
	own.pause += 1 + own.pause / AT_FIRST;
	if (own.pause > AT_FIRST * MAX_PAUSE)
		own.pause = AT_FIRST * MAX_PAUSE;
	own.left = own.pause / AT_FIRST;
}

/* The node that a thread's new memory comes from; VNUMA_NO_NODE: none of its own. */
static int node_of_thread(bool changed)
{
	int node = node_now(topology);
	struct vnuma_nodes nodes;

	if (node == VNUMA_NO_NODE)
		return node;
	if (changed || 1 + node != own.asked) {
		own.asked = 1 + node;
		own.has_memory = !vnuma_read_nodes(topology, &nodes) && vnuma_node_isset(&nodes.memory, node);
	}
	return own.has_memory ? node : VNUMA_NO_NODE;
}

/*
 * Do the pages of a block go back? Its first page, one in the middle and the last are looked at, as AutoNUMA may have taken
 * some of them along. New pages can be elsewhere, too, as the node is full or another thread touches them first: whether
 * they help is seen by one that has gone back.
 */
static bool is_away(char *start, char *end, int node)
{
	void *pages[] = { start, start + (end - start) / 2 / PAGE * PAGE, end - PAGE, own.renewed };
	int where[] = { -1, -1, -1, -1 };
	unsigned long count = own.renewed ? 4 : 3, i;

	/* Where pages are is asked without nodes to move them to (move_pages(2)). Below 0: not there yet. */
	if (syscall(SYS_move_pages, 0, count, pages, NULL, where, 0))
		return false;
	own.renewed = NULL;
	if (where[3] == node)
		own.pause = 0;
	else if (where[3] >= 0)
		return false;
	for (i = 0; i < 3; i++)
		if (where[i] >= 0 && where[i] != node)
			return true;
	return false;
}

/* Have the pages of a block in which nothing is gone back? Nothing here calls malloc(). */
static __attribute__((noinline)) bool look(void *memory, size_t size)
{
	char *start = (char *)(((uintptr_t)memory + PAGE - 1) & -PAGE);
	char *end = (char *)(((uintptr_t)memory + size) & -PAGE);
	/* Before the node: a change in between is seen the next time. */
	uint64_t now = __atomic_load_n(generation, __ATOMIC_ACQUIRE);
	bool changed = own.generation != now, renewed;
	int saved = errno, node;

	if (changed) {
		own.generation = now;
		own.renewed = NULL;
		own.pause = 0;
	}
	node = balances() ? VNUMA_NO_NODE : node_of_thread(changed);
	renewed = node != VNUMA_NO_NODE && is_away(start, end, node) && !madvise(start, end - start, MADV_DONTNEED);
	if (renewed) {
		own.renewed = start;
		own.left = 0;
	} else {
		back_off();
	}
	errno = saved;
	return renewed;
}

/* A block that has just been allocated, of which nobody knows yet. */
static inline bool follow(void *memory, size_t size)
{
	if (__builtin_expect(size < LARGE || !memory || !topology, 1))
		return false;
	if (own.left && own.generation == __atomic_load_n(generation, __ATOMIC_RELAXED)) {
		own.left--;
		return false;
	}
	return look(memory, size);
}

static __attribute__((noinline)) void *followed(void *memory, size_t size)
{
	follow(memory, size);
	return memory;
}

/* What `call` allocates. Nothing is done after the call where the block is small. */
#define FOLLOWED(call, size)	((size) < LARGE ? (call) : followed(call, size))

static __attribute__((constructor)) void start(void)
{
	struct vnuma *opened;

	find_autonuma(ROOT);
	if (vnuma_open_at(&opened, ROOT))
		return;
	generation = vnuma_generation_word(opened);
	__atomic_store_n(&topology, opened, __ATOMIC_RELEASE);
}

void *malloc(size_t size)
{
	return FOLLOWED(mi_malloc(size), size);
}

void *calloc(size_t count, size_t size)
{
	void *memory = mi_calloc(count, size);

	/* New pages are zero, unless a program has given mimalloc memory of its own. Without memory the product may overflow. */
	if (memory && follow(memory, count * size))
		memset(memory, 0, count * size);
	return memory;
}

void *realloc(void *memory, size_t size)
{
	size_t used = size < LARGE || !memory ? SIZE_MAX : mi_usable_size(memory);
	void *grown;

	if (size <= used)
		return memory ? mi_realloc(memory, size) : malloc(size);
	/* As mimalloc does it: into a new block. */
	grown = malloc(size);
	if (grown) {
		memcpy(grown, memory, used);
		mi_free(memory);
	}
	return grown;
}

void *reallocarray(void *memory, size_t count, size_t size)
{
	size_t all;

	if (__builtin_mul_overflow(count, size, &all))
		return mi_reallocarray(memory, count, size);
	return realloc(memory, all);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
	int error = mi_posix_memalign(out, alignment, size);

	if (!error)
		follow(*out, size);
	return error;
}

void *aligned_alloc(size_t alignment, size_t size)
{
	return FOLLOWED(mi_aligned_alloc(alignment, size), size);
}

void *memalign(size_t alignment, size_t size)
{
	return FOLLOWED(mi_memalign(alignment, size), size);
}

void *valloc(size_t size)
{
	return FOLLOWED(mi_valloc(size), size);
}

void *pvalloc(size_t size)
{
	return FOLLOWED(mi_pvalloc(size), size);
}

/*
 * C++'s new and new[], with and without exceptions and alignment. mimalloc has its own, which call no malloc() that
 * stands before it.
 */
#define PLAIN(mangled, function) \
	void *function##_##mangled(size_t size) __asm__(#mangled); \
	void *function##_##mangled(size_t size) \
	{ \
		return FOLLOWED(function(size), size); \
	}
#define NOTHROW(mangled, function) \
	void *function##_##mangled(size_t size, const void *nothrow) __asm__(#mangled); \
	void *function##_##mangled(size_t size, const void *nothrow) \
	{ \
		(void)nothrow; \
		return FOLLOWED(function(size), size); \
	}
#define ALIGNED(mangled, function) \
	void *function##_##mangled(size_t size, size_t alignment) __asm__(#mangled); \
	void *function##_##mangled(size_t size, size_t alignment) \
	{ \
		return FOLLOWED(function(size, alignment), size); \
	}
#define ALIGNED_NOTHROW(mangled, function) \
	void *function##_##mangled(size_t size, size_t alignment, const void *nothrow) __asm__(#mangled); \
	void *function##_##mangled(size_t size, size_t alignment, const void *nothrow) \
	{ \
		(void)nothrow; \
		return FOLLOWED(function(size, alignment), size); \
	}

PLAIN(_Znwm, mi_new)
PLAIN(_Znam, mi_new)
NOTHROW(_ZnwmRKSt9nothrow_t, mi_new_nothrow)
NOTHROW(_ZnamRKSt9nothrow_t, mi_new_nothrow)
ALIGNED(_ZnwmSt11align_val_t, mi_new_aligned)
ALIGNED(_ZnamSt11align_val_t, mi_new_aligned)
ALIGNED_NOTHROW(_ZnwmSt11align_val_tRKSt9nothrow_t, mi_new_aligned_nothrow)
ALIGNED_NOTHROW(_ZnamSt11align_val_tRKSt9nothrow_t, mi_new_aligned_nothrow)
