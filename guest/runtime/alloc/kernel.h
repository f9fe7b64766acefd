/* SPDX-License-Identifier: Apache-2.0 */
/* What stands before an allocator asks the kernel: is AutoNUMA at work, and where is this thread? */
#ifndef VNUMA_ALLOC_KERNEL_H
#define VNUMA_ALLOC_KERNEL_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vnuma/vnuma.h>

#include "../src/calls.h"

#define SWITCHES	"/proc/sys/kernel"

static char autonuma_switch[PATH_MAX], switches[PATH_MAX];

/* Where its switch is. NULL is "/". */
static void find_autonuma(const char *root)
{
	snprintf(autonuma_switch, sizeof(autonuma_switch), "%s" SWITCHES "/numa_balancing", root ? root : "");
	snprintf(switches, sizeof(switches), "%s" SWITCHES, root ? root : "");
}

/*
 * Does AutoNUMA take pages to the threads that use them? If that cannot be seen (no descriptor is left, another root,
 * seccomp) it may, and memory is left alone.
 */
static bool balances(void)
{
	int saved = errno, file = vnuma_call_open(autonuma_switch, O_RDONLY | O_CLOEXEC);
	/* A kernel without AutoNUMA has no such file, where there are others. */
	bool on = file >= 0 || errno != ENOENT || access(switches, F_OK);
	char mode;

	if (file >= 0) {
		/* NUMA_BALANCING_NORMAL; the other bit is about nodes of slower memory. */
		if (vnuma_call_read(file, &mode, 1) == 1)
			on = mode >= '0' && mode <= '9' && (mode - '0') & 1;
		vnuma_call_close(file);
	}
	errno = saved;
	return on;
}

/*
 * The node of the calling thread, or VNUMA_NO_NODE. Without the driver's page, which may come later, libvnuma has what
 * sysfs said at the start. The kernel itself knows better.
 */
static int node_now(const struct vnuma *topology)
{
	unsigned int cpu, node;

	if (vnuma_source(topology) == VNUMA_SOURCE_DEVICE || syscall(SYS_getcpu, &cpu, &node, NULL))
		return vnuma_current_node(topology);
	return node < VNUMA_MAX_NODES ? (int)node : VNUMA_NO_NODE;
}

#endif /* VNUMA_ALLOC_KERNEL_H */
