// SPDX-License-Identifier: Apache-2.0
/*
 * vnuma-run: starts a program with what it needs to follow the topology, in its environment.
 * See docs/vnuma-run.md. It becomes the program: nothing of it stays.
 *
 *	look at the options, the program and the libraries ──▶ plan ──▶ print it, or exec
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

#include "java.h"
#include "program.h"

/* As those of env(1) and nice(1). */
#define STATUS_OWN	125
#define STATUS_REFUSED	126
#define STATUS_MISSING	127

/* Of scripts that are interpreters of scripts: the kernel takes five. */
#define MAX_SCRIPTS	5
#define MAX_NOTES	8

/* Says "[always] madvise never" where all memory may have huge pages. */
#define HUGE_PAGES	"/sys/kernel/mm/transparent_hugepage/enabled"
/* Says how large those of pools are, and how many there are. */
#define MEMORY		"/proc/meminfo"

/* Collectors of HotSpot. What each of them does with it: docs/runtimes.md. */
static const struct collector {
	const char *name;
	const char *flags;
	const char *same[4];	/* flags by which it is chosen, and which go with it; up to NULL */
	const char *variable;	/* what the overlay does for it: numa/hotspot.h, numa/cpu-nodes.h; NULL: nothing */
	bool deals_out_regions;	/* to nodes by turns, and of less than a huge page unless it is told of these */
} collectors[] = {
	{ "parallel", "-XX:+UseParallelGC -XX:+UseNUMA", { "UseParallelGC", "UseParallelOldGC", "AggressiveHeap" }, NULL, false },
	{ "g1", "-XX:+UseG1GC -XX:+UseNUMA", { "UseG1GC" }, "VNUMA_NODE_PER_CPU", true },
	{ "z", "-XX:+UseZGC -XX:+UseNUMA", { "UseZGC" }, "VNUMA_SHARED_CPUS", false },
};

/*
 * What the overlay answers, as each HotSpot from 8 to 25 has it: it is looked up by these names. A Java VM without them
 * reads the topology in another way, if it does.
 */
static const char *const asked_by_hotspot[] = { "libnuma.so.1", "numa_node_to_cpus", "sched_getcpu", NULL };
/* Where libjvm.so is, beside bin/java: since 9, and in 8. */
static const char *const places_of_jvm[] = { "lib/server/libjvm.so", "lib/amd64/server/libjvm.so",
					      "jre/lib/amd64/server/libjvm.so" };

struct plan {
	const char *libraries;		/* folder of the overlays */
	const struct collector *collector;	/* NULL: the program is no Java VM */
	bool jemalloc;
	bool mimalloc;
	bool tcmalloc;
	bool tcmalloc_loaded;
	bool has_malloc;			/* the program's own, which nothing that is preloaded comes before */
	bool dry_run;
	bool overlay;			/* the one of libnuma is preloaded */
	bool huge_pages;		/* the Java VM is told that it has them */
	char preload[3 * PATH_MAX];	/* "": nothing is preloaded */
	char notes[MAX_NOTES][2 * PATH_MAX];
	int nr_notes;
};

static const char usage[] =
	"Usage: vnuma-run [--gc parallel|g1|z] [--allocator jemalloc|mimalloc|tcmalloc]\n"
	"                 [--libraries DIR] [--dry-run] PROGRAM [ARGUMENT...]\n"
	"\n"
	"Starts a program so that it follows the NUMA topology as it is now.\n"
	"\n"
	"      --gc parallel|g1|z    the program is a Java VM; use that collector with its NUMA support\n"
	"      --allocator jemalloc  malloc() is jemalloc's, with arenas of the thread's node\n"
	"      --allocator mimalloc  malloc() is mimalloc's, with large blocks of the thread's node\n"
	"      --allocator tcmalloc  malloc() is google/tcmalloc's, with memory of the thread's node\n"
	"      --libraries DIR       where numa/libnuma.so.1, hotspot/libnuma.so.1,\n"
	"                            jemalloc/libvnuma-jemalloc.so, mimalloc/libvnuma-mimalloc.so\n"
	"                            and tcmalloc/libvnuma-tcmalloc.so are\n"
	"                            [default: " VNUMA_LIBRARIES "]\n"
	"      --dry-run             print what would be set, and start nothing\n"
	"  -h, --help                print this\n"
	"  -V, --version             print the version\n";

/* What could not be done. The program runs all the same, as it would have without vnuma-run. */
static void note(struct plan *plan, const char *format, ...)
	__attribute__((format(printf, 2, 3)));


static void note(struct plan *plan, const char *format, ...)
{
	va_list arguments;

	if (plan->nr_notes == MAX_NOTES)
		return;
	va_start(arguments, format);
	vsnprintf(plan->notes[plan->nr_notes++], sizeof(plan->notes[0]), format, arguments);
	va_end(arguments);
}

static int fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int fail(int status, const char *format, ...)
{
	va_list arguments;

	fputs("vnuma-run: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	return status;
}

/* Where execvp() would find it. 0, or the errno of the best candidate. */
static int find_program(const char *name, char *path)
{
	const char *list = getenv("PATH"), *end;
	int problem = ENOENT;
	struct stat status;

	if (strchr(name, '/')) {
		snprintf(path, PATH_MAX, "%s", name);
		if (access(path, X_OK))
			return errno;
		return stat(path, &status) ? errno : S_ISREG(status.st_mode) ? 0 : EACCES;
	}
	for (list = list ? list : "/bin:/usr/bin"; list; list = *end ? end + 1 : NULL) {
		end = strchrnul(list, ':');
		if (snprintf(path, PATH_MAX, "%.*s%s%s", (int)(end - list), list,
			     end == list ? "" : "/", name) >= PATH_MAX)
			continue;
		if (!stat(path, &status) && S_ISREG(status.st_mode)) {
			if (!access(path, X_OK))
				return 0;
			problem = EACCES;
		}
	}
	return problem;
}

static ssize_t read_file(void *context, void *buffer, size_t size, uint64_t offset)
{
	if (offset > INT64_MAX)
		return -1;
	return pread(*(int *)context, buffer, size, (off_t)offset);
}

/* Would the dynamic linker distrust the environment (AT_SECURE)? */
static const char *privileges(int fd)
{
	struct stat status;

	if (fstat(fd, &status))
		return NULL;
	if (status.st_mode & S_ISUID && status.st_uid != geteuid())
		return "set-user-ID";
	if (status.st_mode & S_ISGID && status.st_mode & S_IXGRP && status.st_gid != getegid())
		return "set-group-ID";
	if (geteuid() != 0 && fgetxattr(fd, "security.capability", NULL, 0) > 0)
		return "it has file capabilities";
	return NULL;
}

static bool has_allocator(const struct plan *plan)
{
	return plan->jemalloc || plan->mimalloc || plan->tcmalloc;
}

/* Can anything be preloaded into it? Scripts are their interpreter. */
static bool can_preload(struct plan *plan, const char *path)
{
	struct vnuma_program program;
	char name[PATH_MAX];
	int depth;

	snprintf(name, sizeof(name), "%s", path);
	for (depth = 0; depth <= MAX_SCRIPTS; depth++) {
		int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
		const char *why;

		if (fd < 0) {
			/* It may be executable without being readable. */
			note(plan, "%s: %s: whether it is dynamically linked is not known", name,
			     strerror(errno));
			return false;
		}
		vnuma_examine(&program, read_file, &fd);
		plan->has_malloc = has_allocator(plan) && program.kind == VNUMA_PROGRAM_DYNAMIC &&
				   vnuma_exports("malloc", read_file, &fd);
		why = program.kind == VNUMA_PROGRAM_SCRIPT ? NULL : privileges(fd);
		close(fd);
		if (program.kind == VNUMA_PROGRAM_OTHER)
			why = program.reason;
		if (why) {
			note(plan, "%s: %s: no library can be preloaded", name, why);
			return false;
		}
		if (plan->has_malloc)
			note(plan, "%s: it has a malloc() of its own, which no other comes before", name);
		if (program.kind == VNUMA_PROGRAM_DYNAMIC)
			return true;
		snprintf(name, sizeof(name), "%s", program.interpreter);
	}
	note(plan, "%s: too many scripts that interpret scripts", path);
	return false;
}

static bool add_path(struct plan *plan, const char *path)
{
	size_t used = strlen(plan->preload);

	/* LD_PRELOAD has no way to quote them. */
	if (strpbrk(path, ": ")) {
		note(plan, "%s: a path with a colon or a space cannot be preloaded", path);
		return false;
	}
	snprintf(plan->preload + used, sizeof(plan->preload) - used, "%s%s", used ? ":" : "", path);
	return true;
}

/* Preloads a library of ours, if it and the one that it stands before, if any, are there. */
static bool add_library(struct plan *plan, const char *name, const char *before, const char *else_what)
{
	const char *missing = NULL;
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/%s", plan->libraries, name) >= (int)sizeof(path)) {
		note(plan, "%s/%s: %s", plan->libraries, name, strerror(ENAMETOOLONG));
		return false;
	}
	if (access(path, R_OK))
		missing = path;
	else if (before && access(before, R_OK))
		missing = before;
	if (missing) {
		note(plan, "%s: %s: %s", missing, strerror(errno), else_what);
		return false;
	}
	return add_path(plan, path);
}

/* The libjvm.so of a Java VM, by the path of its java. Below 0: it has none, as it is a script or something else. */
static int open_jvm(const char *java, char *path)
{
	char real[PATH_MAX], *end;
	size_t i;
	int fd;

	if (!realpath(java, real))
		return -1;
	for (i = 0; i < 2; i++) {
		end = strrchr(real, '/');
		if (!end)
			return -1;
		*end = 0;
	}
	for (i = 0; i < sizeof(places_of_jvm) / sizeof(*places_of_jvm); i++) {
		if (snprintf(path, PATH_MAX, "%s/%s", real, places_of_jvm[i]) >= PATH_MAX)
			continue;
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd >= 0)
			return fd;
	}
	return -1;
}

/* Is it no Java VM whose questions the overlay answers? One that is started by a script is not looked at. */
static bool is_unknown_jvm(struct plan *plan, const char *java)
{
	char path[PATH_MAX];
	const char *missing;
	int fd = open_jvm(java, path);

	if (fd < 0)
		return false;
	missing = vnuma_missing_word(asked_by_hotspot, read_file, &fd);
	close(fd);
	if (missing)
		note(plan, "%s: unknown layout, it does not look up %s: the Java VM is left as it is", path, missing);
	return missing;
}

/* Is the Java VM told to use another collector? */
static bool has_other_collector(struct plan *plan, char *const *arguments)
{
	struct vnuma_chosen chosen;

	if (!vnuma_other_collector(arguments, plan->collector->same, &chosen))
		return false;
	note(plan, "%s%s%s: another collector than --gc %s, and a Java VM that is told of two does not start: it is left as it is",
	     chosen.option, chosen.variable ? " in " : "", chosen.variable ? chosen.variable : "", plan->collector->name);
	return true;
}

/* Has a file such a line? */
static bool has_line(const char *path, const char *name, const char *value)
{
	size_t length = strlen(name);
	bool found = false;
	char line[128];
	FILE *file = fopen(path, "re");

	while (file && !found && fgets(line, sizeof(line), file))
		found = !strncmp(line, name, length) && strstr(line + length, value);
	if (file)
		fclose(file);
	return found;
}

/*
 * Has all memory of a program huge pages of 2 MiB, where there are some? A Java VM before 21 has those that it is told of as large as
 * pools have them by default. A machine with a pool has that for a purpose, and a Java VM that is told of others leaves it alone.
 */
static bool has_huge_pages(void)
{
	return has_line(HUGE_PAGES, "", "[always]") && has_line(MEMORY, "Hugepagesize:", " 2048 kB") &&
	       has_line(MEMORY, "HugePages_Total:", " 0\n");
}

/* Both or none: memory of the one is freed by the other. */
static void add_mimalloc(struct plan *plan)
{
	size_t used = strlen(plan->preload);

	if (add_library(plan, "mimalloc/libvnuma-mimalloc.so", VNUMA_REAL_MIMALLOC, "malloc() is the program's own") &&
	    !add_path(plan, VNUMA_REAL_MIMALLOC))
		plan->preload[used] = 0;
}

static void add_allocator(struct plan *plan)
{
	if (plan->jemalloc)
		add_library(plan, "jemalloc/libvnuma-jemalloc.so", VNUMA_REAL_JEMALLOC, "malloc() is the program's own");
	if (plan->mimalloc)
		add_mimalloc(plan);
	if (plan->tcmalloc)
		plan->tcmalloc_loaded = add_library(plan, "tcmalloc/libvnuma-tcmalloc.so", NULL, "malloc() is the program's own");
}

/* Without the driver's page nobody is told of changes. Most look at the CPU that a thread is on themselves. */
static void say_what_stays(struct plan *plan, const char *problem)
{
	note(plan, "%s: the topology is read from sysfs", problem);
	if (plan->collector && plan->overlay && !strcmp(plan->collector->name, "g1"))
		note(plan, "--gc g1: the regions of the heap stay where they are, as nobody says when a CPU goes to another node");
	if (plan->tcmalloc_loaded)
		note(plan, "--allocator tcmalloc: it keeps the nodes that CPUs have now, as nobody says when one goes to another node");
}

static void make_plan(struct plan *plan, const char *path, char *const *arguments)
{
	struct vnuma *topology;
	int err;

	if (plan->collector && (is_unknown_jvm(plan, path) || has_other_collector(plan, arguments)))
		plan->collector = NULL;
	if (can_preload(plan, path)) {
		plan->overlay = add_library(plan, plan->collector ? "hotspot/libnuma.so.1" : "numa/libnuma.so.1",
					    VNUMA_REAL_LIBNUMA, "libnuma answers as it always does");
		if (!plan->has_malloc)
			add_allocator(plan);
	}
	plan->huge_pages = plan->collector && plan->collector->deals_out_regions && has_huge_pages() && !vnuma_chooses_pages(arguments);
	err = vnuma_open(&topology);
	if (err) {
		note(plan, "the topology cannot be read: %s", strerror(-err));
		return;
	}
	if (vnuma_source(topology) == VNUMA_SOURCE_SYSFS)
		say_what_stays(plan, vnuma_device_problem(topology));
	vnuma_close(topology);
}

/* NAME=FIRST, then what NAME has already. Printed, or set. */
static int put_before(const struct plan *plan, const char *name, const char *first, char separator)
{
	const char *old = getenv(name);
	char *value;

	if (asprintf(&value, old && *old ? "%s%c%s" : "%s", first, separator, old) < 0)
		return -1;
	if (plan->dry_run)
		printf("%s=%s\n", name, value);
	else if (setenv(name, value, 1))
		return -1;
	free(value);
	return 0;
}

/* NAME=VALUE, unless NAME is set. Printed, or set. */
static int put_default(const struct plan *plan, const char *name, const char *value)
{
	if (getenv(name))
		return 0;
	if (!plan->dry_run)
		return setenv(name, value, 0);
	printf("%s=%s\n", name, value);
	return 0;
}

/*
 * A CPU's regions follow it sooner by huge pages. In heaps below 4 GiB G1 has regions of 1 MiB, each of another node than the
 * next one, where no huge page fits in. If it is told of huge pages it deals out these, of two regions each.
 */
static int put_flags(const struct plan *plan)
{
	char flags[128];

	snprintf(flags, sizeof(flags), "%s%s", plan->collector->flags, plan->huge_pages ? " -XX:+UseTransparentHugePages" : "");
	return put_before(plan, "JAVA_TOOL_OPTIONS", flags, ' ');
}

static int apply(const struct plan *plan)
{
	if (plan->preload[0] && put_before(plan, "LD_PRELOAD", plan->preload, ':'))
		return -1;
	/* The flags are worth nothing to a Java VM that does not follow. */
	if (plan->collector && plan->overlay &&
	    (put_flags(plan) ||
	     (plan->collector->variable && put_default(plan, plan->collector->variable, "1"))))
		return -1;
	/*
	 * tcmalloc asks the kernel itself by rseq(2) for the CPU of a thread, which the C library does for itself
	 * otherwise: a thread can do so only once. Of tunables of one name the last one counts, so what is set stays.
	 */
	if (plan->tcmalloc_loaded && (put_before(plan, "GLIBC_TUNABLES", "glibc.pthread.rseq=0", ':') ||
				      put_default(plan, "TCMALLOC_NUMA_AWARE", "1")))
		return -1;
	return 0;
}

static int start(struct plan *plan, char **command)
{
	char path[PATH_MAX];
	int problem = find_program(command[0], path), i;

	if (problem)
		return fail(problem == ENOENT || problem == ENOTDIR ? STATUS_MISSING : STATUS_REFUSED,
			    "%s: %s", command[0], strerror(problem));
	make_plan(plan, path, command + 1);
	for (i = 0; i < plan->nr_notes; i++)
		fail(0, "%s", plan->notes[i]);
	if (apply(plan))
		return fail(STATUS_OWN, "the environment: %s", strerror(errno));
	if (plan->dry_run) {
		for (i = 0; command[i]; i++)
			printf("%s%s", i ? " " : "", command[i]);
		putchar('\n');
		return 0;
	}
	execvp(command[0], command);
	return fail(STATUS_REFUSED, "%s: %s", command[0], strerror(errno));
}

static const struct collector *find_collector(const char *name)
{
	size_t i;

	for (i = 0; i < sizeof(collectors) / sizeof(*collectors); i++)
		if (!strcmp(collectors[i].name, name))
			return &collectors[i];
	return NULL;
}

/* The program, and what it starts, may be in another folder when they are preloaded. One that is not there is named as it is. */
static const char *whole_path(const char *path)
{
	static char whole[PATH_MAX];

	return *path != '/' && realpath(path, whole) ? whole : path;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "gc", required_argument, NULL, 'g' },
		{ "allocator", required_argument, NULL, 'a' },
		{ "libraries", required_argument, NULL, 'l' },
		{ "dry-run", no_argument, NULL, 'n' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{ NULL, 0, NULL, 0 },
	};
	static struct plan plan = { .libraries = VNUMA_LIBRARIES };
	int option;

	/* "+": options of the program are its own. */
	while ((option = getopt_long(argc, argv, "+hV", options, NULL)) != -1) {
		switch (option) {
		case 'g':
			plan.collector = find_collector(optarg);
			if (!plan.collector)
				return fail(STATUS_OWN, "--gc %s: only parallel, g1 and z are known", optarg);
			break;
		case 'a':
			plan.jemalloc = !strcmp(optarg, "jemalloc");
			plan.mimalloc = !strcmp(optarg, "mimalloc");
			plan.tcmalloc = !strcmp(optarg, "tcmalloc");
			if (!plan.jemalloc && !plan.mimalloc && !plan.tcmalloc)
				return fail(STATUS_OWN, "--allocator %s: only jemalloc, mimalloc and tcmalloc are known",
					    optarg);
			break;
		case 'l':
			plan.libraries = whole_path(optarg);
			break;
		case 'n':
			plan.dry_run = true;
			break;
		case 'h':
			fputs(usage, stdout);
			return 0;
		case 'V':
			puts("vnuma-run " VNUMA_VERSION);
			return 0;
		default:
			fputs(usage, stderr);
			return STATUS_OWN;
		}
	}
	if (optind == argc) {
		fputs(usage, stderr);
		return STATUS_OWN;
	}
	return start(&plan, argv + optind);
}
