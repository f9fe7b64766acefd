/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvnuma: the NUMA topology of this machine as it is now, for programs that place
 * threads or memory. See libvnuma(3) and docs/libvnuma.md.
 *
 * In a guest with vnuma.ko it reads the page of /dev/vnuma. Elsewhere it reads sysfs.
 *
 * A handle has no locks. Threads may use it at the same time, and a child may go on using it
 * after fork(). Functions marked [signal] may be called from a signal handler: they leave errno
 * alone and need at most 32 KiB of stack. Functions that can fail return -errno.
 */
#ifndef VNUMA_VNUMA_H
#define VNUMA_VNUMA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VNUMA_MAX_CPUS	4096
#define VNUMA_MAX_NODES	1024
#define VNUMA_NO_NODE	(-1)

/* Where answers come from. */
enum vnuma_source {
	VNUMA_SOURCE_DEVICE = 1,	/* the page of /dev/vnuma */
	VNUMA_SOURCE_SYSFS = 2,		/* /sys/devices/system, read by vnuma_refresh() */
};

struct vnuma;

/* Nodes, a bit each: node N is bit N % 64 of bits[N / 64]. */
struct vnuma_node_set {
	uint64_t bits[VNUMA_MAX_NODES / 64];
};

/* Nodes that have CPUs, and that have memory. */
struct vnuma_nodes {
	uint64_t generation;
	struct vnuma_node_set cpus;
	struct vnuma_node_set memory;
};

/* What differs between two of them. */
struct vnuma_changes {
	struct vnuma_node_set gained_cpus;	/* had none */
	struct vnuma_node_set lost_cpus;	/* has none any more */
	struct vnuma_node_set gained_memory;
	struct vnuma_node_set lost_memory;
};

/* All CPUs at one moment. */
struct vnuma_cpus {
	uint64_t generation;
	uint32_t count;				/* entries in use */
	int16_t node[VNUMA_MAX_CPUS];		/* VNUMA_NO_NODE: there is no such CPU */
};

/* A handle for this machine. 0 or -errno. */
int vnuma_open(struct vnuma **out);

/*
 * The same for the files below a folder, for example of a container or of a test. There,
 * /dev/vnuma may be a regular file. NULL is "/".
 */
int vnuma_open_at(struct vnuma **out, const char *root);

/* Nobody uses the handle any more. NULL is allowed. */
void vnuma_close(struct vnuma *v);

/* [signal] Where the handle's answers come from. It stays the same. */
enum vnuma_source vnuma_source(const struct vnuma *v);

/* [signal] Why /dev/vnuma is not used: 0 if it is, else -errno. */
int vnuma_device_error(const struct vnuma *v);

/* The same as a sentence, "" if the device is used. Valid as long as the handle. */
const char *vnuma_device_problem(const struct vnuma *v);

/*
 * [signal] The generation of the topology. It is compared for change only, never for order.
 * With VNUMA_SOURCE_SYSFS it changes when vnuma_refresh() has found a difference.
 */
uint64_t vnuma_generation(const struct vnuma *v);

/*
 * [signal] Where the generation is: a program that looks often loads it itself, with acquire
 * order. Valid as long as the handle.
 */
const uint64_t *vnuma_generation_word(const struct vnuma *v);

/*
 * [signal] With VNUMA_SOURCE_SYSFS: reads the CPUs of all nodes again. 1 if something has
 * changed, 0 if not or if another thread is at it, -errno. 0 with VNUMA_SOURCE_DEVICE,
 * whose answers are never old.
 */
int vnuma_refresh(struct vnuma *v);

/* [signal] The node of a CPU, or VNUMA_NO_NODE. */
int vnuma_cpu_node(const struct vnuma *v, unsigned int cpu);

/* [signal] The node of the CPU that the calling thread runs on, or VNUMA_NO_NODE. */
int vnuma_current_node(const struct vnuma *v);

/* [signal] All CPUs of one generation. 0, or -EAGAIN if the topology does not stand still. */
int vnuma_copy_cpus(const struct vnuma *v, struct vnuma_cpus *out);

/* [signal] The distance that the kernel uses now, read from sysfs; or -errno. */
int vnuma_distance(const struct vnuma *v, int from, int to);

/* [signal] Which nodes have CPUs and memory now, read from sysfs. 0 or -errno. */
int vnuma_read_nodes(const struct vnuma *v, struct vnuma_nodes *out);

/* [signal] What has changed between two readings. */
void vnuma_compare_nodes(const struct vnuma_nodes *before,
			 const struct vnuma_nodes *after, struct vnuma_changes *out);

/* [signal] Is the node in the set? */
static inline int vnuma_node_isset(const struct vnuma_node_set *set, int node)
{
	return node >= 0 && node < VNUMA_MAX_NODES &&
	       (int)(set->bits[node / 64] >> (node % 64) & 1);
}

/*
 * A new file descriptor that is readable when the topology may have changed: with
 * VNUMA_SOURCE_DEVICE when it has, with VNUMA_SOURCE_SYSFS every second. Watch first, then
 * read what you need, so that no change is lost. Memory that a node gains or loses is no change
 * of it: ask vnuma_read_nodes() from time to time. Close it with close(). A child of fork()
 * makes its own. -errno if there is none.
 */
int vnuma_watch(const struct vnuma *v);

/* [signal] Makes it readable at the next change only. 0 or -errno. Does not block. */
int vnuma_clear_watch(int fd);

#ifdef __cplusplus
}
#endif

#endif /* VNUMA_VNUMA_H */
