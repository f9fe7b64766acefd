// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma-affinity: do tasks keep their affinity while CPUs change their node?
 *
 *	vnuma-affinity SECONDS FILE
 *
 * Starts, per CPU: a keeper that is bound to it all the time, and has a child somewhere in
 * the SECONDS; and a number of setters, which bind themselves now to one CPU and now to two.
 * Each does it for the last time at a random moment in the SECONDS. When FILE exists, which
 * whoever moves the CPUs makes when all is still again, every task must have the affinity
 * that it asked for last. Each that has not is a line; exit status 1 if there is any, 2 if
 * it could not be tried. "ready" is printed when all keepers are bound.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SETTERS_PER_CPU	8
#define WAIT_S		300

/* From 6.2 the kernel remembers what was asked for. */
static bool remembers;
static double until;
static const char *file;
static int *ready;

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void print_set(const char *what, const cpu_set_t *set)
{
	int cpu;

	printf("  %s", what);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, set))
			printf(" %d", cpu);
	printf("\n");
}

/*
 * What counts is what was asked for. Where the kernel does not remember that, a CPU that was
 * offline at the time, so missing from @got, may be missing still; one that went offline during
 * the call made the kernel give all others (__sched_setaffinity()); and one that was about to go
 * when a setter asked for it alone made the kernel give all, which nobody can tell from a call
 * that asked for all.
 */
static int compare(const char *name, const cpu_set_t *asked, const cpu_set_t *got)
{
	cpu_set_t now, most, both;

	sched_getaffinity(0, sizeof(now), &now);
	if (CPU_EQUAL(&now, asked))
		return 0;
	if (!remembers && !strcmp(name, "setter") && CPU_COUNT(asked) == 1 &&
	    CPU_COUNT(&now) == sysconf(_SC_NPROCESSORS_ONLN)) {
		printf("setter %d asked for a CPU that was about to go\n", getpid());
		fflush(stdout);
		return 0;
	}
	CPU_OR(&most, asked, got);
	CPU_OR(&most, &most, &now);
	CPU_OR(&both, asked, got);
	if (!remembers && CPU_EQUAL(&most, &both)) {
		CPU_AND(&both, &now, got);
		if (CPU_EQUAL(&both, got))
			return 0;
	}
	printf("%s %d has another affinity\n", name, getpid());
	print_set("asked for:", asked);
	print_set("then got: ", got);
	print_set("has:      ", &now);
	fflush(stdout);
	return 1;
}

/* Wakes up now and then: a task that never runs loses nothing. */
static void await_file(void)
{
	double limit = until + WAIT_S;

	while (access(file, F_OK)) {
		if (now_s() > limit)
			_exit(2);
		usleep(1000 + rand() % 5000);
	}
}

static int keeper(int cpu)
{
	double child_at = now_s() + (until - now_s()) * (rand() % 1000) / 1000;
	cpu_set_t asked, got;
	int status = 0;
	pid_t child;

	CPU_ZERO(&asked);
	CPU_SET(cpu, &asked);
	if (sched_setaffinity(0, sizeof(asked), &asked))
		return 2;
	sched_getaffinity(0, sizeof(got), &got);
	__atomic_add_fetch(ready, 1, __ATOMIC_SEQ_CST);
	while (now_s() < child_at)
		usleep(1000);
	child = fork();
	await_file();
	if (!child)
		return compare("child of a keeper", &asked, &got);
	if (waitpid(child, &status, 0) != child)
		return 2;
	return compare("keeper", &asked, &got) | WEXITSTATUS(status);
}

static int setter(int nr_cpus)
{
	double last = now_s() + (until - now_s()) * (rand() % 1000) / 1000;
	cpu_set_t asked, got;
	bool set = false;

	while (!set || now_s() < last) {
		cpu_set_t wanted;

		CPU_ZERO(&wanted);
		CPU_SET(rand() % nr_cpus, &wanted);
		if (rand() % 2)
			CPU_SET(rand() % nr_cpus, &wanted);
		/* No CPU of these is online just now. */
		if (sched_setaffinity(0, sizeof(wanted), &wanted))
			continue;
		asked = wanted;
		sched_getaffinity(0, sizeof(got), &got);
		set = true;
		usleep(rand() % 20000);
	}
	await_file();
	return compare("setter", &asked, &got);
}

static void start(int nr_cpus, int cpu)
{
	if (fork())
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	srand(getpid());
	_exit(cpu >= 0 ? keeper(cpu) : setter(nr_cpus));
}

int main(int argc, char **argv)
{
	int nr_cpus = sysconf(_SC_NPROCESSORS_ONLN), cpu, i, status, worst = 0;
	int major = 0, minor = 0, tasks = 0;
	struct utsname name;

	if (argc != 3) {
		fprintf(stderr, "usage: vnuma-affinity SECONDS FILE\n");
		return 2;
	}
	uname(&name);
	sscanf(name.release, "%d.%d", &major, &minor);
	remembers = major > 6 || (major == 6 && minor >= 2);
	until = now_s() + atof(argv[1]);
	file = argv[2];
	ready = mmap(NULL, sizeof(*ready), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (ready == MAP_FAILED)
		return 2;
	for (cpu = 0; cpu < nr_cpus; cpu++) {
		start(nr_cpus, cpu);
		for (i = 0; i < SETTERS_PER_CPU; i++)
			start(nr_cpus, -1);
	}
	while (__atomic_load_n(ready, __ATOMIC_SEQ_CST) < nr_cpus &&
	       now_s() < until)
		usleep(1000);
	printf("ready\n");
	fflush(stdout);
	while (wait(&status) > 0) {
		tasks++;
		if (!WIFEXITED(status))
			worst = 2;
		else if (WEXITSTATUS(status) > worst)
			worst = WEXITSTATUS(status);
	}
	printf("%d tasks, status %d\n", tasks, worst);
	return worst;
}
