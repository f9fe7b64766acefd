/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HotSpot's G1 (-XX:+UseNUMA) deals out the regions of its heap to the nodes by turns, for ever. A thread gets one of its
 * node if one is among the next free ones, three for each node, and any otherwise. Where more threads are on a node than on
 * others, they soon get regions of others.
 *
 * So each CPU is a node for G1. A thread gets regions of its CPU, of which there are as many as of any other. When the CPU
 * goes to another node, a thread of this library moves their pages there.
 *
 *	regions of the heap	0 1 2 3 0 1 2 3 ...	by turns, to a CPU each
 *	node of their pages	a a b a a a b a ...	when CPU 1 has gone from node b to node a
 *
 * Only libjvm.so is told so: other libraries in the process get the nodes that there are. Variables, and functions that came
 * with libnuma 2, have a second version here, which HotSpot looks for before the real one and nothing else knows.
 *
 * Without /dev/vnuma nobody says when a CPU goes, and G1 has the nodes that there are.
 */
#ifndef VNUMA_CPU_NODES_H
#define VNUMA_CPU_NODES_H

#include <limits.h>
#include <link.h>
#include <linux/mempolicy.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>

/* vnuma-run sets it. 0: G1 has the nodes that there are. */
#define PER_CPU	"VNUMA_NODE_PER_CPU"

/* Each has a region at a time that is being filled, and a small young generation has some hundred regions. */
#define MAX_CPU_NODES	16

#define OWN_DISTANCE		10
#define DISTANCE_OF_OTHERS	20

#define PAGE		4096UL
#define HUGE_PAGE	(2UL << 20)
/* Pages of a call of move_pages(), which has every CPU put its lists of pages back first: the fewer calls the better. */
#define MOVED_AT_ONCE	65536
/* And where one has failed. */
#define PIECE		512

/* Memory that G1 has dealt out to a CPU, by numa_tonode_memory(). */
struct dealt {
	char *start;
	size_t size;
	unsigned int cpu_node;
};

static struct {
	bool is_g1;			/* whatever nodes it has */
	unsigned int count;		/* 0: HotSpot has the nodes that there are */
	short of_cpu[CPU_SETSIZE];
	unsigned int cpu[MAX_CPU_NODES];
	struct bitmask *all;
	struct bitmask **real_all;	/* the real library's, of nodes with memory */
	/* What follows is read and written with the lock. */
	pthread_mutex_t lock;
	int node[MAX_CPU_NODES];	/* where its memory is, or goes to */
	struct dealt *dealt;		/* by address */
	size_t nr_dealt;
	size_t room;
} cpu_nodes = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* What HotSpot has for numa_all_nodes_ptr and numa_nodes_ptr. */
struct bitmask *all_nodes_of_hotspot, *nodes_of_hotspot;

/* May the process have memory of all nodes, and has no policy by which it is to come from some? */
static bool is_free_to_move(void)
{
	size_t word, words = (all_nodes_of_hotspot->size + LONG_BITS - 1) / LONG_BITS;
	int mode = -1;

	if (!nodes_of_hotspot || nodes_of_hotspot->size < all_nodes_of_hotspot->size)
		return false;
	/* A cpuset may have fewer. */
	for (word = 0; word < words; word++)
		if (nodes_of_hotspot->maskp[word] & ~all_nodes_of_hotspot->maskp[word])
			return false;
	return !syscall(SYS_get_mempolicy, &mode, NULL, 0UL, NULL, 0UL) && mode == MPOL_DEFAULT;
}

/* A node for each CPU that the process may run on, if these are not too many. Others have the number modulo that. */
static unsigned int number_cpus(void)
{
	unsigned int count = 0, cpu;
	cpu_set_t allowed;

	if (sched_getaffinity(0, sizeof(allowed), &allowed))
		return 0;
	count = (unsigned int)CPU_COUNT(&allowed);
	if (count < 2 || count > MAX_CPU_NODES)
		return 0;
	count = 0;
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed))
			cpu_nodes.cpu[count++] = cpu;
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		cpu_nodes.of_cpu[cpu] = (short)(cpu % count);
	for (cpu = 0; cpu < count; cpu++)
		cpu_nodes.of_cpu[cpu_nodes.cpu[cpu]] = (short)cpu;
	return count;
}

static struct bitmask *copy_of_all(void)
{
	struct bitmask *mask = real.allocate_nodemask();
	unsigned int node;

	for (node = 0; mask && node < cpu_nodes.count && node < mask->size; node++)
		mask->maskp[node / LONG_BITS] |= 1UL << (node % LONG_BITS);
	return mask;
}

/*
 * Could a thread wait for changes? The watch that it waits for is its own: until then the program may fork(), and parent and
 * child would see each change once between them, or close all files that it does not know.
 */
static bool can_watch(void)
{
	int watch = vnuma_watch(topology);

	if (watch >= 0)
		close(watch);
	return watch >= 0;
}

/* After the map. Where something is missing, HotSpot gets what the real library has. */
static void make_cpu_nodes(void)
{
	/* A program may have copies of the real library's variables, which it is that fills. */
	struct bitmask **others = dlvsym(RTLD_DEFAULT, "numa_nodes_ptr", "libnuma_1.2");
	const char *asked = getenv(PER_CPU);
	unsigned int count, i;

	cpu_nodes.is_g1 = asked;
	cpu_nodes.real_all = dlvsym(RTLD_DEFAULT, "numa_all_nodes_ptr", "libnuma_1.2");
	all_nodes_of_hotspot = cpu_nodes.real_all ? *cpu_nodes.real_all : NULL;
	nodes_of_hotspot = others ? *others : NULL;
	if (!asked || !strcmp(asked, "0") || !map.nr_nodes || vnuma_source(topology) != VNUMA_SOURCE_DEVICE || !all_nodes_of_hotspot ||
	    !real.free_mask || !real.interleave_memory || !real.allocate_nodemask || !is_free_to_move())
		return;
	count = number_cpus();
	if (!count || all_nodes_of_hotspot->size < count || !can_watch())
		return;
	cpu_nodes.count = count;
	cpu_nodes.all = copy_of_all();
	if (!cpu_nodes.all) {
		cpu_nodes.count = 0;
		return;
	}
	for (i = 0; i < count; i++)
		cpu_nodes.node[i] = vnuma_cpu_node(topology, cpu_nodes.cpu[i]);
	all_nodes_of_hotspot = cpu_nodes.all;
	nodes_of_hotspot = cpu_nodes.all;
}

/* Where libjvm.so is, once it has asked: dladdr() waits for whoever loads a library, and G1 asks while all threads stand. */
static struct {
	uintptr_t start;
	uintptr_t end;		/* 0: not known yet */
} jvm;

static void remember_jvm(const void *start)
{
	const ElfW(Ehdr) *header = start;
	const ElfW(Phdr) *part = (const void *)((const char *)start + header->e_phoff);
	uintptr_t end = 0;
	int i;

	for (i = 0; i < header->e_phnum; i++)
		if (part[i].p_type == PT_LOAD && part[i].p_vaddr + part[i].p_memsz > end)
			end = part[i].p_vaddr + part[i].p_memsz;
	jvm.start = (uintptr_t)start;
	__atomic_store_n(&jvm.end, jvm.start + end, __ATOMIC_RELEASE);
}

/* Is the caller part of libjvm.so? */
static bool is_jvm(const void *caller)
{
	uintptr_t end = __atomic_load_n(&jvm.end, __ATOMIC_ACQUIRE);
	const char *name;
	Dl_info library;

	if (end)
		return (uintptr_t)caller >= jvm.start && (uintptr_t)caller < end;
	if (!dladdr(caller, &library) || !library.dli_fname)
		return false;
	name = strrchr(library.dli_fname, '/');
	if (strcmp(name ? name + 1 : library.dli_fname, "libjvm.so"))
		return false;
	remember_jvm(library.dli_fbase);
	return true;
}

/* Is each CPU a node for this caller? */
static bool sees_cpu_nodes(const void *caller)
{
	return cpu_nodes.count && is_jvm(caller);
}

/* What a thread of G1 was told when it asked last. */
struct answer {
	uintptr_t frame;	/* of the question; 0: there was none */
	int cpu;
};

/*
 * Up to Java 21 G1 asks twice within one allocation, with the lock of the heap (attempt_allocation_locked() and
 * attempt_allocation_force() in G1CollectedHeap::attempt_allocation_slow()). If it is told another node the second time,
 * it loses a region that is in use, and the heap is corrupt (JDK-8351500). With a node for each CPU every migration of a
 * thread would be another node. So a thread keeps its CPU until it asks from further up the stack than before, which is in
 * another allocation: those two questions are asked from the same frame, and the first one of an allocation from a higher one.
 */
static int keep_cpu(struct answer *last, uintptr_t frame, int cpu)
{
	if (!last->frame || frame > last->frame)
		last->cpu = cpu;
	last->frame = frame;
	return last->cpu;
}

/* CPUs of one of these nodes. 0: there is none. */
static int cpus_of_cpu_node(int node, unsigned long *mask, size_t bits)
{
	size_t cpu;

	if (node < 0 || (unsigned int)node >= cpu_nodes.count)
		return 0;
	memset(mask, 0, (bits + LONG_BITS - 1) / LONG_BITS * sizeof(*mask));
	for (cpu = 0; cpu < CPU_SETSIZE && cpu < bits && cpu < (size_t)map.nr_cpus; cpu++)
		if (cpu_nodes.of_cpu[cpu] == node)
			mask[cpu / LONG_BITS] |= 1UL << (cpu % LONG_BITS);
	return 1;
}

/* A huge page would reach into memory of another CPU, and go with that. */
static void keep_apart(const struct dealt *memory)
{
	if ((uintptr_t)memory->start % HUGE_PAGE || memory->size % HUGE_PAGE)
		madvise(memory->start, memory->size, MADV_NOHUGEPAGE);
}

/* New pages come from there, as far as there are any. */
static void prefer(const struct dealt *memory, int node)
{
	unsigned long mask[VNUMA_MAX_NODES / LONG_BITS] = { 0 };

	if (node == VNUMA_NO_NODE)
		return;
	mask[(size_t)node / LONG_BITS] |= 1UL << ((size_t)node % LONG_BITS);
	syscall(SYS_mbind, memory->start, memory->size, MPOL_PREFERRED, mask, VNUMA_MAX_NODES + 1UL, 0U);
}

/* Pages of a call, of memory of one CPU. */
static struct batch {
	void *pages[MOVED_AT_ONCE];
	int nodes[MOVED_AT_ONCE];
	int status[MOVED_AT_ONCE];
	unsigned long count;
} batch;

static long move_some(unsigned long first, unsigned long count)
{
	return syscall(SYS_move_pages, 0, count, batch.pages + first, batch.nodes + first, batch.status, MPOL_MF_MOVE);
}

/* The kernel gives a call up at a page that it cannot move, as one that is pinned: what is behind that is tried by pieces. */
static void move_batch(void)
{
	unsigned long at, count;

	if (batch.count && move_some(0, batch.count)) {
		for (at = 0; at < batch.count; at += count) {
			count = batch.count - at < PIECE ? batch.count - at : PIECE;
			move_some(at, count);
		}
	}
	batch.count = 0;
}

static void move_memory(const struct dealt *memory, int node)
{
	size_t at;

	for (at = 0; at < memory->size; at += PAGE) {
		batch.pages[batch.count] = memory->start + at;
		batch.nodes[batch.count++] = node;
		if (batch.count == MOVED_AT_ONCE)
			move_batch();
	}
}

/* The next memory of a CPU. What comes meanwhile is on the right node. */
static bool next_dealt(size_t *at, unsigned int cpu_node, struct dealt *out)
{
	bool found = false;

	pthread_mutex_lock(&cpu_nodes.lock);
	while (!found && *at < cpu_nodes.nr_dealt) {
		*out = cpu_nodes.dealt[(*at)++];
		found = out->cpu_node == cpu_node;
	}
	pthread_mutex_unlock(&cpu_nodes.lock);
	return found;
}

/* The memory of a CPU goes to its node. First the policy, so that new pages are there. */
static void bring_memory(unsigned int cpu_node, int node)
{
	struct dealt memory;
	size_t at;

	for (at = 0; next_dealt(&at, cpu_node, &memory);)
		prefer(&memory, node);
	for (at = 0; next_dealt(&at, cpu_node, &memory);)
		move_memory(&memory, node);
	move_batch();
}

/* Has the CPU gone to a node that its memory is not on? */
static bool has_gone(unsigned int cpu_node, int *node)
{
	bool gone;

	*node = vnuma_cpu_node(topology, cpu_nodes.cpu[cpu_node]);
	pthread_mutex_lock(&cpu_nodes.lock);
	gone = *node != VNUMA_NO_NODE && *node != cpu_nodes.node[cpu_node];
	if (gone)
		cpu_nodes.node[cpu_node] = *node;
	pthread_mutex_unlock(&cpu_nodes.lock);
	return gone;
}

static void *follow_cpus(void *file)
{
	struct pollfd watch = { .fd = (int)(intptr_t)file, .events = POLLIN };
	unsigned int i;
	int node;

	for (;;) {
		if (vnuma_clear_watch(watch.fd))
			break;
		for (i = 0; i < cpu_nodes.count; i++)
			if (has_gone(i, &node))
				bring_memory(i, node);
		while (poll(&watch, 1, -1) < 0 && errno == EINTR)
			;
		/* Nothing that the driver does today. */
		if (watch.revents & ~POLLIN)
			break;
	}
	return NULL;
}

/* With the lock: only a Java VM that uses its nodes gets the thread. False if there is none: it is tried again. */
static bool start_thread(void)
{
	int watch = vnuma_watch(topology);
	bool started = false;
	pthread_attr_t attributes;
	sigset_t all, before;
	pthread_t thread;

	if (watch < 0)
		return false;
	if (pthread_attr_init(&attributes)) {
		close(watch);
		return false;
	}
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	/* Signals are the Java VM's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	started = !pthread_create(&thread, &attributes, follow_cpus, (void *)(intptr_t)watch);
	if (started)
		pthread_setname_np(thread, "vnuma");
	else
		close(watch);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return started;
}

/* With the lock: where memory that starts there is, or is to be put. Mostly behind all others. */
static size_t place_of(const char *start)
{
	size_t from = 0, to = cpu_nodes.nr_dealt;

	if (to && cpu_nodes.dealt[to - 1].start < start)
		return to;
	while (from < to) {
		size_t middle = from + (to - from) / 2;

		if (cpu_nodes.dealt[middle].start < start)
			from = middle + 1;
		else
			to = middle;
	}
	return from;
}

/* With the lock: false if there is no memory to remember it. */
static bool remember(const struct dealt *memory)
{
	size_t at = place_of(memory->start);
	bool known = at < cpu_nodes.nr_dealt && cpu_nodes.dealt[at].start == memory->start;

	if (!known && cpu_nodes.nr_dealt == cpu_nodes.room) {
		size_t room = cpu_nodes.room ? 2 * cpu_nodes.room : 1024;
		struct dealt *more = realloc(cpu_nodes.dealt, room * sizeof(*more));

		if (!more)
			return false;
		cpu_nodes.dealt = more;
		cpu_nodes.room = room;
	}
	if (!known) {
		memmove(cpu_nodes.dealt + at + 1, cpu_nodes.dealt + at, (cpu_nodes.nr_dealt - at) * sizeof(*memory));
		cpu_nodes.nr_dealt++;
	}
	cpu_nodes.dealt[at] = *memory;
	return true;
}

/* G1 deals out memory, of new regions or of some that it has given back before. */
static void deal(void *start_of_memory, size_t size, int cpu_node)
{
	struct dealt memory = { start_of_memory, size, (unsigned int)cpu_node };
	static bool started;

	if (cpu_node < 0 || memory.cpu_node >= cpu_nodes.count)
		return;
	pthread_mutex_lock(&cpu_nodes.lock);
	if (!started)
		started = start_thread();
	remember(&memory);
	keep_apart(&memory);
	prefer(&memory, cpu_nodes.node[memory.cpu_node]);
	pthread_mutex_unlock(&cpu_nodes.lock);
}

#endif /* VNUMA_CPU_NODES_H */
