// SPDX-License-Identifier: GPL-2.0
/*
 * Reads what the scheduler knows of many threads, and how long CPUs were idle, in one call:
 * what /proc/PID/task/TID/{schedstat,stat,status} and /proc/stat say, without making and
 * parsing the text of these files.
 *
 * One of the two programs is run by user space (BPF_PROG_TEST_RUN), attached to nothing.
 * They need the kfunc bpf_task_from_pid() in programs of this type, which kernels have from
 * 6.10 on. The one that reads CPUs as well needs symbols of the kernel's variables, too
 * (CONFIG_KALLSYMS_ALL).
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <vnuma/tasks.h>
#include "kernel.h"

/* Indexes of kernel_cpustat.cpustat (enum cpu_usage_stat). */
#define CPUTIME_IDLE	5
#define CPUTIME_IOWAIT	6

/* tick_sched.flags: the CPU is idle now (TS_FLAG_IDLE_ACTIVE in kernel/time/tick-sched.h). */
#define IDLE_ACTIVE	0x4

/* task_struct.__state (include/linux/sched.h) */
#define TASK_STOPPED	0x4	/* __TASK_STOPPED */
#define TASK_TRACED	0x8	/* __TASK_TRACED */

/* Looks at times of a CPU that is becoming idle, or ends being so, at that moment. */
#define TRIES		4

/* Counters of a thread that are looked at for the leader of the group. */
#define LOOKED_AT	64

#define READ_ONCE(x)	(*(__volatile__ typeof(x) *)&(x))

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vnuma_tasks);
} tasks SEC(".maps");

static __always_inline struct vnuma_tasks *shared(void)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&tasks, &only);
}

/*
 * The verifier takes what these return for a pointer to the kernel's type: it is read by plain
 * loads, which give 0 where nothing is mapped, and not by a call for each member.
 */
#define EVENT(pointer)	bpf_core_cast(pointer, struct perf_event)
#define HOLDER(entry, member) \
	EVENT((void *)(entry) - bpf_core_field_offset(struct perf_event, member))
#define SIBLING(entry)	HOLDER(entry, sibling_list)
#define IN_LIST(entry)	HOLDER(entry, event_entry)

/* The leader with this id. New events come first: the first one is of its group, mostly. */
static __always_inline struct perf_event *find_leader(struct task_struct *task, __u64 wanted)
{
	struct perf_event_context *context = task->perf_event_ctxp;
	struct list_head *entry;
	int i;

	if (!context)
		return NULL;
	entry = context->event_list.next;
	for (i = 0; i < LOOKED_AT && entry; i++) {
		struct perf_event *event = IN_LIST(entry), *leader = EVENT(event->group_leader);

		/* The head of the list is no event; what is read there has no such id. */
		if (leader->id == wanted)
			return leader;
		entry = event->event_entry.next;
	}
	return NULL;
}

/*
 * The counts of a group as they were when the thread last left its CPU, or were read last:
 * the CPU is not interrupted for newer ones. If the thread is leaving it right now, some
 * may be newer than others, by one turn on the CPU. No lock is held: what is freed
 * meanwhile has no id that is asked for, and is read without faults.
 */
static __always_inline void read_events(struct vnuma_task *to, struct task_struct *task)
{
	__u32 events = READ_ONCE(to->nr_events), k;
	struct perf_event *leader, *event;
	struct list_head *entry;

	to->nr_counts = 0;
	if (!bpf_core_field_exists(task->perf_event_ctxp) || !events || events > VNUMA_TASKS_EVENTS)
		return;
	leader = find_leader(task, to->events[0]);
	if (!leader)
		return;
	event = leader;
	to->enabled_ns = leader->total_time_enabled;
	to->running_ns = leader->total_time_running;
	entry = leader->sibling_list.next;
	for (k = 0; k < VNUMA_TASKS_EVENTS && k < events; k++) {
		if (event->id != to->events[k])
			return;
		to->counts[k] = event->count.a.a.counter;
		if (k)
			entry = event->sibling_list.next;
		if (!entry)
			return;
		event = SIBLING(entry);
	}
	if (READ_ONCE(leader->total_time_enabled) == to->enabled_ns)
		to->nr_counts = events;
}

static __always_inline __u32 state_of(struct task_struct *task)
{
	__u32 state = READ_ONCE(task->__state);

	if (READ_ONCE(task->exit_state))
		return VNUMA_TASK_ENDED;
	if (state & TASK_STOPPED)
		return VNUMA_TASK_STOPPED;
	if (state & TASK_TRACED)
		return VNUMA_TASK_TRACED;
	return state ? VNUMA_TASK_SLEEPS : VNUMA_TASK_RUNS;
}

/*
 * As /proc/PID/syscall. Registers of a thread that runs say nothing; one that was woken up
 * meanwhile counts as running.
 */
static __always_inline void read_call(struct vnuma_task *to, struct task_struct *task)
{
	struct pt_regs *regs;

	to->call = -1;
	to->stack = 0;
	to->sleeps = task->nvcsw;
	to->state = state_of(task);
	if (to->state != VNUMA_TASK_SLEEPS)
		return;
	regs = (struct pt_regs *)bpf_task_pt_regs(task);
	if (bpf_core_field_exists(regs->orig_ax))
		to->call = (__s64)regs->orig_ax;
	else if (bpf_core_field_exists(regs->syscallno))
		to->call = regs->syscallno;
	to->stack = regs->sp;
	to->state = state_of(task);
}

static long read_task(__u32 at, void *unused)
{
	struct vnuma_tasks *all = shared();
	struct vnuma_task *to;
	struct task_struct *task;
	__u32 size, flags;

	if (!all || at >= VNUMA_TASKS_MAX)
		return 1;
	to = &all->tasks[at];
	flags = READ_ONCE(all->flags);
	to->pid = 0;
	task = bpf_task_from_pid(to->tid);
	if (!task)
		return 0;
	to->start_ns = task->start_boottime;
	if (flags & VNUMA_TASKS_CALLS)
		read_call(to, task);
	if (!(flags & VNUMA_TASKS_TIMES)) {
		to->pid = task->tgid;
		goto out;
	}
	to->ran_ns = task->se.sum_exec_runtime;
	to->waited_ns = task->sched_info.run_delay;
	to->cpu = task->thread_info.cpu;
	to->policy = task->policy;
	read_events(to, task);
	size = READ_ONCE(all->mask_words) * 8;
	if (size > bpf_core_field_size(task->cpus_mask))
		size = bpf_core_field_size(task->cpus_mask);
	if (size <= sizeof(to->cpus) &&
	    !bpf_probe_read_kernel(to->cpus, size, &task->cpus_mask))
		to->pid = task->tgid;
out:
	bpf_task_release(task);
	return 0;
}

/* The kernel shows idle time and time waiting for I/O apart; their sum is wanted here. */
static __always_inline __u64 idle_of(struct kernel_cpustat *times)
{
	return times->cpustat[CPUTIME_IDLE] + times->cpustat[CPUTIME_IOWAIT];
}

static __always_inline __u64 with_now(__u64 idle, __u64 since)
{
	__u64 now = bpf_ktime_get_ns();

	return now > since ? idle + now - since : idle;
}

/* Kernels that keep it all in kernel_cpustat. */
static __always_inline __u64 idle_ns_new(struct kernel_cpustat *times)
{
	__u64 idle = 0;
	int try;

	for (try = 0; try < TRIES; try++) {
		unsigned int seq = READ_ONCE(times->idle_sleeptime_seq.sequence);

		idle = idle_of(times);
		if (READ_ONCE(times->idle_elapse))
			idle = with_now(idle, times->idle_entrytime);
		if (!(seq & 1) && READ_ONCE(times->idle_sleeptime_seq.sequence) == seq)
			break;
	}
	return idle;
}

/* Older kernels, while they stop the tick of idle CPUs. */
static __always_inline __u64 idle_ns_tick(struct tick_sched *tick)
{
	__u64 idle = 0;
	int try;

	for (try = 0; try < TRIES; try++) {
		unsigned int seq = READ_ONCE(tick->idle_sleeptime_seq.sequence);

		idle = tick->idle_sleeptime + tick->iowait_sleeptime;
		if (READ_ONCE(tick->flags) & IDLE_ACTIVE)
			idle = with_now(idle, tick->idle_entrytime);
		if (!(seq & 1) && READ_ONCE(tick->idle_sleeptime_seq.sequence) == seq)
			break;
	}
	return idle;
}

static long read_cpu(__u32 cpu, void *unused)
{
	struct kernel_cpustat *times;
	struct vnuma_tasks *all = shared();
	struct rq *rq;
	__u64 idle = 0, *to;

	if (!all || cpu >= VNUMA_TASKS_CPUS)
		return 1;
	to = &all->idle_ns[cpu];
	rq = bpf_per_cpu_ptr(&runqueues, cpu);
	times = bpf_per_cpu_ptr(&kernel_cpustat, cpu);
	if (!rq || !times || !rq->online) {
		*to = VNUMA_TASKS_OFFLINE;
		return 0;
	}
	if (bpf_core_field_exists(times->idle_elapse)) {
		idle = idle_ns_new(times);
	} else if (bpf_core_field_exists(((struct tick_sched *)0)->idle_sleeptime) &&
		   &tick_cpu_sched) {
		struct tick_sched *tick = bpf_per_cpu_ptr(&tick_cpu_sched, cpu);

		if (tick)
			idle = idle_ns_tick(tick);
	}
	/* The tick counts it if it is never stopped. */
	*to = idle ? idle : idle_of(times);
	return 0;
}

SEC("syscall")
int vnuma_tasks(void *unused)
{
	struct vnuma_tasks *all = shared();

	if (!all)
		return 1;
	bpf_loop(READ_ONCE(all->nr_tasks), read_task, NULL, 0);
	return 0;
}

SEC("syscall")
int vnuma_tasks_and_cpus(void *unused)
{
	struct vnuma_tasks *all = shared();

	if (!all)
		return 1;
	bpf_loop(READ_ONCE(all->nr_tasks), read_task, NULL, 0);
	bpf_loop(READ_ONCE(all->nr_cpus), read_cpu, NULL, 0);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
