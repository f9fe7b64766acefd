// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma-check: does everything in this guest agree on which node each CPU is on?
 *
 *	vnuma-check [--json] [--strict] [--kernel] APIC:NODE,APIC:NODE,...
 *	vnuma-check --wait GENERATION [--timeout SECONDS]
 *	vnuma-check --poll SECONDS
 *	vnuma-check --events COUNT [--timeout SECONDS]
 *	vnuma-check --load SECONDS
 *
 * The first form compares every online CPU's node, by every interface that shows it,
 * with what the host says: sysfs (lists, both links, has_cpu), the vDSO's registers
 * and getcpu by vDSO, by system call and by rseq, where fresh pages come from, the
 * spans of the scheduler's domains, lscpu, numactl and /dev/vnuma. A CPU that is not
 * named must agree with itself. Each disagreement is a line; exit status 1 if there
 * is any, 2 if the check could not be made. What a guest need not have (lscpu,
 * numactl, /dev/vnuma, scheduler domains) is passed over with a line when it is
 * missing; with --strict that is a disagreement as well. --kernel also compares what
 * no interface shows: which CPUs share a cache for the scheduler.
 *
 * --wait returns when /dev/vnuma has that generation (16 hex digits), status 3 after
 * the time limit. --poll prints each generation as it comes, with the time
 * from the interrupt to the agreement. --events first prints "watching GENERATION",
 * then "poll GENERATION" for each that poll() reports and "uevent GENERATION" for
 * each uevent, until a second after COUNT of both; status 3 after the time limit.
 * --load returns at once and leaves two busy
 * processes per CPU behind, which allocate, sleep, fork and wake each other.
 *
 * It shares no code with the driver: the expectation is an argument, and APIC ids
 * come from /proc/cpuinfo.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device.h"
#include "kcore.h"

#define MAX_CPUS	4096
#define MAX_NODES	1024
#define PAGES		16
/* move_pages() has no node for a page that is isolated or on its way elsewhere. */
#define PAGE_TRIES	100
#define PAGE_RETRY_US	1000
#define CPU_DIR		"/sys/devices/system/cpu"
#define NODE_DIR	"/sys/devices/system/node"
/* GDT_ENTRY_CPUNODE * 8 + 3 of arch/x86/include/asm/segment.h */
#define CPUNODE_SEG	(15 * 8 + 3)
#define CPUNODE_SHIFT	12
/* AT_RSEQ_FEATURE_SIZE of linux/auxvec.h, which older libcs lack */
#define RSEQ_FEATURE_SIZE_AUX	27
#define RSEQ_NODE_ID_OFFSET	20

static bool json;
static bool strict;
static bool kernel;
static unsigned int disagreements;

static int nr_cpus;
static int apic_ids[MAX_CPUS];
static bool online[MAX_CPUS];
static bool named[MAX_CPUS];
static int expected[MAX_CPUS];

/* One disagreement; @found is what was found instead. */
static void disagree(int cpu, const char *check, int want, const char *format,
		     ...)
{
	char found[256];
	va_list args;

	va_start(args, format);
	vsnprintf(found, sizeof(found), format, args);
	va_end(args);
	if (json)
		printf("%s{\"cpu\":%d,\"check\":\"%s\",\"expected\":%d,\"found\":\"%s\"}",
		       disagreements ? "," : "", cpu, check, want, found);
	else
		printf("CPU %d: %s: expected node %d, found %s\n", cpu, check,
		       want, found);
	disagreements++;
}

/* Something could not be compared. */
static void not_compared(const char *check, const char *why)
{
	if (strict)
		disagree(-1, check, -1, "%s, so nothing to compare", why);
	else
		fprintf(stderr, "vnuma-check: %s: %s, not compared\n", check,
			why);
}

static bool read_line(char *buffer, int size, const char *format, ...)
{
	char path[256];
	va_list args;
	FILE *file;
	bool ok;

	va_start(args, format);
	vsnprintf(path, sizeof(path), format, args);
	va_end(args);
	file = fopen(path, "r");
	if (!file)
		return false;
	ok = fgets(buffer, size, file);
	if (!ok)
		buffer[0] = 0;
	buffer[strcspn(buffer, "\n")] = 0;
	fclose(file);
	return true;
}

/* Sets members[i] for each i of a list like "0-3,7". */
static void parse_list(const char *list, bool *members, int size)
{
	memset(members, 0, size * sizeof(*members));
	while (*list) {
		char *end;
		long from = strtol(list, &end, 10), to = from;

		if (end == list)
			return;
		if (*end == '-')
			to = strtol(end + 1, &end, 10);
		for (; from >= 0 && from <= to && from < size; from++)
			members[from] = true;
		list = *end == ',' ? end + 1 : end;
	}
}

static void read_cpus(void)
{
	char line[8192];
	int cpu = -1;
	FILE *file;

	if (!read_line(line, sizeof(line), CPU_DIR "/online"))
		die("no " CPU_DIR "/online");
	parse_list(line, online, MAX_CPUS);
	for (cpu = 0; cpu < MAX_CPUS; cpu++) {
		apic_ids[cpu] = -1;
		expected[cpu] = -1;
		if (online[cpu])
			nr_cpus = cpu + 1;
	}
	file = fopen("/proc/cpuinfo", "r");
	if (!file)
		die("no /proc/cpuinfo");
	cpu = -1;
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "processor : %d", &cpu) == 1)
			continue;
		if (cpu >= 0 && cpu < MAX_CPUS)
			sscanf(line, "apicid : %d", &apic_ids[cpu]);
	}
	fclose(file);
}

/* The node whose cpulist has @cpu, -1 if none; reports a second one. */
static int node_by_cpulist(int cpu)
{
	static bool members[MAX_CPUS];
	static char line[8192];
	int node, found = -1;

	for (node = 0; node < MAX_NODES; node++) {
		if (!read_line(line, sizeof(line), NODE_DIR "/node%d/cpulist",
			       node))
			continue;
		parse_list(line, members, MAX_CPUS);
		if (!members[cpu])
			continue;
		if (found >= 0)
			disagree(cpu, "cpulist", expected[cpu],
				 "nodes %d and %d", found, node);
		found = node;
	}
	return found;
}

static void parse_expectation(char *argument)
{
	char *pair, *state = NULL;
	int cpu;

	for (pair = strtok_r(argument, ",", &state); pair;
	     pair = strtok_r(NULL, ",", &state)) {
		int apic_id, node, end = 0;

		if (sscanf(pair, "%d:%d%n", &apic_id, &node, &end) != 2 ||
		    pair[end] || node < 0 || node >= MAX_NODES)
			die("'%s' is not APIC:NODE", pair);
		for (cpu = 0; cpu < nr_cpus; cpu++)
			if (online[cpu] && apic_ids[cpu] == apic_id)
				break;
		if (cpu == nr_cpus)
			die("no online CPU has APIC id %d", apic_id);
		expected[cpu] = node;
		named[cpu] = true;
	}
	for (cpu = 0; cpu < nr_cpus; cpu++)
		if (online[cpu] && !named[cpu])
			expected[cpu] = node_by_cpulist(cpu);
}

static void check_node(int cpu, const char *check, int found)
{
	if (found != expected[cpu])
		disagree(cpu, check, expected[cpu], "%d", found);
}

/* A link from @path must lead to a directory with that name. */
static void check_link(int cpu, const char *check, const char *path,
		       const char *name)
{
	char target[4096];
	ssize_t length = readlink(path, target, sizeof(target) - 1);
	const char *base;

	if (length < 0) {
		disagree(cpu, check, expected[cpu], "no link %s", path);
		return;
	}
	target[length] = 0;
	base = strrchr(target, '/');
	if (strcmp(base ? base + 1 : target, name) || access(path, F_OK))
		disagree(cpu, check, expected[cpu], "%s leads to %s", path,
			 target);
}

static void check_links(int cpu)
{
	char path[256], name[32], line[16];
	struct dirent *entry;
	int node;
	DIR *dir;

	snprintf(path, sizeof(path), CPU_DIR "/cpu%d/node%d", cpu,
		 expected[cpu]);
	snprintf(name, sizeof(name), "node%d", expected[cpu]);
	check_link(cpu, "link cpu->node", path, name);
	snprintf(path, sizeof(path), NODE_DIR "/node%d/cpu%d", expected[cpu],
		 cpu);
	snprintf(name, sizeof(name), "cpu%d", cpu);
	check_link(cpu, "link node->cpu", path, name);

	/* And none that was left behind. */
	snprintf(path, sizeof(path), CPU_DIR "/cpu%d", cpu);
	dir = opendir(path);
	if (!dir)
		die("no %s", path);
	while ((entry = readdir(dir)))
		if (sscanf(entry->d_name, "node%d", &node) == 1 &&
		    node != expected[cpu])
			disagree(cpu, "link cpu->node", expected[cpu],
				 "also a link to node %d", node);
	closedir(dir);
	for (node = 0; node < MAX_NODES; node++) {
		if (!read_line(line, sizeof(line), NODE_DIR "/node%d/distance",
			       node) || node == expected[cpu])
			continue;
		snprintf(path, sizeof(path), NODE_DIR "/node%d/cpu%d", node,
			 cpu);
		if (!faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW))
			disagree(cpu, "link node->cpu", expected[cpu],
				 "also a link from node %d", node);
	}
}

static void check_has_cpu(void)
{
	static bool has_cpu[MAX_NODES], wanted[MAX_NODES];
	char line[8192];
	int i;

	if (!read_line(line, sizeof(line), NODE_DIR "/has_cpu"))
		die("no " NODE_DIR "/has_cpu");
	parse_list(line, has_cpu, MAX_NODES);
	for (i = 0; i < nr_cpus; i++)
		if (online[i] && expected[i] >= 0 && expected[i] < MAX_NODES)
			wanted[expected[i]] = true;
	for (i = 0; i < MAX_NODES; i++)
		if (has_cpu[i] != wanted[i])
			disagree(-1, "has_cpu", i, "%s (list %s)",
				 has_cpu[i] ? "set" : "not set", line);
}

static bool have_rdtscp(void)
{
	static int answer = -1;
	char line[8192];
	FILE *file;

	if (answer >= 0)
		return answer;
	answer = 0;
	file = fopen("/proc/cpuinfo", "r");
	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, "flags", 5) && strstr(line, " rdtscp")) {
			answer = 1;
			break;
		}
	if (file)
		fclose(file);
	return answer;
}

/* Both sources of the vDSO, whichever of them it uses here. */
static void check_registers(int cpu)
{
	uint32_t limit = 0, aux = 0, low, high;

	asm volatile("lsl %1, %0" : "=r"(limit) : "r"(CPUNODE_SEG) : "cc");
	if ((int)(limit & 0xfff) != cpu)
		disagree(cpu, "GDT entry", expected[cpu], "CPU %d",
			 limit & 0xfff);
	check_node(cpu, "GDT entry", limit >> CPUNODE_SHIFT);
	if (!have_rdtscp())
		return;
	asm volatile("rdtscp" : "=a"(low), "=d"(high), "=c"(aux));
	check_node(cpu, "MSR_TSC_AUX", aux >> CPUNODE_SHIFT);
}

static void check_rseq(int cpu)
{
	const char *area = (char *)__builtin_thread_pointer() + __rseq_offset;

	/* The kernel fills node_id since 6.3; libc may not have registered. */
	if (!__rseq_size ||
	    getauxval(RSEQ_FEATURE_SIZE_AUX) < RSEQ_NODE_ID_OFFSET + 4)
		return;
	check_node(cpu, "rseq node_id",
		   *(const volatile uint32_t *)(area + RSEQ_NODE_ID_OFFSET));
}

static void check_getcpu(int cpu)
{
	unsigned int c, node;

	if (getcpu(&c, &node) || (int)c != cpu)
		disagree(cpu, "getcpu by vDSO", expected[cpu], "CPU %u", c);
	check_node(cpu, "getcpu by vDSO", node);
	if (syscall(SYS_getcpu, &c, &node, NULL) || (int)c != cpu)
		disagree(cpu, "getcpu by syscall", expected[cpu], "CPU %u", c);
	check_node(cpu, "getcpu by syscall", node);
}

/* The node of each page; negative if it still has none after some tries. */
static void pages_to_nodes(void **pages, int *nodes)
{
	int try, i;

	for (try = 0; try < PAGE_TRIES; try++) {
		if (try)
			usleep(PAGE_RETRY_US);
		if (syscall(SYS_move_pages, 0, PAGES, pages, NULL, nodes, 0))
			die("move_pages: %s", strerror(errno));
		for (i = 0; i < PAGES && nodes[i] >= 0; i++)
			;
		if (i == PAGES)
			return;
	}
}

static void check_first_touch(int cpu)
{
	long page_size = sysconf(_SC_PAGESIZE);
	int nodes[PAGES], i, elsewhere = 0, other = -1;
	void *pages[PAGES];
	char *area;

	area = mmap(NULL, PAGES * page_size, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	madvise(area, PAGES * page_size, MADV_NOHUGEPAGE);
	for (i = 0; i < PAGES; i++) {
		pages[i] = area + i * page_size;
		*(volatile char *)pages[i] = 1;
	}
	pages_to_nodes(pages, nodes);
	for (i = 0; i < PAGES; i++) {
		if (nodes[i] == expected[cpu])
			continue;
		elsewhere++;
		other = nodes[i];
	}
	if (elsewhere)
		disagree(cpu, "first touch", expected[cpu],
			 "%d of %d pages elsewhere (node %d)", elsewhere, PAGES,
			 other);
	munmap(area, PAGES * page_size);
}

static void check_on_cpu(int cpu)
{
	cpu_set_t *set = CPU_ALLOC(MAX_CPUS);
	size_t size = CPU_ALLOC_SIZE(MAX_CPUS);

	CPU_ZERO_S(size, set);
	CPU_SET_S(cpu, size, set);
	if (sched_setaffinity(0, size, set))
		die("CPU %d: sched_setaffinity: %s", cpu, strerror(errno));
	CPU_FREE(set);
	check_registers(cpu);
	check_getcpu(cpu);
	check_rseq(cpu);
	check_first_touch(cpu);
}

/* A mask as /proc/schedstat prints it: "3f" or "00000001,ffffffff". */
static void parse_mask(const char *mask, bool *members)
{
	int length = strcspn(mask, " \n"), bit = 0, i, b;

	memset(members, 0, MAX_CPUS * sizeof(*members));
	for (i = length - 1; i >= 0; i--) {
		char digit[2] = { mask[i], 0 };
		int value;

		if (mask[i] == ',')
			continue;
		value = strtol(digit, NULL, 16);
		for (b = 0; b < 4; b++, bit++)
			if (bit < MAX_CPUS)
				members[bit] = value >> b & 1;
	}
}

/* Does @span have just the CPUs of @cpu's node that share a cache or core with it? */
static bool is_shared_part(int cpu, const bool *span)
{
	static const char *const lists[] = {
		"topology/thread_siblings_list",
		"cache/index2/shared_cpu_list",
		"cache/index3/shared_cpu_list",
	};
	static bool sharing[MAX_CPUS];
	char line[8192];
	unsigned int i;
	int c;

	for (i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
		if (!read_line(line, sizeof(line), CPU_DIR "/cpu%d/%s", cpu,
			       lists[i]))
			continue;
		parse_list(line, sharing, MAX_CPUS);
		for (c = 0; c < nr_cpus; c++)
			if (span[c] != (sharing[c] &&
					expected[c] == expected[cpu]))
				break;
		if (c == nr_cpus)
			return true;
	}
	return false;
}

/*
 * A span is a union of whole nodes, or a part of the CPU's node that shares a cache.
 * Return: whether it is exactly the node.
 */
static bool check_span(int cpu, const bool *span, const char *text)
{
	int length = strcspn(text, " \n"), c;
	bool whole = true, node_only = true;
	static bool touched[MAX_NODES];

	memset(touched, 0, sizeof(touched));
	for (c = 0; c < nr_cpus; c++)
		if (span[c] && expected[c] >= 0)
			touched[expected[c]] = true;
	for (c = 0; c < nr_cpus; c++) {
		if (!online[c] || expected[c] < 0)
			continue;
		if (span[c] && expected[c] != expected[cpu])
			node_only = false;
		if (!span[c] && touched[expected[c]])
			whole = false;
	}
	if (!span[cpu])
		disagree(cpu, "scheduler domain", expected[cpu],
			 "span %.*s without the CPU", length, text);
	else if (!whole && (!node_only || !is_shared_part(cpu, span)))
		disagree(cpu, "scheduler domain", expected[cpu],
			 "span %.*s, which cuts through a node", length, text);
	return node_only && whole;
}

static int count_on_node(int node)
{
	int cpu, count = 0;

	for (cpu = 0; cpu < nr_cpus; cpu++)
		count += online[cpu] && expected[cpu] == node;
	return count;
}

static int count_online(void)
{
	int cpu, count = 0;

	for (cpu = 0; cpu < nr_cpus; cpu++)
		count += online[cpu];
	return count;
}

/* What the domains of one CPU are, taken together. */
struct domains {
	bool any;
	bool has_node;
	bool has_all;
};

static void check_cpu_domains(int cpu, const struct domains *domains)
{
	if (!domains->any) {
		/* isolcpus= and cpuset partitions can have it so. */
		if (strict && count_online() > 1)
			disagree(cpu, "scheduler domain", expected[cpu],
				 "no domain at all");
		return;
	}
	if (!domains->has_node && count_on_node(expected[cpu]) > 1)
		disagree(cpu, "scheduler domain", expected[cpu],
			 "no domain spans that node");
	if (!domains->has_all)
		disagree(cpu, "scheduler domain", expected[cpu],
			 "no domain spans all CPUs");
}

static void add_domain(int cpu, const char *mask, struct domains *domains)
{
	static bool span[MAX_CPUS];
	int c;

	domains->any = true;
	parse_mask(mask, span);
	domains->has_node |= check_span(cpu, span, mask);
	for (c = 0; c < nr_cpus && (span[c] || !online[c]); c++)
		;
	domains->has_all |= c == nr_cpus;
}

/* isolcpus= and cpuset partitions cut domains: then this check does not apply. */
static void check_domains(void)
{
	static struct domains domains[MAX_CPUS];
	static char line[65536];
	FILE *file = fopen("/proc/schedstat", "r");
	int cpu = -1, level;

	if (!file) {
		not_compared("scheduler domain", "/proc/schedstat unreadable");
		return;
	}
	while (fgets(line, sizeof(line), file)) {
		char *mask = strchr(line, ' ');

		if (sscanf(line, "cpu%d", &cpu) == 1 || !mask || cpu < 0 ||
		    cpu >= nr_cpus || sscanf(line, "domain%d", &level) != 1)
			continue;
		/* Version 17 names the domain before its span. */
		if (strspn(mask + 1, "0123456789abcdef,") !=
		    strcspn(mask + 1, " \n"))
			mask = strchr(mask + 1, ' ');
		if (mask)
			add_domain(cpu, mask + 1, &domains[cpu]);
	}
	fclose(file);
	for (cpu = 0; cpu < nr_cpus; cpu++)
		if (online[cpu])
			check_cpu_domains(cpu, &domains[cpu]);
}

/* A program must name each online CPU once. */
static void check_seen(const char *check, bool failed, int seen)
{
	if (failed)
		not_compared(check, "it cannot be run");
	else if (seen != count_online())
		disagree(-1, check, -1, "%d of %d CPUs", seen, count_online());
}

static void check_lscpu(void)
{
	FILE *pipe = popen("lscpu -p=CPU,NODE 2>/dev/null", "r");
	char line[256];
	int cpu, node, seen = 0;

	while (pipe && fgets(line, sizeof(line), pipe)) {
		if (sscanf(line, "%d,%d", &cpu, &node) != 2 || cpu < 0 ||
		    cpu >= nr_cpus)
			continue;
		check_node(cpu, "lscpu", node);
		seen++;
	}
	check_seen("lscpu", !pipe || pclose(pipe), seen);
}

static void check_numactl(void)
{
	FILE *pipe = popen("numactl -H 2>/dev/null", "r");
	static char line[65536];
	int node, at, cpu, step, seen = 0;

	while (pipe && fgets(line, sizeof(line), pipe)) {
		if (sscanf(line, "node %d cpus:%n", &node, &at) != 1 ||
		    strncmp(line + strcspn(line, ":") - 4, "cpus", 4))
			continue;
		for (; sscanf(line + at, "%d%n", &cpu, &step) == 1; at += step)
			if (cpu >= 0 && cpu < nr_cpus) {
				check_node(cpu, "numactl -H", node);
				seen++;
			}
	}
	check_seen("numactl -H", !pipe || pclose(pipe), seen);
}

static void check_device(void)
{
	const struct vnuma_gd_page *page;
	struct vnuma_gd_page copy;
	int fd, cpu;

	page = map_device(&fd);
	if (!page) {
		not_compared("/dev/vnuma", strerror(errno));
		return;
	}
	copy_page(page, &copy);
	for (cpu = 0; cpu < nr_cpus && cpu < VNUMA_GD_MAX_CPUS; cpu++)
		if (online[cpu])
			check_node(cpu, "/dev/vnuma", copy.cpu_node[cpu]);
	close(fd);
}

/* CPUs share a cache for the scheduler whose ids of it (sd_llc_id) are alike. They must not on two nodes. */
static void check_caches(void)
{
	uint64_t id = kernel_symbol("sd_llc_id"), offsets = kernel_symbol("__per_cpu_offset");
	static int ids[MAX_CPUS];
	int cpu, other;

	if (!id || !offsets || !kcore_open()) {
		not_compared("sd_llc_id", "no address, or no /proc/kcore");
		return;
	}
	for (cpu = 0; cpu < nr_cpus; cpu++) {
		uint64_t offset;

		if (!online[cpu])
			continue;
		if (!kcore_read(offsets + cpu * sizeof(offset), &offset, sizeof(offset)) ||
		    !kcore_read(id + offset, &ids[cpu], sizeof(ids[cpu])))
			die("/proc/kcore has no sd_llc_id of CPU %d", cpu);
		for (other = 0; other < cpu; other++)
			if (online[other] && ids[other] == ids[cpu] &&
			    expected[other] != expected[cpu])
				disagree(cpu, "sd_llc_id", expected[cpu],
					 "%d, as of CPU %d on node %d", ids[cpu], other,
					 expected[other]);
	}
}

static int check_all(char *expectation)
{
	int cpu, checked = 0;

	read_cpus();
	if (json)
		printf("{\"disagreements\":[");
	parse_expectation(expectation);
	for (cpu = 0; cpu < nr_cpus; cpu++) {
		if (!online[cpu])
			continue;
		check_node(cpu, "cpulist", node_by_cpulist(cpu));
		check_links(cpu);
		check_on_cpu(cpu);
		checked++;
	}
	check_has_cpu();
	check_domains();
	check_lscpu();
	check_numactl();
	check_device();
	if (kernel)
		check_caches();
	if (json)
		printf("],\"cpus\":%d,\"ok\":%s}\n", checked,
		       disagreements ? "false" : "true");
	else
		printf("%d CPUs, %u disagreements\n", checked, disagreements);
	return disagreements ? 1 : 0;
}

/* What the scheduler and the allocator do under load, until @until. */
static void work(double until, bool sleeper)
{
	const size_t size = 1 << 20;

	while (now_s() < until) {
		char *area = mmap(NULL, size, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		pid_t child;

		if (area != MAP_FAILED) {
			memset(area, 1, size);
			munmap(area, size);
		}
		child = fork();
		if (!child)
			_exit(0);
		if (child > 0)
			waitpid(child, NULL, 0);
		if (sleeper)
			usleep(1000);
	}
}

static int load(double seconds)
{
	int processes = 2 * sysconf(_SC_NPROCESSORS_ONLN), i, null;
	double until = now_s() + seconds;

	for (i = 0; i < processes; i++) {
		if (fork())
			continue;
		/* The caller must not wait for its output to end. */
		null = open("/dev/null", O_RDWR);
		dup2(null, 0);
		dup2(null, 1);
		dup2(null, 2);
		setsid();
		work(until, i % 2);
		_exit(0);
	}
	return 0;
}

static void usage(void)
{
	fprintf(stderr,
		"usage: vnuma-check [--json] [--strict] [--kernel] APIC:NODE,...\n"
		"       vnuma-check --wait GENERATION [--timeout SECONDS]\n"
		"       vnuma-check --poll SECONDS\n"
		"       vnuma-check --events COUNT [--timeout SECONDS]\n"
		"       vnuma-check --load SECONDS\n");
	exit(2);
}

int main(int argc, char **argv)
{
	const char *wait = NULL, *events = NULL, *seconds = NULL;
	char *expectation = NULL;
	double limit;
	int i;

	for (i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json"))
			json = true;
		else if (!strcmp(argv[i], "--strict"))
			strict = true;
		else if (!strcmp(argv[i], "--kernel"))
			kernel = true;
		else if (!strcmp(argv[i], "--wait") && i + 1 < argc)
			wait = argv[++i];
		else if (!strcmp(argv[i], "--events") && i + 1 < argc)
			events = argv[++i];
		else if ((!strcmp(argv[i], "--timeout") ||
			  !strcmp(argv[i], "--poll")) && i + 1 < argc)
			seconds = argv[++i];
		else if (!strcmp(argv[i], "--load") && i + 1 < argc)
			return load(atof(argv[i + 1]));
		else if (argv[i][0] != '-' && !expectation)
			expectation = argv[i];
		else
			usage();
	}
	if (expectation && !wait && !events && !seconds)
		return check_all(expectation);
	if (expectation || (wait && events) || (!wait && !events && !seconds))
		usage();
	limit = seconds ? atof(seconds) : 30;
	if (events)
		return follow_events(atoi(events), limit);
	return follow(wait, wait ? strtoull(wait, NULL, 16) : 0, limit);
}
