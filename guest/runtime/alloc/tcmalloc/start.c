// SPDX-License-Identifier: Apache-2.0
/*
 * tcmalloc takes an object of every 2 MiB for its profile of the heap, and gives it memory of no node. Nobody asks a
 * library that is preloaded for a profile.
 */
#include <stdint.h>

void TCMalloc_Internal_SetProfileSamplingInterval(int64_t bytes);

static __attribute__((constructor)) void start(void)
{
	TCMalloc_Internal_SetProfileSamplingInterval(0);
}
