/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What tasks.bpf.c needs of the kernel. Only the members that are used are here: they are
 * relocated against the running kernel (CO-RE).
 */
#ifndef VNUMA_TASKS_KERNEL_H
#define VNUMA_TASKS_KERNEL_H

#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

struct cpumask {
	unsigned long bits[1];
} __attribute__((preserve_access_index));

struct thread_info {
	__u32 cpu;
} __attribute__((preserve_access_index));

struct sched_entity {
	__u64 sum_exec_runtime;
} __attribute__((preserve_access_index));

struct sched_info {
	unsigned long long run_delay;
} __attribute__((preserve_access_index));

struct list_head {
	struct list_head *next;
} __attribute__((preserve_access_index));

/* local64_t where longs have 64 bits */
struct atomic_long {
	__s64 counter;
};

struct local {
	struct atomic_long a;
};

struct count {
	struct local a;
};

struct perf_event {
	struct list_head event_entry;	/* of all of the thread */
	struct list_head sibling_list;	/* of the group: its head is the leader's */
	struct perf_event *group_leader;
	struct count count;
	__u64 total_time_enabled;
	__u64 total_time_running;
	__u64 id;
} __attribute__((preserve_access_index));

struct perf_event_context {
	struct list_head event_list;
} __attribute__((preserve_access_index));

/* Registers of a thread in user space: those of x86 and arm64. */
struct pt_regs {
	unsigned long sp;
	unsigned long orig_ax;
	int syscallno;
} __attribute__((preserve_access_index));

struct task_struct {
	unsigned int __state;
	int exit_state;
	struct perf_event_context *perf_event_ctxp;
	struct thread_info thread_info;
	struct sched_entity se;
	struct sched_info sched_info;
	unsigned int policy;
	struct cpumask cpus_mask;
	int tgid;
	unsigned long nvcsw;
	__u64 start_boottime;
} __attribute__((preserve_access_index));

struct rq {
	int online;
} __attribute__((preserve_access_index));

struct seqcount {
	unsigned int sequence;
} __attribute__((preserve_access_index));

/* Times of idle CPUs up to 7.0, and of newer kernels. */
struct tick_sched {
	unsigned long flags;
	struct seqcount idle_sleeptime_seq;
	__u64 idle_entrytime;
	__u64 idle_sleeptime;
	__u64 iowait_sleeptime;
} __attribute__((preserve_access_index));

struct kernel_cpustat {
	bool idle_elapse;
	struct seqcount idle_sleeptime_seq;
	__u64 idle_entrytime;
	__u64 cpustat[10];
} __attribute__((preserve_access_index));

struct task_struct *bpf_task_from_pid(__s32 pid) __ksym;
void bpf_task_release(struct task_struct *task) __ksym;
extern struct rq runqueues __ksym;
extern struct kernel_cpustat kernel_cpustat __ksym;
extern struct tick_sched tick_cpu_sched __ksym __weak;

#endif
