// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma-faults: loads or unloads a module while one allocation of that call fails, for tests of
 * vnuma.ko on a kernel with fault injection.
 *
 *	vnuma-faults load FILE NTH [PARAMETER]
 *	vnuma-faults unload NAME NTH
 *
 * The NTHth allocation of the call fails (fail-nth, Documentation/fault-injection of the kernel).
 * Prints the error of the call, 0 if it succeeded, and how many allocations were left until the
 * one that was to fail, 0 if it did.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "vnuma-faults: %s: %s\n", what, strerror(errno));
	exit(2);
}

static void set_nth(int fd, const char *nth)
{
	if (pwrite(fd, nth, strlen(nth), 0) < 0)
		die("fail-nth");
}

int main(int argc, char **argv)
{
	char left[32] = "";
	int fd, module = -1, load, err;

	load = argc >= 4 && !strcmp(argv[1], "load");
	if (!load && (argc != 4 || strcmp(argv[1], "unload"))) {
		fprintf(stderr, "usage: vnuma-faults load FILE NTH [PARAMETER] | unload NAME NTH\n");
		return 2;
	}
	fd = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		die("/proc/thread-self/fail-nth");
	if (load) {
		module = open(argv[2], O_RDONLY | O_CLOEXEC);
		if (module < 0)
			die(argv[2]);
	}

	set_nth(fd, argv[3]);
	if (load)
		err = syscall(SYS_finit_module, module, argc > 4 ? argv[4] : "", 0);
	else
		err = syscall(SYS_delete_module, argv[2], 0);
	err = err ? errno : 0;
	if (pread(fd, left, sizeof(left) - 1, 0) < 0)
		die("fail-nth");
	set_nth(fd, "0");
	printf("%d %d\n", err, atoi(left));
	return 0;
}
