// SPDX-License-Identifier: Apache-2.0
/*
 * malloc() of a program that vnuma-run starts with --allocator jemalloc. It stands before jemalloc,
 * and divides its arenas among the nodes, so that the memory of each comes from its node.
 *
 *	program ──▶ malloc() here ──▶ malloc() of jemalloc, in an arena of the thread's node
 *	                └─ each new generation, and each LOOK_EVERY calls: where is the thread?
 *
 * With AutoNUMA a new generation is another matter than a thread that was scheduled on another node: the kernel
 * takes what the thread uses after its CPU, and the driver tells it to look for that at once. If the thread went
 * on in another arena, memory of the one before would come along as well, as much of it as is in use, and be on
 * the wrong node once the thread is back in that arena. So an arena that one thread alone uses changes nodes
 * with it, and both nodes' arenas change places.
 *
 * It is preloaded alone: jemalloc comes as what it depends on. All of jemalloc's interface that is
 * used is documented in jemalloc(3).
 *
 * Memory that a thread frees on another node than it is of goes to the thread's cache first, as with jemalloc by
 * itself, and so may be used again there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

#include "kernel.h"
#include "regions.h"

#define JEMALLOC	"libjemalloc.so.2"
/* Calls of a thread until it is looked whether the guest's scheduler has taken it to another node. */
#define LOOK_EVERY	1024
/* At first it is looked sooner: a thread that binds itself to CPUs does so when it begins, after its first calls. */
#define LOOK_FIRST	8
/* Arenas of a node, at most. Threads share them. */
#define PER_NODE	64
/* As many as jemalloc has for each CPU, where its own are not to be had. */
#define PER_CPU		4
/* A node whose arena could not be made. */
#define NO_ARENA	UINT32_MAX

#ifndef ROOT
#define ROOT	NULL
#endif

/* jemalloc.h: flags of mallocx() and the like, and how an arena gets its memory. */
#define MALLOCX_ZERO	0x40

typedef struct extent_hooks_s extent_hooks_t;

struct extent_hooks_s {
	void *(*alloc)(extent_hooks_t *hooks, void *address, size_t size, size_t alignment,
		       bool *zero, bool *commit, unsigned int arena);
	void *others[8];	/* dalloc, destroy, commit, decommit, purge_lazy, purge_forced, split, merge */
};

/* Of which there are no other names, so that these are jemalloc's whatever else is loaded. Two come by here: see below. */
void *mallocx(size_t size, int flags);
void *rallocx(void *memory, size_t size, int flags);
void dallocx(void *memory, int flags);
size_t sallocx(const void *memory, int flags);
int mallctl(const char *name, void *old, size_t *old_size, void *new, size_t new_size);
int mallctlnametomib(const char *name, size_t *mib, size_t *length);
int mallctlbymib(const size_t *mib, size_t length, void *old, size_t *old_size, void *new, size_t new_size);

struct node_hooks {
	extent_hooks_t hooks;
	int node;
};

static struct vnuma *topology;		/* NULL: not to be had, jemalloc works by itself */
static const uint64_t unknown;
static const extent_hooks_t *by_default;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;	/* who makes or takes arenas */
static struct node_hooks node_hooks[VNUMA_MAX_NODES];
static _Atomic uint32_t arenas[VNUMA_MAX_NODES][PER_NODE];	/* 0: not made yet */
static uint32_t users[VNUMA_MAX_NODES][PER_NODE];	/* threads that use an arena; by the mutex */
static atomic_uint threads;
static unsigned int nr_slots = PER_CPU;	/* of each node's arenas, those that are used */
static unsigned int nr_automatic = UINT_MAX;	/* arenas before this one are those that jemalloc chooses from */
static unsigned int next_automatic = UINT_MAX;	/* the first one of these that is no node's yet; by the mutex */
static pthread_key_t at_end;		/* not NULL: the thread is one of `users` */
static bool counts_ends;
static atomic_int nr_nodes;		/* nodes from this one on have no arenas */
static size_t decay[3];			/* "arena.N.decay" as jemalloc counts; decay[2] is 0: unknown */

static void *early_malloc(size_t size);
static void *early_calloc(size_t count, size_t size);
static void *early_realloc(void *memory, size_t size);
static void early_free(void *memory);

/* What each call reads, in one line of the caches. */
static struct {
	const uint64_t *generation;
	void *(*malloc)(size_t size);
	void *(*calloc)(size_t count, size_t size);
	void *(*realloc)(void *memory, size_t size);
	void (*free)(void *memory);
} hot __attribute__((aligned(64))) = { &unknown, early_malloc, early_calloc, early_realloc, early_free };

/* Of a thread. Zero at first, so that its first call looks. In one line of the caches as well. */
static __thread struct {
	uint64_t generation;
	int32_t left;
	uint32_t arena;			/* 0: that of jemalloc */
	int node;			/* of the arena */
	int tidied;			/* the node whose arena was given a chance to tidy up last */
	uint16_t period;		/* calls between the last look and the next one */
	uint8_t slot;			/* 0: none yet */
	bool ends;			/* it is not counted any more */
	bool forks;			/* it has the mutex, and other handlers of fork() may allocate */
	bool inside;			/* it may have locks of jemalloc's: what it allocates comes from where it is */
} own __attribute__((tls_model("initial-exec"), aligned(32)));

static bool are_ours(const extent_hooks_t *hooks)
{
	const struct node_hooks *of_node = (const struct node_hooks *)hooks;

	return of_node >= node_hooks && of_node < node_hooks + VNUMA_MAX_NODES;
}

static void *alloc_on_node(extent_hooks_t *hooks, void *address, size_t size, size_t alignment,
			   bool *zero, bool *commit, unsigned int arena)
{
	/* A program may have copied them into hooks of its own. */
	int saved = errno, node = are_ours(hooks) ? ((struct node_hooks *)hooks)->node : VNUMA_NO_NODE;
	void *memory;

	/*
	 * What is aligned to huge pages jemalloc needs for itself, as when it makes an arena: before 5.3 its own function looks into
	 * that arena, which is not there yet.
	 */
	if (!address && size <= REGION && arena < ARENAS && (node != VNUMA_NO_NODE || alignment > PAGE)) {
		memory = alignment > PAGE ? (void *)map_aligned(topology, size, alignment, node) : take(topology, arena, node, size);
		errno = saved;
		if (memory) {
			*zero = true;
			*commit = true;
			return memory;
		}
	}
	memory = by_default->alloc(hooks, address, size, alignment, zero, commit, arena);
	if (memory && node != VNUMA_NO_NODE && !balances())
		place(topology, memory, size, node);
	return memory;
}

/* With the mutex. */
static extent_hooks_t *hooks_of(int node)
{
	struct node_hooks *mine = &node_hooks[node];

	/* Arenas of the node that there are use them already. */
	if (!mine->hooks.alloc) {
		mine->node = node;
		memcpy(mine->hooks.others, by_default->others, sizeof(mine->hooks.others));
		mine->hooks.alloc = alloc_on_node;
	}
	return &mine->hooks;
}

/* NULL: unknown. */
static const extent_hooks_t *hooks_of_arena(const char *name)
{
	const extent_hooks_t *hooks;
	size_t size = sizeof(hooks);

	return mallctl(name, &hooks, &size, NULL, 0) ? NULL : hooks;
}

static bool set_hooks(uint32_t arena, extent_hooks_t *hooks)
{
	char name[64];

	snprintf(name, sizeof(name), "arena.%u.extent_hooks", arena);
	if (mallctl(name, NULL, NULL, &hooks, sizeof(hooks)))
		return false;
	/* If a thread that begins has jemalloc make the arena meanwhile it has jemalloc's, and nobody says so. Once it is there they are set. */
	return hooks_of_arena(name) == hooks || !mallctl(name, NULL, NULL, &hooks, sizeof(hooks));
}

/* Has the program given an arena of jemalloc's own hooks? It stays the program's then, and so do threads in it. */
static bool is_programs(uint32_t arena)
{
	const extent_hooks_t *hooks;
	char name[64];

	snprintf(name, sizeof(name), "arena.%u.extent_hooks", arena);
	hooks = hooks_of_arena(name);
	return hooks != by_default && !are_ours(hooks);
}

/*
 * The index of a new arena, or NO_ARENA. jemalloc's own ones come first: of those that are created beside them it keeps a
 * list of all full slabs, and each time one becomes full or is full no longer its neighbours in the list are written, which are
 * in no cache. With the mutex.
 */
static uint32_t make_arena(int node)
{
	extent_hooks_t *hooks = hooks_of(node);
	unsigned int index;
	size_t size = sizeof(index);

	while (next_automatic < nr_automatic && is_programs(next_automatic))
		next_automatic++;
	if (next_automatic < nr_automatic)
		return set_hooks(next_automatic, hooks) ? next_automatic++ : NO_ARENA;
	return mallctl("arenas.create", &index, &size, &hooks, sizeof(hooks)) ? NO_ARENA : index;
}

/* With the mutex. */
static void set_arena(int node, unsigned int slot, uint32_t arena)
{
	if (node >= atomic_load(&nr_nodes))
		atomic_store(&nr_nodes, node + 1);
	atomic_store_explicit(&arenas[node][slot], arena, memory_order_release);
}

/*
 * The thread is a user of a node's arena, which is made if there is none. jemalloc may have had no memory for one: that is tried again
 * when the topology has changed.
 */
static uint32_t enter(int node, unsigned int slot, bool changed)
{
	uint32_t arena;

	pthread_mutex_lock(&mutex);
	arena = atomic_load_explicit(&arenas[node][slot], memory_order_relaxed);
	if (!arena || (arena == NO_ARENA && changed)) {
		arena = make_arena(node);
		set_arena(node, slot, arena);
	}
	if (arena != NO_ARENA && !own.ends)
		users[node][slot]++;
	pthread_mutex_unlock(&mutex);
	return arena;
}

static void leave(int node, unsigned int slot)
{
	if (own.ends)
		return;
	pthread_mutex_lock(&mutex);
	users[node][slot]--;
	pthread_mutex_unlock(&mutex);
}

/* Called at the thread's end. Whatever it allocates after this is not counted. */
static void end(void *unused)
{
	(void)unused;
	if (own.arena)
		leave(own.node, own.slot - 1);
	own.ends = true;
}

/* Where it gets memory is looked at only if AutoNUMA is off by then. An error leaves it as it is. With the mutex. */
static void give_to(int node, unsigned int slot, uint32_t arena)
{
	set_arena(node, slot, arena);
	if (arena)
		set_hooks(arena, hooks_of(node));
}

/* The thread's arena becomes one of another node, unless other threads use it, or the one that is there. */
static bool take_along(int node)
{
	unsigned int slot = own.slot - 1;
	uint32_t other;
	bool alone;

	pthread_mutex_lock(&mutex);
	alone = counts_ends && !own.ends && users[own.node][slot] == 1 && !users[node][slot];
	if (alone) {
		other = atomic_load_explicit(&arenas[node][slot], memory_order_relaxed);
		give_to(node, slot, own.arena);
		give_to(own.node, slot, other == NO_ARENA ? 0 : other);
		users[node][slot] = 1;
		users[own.node][slot] = 0;
		own.node = node;
	}
	pthread_mutex_unlock(&mutex);
	return alone;
}

/* Has the program chosen another arena for the thread? Then it stays with that one. */
static bool is_chosen(void)
{
	unsigned int arena;
	size_t size = sizeof(arena);

	if (mallctl("thread.arena", &arena, &size, NULL, 0))
		return false;
	return own.arena ? arena != own.arena : arena >= nr_automatic || is_programs(arena);
}

static void bind_thread(int node, bool changed)
{
	unsigned int arena;

	if ((own.arena && own.node == node) || is_chosen())
		return;
	if (own.arena && changed && balances() && take_along(node))
		return;
	if (!own.slot) {
		own.slot = 1 + atomic_fetch_add(&threads, 1) % nr_slots;
		if (counts_ends)
			pthread_setspecific(at_end, &own);
	}
	arena = enter(node, own.slot - 1, changed);
	if (arena == NO_ARENA)
		return;
	/* What it holds is of the node before. An error leaves the thread as it is. */
	mallctl("thread.tcache.flush", NULL, NULL, NULL, 0);
	if (mallctl("thread.arena", NULL, NULL, &arena, sizeof(arena))) {
		leave(node, own.slot - 1);
		return;
	}
	if (own.arena)
		leave(own.node, own.slot - 1);
	own.arena = arena;
	own.node = node;
}

/*
 * An arena gives back to the kernel what has been free for some time, when it is used. One that its threads have left is
 * given an occasion here, one at a time.
 */
static void tidy_up(void)
{
	size_t mib[] = { decay[0], 0, decay[2] };
	uint32_t arena;

	if (!own.slot || !decay[2])
		return;
	own.tidied = own.tidied + 1 < atomic_load_explicit(&nr_nodes, memory_order_relaxed) ? own.tidied + 1 : 0;
	arena = atomic_load_explicit(&arenas[own.tidied][own.slot - 1], memory_order_relaxed);
	if (!arena || arena == NO_ARENA || arena == own.arena)
		return;
	mib[1] = arena;
	mallctlbymib(mib, 3, NULL, NULL, NULL, 0);
}

/* Is this one of the threads of jemalloc's own ("background_thread")? Who ends it waits for it with jemalloc's locks. */
static bool is_of_jemalloc(void)
{
	char name[16];

	return !prctl(PR_GET_NAME, name) && !strcmp(name, "jemalloc_bg_thd");
}

/* Nothing here calls malloc(). */
static __attribute__((noinline)) void look(void)
{
	/* Before the node: a change in between is seen the next time. */
	uint64_t now = __atomic_load_n(hot.generation, __ATOMIC_ACQUIRE);
	bool changed = own.generation != now;
	int saved = errno, node;

	own.period = !own.period ? LOOK_FIRST : own.period < LOOK_EVERY ? 2 * own.period : LOOK_EVERY;
	own.left = own.period;
	if (!topology || own.forks || own.inside)
		return;
	own.inside = true;
	/* For good. */
	if (!own.slot && is_of_jemalloc())
		return;
	own.generation = now;
	node = node_now(topology);
	if (node != VNUMA_NO_NODE)
		bind_thread(node, changed);
	tidy_up();
	own.inside = false;
	errno = saved;
}

static inline void follow(void)
{
	/* look() says anew how many are left. */
	if (__builtin_expect(--own.left < 0 || own.generation != __atomic_load_n(hot.generation, __ATOMIC_ACQUIRE), 0))
		look();
}

/* mallocx() and the like leave errno alone. */
static void *checked(void *memory)
{
	if (!memory)
		errno = ENOMEM;
	return memory;
}

/* Until the constructor has run. */
static void *early_malloc(size_t size)
{
	return checked(mallocx(size ? size : 1, 0));
}

static void *early_calloc(size_t count, size_t size)
{
	size_t all;

	if (__builtin_mul_overflow(count, size, &all))
		return checked(NULL);
	return checked(mallocx(all ? all : 1, MALLOCX_ZERO));
}

static void *early_realloc(void *memory, size_t size)
{
	return memory ? checked(rallocx(memory, size ? size : 1, 0)) : early_malloc(size);
}

static void early_free(void *memory)
{
	if (memory)
		dallocx(memory, 0);
}

static const struct {
	void *pointer;
	const char *name;
} symbols[] = {
	{ &hot.malloc, "malloc" },
	{ &hot.calloc, "calloc" },
	{ &hot.realloc, "realloc" },
	{ &hot.free, "free" },
};

/*
 * Of these a program gets what it would have without this library. C++'s new and new[], with and without exceptions and alignment,
 * are jemalloc's, another library's with a delete to match, or the C++ library's. jemalloc's call no malloc() that stands before it.
 */
enum {
	MALLCTL, MALLCTLBYMIB, NEW, NEW_ARRAY, NEW_NOTHROW, NEW_ARRAY_NOTHROW, NEW_ALIGNED, NEW_ARRAY_ALIGNED, NEW_ALIGNED_NOTHROW,
	NEW_ARRAY_ALIGNED_NOTHROW, NR_NEXT
};

static const char *const names_of_next[NR_NEXT] = {
	"mallctl", "mallctlbymib", "_Znwm", "_Znam", "_ZnwmRKSt9nothrow_t", "_ZnamRKSt9nothrow_t", "_ZnwmSt11align_val_t",
	"_ZnamSt11align_val_t", "_ZnwmSt11align_val_tRKSt9nothrow_t", "_ZnamSt11align_val_tRKSt9nothrow_t",
};

static union {
	void *symbol;			/* NULL: not found yet */
	int (*mallctl)(const char *name, void *old, size_t *old_size, void *new, size_t new_size);
	int (*mallctlbymib)(const size_t *mib, size_t length, void *old, size_t *old_size, void *new, size_t new_size);
	void *(*plain)(size_t size);
	void *(*nothrow)(size_t size, const void *nothrow);
	void *(*aligned)(size_t size, size_t alignment);
	void *(*aligned_nothrow)(size_t size, size_t alignment, const void *nothrow);
} next[NR_NEXT];

/* A jemalloc without C++ has no new. The C++ library may come with a part of a program that was loaded for itself. */
static bool find_next(int which)
{
	void *symbol = __atomic_load_n(&next[which].symbol, __ATOMIC_RELAXED), *library;

	if (symbol)
		return true;
	symbol = dlsym(RTLD_NEXT, names_of_next[which]);
	if (!symbol && which >= NEW) {
		library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
		symbol = library ? dlsym(library, names_of_next[which]) : NULL;
	}
	/* Not over what another thread has found meanwhile. */
	if (symbol)
		__atomic_store_n(&next[which].symbol, symbol, __ATOMIC_RELAXED);
	return symbol;
}

static void lock(void)
{
	pthread_mutex_lock(&mutex);
	own.forks = true;
}

static void unlock(void)
{
	own.forks = false;
	pthread_mutex_unlock(&mutex);
}

/* The other threads are not in the child. */
static void unlock_child(void)
{
	memset(users, 0, (size_t)atomic_load(&nr_nodes) * sizeof(*users));
	if (own.arena && !own.ends)
		users[own.node][own.slot - 1] = 1;
	unlock();
}

/* Of CPUs that the process may use, as jemalloc counts them: more may not have been known to it. */
static unsigned int count_nodes(const struct vnuma *opened)
{
	uint64_t seen[VNUMA_MAX_NODES / 64] = { 0 };
	unsigned int count = 0, cpu;
	cpu_set_t allowed;
	int node;

	if (sched_getaffinity(0, sizeof(allowed), &allowed))
		CPU_ZERO(&allowed);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &allowed))
			continue;
		node = vnuma_cpu_node(opened, cpu);
		if (node == VNUMA_NO_NODE || seen[node / 64] >> node % 64 & 1)
			continue;
		seen[node / 64] |= 1ULL << node % 64;
		count++;
	}
	return count ? count : 1;
}

/*
 * Each node gets as many of jemalloc's own arenas, and those of a CPU at least. The first one stays as it is: it is jemalloc's for what it
 * needs itself. If too few are left, or each is a CPU's ("percpu_arena"), others are created.
 */
static void divide_arenas(const struct vnuma *opened)
{
	unsigned int nodes = count_nodes(opened), each;
	long cpus = sysconf(_SC_NPROCESSORS_CONF);
	const char *of_cpus = "";
	size_t size = sizeof(nr_automatic);

	if (mallctl("opt.narenas", &nr_automatic, &size, NULL, 0))
		nr_automatic = UINT_MAX;
	size = sizeof(of_cpus);
	each = nr_automatic > nodes ? (nr_automatic - 1) / nodes : 0;
	if (nr_automatic != UINT_MAX && each &&
	    !mallctl("opt.percpu_arena", &of_cpus, &size, NULL, 0) && !strcmp(of_cpus, "disabled")) {
		nr_slots = each < PER_CPU ? PER_CPU : each < PER_NODE ? each : PER_NODE;
		next_automatic = 1;
	} else if (cpus > 0) {
		nr_slots = cpus < PER_NODE / PER_CPU ? (unsigned int)cpus * PER_CPU : PER_NODE;
	}
}

static __attribute__((constructor)) void start(void)
{
	void *handle = dlopen(JEMALLOC, RTLD_LAZY | RTLD_NOLOAD);
	size_t size = sizeof(by_default), length = 3, i;
	struct vnuma *opened;
	int which;

	for (i = 0; handle && i < sizeof(symbols) / sizeof(*symbols); i++) {
		void *symbol = dlsym(handle, symbols[i].name);

		if (symbol)
			memcpy(symbols[i].pointer, &symbol, sizeof(symbol));
	}
	for (which = 0; which < NR_NEXT; which++)
		find_next(which);
	pthread_atfork(lock, unlock, unlock_child);
	counts_ends = !pthread_key_create(&at_end, end);
	find_autonuma(ROOT);
	if (mallctl("arena.0.extent_hooks", &by_default, &size, NULL, 0) ||
	    vnuma_open_at(&opened, ROOT))
		return;
	divide_arenas(opened);
	if (mallctlnametomib("arena.0.decay", decay, &length))
		decay[2] = 0;
	hot.generation = vnuma_generation_word(opened);
	topology = opened;
}

void *malloc(size_t size)
{
	follow();
	return hot.malloc(size);
}

void *calloc(size_t count, size_t size)
{
	follow();
	return hot.calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
	follow();
	return hot.realloc(memory, size);
}

void free(void *memory)
{
	hot.free(memory);
}

/* A power of two is its logarithm in the flags. */
static void *aligned(size_t alignment, size_t size)
{
	follow();
	return checked(mallocx(size ? size : 1, __builtin_ctzl(alignment)));
}

static bool is_power_of_two(size_t value)
{
	return value && !(value & (value - 1));
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
	int saved = errno;
	void *memory;

	if (!is_power_of_two(alignment) || alignment < sizeof(void *))
		return EINVAL;
	memory = aligned(alignment, size);
	errno = saved;
	if (!memory)
		return ENOMEM;
	*out = memory;
	return 0;
}

void *aligned_alloc(size_t alignment, size_t size)
{
	if (!is_power_of_two(alignment)) {
		errno = EINVAL;
		return NULL;
	}
	return aligned(alignment, size);
}

void *memalign(size_t alignment, size_t size)
{
	return aligned_alloc(alignment, size);
}

void *valloc(size_t size)
{
	return aligned_alloc((size_t)sysconf(_SC_PAGESIZE), size);
}

void *pvalloc(size_t size)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	if (size > SIZE_MAX - page)
		return checked(NULL);
	return aligned_alloc(page, (size + page - 1) / page * page);
}

size_t malloc_usable_size(void *memory)
{
	return memory ? sallocx(memory, 0) : 0;
}

/* Without a C++ library nobody expects an exception. */
static void *must(void *memory)
{
	if (!memory)
		abort();
	return memory;
}

#define PLAIN(mangled, which) \
	void *operator_##which(size_t size) __asm__(#mangled); \
	void *operator_##which(size_t size) \
	{ \
		follow(); \
		return find_next(which) ? next[which].plain(size) : must(early_malloc(size)); \
	}
#define NOTHROW(mangled, which) \
	void *operator_##which(size_t size, const void *nothrow) __asm__(#mangled); \
	void *operator_##which(size_t size, const void *nothrow) \
	{ \
		follow(); \
		return find_next(which) ? next[which].nothrow(size, nothrow) : early_malloc(size); \
	}
#define ALIGNED(mangled, which) \
	void *operator_##which(size_t size, size_t alignment) __asm__(#mangled); \
	void *operator_##which(size_t size, size_t alignment) \
	{ \
		follow(); \
		return find_next(which) ? next[which].aligned(size, alignment) : must(aligned(alignment, size)); \
	}
#define ALIGNED_NOTHROW(mangled, which) \
	void *operator_##which(size_t size, size_t alignment, const void *nothrow) __asm__(#mangled); \
	void *operator_##which(size_t size, size_t alignment, const void *nothrow) \
	{ \
		follow(); \
		return find_next(which) ? next[which].aligned_nothrow(size, alignment, nothrow) : aligned(alignment, size); \
	}

PLAIN(_Znwm, NEW)
PLAIN(_Znam, NEW_ARRAY)
NOTHROW(_ZnwmRKSt9nothrow_t, NEW_NOTHROW)
NOTHROW(_ZnamRKSt9nothrow_t, NEW_ARRAY_NOTHROW)
ALIGNED(_ZnwmSt11align_val_t, NEW_ALIGNED)
ALIGNED(_ZnamSt11align_val_t, NEW_ARRAY_ALIGNED)
ALIGNED_NOTHROW(_ZnwmSt11align_val_tRKSt9nothrow_t, NEW_ALIGNED_NOTHROW)
ALIGNED_NOTHROW(_ZnamSt11align_val_tRKSt9nothrow_t, NEW_ARRAY_ALIGNED_NOTHROW)

/*
 * jemalloc has its locks while it starts threads of its own ("background_thread"), and pthread_create() calls calloc(), which
 * may not want them then.
 */
int mallctl(const char *name, void *old, size_t *old_size, void *new, size_t new_size)
{
	bool inside = own.inside;
	int err;

	own.inside = true;
	err = find_next(MALLCTL) ? next[MALLCTL].mallctl(name, old, old_size, new, new_size) : ENOENT;
	own.inside = inside;
	return err;
}

int mallctlbymib(const size_t *mib, size_t length, void *old, size_t *old_size, void *new, size_t new_size)
{
	bool inside = own.inside;
	int err;

	own.inside = true;
	err = find_next(MALLCTLBYMIB) ? next[MALLCTLBYMIB].mallctlbymib(mib, length, old, old_size, new, new_size) : ENOENT;
	own.inside = inside;
	return err;
}
