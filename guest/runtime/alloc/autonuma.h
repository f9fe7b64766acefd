/* SPDX-License-Identifier: Apache-2.0 */
/* Is AutoNUMA at work? What stands before an allocator leaves memory that is in use to it. */
#ifndef VNUMA_ALLOC_AUTONUMA_H
#define VNUMA_ALLOC_AUTONUMA_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

static char autonuma_switch[PATH_MAX];

/* Where its switch is. NULL is "/". */
static void find_autonuma(const char *root)
{
	snprintf(autonuma_switch, sizeof(autonuma_switch), "%s/proc/sys/kernel/numa_balancing", root ? root : "");
}

/* Does AutoNUMA take pages to the threads that use them? */
static bool balances(void)
{
	int saved = errno, file = open(autonuma_switch, O_RDONLY | O_CLOEXEC);
	char mode = '0';

	if (file >= 0) {
		if (read(file, &mode, 1) != 1)
			mode = '0';
		close(file);
	}
	errno = saved;
	/* NUMA_BALANCING_NORMAL; the other bit is about nodes of slower memory. */
	return mode >= '0' && mode <= '9' && (mode - '0') & 1;
}

#endif /* VNUMA_ALLOC_AUTONUMA_H */
