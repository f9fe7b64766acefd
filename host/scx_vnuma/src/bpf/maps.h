/* SPDX-License-Identifier: GPL-2.0 */
/* The maps: those of vnuma/sched.h, and what the scheduler keeps for itself. */
#ifndef SCX_VNUMA_MAPS_H
#define SCX_VNUMA_MAPS_H

#define MAX_CPUS	VNUMA_SCHED_MAX_CPUS
#define MAX_NODES	VNUMA_SCHED_MAX_NODES

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vnuma_sched_header);
} header SEC(".maps");

static struct vnuma_sched_header *get_header(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&header, &first);
}

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, VNUMA_SCHED_MAX_THREADS);
	__type(key, __u32);
	__type(value, struct vnuma_sched_assignment);
} assignments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, VNUMA_SCHED_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

static void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counts, &which);

	if (counter)
		(*counter)++;
}

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vnuma_sched_topology);
} topology SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vnuma_sched_exit);
} ended SEC(".maps");

/* What is known of a thread. */
struct thread {
	counted_cpumask *place;	/* its place, as far as the operator allows */
	__u64 epoch;		/* of the assignment that `place` is of; 0: of none */
	__u64 vtime;		/* in the time of the queue of `cpu` */
	__u64 queued_ns;	/* when it joined a queue of a CPU; 0: it has run since */
	__u64 since_ns;		/* when it began to wait, for a cpu.max or a CPU; likewise */
	__u64 running_ns;	/* when it got a CPU */
	__u32 cpu;		/* the one whose queue it was in last */
	__u32 pressure;
	__u32 in_group;		/* its weight, as its group has it; 0: it is not runnable */
	__u64 share;		/* of a CPU, when it got one; WHOLE is all */
	__u64 until_ns;		/* its control group has used up its cpu.max until then */
	__u64 late_ns;		/* when it got a CPU as it had waited too long; 0: it has not */
	__u64 parked_ns;	/* it waits until then */
	__u64 in_kernel_ns;	/* it has run since it was asked to park */
	bool brief;		/* its turn is short, as it had waited too long */
	bool asked;		/* its return to user space is awaited, to have it park */
	bool parks;		/* it is about to return to user space, and waits there */
	__u64 limited_ns;	/* when `limited` was right; 0: never */
	bool limited;		/* its group has a cpu.max, or one above it has */
	bool placed;		/* `place` counts */
	bool apply;		/* it is to be taken there */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

static struct thread *get_thread(struct task_struct *p)
{
	return bpf_task_storage_get(&threads, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* Of each CPU. */
struct queue {
	__u64 vtime;		/* of the thread that is behind most; it never goes back */
	__u64 searched_ns;	/* when the CPU looked for threads that wait too long */
	__u32 searched;		/* the CPU whose queue it looks at first then */
	__u64 apart_ns;		/* when those that wait too long for it were set apart */
	__u64 late_from_ns;	/* when the next one of these has a turn */
	__u64 served_ns;	/* when a thread of ours ran last, if none does */
	bool taken;		/* another class has the CPU since */
	__u64 again_ns;		/* when the CPU is to look for work again; 0: when something comes */
	__u32 next;		/* the thread that another one gave the CPU to; 0: none */
	__u32 next_at;		/* the CPU in whose queue that waits */
	__u64 charged_ns;	/* when `runs_vtime` was right; 0: no thread of ours runs */
	__u64 runs_vtime;	/* of the thread that runs */
	__u64 runs_share;	/* its share of a CPU */
	__u64 ends_ns;		/* when its time is up, if a tick is too late; 0: it is not */
	__u64 load;		/* shares of the thread that runs and of those that wait, as last added up */
	bool endless;		/* its time is never up, so that the CPU needs no tick */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, __u32);
	__type(value, struct queue);
} queues SEC(".maps");

#endif
