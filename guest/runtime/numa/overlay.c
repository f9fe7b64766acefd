// SPDX-License-Identifier: Apache-2.0
/*
 * libnuma.so.1 of a program that vnuma-run starts. It stands before the real libnuma, which
 * reads the CPUs of a node once and keeps them, and the distances too.
 *
 *	program ──▶ this library ──▶ the real libnuma, by the path in REAL_LIBNUMA
 *	   └──────── everything else ────────▶┘
 *
 * It has the real one's SONAME and versions and few of its symbols: the queries whose answers
 * change. The dynamic linker finds the others, and all variables, in the real library, on which
 * this one depends by its path. A query has the real library forget what it knows and then calls it, so that
 * masks, warnings and errors are the real one's.
 *
 * The real library refreshes one node per numa_node_to_cpu_update(), hence once for each node.
 *
 * With HOTSPOT it is for the collectors of HotSpot, whose table of CPUs is read once: see hotspot.h and, for G1, cpu-nodes.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <vnuma/vnuma.h>

/* The binary interface of libnuma on x86-64. */
struct bitmask {
	unsigned long size;		/* bits */
	unsigned long *maskp;
};

struct nodemask {
	unsigned long n[2];
};

#define LONG_BITS	(8 * sizeof(unsigned long))

/* What is called of the real library. Versions matter: v1 and v2 have the same names. */
static struct {
	int (*max_node)(void);
	void (*update)(void);
	struct bitmask *(*allocate_cpumask)(void);
	void (*free_mask)(struct bitmask *mask);
	int (*node_to_cpus_v1)(int node, unsigned long *buffer, int length);
	int (*node_to_cpus_v2)(int node, struct bitmask *mask);
	int (*node_of_cpu)(int cpu);
	int (*distance)(int from, int to);
	int (*run_on_node)(int node);
	int (*run_on_node_mask_v1)(const struct nodemask *mask);
	int (*run_on_node_mask_v2)(struct bitmask *mask);
	int (*run_on_node_mask_all)(struct bitmask *mask);
	struct nodemask (*get_run_node_mask_v1)(void);
	struct bitmask *(*get_run_node_mask_v2)(void);
	void (*bind_v1)(const struct nodemask *mask);
	void (*bind_v2)(struct bitmask *mask);
	struct bitmask *(*allocate_nodemask)(void);
	struct bitmask *(*get_membind)(void);
	int (*configured_nodes)(void);
	void (*tonode_memory)(void *start, size_t size, int node);
	void (*interleave_memory)(void *start, size_t size, struct bitmask *mask);
	int (*move_pages)(int pid, unsigned long count, void **pages, const int *nodes, int *status, int flags);
} real;

static const struct {
	void *pointer;
	const char *name;
	const char *version;
} symbols[] = {
	{ &real.max_node, "numa_max_node", "libnuma_1.1" },
	{ &real.update, "numa_node_to_cpu_update", "libnuma_1.1" },
	{ &real.allocate_cpumask, "numa_allocate_cpumask", "libnuma_1.2" },
	{ &real.free_mask, "numa_bitmask_free", "libnuma_1.2" },
	{ &real.node_to_cpus_v1, "numa_node_to_cpus", "libnuma_1.1" },
	{ &real.node_to_cpus_v2, "numa_node_to_cpus", "libnuma_1.2" },
	{ &real.node_of_cpu, "numa_node_of_cpu", "libnuma_1.2" },
	{ &real.distance, "numa_distance", "libnuma_1.1" },
	{ &real.run_on_node, "numa_run_on_node", "libnuma_1.1" },
	{ &real.run_on_node_mask_v1, "numa_run_on_node_mask", "libnuma_1.1" },
	{ &real.run_on_node_mask_v2, "numa_run_on_node_mask", "libnuma_1.2" },
	{ &real.run_on_node_mask_all, "numa_run_on_node_mask_all", "libnuma_1.4" },
	{ &real.get_run_node_mask_v1, "numa_get_run_node_mask", "libnuma_1.1" },
	{ &real.get_run_node_mask_v2, "numa_get_run_node_mask", "libnuma_1.2" },
	{ &real.bind_v1, "numa_bind", "libnuma_1.1" },
	{ &real.bind_v2, "numa_bind", "libnuma_1.2" },
	{ &real.allocate_nodemask, "numa_allocate_nodemask", "libnuma_1.2" },
	{ &real.get_membind, "numa_get_membind", "libnuma_1.2" },
	{ &real.configured_nodes, "numa_num_configured_nodes", "libnuma_1.2" },
	{ &real.tonode_memory, "numa_tonode_memory", "libnuma_1.1" },
	{ &real.interleave_memory, "numa_interleave_memory", "libnuma_1.2" },
	{ &real.move_pages, "numa_move_pages", "libnuma_1.2" },
};

#ifndef ROOT
#define ROOT	NULL
#endif

static struct vnuma *topology;		/* NULL: not to be had, the real library answers alone */
static pthread_once_t once = PTHREAD_ONCE_INIT;
#ifdef HOTSPOT
#include "hotspot.h"
#include "cpu-nodes.h"

#define caller_sees_cpu_nodes()	sees_cpu_nodes(__builtin_return_address(0))
#endif

#define UNLOCKED	PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP

/*
 * The real library's tables: nobody reads them while they are read anew. A program's own numa_error() and numa_warn() are called
 * with it, and may come back here.
 */
static pthread_mutex_t mutex = UNLOCKED;
static int depth;			/* how often it is locked, by the thread that has it */

static void before_fork(void)
{
	pthread_mutex_lock(&mutex);
}

static void in_parent(void)
{
	pthread_mutex_unlock(&mutex);
}

/* The thread has another number now, and does not own what it has locked. It may be in numa_error(). */
static void in_child(void)
{
	int i;

	mutex = (pthread_mutex_t)UNLOCKED;
	for (i = 0; i < depth; i++)
		pthread_mutex_lock(&mutex);
}

/* The real library reads files. A thread that is cancelled there would end with the lock. */
static int lock(void)
{
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(&mutex);
	depth++;
	return state;
}

static void unlock(int state)
{
	depth--;
	pthread_mutex_unlock(&mutex);
	pthread_setcancelstate(state, &state);
}

static void prepare(void)
{
	void *handle = dlopen(REAL_LIBNUMA, RTLD_LAZY | RTLD_LOCAL);
	size_t i;

	for (i = 0; handle && i < sizeof(symbols) / sizeof(*symbols); i++) {
		void *symbol = dlvsym(handle, symbols[i].name, symbols[i].version);

		memcpy(symbols[i].pointer, &symbol, sizeof(symbol));
	}
	if (vnuma_open_at(&topology, ROOT))
		topology = NULL;
#ifdef HOTSPOT
	make_map(topology);
	make_cpu_nodes();
#endif
	pthread_atfork(before_fork, in_parent, in_child);
}

/* Before the program's own code where the linker can see to it, and at the first call otherwise. */
static __attribute__((constructor)) void start(void)
{
	int saved = errno;

	pthread_once(&once, prepare);
	errno = saved;
}

/* Is there a function of the real library? An old one may lack it. */
#define has(function) (start(), real.function ? 1 : (errno = ENOSYS, 0))

/*
 * Can the files of the nodes be read? If not (after chroot(), without a free file descriptor), what the real library has
 * read before is better than nothing.
 */
static int can_read(void)
{
	struct vnuma_nodes nodes;

	return !topology || !vnuma_read_nodes(topology, &nodes);
}

/* With the lock: the real library reads a node anew when it is asked for it next. */
static void forget(void)
{
	if (real.update && can_read())
		real.update();
}

static int can_refresh(void)
{
	return can_read() && real.update && real.max_node && real.allocate_cpumask && real.free_mask &&
	       real.node_to_cpus_v1 && real.node_to_cpus_v2;
}

/* With the lock: all nodes are read anew, for the second version or for the first. */
static void refresh_all(int version)
{
	int saved = errno, node, last;
	struct bitmask *mask;

	if (!can_refresh())
		return;
	mask = real.allocate_cpumask();
	last = real.max_node();
	for (node = 0; mask && node <= last; node++) {
		size_t bytes = (mask->size + LONG_BITS - 1) / LONG_BITS * sizeof(unsigned long);

		/* A node that is not there is none of a caller's business. */
		real.update();
		if (version == 1)
			real.node_to_cpus_v1(node, mask->maskp, (int)bytes);
		else
			real.node_to_cpus_v2(node, mask);
	}
	if (mask)
		real.free_mask(mask);
	errno = saved;
}

/* Their names with versions are below. */
int numa_node_to_cpus_v1(int node, unsigned long *buffer, int length);
int numa_node_to_cpus_v2(int node, struct bitmask *mask);
int numa_node_of_cpu_v2(int cpu);
int numa_distance_v1(int from, int to);
int numa_run_on_node_v1(int node);
int numa_run_on_node_mask_v1(const struct nodemask *mask);
int numa_run_on_node_mask_v2(struct bitmask *mask);
int numa_run_on_node_mask_all_v2(struct bitmask *mask);
struct nodemask numa_get_run_node_mask_v1(void);
struct bitmask *numa_get_run_node_mask_v2(void);
void numa_bind_v1(const struct nodemask *mask);
void numa_bind_v2(struct bitmask *mask);
#ifdef HOTSPOT
int representative_cpu(void);
int numa_max_node_v1(void);
int configured_nodes_of_hotspot(void);
struct bitmask *numa_get_membind_v2(void);
void numa_tonode_memory_v1(void *start, size_t size, int node);
void numa_interleave_memory_v2(void *start, size_t size, struct bitmask *mask);
int move_pages_of_hotspot(int pid, unsigned long count, void **pages, const int *nodes, int *status, int flags);
#endif

/* The version of a name that a program gets: "@@" is the one that it is linked to today. */
#define version(function, symbol) __asm__(".symver " #function ", " symbol)

version(numa_node_to_cpus_v1, "numa_node_to_cpus@libnuma_1.1");
int numa_node_to_cpus_v1(int node, unsigned long *buffer, int length)
{
	int result, state;

	if (!has(node_to_cpus_v1))
		return -1;
#ifdef HOTSPOT
	if (buffer && length > 0 && caller_sees_cpu_nodes() && cpus_of_cpu_node(node, buffer, (size_t)length * 8))
		return 0;
	if (!cpu_nodes.count && buffer && length > 0 && mapped_cpus(node, buffer, (size_t)length * 8))
		return 0;
#endif
	state = lock();
	forget();
	result = real.node_to_cpus_v1(node, buffer, length);
	unlock(state);
	return result;
}

version(numa_node_to_cpus_v2, "numa_node_to_cpus@@libnuma_1.2");
int numa_node_to_cpus_v2(int node, struct bitmask *mask)
{
	int result, state;

	if (!has(node_to_cpus_v2))
		return -1;
	/* The real one looks for it before its table. */
	if (node < 0) {
		errno = ERANGE;
		return -1;
	}
#ifdef HOTSPOT
	if (mask && caller_sees_cpu_nodes() && cpus_of_cpu_node(node, mask->maskp, mask->size))
		return 0;
	if (!cpu_nodes.count && mask && mapped_cpus(node, mask->maskp, mask->size))
		return 0;
#endif
	state = lock();
	forget();
	result = real.node_to_cpus_v2(node, mask);
	unlock(state);
	return result;
}

version(numa_node_of_cpu_v2, "numa_node_of_cpu@@libnuma_1.2");
int numa_node_of_cpu_v2(int cpu)
{
	int node, state;

	start();
	if (topology && cpu >= 0 && cpu < VNUMA_MAX_CPUS) {
		int is_copy = vnuma_source(topology) == VNUMA_SOURCE_SYSFS;

		/* A refresh that another thread has begun may be older than this call. */
		if (is_copy) {
			state = lock();
			vnuma_refresh(topology);
		}
		node = vnuma_cpu_node(topology, (unsigned int)cpu);
		if (is_copy)
			unlock(state);
		if (node == VNUMA_NO_NODE)
			errno = EINVAL;
		return node;
	}
	if (!has(node_of_cpu))
		return -1;
	state = lock();
	refresh_all(2);
	node = real.node_of_cpu(cpu);
	unlock(state);
	return node;
}

/*
 * What the real library knows, for when sysfs cannot be read any more (after chroot(), without a free file descriptor). It reads
 * all distances when it is first asked for one.
 */
static int distance_read_before(int from, int to)
{
	int saved = errno, state = lock(), value = real.distance ? real.distance(from, to) : 0;

	unlock(state);
	errno = saved;
	return value;
}

version(numa_distance_v1, "numa_distance@@libnuma_1.1");
int numa_distance_v1(int from, int to)
{
	start();
#ifdef HOTSPOT
	if (caller_sees_cpu_nodes())
		return from == to ? OWN_DISTANCE : DISTANCE_OF_OTHERS;
#endif
	if (topology) {
		static int asked;
		int value = vnuma_distance(topology, from, to);

		if (value >= 0 && !__atomic_load_n(&asked, __ATOMIC_RELAXED)) {
			distance_read_before(from, to);
			__atomic_store_n(&asked, 1, __ATOMIC_RELAXED);
		}
		/* 0 is libnuma's word for unknown. */
		if (value == -ENODEV || value == -EINVAL)
			return 0;
		return value < 0 ? distance_read_before(from, to) : value;
	}
	return has(distance) ? real.distance(from, to) : 0;
}

version(numa_run_on_node_v1, "numa_run_on_node@@libnuma_1.1");
int numa_run_on_node_v1(int node)
{
	int result, state;

	if (!has(run_on_node))
		return -1;
	state = lock();
	forget();
	result = real.run_on_node(node);
	unlock(state);
	return result;
}

version(numa_run_on_node_mask_v1, "numa_run_on_node_mask@libnuma_1.1");
int numa_run_on_node_mask_v1(const struct nodemask *mask)
{
	int result, state;

	if (!has(run_on_node_mask_v1))
		return -1;
	state = lock();
	refresh_all(1);
	result = real.run_on_node_mask_v1(mask);
	unlock(state);
	return result;
}

version(numa_run_on_node_mask_v2, "numa_run_on_node_mask@@libnuma_1.2");
int numa_run_on_node_mask_v2(struct bitmask *mask)
{
	int result, state;

	if (!has(run_on_node_mask_v2))
		return -1;
	state = lock();
	refresh_all(2);
	result = real.run_on_node_mask_v2(mask);
	unlock(state);
	return result;
}

version(numa_run_on_node_mask_all_v2, "numa_run_on_node_mask_all@@libnuma_1.4");
int numa_run_on_node_mask_all_v2(struct bitmask *mask)
{
	int result, state;

	if (!has(run_on_node_mask_all))
		return -1;
	state = lock();
	refresh_all(2);
	result = real.run_on_node_mask_all(mask);
	unlock(state);
	return result;
}

version(numa_get_run_node_mask_v1, "numa_get_run_node_mask@libnuma_1.1");
struct nodemask numa_get_run_node_mask_v1(void)
{
	struct nodemask result = { { 0 } };
	int state;

	if (!has(get_run_node_mask_v1))
		return result;
	state = lock();
	refresh_all(2);
	result = real.get_run_node_mask_v1();
	unlock(state);
	return result;
}

version(numa_get_run_node_mask_v2, "numa_get_run_node_mask@@libnuma_1.2");
struct bitmask *numa_get_run_node_mask_v2(void)
{
	struct bitmask *result;
	int state;

	if (!has(get_run_node_mask_v2))
		return NULL;
#ifdef HOTSPOT
	if (caller_sees_cpu_nodes())
		return copy_of_all();
#endif
	state = lock();
	refresh_all(2);
	result = real.get_run_node_mask_v2();
	unlock(state);
#ifdef HOTSPOT
	if (result && !cpu_nodes.count)
		add_mapped_nodes(result->maskp, result->size);
#endif
	return result;
}

version(numa_bind_v1, "numa_bind@libnuma_1.1");
void numa_bind_v1(const struct nodemask *mask)
{
	int state;

	if (!has(bind_v1))
		return;
	state = lock();
	refresh_all(2);
	real.bind_v1(mask);
	unlock(state);
}

version(numa_bind_v2, "numa_bind@@libnuma_1.2");
void numa_bind_v2(struct bitmask *mask)
{
	int state;

	if (!has(bind_v2))
		return;
	state = lock();
	refresh_all(2);
	real.bind_v2(mask);
	unlock(state);
}

#ifdef HOTSPOT
version(representative_cpu, "sched_getcpu@@libvnuma_hotspot");
int representative_cpu(void)
{
	static __thread struct answer last __attribute__((tls_model("initial-exec")));
	unsigned int number;
	int cpu;

	start();
	if (!cpu_nodes.count)
		cpu = mapped_cpu();
	else
		cpu = getcpu(&number, NULL) ? -1 : (int)number;
	if (!cpu_nodes.is_g1 || !is_jvm(__builtin_return_address(0)))
		return cpu;
	return keep_cpu(&last, (uintptr_t)__builtin_frame_address(0), cpu);
}

/* What follows is the real library's, unless G1 has a node for each CPU: cpu-nodes.h. */

version(all_nodes_of_hotspot, "numa_all_nodes_ptr@libnuma_1.1");
version(nodes_of_hotspot, "numa_nodes_ptr@libnuma_1.1");

version(numa_max_node_v1, "numa_max_node@@libnuma_1.1");
int numa_max_node_v1(void)
{
	if (!has(max_node))
		return -1;
	return caller_sees_cpu_nodes() ? (int)cpu_nodes.count - 1 : real.max_node();
}

version(configured_nodes_of_hotspot, "numa_num_configured_nodes@libnuma_1.1");
int configured_nodes_of_hotspot(void)
{
	if (!has(configured_nodes))
		return 0;
	return caller_sees_cpu_nodes() ? (int)cpu_nodes.count : real.configured_nodes();
}

version(numa_get_membind_v2, "numa_get_membind@@libnuma_1.2");
struct bitmask *numa_get_membind_v2(void)
{
	if (!has(get_membind))
		return NULL;
	return caller_sees_cpu_nodes() ? copy_of_all() : real.get_membind();
}

version(numa_tonode_memory_v1, "numa_tonode_memory@@libnuma_1.1");
void numa_tonode_memory_v1(void *start_of_memory, size_t size, int node)
{
	if (!has(tonode_memory))
		return;
	if (caller_sees_cpu_nodes())
		deal(start_of_memory, size, node);
	else
		real.tonode_memory(start_of_memory, size, node);
}

version(numa_interleave_memory_v2, "numa_interleave_memory@@libnuma_1.2");
void numa_interleave_memory_v2(void *start_of_memory, size_t size, struct bitmask *mask)
{
	if (has(interleave_memory))
		real.interleave_memory(start_of_memory, size, caller_sees_cpu_nodes() ? *cpu_nodes.real_all : mask);
}

/* G1 asks for the node of pages that it has touched. They are on none of these nodes, and it takes the one that it has dealt out. */
version(move_pages_of_hotspot, "numa_move_pages@libnuma_1.1");
int move_pages_of_hotspot(int pid, unsigned long count, void **pages, const int *nodes, int *status, int flags)
{
	unsigned long i;

	if (!has(move_pages))
		return -1;
	if (nodes || !caller_sees_cpu_nodes())
		return real.move_pages(pid, count, pages, nodes, status, flags);
	for (i = 0; i < count; i++)
		status[i] = -ENOENT;
	return 0;
}
#endif
