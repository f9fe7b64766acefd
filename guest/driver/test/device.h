/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vnuma-check's view of /dev/vnuma: the page, poll() and the uevents.
 */
#ifndef VNUMA_TEST_DEVICE_H
#define VNUMA_TEST_DEVICE_H

#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <vnuma/guest_device.h>

/* The multicast group of the kernel's own uevents; udev's are in another one. */
#define UEVENT_GROUP	1
/* How long --events waits for an event too many. */
#define QUIET_SECONDS	1.0

static void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "vnuma-check: ");
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	va_end(args);
	exit(2);
}

static const struct vnuma_gd_page *map_device(int *fd)
{
	const struct vnuma_gd_page *page;

	*fd = open("/dev/vnuma", O_RDONLY | O_CLOEXEC);
	if (*fd < 0)
		return NULL;
	page = mmap(NULL, VNUMA_GD_SIZE, PROT_READ, MAP_SHARED, *fd, 0);
	if (page == MAP_FAILED)
		die("/dev/vnuma: mmap: %s", strerror(errno));
	if (page->magic != VNUMA_GD_MAGIC ||
	    page->version_major != VNUMA_GD_VERSION_MAJOR)
		die("/dev/vnuma: unknown layout");
	return page;
}

/* A copy that no writer disturbed. */
static void copy_page(const struct vnuma_gd_page *page,
		      struct vnuma_gd_page *copy)
{
	uint32_t before;

	do {
		before = __atomic_load_n(&page->sequence, __ATOMIC_ACQUIRE);
		if (before & 1) {
			sched_yield();
			continue;
		}
		memcpy(copy, page, sizeof(*copy));
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
	} while (before & 1 ||
		 before != __atomic_load_n(&page->sequence, __ATOMIC_RELAXED));
}

static double now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec + ts.tv_nsec / 1e9;
}

/* Waits for a generation that was not read yet. Return: false after @until. */
static bool next_generation(int fd, double until, uint64_t *generation)
{
	struct pollfd pollfd = { .fd = fd, .events = POLLPRI | POLLIN };
	double left = until - now_s();

	if (left <= 0 || poll(&pollfd, 1, left * 1000 + 1) <= 0)
		return false;
	if (read(fd, generation, sizeof(*generation)) != sizeof(*generation))
		die("/dev/vnuma: read: %s", strerror(errno));
	return true;
}

static int follow(bool wait, uint64_t wanted, double seconds)
{
	const struct vnuma_gd_page *page;
	double until = now_s() + seconds;
	struct vnuma_gd_page copy;
	uint64_t generation = 0;
	int fd;

	page = map_device(&fd);
	if (!page)
		die("/dev/vnuma: %s", strerror(errno));
	while (next_generation(fd, until, &generation)) {
		copy_page(page, &copy);
		printf("%016llx %.3f ms\n", (unsigned long long)generation,
		       (copy.applied_ns - copy.interrupt_ns) / 1e6);
		fflush(stdout);
		if (wait && generation == wanted)
			return 0;
	}
	return wait ? 3 : 0;
}

static int open_uevents(void)
{
	struct sockaddr_nl address = {
		.nl_family = AF_NETLINK,
		.nl_groups = UEVENT_GROUP,
	};
	int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC,
			NETLINK_KOBJECT_UEVENT);

	if (fd < 0 || bind(fd, (void *)&address, sizeof(address)))
		die("netlink: %s", strerror(errno));
	return fd;
}

/* Prints a uevent of /dev/vnuma. Return: whether it was a change of that device. */
static bool print_uevent(int fd)
{
	const char *prefix = "change@", *path = "/misc/vnuma";
	const char *key = "VNUMA_GENERATION=";
	const char *generation = "none", *field;
	char message[8192];
	ssize_t length = recv(fd, message, sizeof(message) - 1, 0);

	/* ENOBUFS as well: then some are lost. */
	if (length < 0)
		die("netlink: %s", strerror(errno));
	message[length] = 0;
	/* ACTION@PATH, then KEY=VALUE, each with a NUL behind it */
	if (strncmp(message, prefix, strlen(prefix)) ||
	    strlen(message) < strlen(path) ||
	    strcmp(message + strlen(message) - strlen(path), path))
		return false;
	for (field = message; field < message + length;
	     field += strlen(field) + 1)
		if (!strncmp(field, key, strlen(key)))
			generation = field + strlen(key);
	printf("uevent %s\n", generation);
	return true;
}

/* Prints the generation that poll() reported; it must be the page's as well. */
static void print_polled(int fd, short events,
			 const struct vnuma_gd_page *page)
{
	struct vnuma_gd_page copy;
	uint64_t generation;

	if (read(fd, &generation, sizeof(generation)) != sizeof(generation))
		die("/dev/vnuma: read: %s", strerror(errno));
	copy_page(page, &copy);
	if (copy.generation != generation)
		die("/dev/vnuma: read() has generation %016llx, the page %016llx",
		    (unsigned long long)generation,
		    (unsigned long long)copy.generation);
	if ((events & (POLLPRI | POLLIN)) != (POLLPRI | POLLIN))
		die("/dev/vnuma: poll() has only %#x", events);
	printf("poll %016llx\n", (unsigned long long)generation);
}

/* One source of --events, until a second after @count. Return: 3 after @until. */
static int follow_source(int fd, short events, int count, double until,
			 const struct vnuma_gd_page *page)
{
	struct pollfd pollfd = { .fd = fd, .events = events };
	double quiet = 0;
	int seen = 0;

	for (;;) {
		double left = (quiet ? quiet : until) - now_s();

		if (left <= 0)
			return quiet ? 0 : 3;
		if (poll(&pollfd, 1, left * 1000 + 1) <= 0)
			continue;
		if (page) {
			print_polled(fd, pollfd.revents, page);
			seen++;
		} else {
			seen += print_uevent(fd);
		}
		fflush(stdout);
		if (!quiet && seen >= count)
			quiet = now_s() + QUIET_SECONDS;
	}
}

/* Two processes: in one, a uevent would end a poll() that the driver forgot to wake. */
static int follow_events(int count, double seconds)
{
	double until = now_s() + seconds;
	const struct vnuma_gd_page *page;
	int uevents, fd, status, child_status;
	uint64_t generation;
	pid_t child;

	uevents = open_uevents();
	page = map_device(&fd);
	if (!page)
		die("/dev/vnuma: %s", strerror(errno));
	if (read(fd, &generation, sizeof(generation)) != sizeof(generation))
		die("/dev/vnuma: read: %s", strerror(errno));
	printf("watching %016llx\n", (unsigned long long)generation);
	fflush(stdout);
	child = fork();
	if (child < 0)
		die("fork: %s", strerror(errno));
	if (!child)
		exit(follow_source(uevents, POLLIN, count, until, NULL));
	status = follow_source(fd, POLLPRI | POLLIN, count, until, page);
	if (waitpid(child, &child_status, 0) != child ||
	    !WIFEXITED(child_status))
		die("the process that reads uevents ended early");
	return status ? status : WEXITSTATUS(child_status);
}

#endif /* VNUMA_TEST_DEVICE_H */
