// SPDX-License-Identifier: Apache-2.0
/*
 * libjvm.so of a test: asks libnuma what HotSpot asks, by the versions that HotSpot looks for first (libnuma_dlsym() and
 * libnuma_v2_dlsym() of src/hotspot/os/linux/os_linux.cpp), from a library of that name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>

struct bitmask;

static void *first_version(const char *name)
{
	void *handle = dlopen("libnuma.so.1", RTLD_LAZY), *symbol = dlvsym(handle, name, "libnuma_1.1");

	return symbol ? symbol : dlsym(handle, name);
}

static void *second_version(const char *name)
{
	return dlvsym(dlopen("libnuma.so.1", RTLD_LAZY), name, "libnuma_1.2");
}

int jvm_max_node(void)
{
	return ((int (*)(void))first_version("numa_max_node"))();
}

int jvm_configured_nodes(void)
{
	return ((int (*)(void))first_version("numa_num_configured_nodes"))();
}

int jvm_distance(int from, int to)
{
	return ((int (*)(int, int))first_version("numa_distance"))(from, to);
}

/* numa_all_nodes_ptr or numa_nodes_ptr. */
struct bitmask *jvm_variable(const char *name)
{
	return *(struct bitmask **)first_version(name);
}

/* numa_get_membind() or numa_get_run_node_mask(). */
struct bitmask *jvm_mask(const char *name)
{
	return ((struct bitmask *(*)(void))second_version(name))();
}

int jvm_node_to_cpus(int node, struct bitmask *mask)
{
	return ((int (*)(int, struct bitmask *))second_version("numa_node_to_cpus"))(node, mask);
}

void jvm_tonode_memory(void *start, size_t size, int node)
{
	((void (*)(void *, size_t, int))first_version("numa_tonode_memory"))(start, size, node);
}

void jvm_interleave_memory(void *start, size_t size, struct bitmask *mask)
{
	((void (*)(void *, size_t, struct bitmask *))second_version("numa_interleave_memory"))(start, size, mask);
}

int jvm_node_of(void *page)
{
	int (*move_pages)(int pid, unsigned long count, void **pages, const int *nodes, int *status, int flags) =
		(int (*)(int, unsigned long, void **, const int *, int *, int))first_version("numa_move_pages");
	int node = -1;

	return move_pages(0, 1, &page, NULL, &node, 0) ? -1 : node;
}

/* The CPU of the thread, asked from so many frames further down. */
__attribute__((noinline)) int jvm_cpu(int frames)
{
	int cpu = frames > 0 ? jvm_cpu(frames - 1) : ((int (*)(void))dlsym(RTLD_DEFAULT, "sched_getcpu"))();

	/* What comes behind a call keeps the frame. */
	__asm__ volatile("" : "+r"(cpu));
	return cpu;
}
