// SPDX-License-Identifier: Apache-2.0
/*
 * For tests in a guest: what libvnuma says, and what libnuma says in the same process, now and
 * after each change, a line each, until the input ends:
 *
 *	source=device cpus=0,1 libnuma=0,1 distance=20/20 with-cpus=0,1 lost=- gained=- current=ok
 *
 * `cpus` and `libnuma` are nodes by CPU, `distance` that from node 0 to node 1 of both. `lost` and
 * `gained` are nodes whose CPUs have all gone or that had none. `current` is ok if the node of the
 * calling thread is right on each CPU.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

#define MAX_NODES	8
/* Only against waiting for ever for a change that does not come. */
#define LIMIT_MS	600000

struct bitmask {
	unsigned long size;
	unsigned long *maskp;
};

static struct {
	struct bitmask *(*allocate_cpumask)(void);
	int (*max_node)(void);
	int (*node_to_cpus)(int node, struct bitmask *mask);
	int (*distance)(int from, int to);
} numa;

static void *symbol(void *library, const char *name, const char *version)
{
	void *found = dlvsym(library, name, version);

	if (!found) {
		fprintf(stderr, "libnuma.so.1: no %s\n", name);
		exit(1);
	}
	return found;
}

static void open_libnuma(void)
{
	void *library = dlopen("libnuma.so.1", RTLD_NOW);

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	numa.allocate_cpumask = symbol(library, "numa_allocate_cpumask", "libnuma_1.2");
	numa.max_node = symbol(library, "numa_max_node", "libnuma_1.1");
	numa.node_to_cpus = symbol(library, "numa_node_to_cpus", "libnuma_1.2");
	numa.distance = symbol(library, "numa_distance", "libnuma_1.1");
}

static int libnuma_node(int cpu)
{
	static struct bitmask *mask;
	int node;

	if (!mask)
		mask = numa.allocate_cpumask();
	for (node = 0; node <= numa.max_node(); node++)
		if (!numa.node_to_cpus(node, mask) && mask->maskp[cpu / 64] >> (cpu % 64) & 1)
			return node;
	return VNUMA_NO_NODE;
}

static void print_nodes(const char *name, const struct vnuma_node_set *set)
{
	const char *before = "";
	int node;

	printf(" %s=", name);
	for (node = 0; node < MAX_NODES; node++) {
		if (vnuma_node_isset(set, node)) {
			printf("%s%d", before, node);
			before = ",";
		}
	}
	fputs(*before ? "" : "-", stdout);
}

/* Goes to each CPU and asks where it is. */
static int current_is_right(const struct vnuma *v, int count)
{
	cpu_set_t all, one;
	int cpu, right = 1;

	sched_getaffinity(0, sizeof(all), &all);
	for (cpu = 0; cpu < count; cpu++) {
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		if (!sched_setaffinity(0, sizeof(one), &one))
			right &= vnuma_current_node(v) == vnuma_cpu_node(v, (unsigned int)cpu);
	}
	sched_setaffinity(0, sizeof(all), &all);
	return right;
}

static void show(const struct vnuma *v, struct vnuma_nodes *before)
{
	static struct vnuma_cpus cpus;
	struct vnuma_changes changes;
	struct vnuma_nodes now;
	int count = (int)sysconf(_SC_NPROCESSORS_CONF), cpu, err;

	err = vnuma_copy_cpus(v, &cpus);
	if (!err)
		err = vnuma_read_nodes(v, &now);
	if (err) {
		printf("error=%s\n", strerror(-err));
		return;
	}
	vnuma_compare_nodes(before, &now, &changes);
	*before = now;
	printf("source=%s cpus=", vnuma_source(v) == VNUMA_SOURCE_DEVICE ? "device" : "sysfs");
	for (cpu = 0; cpu < count; cpu++)
		printf("%s%d", cpu ? "," : "", cpus.node[cpu]);
	for (cpu = 0; cpu < count; cpu++)
		printf("%s%d", cpu ? "," : " libnuma=", libnuma_node(cpu));
	printf(" distance=%d/%d", vnuma_distance(v, 0, 1), numa.distance(0, 1));
	print_nodes("with-cpus", &now.cpus);
	print_nodes("lost", &changes.lost_cpus);
	print_nodes("gained", &changes.gained_cpus);
	printf(" current=%s\n", current_is_right(v, count) ? "ok" : "wrong");
}

int main(void)
{
	struct pollfd files[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .events = POLLIN } };
	struct vnuma_nodes before;
	struct vnuma *v;
	uint64_t seen;
	int ready;
	char byte;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (vnuma_open(&v) || vnuma_read_nodes(v, &before)) {
		fprintf(stderr, "no topology\n");
		return 1;
	}
	open_libnuma();
	files[1].fd = vnuma_watch(v);
	seen = vnuma_generation(v);
	show(v, &before);
	while ((ready = poll(files, 2, LIMIT_MS)) > 0) {
		if (files[0].revents && read(STDIN_FILENO, &byte, 1) <= 0)
			break;
		if (!files[1].revents)
			continue;
		vnuma_clear_watch(files[1].fd);
		vnuma_refresh(v);
		if (vnuma_generation(v) == seen)
			continue;
		seen = vnuma_generation(v);
		show(v, &before);
	}
	vnuma_close(v);
	if (ready == 0)
		fprintf(stderr, "nothing has changed for %d s\n", LIMIT_MS / 1000);
	return ready == 0;
}
