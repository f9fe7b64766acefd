// SPDX-License-Identifier: Apache-2.0
/*
 * The handle: the driver's page if there is one that this library understands, else a copy of what
 * sysfs says.
 *
 * A mapping of the page keeps the driver loaded and never goes bad: rmmod says that the module is
 * in use until the last program that has it mapped has ended.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "calls.h"
#include "internal.h"

#define DEVICE		"/dev/vnuma"
/* The driver writes for microseconds, but a host may stop its vCPU meanwhile. */
#define COPY_TRIES	1000
#define WATCH_SECONDS	1

_Static_assert(VNUMA_MAX_CPUS == VNUMA_GD_MAX_CPUS, "sizes of the tables");

static int open_device(const struct vnuma *v, struct stat *status)
{
	char path[PATH_MAX];
	int fd, err = 0;

	snprintf(path, sizeof(path), "%s" DEVICE, v->root);
	/* Whatever is there, opening it must not wait. */
	fd = vnuma_call_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return -errno;
	if (fstat(fd, status))
		err = -errno;
	else if (!S_ISCHR(status->st_mode) && !(S_ISREG(status->st_mode) && v->root[0]))
		err = -ENODEV;
	else if (S_ISREG(status->st_mode) && status->st_size < VNUMA_GD_SIZE)
		err = -EBADMSG;
	if (!err)
		return fd;
	vnuma_call_close(fd);
	return err;
}

/* 0, or -errno with the reason in v->problem. */
static int map_device(struct vnuma *v)
{
	char reason[sizeof(v->problem) - VNUMA_ROOT_MAX - sizeof(DEVICE) - 4];
	struct stat status;
	void *page;
	int fd, err;

	fd = open_device(v, &status);
	if (fd < 0) {
		snprintf(v->problem, sizeof(v->problem), "%s" DEVICE ": %s", v->root,
			 strerror(-fd));
		return fd;
	}
	page = mmap(NULL, VNUMA_GD_SIZE, PROT_READ, MAP_SHARED, fd, 0);
	err = page == MAP_FAILED ? -errno : 0;
	vnuma_call_close(fd);
	if (err) {
		snprintf(v->problem, sizeof(v->problem), "%s" DEVICE ": cannot be mapped: %s",
			 v->root, strerror(-err));
		return err;
	}
	err = vnuma_check_page(page, reason, sizeof(reason));
	if (err) {
		snprintf(v->problem, sizeof(v->problem), "%s" DEVICE ": %s", v->root, reason);
		munmap(page, VNUMA_GD_SIZE);
		return err;
	}
	v->page = page;
	v->generation = (const uint64_t *)&v->page->generation;
	return 0;
}

int vnuma_open_at(struct vnuma **out, const char *root)
{
	size_t length = root ? strlen(root) : 0;
	struct vnuma *v;
	int err;

	while (length > 0 && root[length - 1] == '/')
		length--;
	if (length >= VNUMA_ROOT_MAX)
		return -ENAMETOOLONG;
	v = mmap(NULL, sizeof(*v), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (v == MAP_FAILED)
		return -errno;
	memcpy(v->root, length ? root : "", length);
	v->device_error = map_device(v);
	if (!v->page) {
		v->own_generation = 1;
		v->generation = &v->own_generation;
		err = vnuma_sysfs_cpus(v, v->cpu_node, &v->nr_cpus);
		if (err) {
			vnuma_close(v);
			return err;
		}
	}
	*out = v;
	return 0;
}

int vnuma_open(struct vnuma **out)
{
	return vnuma_open_at(out, NULL);
}

void vnuma_close(struct vnuma *v)
{
	if (!v)
		return;
	if (v->page)
		munmap((void *)v->page, VNUMA_GD_SIZE);
	munmap(v, sizeof(*v));
}

enum vnuma_source vnuma_source(const struct vnuma *v)
{
	return v->page ? VNUMA_SOURCE_DEVICE : VNUMA_SOURCE_SYSFS;
}

int vnuma_device_error(const struct vnuma *v)
{
	return v->device_error;
}

const char *vnuma_device_problem(const struct vnuma *v)
{
	return v->problem;
}

uint64_t vnuma_generation(const struct vnuma *v)
{
	return __atomic_load_n(v->generation, __ATOMIC_ACQUIRE);
}

const uint64_t *vnuma_generation_word(const struct vnuma *v)
{
	return v->generation;
}

static int node_from(uint16_t value)
{
	/* Also what the page may not hold: a node that no kernel has. */
	return value < VNUMA_MAX_NODES ? value : VNUMA_NO_NODE;
}

int vnuma_cpu_node(const struct vnuma *v, unsigned int cpu)
{
	if (cpu >= VNUMA_MAX_CPUS)
		return VNUMA_NO_NODE;
	if (v->page)
		return cpu < v->page->nr_cpus ? node_from(v->page->cpu_node[cpu]) : VNUMA_NO_NODE;
	return node_from(__atomic_load_n(&v->cpu_node[cpu], __ATOMIC_RELAXED));
}

int vnuma_current_node(const struct vnuma *v)
{
	unsigned int cpu;

	/* Not sched_getcpu(): a shim for a runtime may stand in its place. */
	if (getcpu(&cpu, NULL))
		return VNUMA_NO_NODE;
	return vnuma_cpu_node(v, cpu);
}

/* A copy, unless the writer was at it. */
static int copy_page(const volatile struct vnuma_gd_page *page, struct vnuma_cpus *out)
{
	uint32_t before = __atomic_load_n(&page->sequence, __ATOMIC_ACQUIRE), cpu;

	if (before & 1)
		return 0;
	out->generation = page->generation;
	out->count = page->nr_cpus <= VNUMA_MAX_CPUS ? page->nr_cpus : VNUMA_MAX_CPUS;
	for (cpu = 0; cpu < VNUMA_MAX_CPUS; cpu++)
		out->node[cpu] = (int16_t)(cpu < out->count ? node_from(page->cpu_node[cpu]) :
							      VNUMA_NO_NODE);
	/* All fields are loaded before the sequence is loaded again. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return __atomic_load_n(&page->sequence, __ATOMIC_RELAXED) == before;
}

static int copy_table(const struct vnuma *v, struct vnuma_cpus *out)
{
	uint32_t cpu;

	/* After a fork() in the middle of a refresh the parent's number is left there. */
	if (__atomic_load_n(&v->refreshing, __ATOMIC_ACQUIRE) == getpid())
		return 0;
	out->generation = vnuma_generation(v);
	out->count = __atomic_load_n(&v->nr_cpus, __ATOMIC_RELAXED);
	for (cpu = 0; cpu < VNUMA_MAX_CPUS; cpu++)
		out->node[cpu] = (int16_t)vnuma_cpu_node(v, cpu);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return vnuma_generation(v) == out->generation &&
	       __atomic_load_n(&v->refreshing, __ATOMIC_ACQUIRE) != getpid();
}

int vnuma_copy_cpus(const struct vnuma *v, struct vnuma_cpus *out)
{
	int saved = errno, try;

	for (try = 0; try < COPY_TRIES; try++) {
		if (v->page ? copy_page(v->page, out) : copy_table(v, out))
			return 0;
		sched_yield();
	}
	errno = saved;
	return -EAGAIN;
}

/* Only one thread writes the table. The number of another process is left from before a fork(). */
static int begin_refresh(struct vnuma *v)
{
	int nobody = 0, self = getpid(), holder;

	if (__atomic_compare_exchange_n(&v->refreshing, &nobody, self, 0, __ATOMIC_ACQUIRE,
					__ATOMIC_RELAXED))
		return 1;
	holder = nobody;
	return holder != self && __atomic_compare_exchange_n(&v->refreshing, &holder, self, 0,
							     __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

int vnuma_refresh(struct vnuma *v)
{
	uint16_t found[VNUMA_MAX_CPUS];
	int saved = errno, changed = 0, err;
	uint32_t nr_cpus, cpu;

	if (v->page || !begin_refresh(v))
		return 0;
	err = vnuma_sysfs_cpus(v, found, &nr_cpus);
	if (!err) {
		for (cpu = 0; cpu < VNUMA_MAX_CPUS; cpu++) {
			changed |= v->cpu_node[cpu] != found[cpu];
			__atomic_store_n(&v->cpu_node[cpu], found[cpu], __ATOMIC_RELAXED);
		}
		changed |= v->nr_cpus != nr_cpus;
		__atomic_store_n(&v->nr_cpus, nr_cpus, __ATOMIC_RELAXED);
		if (changed)
			__atomic_store_n(&v->own_generation, v->own_generation + 1,
					 __ATOMIC_RELEASE);
	}
	__atomic_store_n(&v->refreshing, 0, __ATOMIC_RELEASE);
	errno = saved;
	return err ? err : changed;
}

void vnuma_compare_nodes(const struct vnuma_nodes *before,
			 const struct vnuma_nodes *after, struct vnuma_changes *out)
{
	int word;

	for (word = 0; word < VNUMA_MAX_NODES / 64; word++) {
		out->gained_cpus.bits[word] = after->cpus.bits[word] & ~before->cpus.bits[word];
		out->lost_cpus.bits[word] = before->cpus.bits[word] & ~after->cpus.bits[word];
		out->gained_memory.bits[word] =
			after->memory.bits[word] & ~before->memory.bits[word];
		out->lost_memory.bits[word] =
			before->memory.bits[word] & ~after->memory.bits[word];
	}
}

static int watch_clock(void)
{
	struct itimerspec every = { { WATCH_SECONDS, 0 }, { WATCH_SECONDS, 0 } };
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), err;

	if (fd < 0)
		return -errno;
	if (timerfd_settime(fd, 0, &every, NULL)) {
		err = -errno;
		vnuma_call_close(fd);
		return err;
	}
	return fd;
}

int vnuma_watch(const struct vnuma *v)
{
	struct stat status;
	int fd, err;

	if (!v->page)
		return watch_clock();
	fd = open_device(v, &status);
	if (fd < 0)
		return fd;
	if (!S_ISCHR(status.st_mode)) {
		/* A file of a test: it cannot be waited for. */
		vnuma_call_close(fd);
		return watch_clock();
	}
	err = vnuma_clear_watch(fd);
	if (err) {
		vnuma_call_close(fd);
		return err;
	}
	return fd;
}

int vnuma_clear_watch(int fd)
{
	int saved = errno, err = 0;
	uint64_t value;

	/* A driver or a timer: both give eight bytes. */
	if (vnuma_call_read(fd, &value, sizeof(value)) < 0 && errno != EAGAIN)
		err = -errno;
	errno = saved;
	return err;
}
