/* SPDX-License-Identifier: GPL-2.0 */
/* As much of the kernel as channel.c needs, for a test in user space. */
#ifndef VNUMA_TEST_KERNEL_H
#define VNUMA_TEST_KERNEL_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/types.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int16_t s16;
typedef long long s64;
typedef int64_t ktime_t;
typedef struct cpumask *cpumask_var_t;
struct mutex;

typedef struct {
	unsigned long bits;
} nodemask_t;

#define __percpu
#define __rcu
#define scnprintf	snprintf
#define ARRAY_SIZE(a)	(sizeof(a) / sizeof((a)[0]))
#define min_t(type, a, b)	min((type)(a), (type)(b))
#define min(a, b)	((a) < (b) ? (a) : (b))
#define max(a, b)	((a) > (b) ? (a) : (b))

#define barrier()	__asm__ __volatile__("" ::: "memory")
#define smp_rmb()	__atomic_thread_fence(__ATOMIC_ACQUIRE)
#define smp_wmb()	__atomic_thread_fence(__ATOMIC_RELEASE)
#define smp_load_acquire(p)	__atomic_load_n(p, __ATOMIC_ACQUIRE)
#define smp_store_release(p, v)	__atomic_store_n(p, v, __ATOMIC_RELEASE)

static inline void sort(void *base, size_t num, size_t size,
			int (*compare)(const void *, const void *), void *swap)
{
	(void)swap;
	qsort(base, num, size, compare);
}

/* The test's, so that it can write while the reader waits. */
void usleep_range(unsigned long least, unsigned long most);

#endif /* VNUMA_TEST_KERNEL_H */
