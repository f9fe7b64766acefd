// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma-fifo: does a reader of /dev/vnuma that lets no other task have its CPU ever wait for one?
 *
 *	vnuma-fifo SECONDS FILE
 *
 * Starts per CPU a thread of SCHED_FIFO, above those of interrupts, which reads the page as its
 * header says and sleeps for a moment, again and again. "ready" is printed when all run. When
 * FILE exists they end, and how often they have read is printed. A thread that has waited for
 * SECONDS within one reading waits for ever: exit status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <vnuma/guest_device.h>

#define PRIORITY	60	/* that of interrupts' threads is 50 */
#define PAUSE_NS	150000
#define MAX_CPUS	64

static struct reader {
	pthread_t thread;
	unsigned long rounds;	/* odd within a reading */
} readers[MAX_CPUS];

static const struct vnuma_gd_page *page;
static volatile bool stop;

static void die(const char *what)
{
	fprintf(stderr, "vnuma-fifo: %s: %s\n", what, strerror(errno));
	exit(2);
}

static double now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec + ts.tv_nsec / 1e9;
}

/* Nothing else has a chance while the sequence is odd. */
static void read_page(struct vnuma_gd_page *copy)
{
	uint32_t before;

	do {
		do
			before = __atomic_load_n(&page->sequence, __ATOMIC_ACQUIRE);
		while (before & 1);
		memcpy(copy, page, sizeof(*copy));
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
	} while (before != __atomic_load_n(&page->sequence, __ATOMIC_RELAXED));
}

static void *read_always(void *argument)
{
	static __thread struct vnuma_gd_page copy;
	struct timespec pause = { .tv_nsec = PAUSE_NS };
	struct reader *reader = argument;

	while (!stop) {
		__atomic_store_n(&reader->rounds, reader->rounds + 1, __ATOMIC_RELAXED);
		read_page(&copy);
		__atomic_store_n(&reader->rounds, reader->rounds + 1, __ATOMIC_RELAXED);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static void start(struct reader *reader, int cpu)
{
	struct sched_param priority = { .sched_priority = PRIORITY };
	pthread_attr_t attributes;
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	pthread_attr_init(&attributes);
	pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
	pthread_attr_setschedpolicy(&attributes, SCHED_FIFO);
	pthread_attr_setschedparam(&attributes, &priority);
	pthread_attr_setaffinity_np(&attributes, sizeof(cpus), &cpus);
	errno = pthread_create(&reader->thread, &attributes, read_always, reader);
	if (errno)
		die("pthread_create");
}

/* The kernel gives other tasks a part of each second unless it is told not to. */
static void take_all(void)
{
	FILE *file = fopen("/proc/sys/kernel/sched_rt_runtime_us", "w");

	if (!file || fputs("-1", file) < 0 || fclose(file))
		die("sched_rt_runtime_us");
}

int main(int argc, char **argv)
{
	struct sched_param priority = { .sched_priority = PRIORITY + 1 };
	unsigned long seen[MAX_CPUS] = { 0 }, all = 0;
	double since[MAX_CPUS];
	int cpu, fd, nr = sysconf(_SC_NPROCESSORS_ONLN);

	if (argc != 3 || nr < 1 || nr > MAX_CPUS) {
		fprintf(stderr, "usage: vnuma-fifo SECONDS FILE\n");
		return 2;
	}
	fd = open("/dev/vnuma", O_RDONLY | O_CLOEXEC);
	page = mmap(NULL, VNUMA_GD_SIZE, PROT_READ, MAP_SHARED, fd, 0);
	if (fd < 0 || page == MAP_FAILED)
		die("/dev/vnuma");
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		die("mlockall");
	take_all();
	if (sched_setscheduler(0, SCHED_FIFO, &priority))
		die("SCHED_FIFO");
	for (cpu = 0; cpu < nr; cpu++) {
		start(&readers[cpu], cpu);
		since[cpu] = now_s();
	}
	puts("ready");
	fflush(stdout);
	while (access(argv[2], F_OK)) {
		struct timespec pause = { .tv_nsec = 200000000 };

		nanosleep(&pause, NULL);
		for (cpu = 0; cpu < nr; cpu++) {
			unsigned long rounds = __atomic_load_n(&readers[cpu].rounds,
							       __ATOMIC_RELAXED);

			if (rounds != seen[cpu] || !(rounds & 1)) {
				seen[cpu] = rounds;
				since[cpu] = now_s();
			} else if (now_s() - since[cpu] > atof(argv[1])) {
				printf("the reader on CPU %d waits for %s s\n", cpu, argv[1]);
				return 1;
			}
		}
	}
	stop = true;
	for (cpu = 0; cpu < nr; cpu++) {
		pthread_join(readers[cpu].thread, NULL);
		all += readers[cpu].rounds / 2;
	}
	printf("%lu readings\n", all);
	return 0;
}
