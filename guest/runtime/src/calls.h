/* SPDX-License-Identifier: Apache-2.0 */
/*
 * System calls by their numbers: as functions of the C library they are cancellation points (pthreads(7)). A thread that is
 * cancelled in the middle of malloc() would leave an allocator's locks held, and in the middle of a refresh nobody could
 * refresh any more.
 */
#ifndef VNUMA_CALLS_H
#define VNUMA_CALLS_H

#include <fcntl.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static inline int vnuma_call_open(const char *path, int flags)
{
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}

/* A path without a slash at its start is below the folder. */
static inline int vnuma_call_open_below(int folder, const char *path, int flags)
{
	return (int)syscall(SYS_openat, folder, path, flags, 0);
}

static inline ssize_t vnuma_call_read(int file, void *buffer, size_t size)
{
	return syscall(SYS_read, file, buffer, size);
}

static inline void vnuma_call_close(int file)
{
	syscall(SYS_close, file);
}

#endif /* VNUMA_CALLS_H */
