// SPDX-License-Identifier: GPL-2.0
/*
 * Schedulers that leave everything to the kernel's sched_ext: a task takes an idle CPU, or waits
 * in the global queue of its node. One keeps idle CPUs by node as well, one has no tasks but those
 * that ask for it.
 */
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#define BIT_ULL(n)	(1ULL << (n))

#define SCX_OPS_SWITCH_PARTIAL		BIT_ULL(3)
#define SCX_OPS_BUILTIN_IDLE_PER_NODE	BIT_ULL(6)

/* The kernel ends a scheduler that has a task wait for so long. */
#define TIMEOUT_MS	10000

/* Members of the kernel's that are not here are left unset. */
struct sched_ext_ops {
	void (*cpu_online)(__s32 cpu);
	void (*cpu_offline)(__s32 cpu);
	__u64 flags;
	__u32 timeout_ms;
	char name[128];
};

/* Without these the kernel ends the scheduler when a CPU comes or goes. */
SEC("struct_ops/cpu_comes")
int cpu_comes(void *context)
{
	return 0;
}

SEC("struct_ops/cpu_goes")
int cpu_goes(void *context)
{
	return 0;
}

SEC(".struct_ops.link")
struct sched_ext_ops per_node = {
	.cpu_online = (void *)cpu_comes,
	.cpu_offline = (void *)cpu_goes,
	.flags = SCX_OPS_BUILTIN_IDLE_PER_NODE,
	.timeout_ms = TIMEOUT_MS,
	.name = "by_node",
};

SEC(".struct_ops.link")
struct sched_ext_ops global = {
	.cpu_online = (void *)cpu_comes,
	.cpu_offline = (void *)cpu_goes,
	.timeout_ms = TIMEOUT_MS,
	.name = "by_node",
};

SEC(".struct_ops.link")
struct sched_ext_ops partial = {
	.cpu_online = (void *)cpu_comes,
	.cpu_offline = (void *)cpu_goes,
	.flags = SCX_OPS_SWITCH_PARTIAL,
	.timeout_ms = TIMEOUT_MS,
	.name = "by_node",
};

char LICENSE[] SEC("license") = "GPL";
