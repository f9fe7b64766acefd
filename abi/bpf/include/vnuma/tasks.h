/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What vnumad asks of threads and CPUs, and the answer of a BPF program: the one
 * value of the map `tasks`, which user space has mapped. Both ends are built together, so
 * it carries no version; tests/tasks_layout.rs compares it with the Rust mirror.
 */
#ifndef VNUMA_TASKS_H
#define VNUMA_TASKS_H

#define VNUMA_TASKS_MAX		128	/* threads that one run of the program reads */
#define VNUMA_TASKS_EVENTS	16	/* counters of a thread that there is room for */
#define VNUMA_TASKS_CPUS	8192	/* CPUs that there is room for */
#define VNUMA_TASKS_MASK_WORDS	128	/* words of a mask of CPUs */

/* vnuma_tasks.flags: what is wanted of the threads. */
#define VNUMA_TASKS_TIMES	1	/* all but what the next one asks for */
#define VNUMA_TASKS_CALLS	2	/* state, call, stack and sleeps */

/* vnuma_task.state */
#define VNUMA_TASK_RUNS		0	/* it is on a CPU, or waits for one */
#define VNUMA_TASK_SLEEPS	1
#define VNUMA_TASK_STOPPED	2	/* by a signal */
#define VNUMA_TASK_TRACED	3	/* held by a debugger */
#define VNUMA_TASK_ENDED	4

/* vnuma_tasks.idle_ns: the CPU is offline. */
#define VNUMA_TASKS_OFFLINE	(~0ULL)

struct vnuma_task {
	__u32 tid;		/* asked for; in the initial PID namespace */
	__u32 pid;		/* its process; 0: there is no such thread */
	__u64 start_ns;		/* CLOCK_BOOTTIME of its start: another one, another thread */
	__u64 ran_ns;		/* time on a CPU */
	__u64 waited_ns;	/* time ready to run, without a CPU */
	__u32 cpu;		/* that it is on, or was on last */
	__u32 policy;		/* SCHED_* */
	__u32 state;		/* VNUMA_TASK_* */
	__s32 call;		/* system call in which it sleeps; negative: none */
	__u64 stack;		/* its stack in user space then */
	__u64 sleeps;		/* times that it has begun to sleep */
	__u32 nr_events;	/* asked for: counters of a group, the leader first */
	__u32 nr_counts;	/* the same number, or 0: they could not be read */
	__u64 enabled_ns;	/* of the group: time that its thread was on a CPU */
	__u64 running_ns;	/* time that it was counting */
	__u64 events[VNUMA_TASKS_EVENTS];	/* asked for: their ids (PERF_EVENT_IOC_ID) */
	__u64 counts[VNUMA_TASKS_EVENTS];	/* when the thread last left its CPU, or later */
	__u64 cpus[VNUMA_TASKS_MASK_WORDS];	/* that it may run on, online or not */
};

struct vnuma_tasks {
	__u32 nr_tasks;		/* threads asked for */
	__u32 nr_cpus;		/* CPUs asked for, from 0 on */
	__u32 mask_words;	/* of each mask that are wanted; the others stay as they are */
	__u32 flags;		/* VNUMA_TASKS_*; what is not wanted stays as it is */
	__u64 idle_ns[VNUMA_TASKS_CPUS];	/* since the boot, or VNUMA_TASKS_OFFLINE */
	struct vnuma_task tasks[VNUMA_TASKS_MAX];
};

#endif /* VNUMA_TASKS_H */
