// SPDX-License-Identifier: Apache-2.0
/* For a test, preloaded before the overlay: a thread is on another CPU, 0 or 1, whenever it asks. */
#include <sched.h>
#include <stdint.h>

int getcpu(unsigned int *cpu, unsigned int *node)
{
	static __thread uint64_t state;

	/* Xorshift, from another place for each thread. */
	if (!state)
		state = (uintptr_t)&state;
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	if (cpu)
		*cpu = state >> 20 & 1;
	if (node)
		*node = state >> 20 & 1;
	return 0;
}
