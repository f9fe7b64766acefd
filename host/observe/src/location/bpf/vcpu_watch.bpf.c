// SPDX-License-Identifier: GPL-2.0
/*
 * Reports to user space when a watched thread is put on a CPU of another node, when its
 * allowed CPUs change, and when it ends.
 *
 * The scheduler migrates threads many thousand times a second on a busy host and
 * nearly all of these moves are of no interest, so the filter sits in the kernel:
 * two bits of an array for a thread that is not watched, and no record for a move
 * within a node. A host whose vCPUs stay put causes no wake-up in user space at all.
 *
 * Only four members of task_struct are used. They are declared here and relocated
 * against the running kernel (CO-RE), so that no dump of a kernel's types is needed
 * and the same object runs on 6.1 and 7.3.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <vnuma/vcpu_event.h>

/* Threads of a word of `watched`. */
#define THREADS		(64 / VNUMA_VCPU_BITS)
#define FIRST		((1ULL << VNUMA_VCPU_BITS) - 1)
#define MAX_CPUS	8192
#define RING_BYTES	(256 * 1024)
/* So many bytes of records that wait wake who takes them. */
#define WAITING_BYTES	(RING_BYTES / 4)

struct thread_info {
	__u32 cpu;
} __attribute__((preserve_access_index));

/* As many words as the kernel was built for. */
struct cpumask {
	unsigned long bits[MAX_CPUS / 64];
};

struct task_struct {
	struct thread_info thread_info;
	int pid;
	struct cpumask cpus_mask;
} __attribute__((preserve_access_index));

/*
 * Thread ids that user space wants to hear of, and how soon: VNUMA_VCPU_WAKES, _WAITS or _PASSED.
 * User space has it mapped. 1 MiB, less than a hash table for as many threads as large hosts
 * have vCPUs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, VNUMA_VCPU_PIDS / THREADS);
	__type(key, __u32);
	__type(value, __u64);
} watched SEC(".maps");

/*
 * Whoever may set the affinity of a thread can do so many thousand times a second, to what it
 * is already. User space has this mapped as well, and clears the entry of a thread that it reads.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, VNUMA_VCPU_MASKS);
	__type(key, __u32);
	__type(value, __u64);
} masks SEC(".maps");

/* CPU to node number plus one; 0 where user space knows no node. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CPUS);
	__type(key, __u32);
	__type(value, __u32);
} cpu_node SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} events SEC(".maps");

/*
 * Records that wake nobody have a ring of their own: a record that finds another one in
 * front of it does not wake anybody, either. Nothing is published to the guest of such a
 * thread, so that its moves need not be known at once.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} waiting SEC(".maps");

/* How many records there were, by VNUMA_VCPU_COUNT_*. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, VNUMA_VCPU_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counts, &which);

	if (counter)
		(*counter)++;
}

static __always_inline void fill(struct vnuma_vcpu_event *event, __u32 tid, __u32 kind, __u32 cpu)
{
	count(VNUMA_VCPU_COUNT_REPORTED);
	event->time_ns = bpf_ktime_get_ns();
	event->tid = tid;
	event->kind = kind;
	event->cpu = cpu;
	event->reserved = 0;
}

static __always_inline int report(__u32 tid, __u32 kind, __u32 cpu)
{
	struct vnuma_vcpu_event *event;

	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		count(VNUMA_VCPU_COUNT_DROPPED);
		return 0;
	}
	fill(event, tid, kind, cpu);
	bpf_ringbuf_submit(event, 0);
	return 1;
}

static __always_inline void report_later(__u32 tid, __u32 kind, __u32 cpu)
{
	struct vnuma_vcpu_event *event;
	__u64 full;

	event = bpf_ringbuf_reserve(&waiting, sizeof(*event), 0);
	if (!event) {
		count(VNUMA_VCPU_COUNT_DROPPED);
		return;
	}
	fill(event, tid, kind, cpu);
	full = bpf_ringbuf_query(&waiting, BPF_RB_AVAIL_DATA) >= WAITING_BYTES;
	bpf_ringbuf_submit(event, full ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
}

static __always_inline __u64 *word_of(__u32 tid)
{
	__u32 at = tid / THREADS;

	return bpf_map_lookup_elem(&watched, &at);
}

static __always_inline __u32 shift_of(__u32 tid)
{
	return tid % THREADS * VNUMA_VCPU_BITS;
}

/* How a thread is watched; 0: it is not. */
static __always_inline __u32 how_watched(__u32 tid)
{
	__u64 *word = word_of(tid);

	return word ? *word >> shift_of(tid) & FIRST : 0;
}

static __always_inline __u32 node_plus_one(__u32 cpu)
{
	__u32 *node = bpf_map_lookup_elem(&cpu_node, &cpu);

	return node ? *node : 0;
}

SEC("tp_btf/sched_migrate_task")
int BPF_PROG(vnuma_migrate, struct task_struct *task, int dest_cpu)
{
	__u32 tid = task->pid, how = how_watched(tid), from_node, to_node;

	if (!how || how == VNUMA_VCPU_PASSED)
		return 0;
	from_node = node_plus_one(task->thread_info.cpu);
	to_node = node_plus_one(dest_cpu);
	/* Between two CPUs of unknown node anything may have happened: report it. */
	if (from_node && from_node == to_node)
		return 0;
	if (how == VNUMA_VCPU_WAITS)
		report_later(tid, VNUMA_VCPU_MIGRATED, dest_cpu);
	else
		report(tid, VNUMA_VCPU_MIGRATED, dest_cpu);
	return 0;
}

/* The allowed CPUs of this thread, in short. 0: they cannot be read. */
static __always_inline __u64 mask_of(struct task_struct *task, __u32 tid)
{
	__u32 words = bpf_core_field_size(task->cpus_mask) / sizeof(__u64), at;
	const void *mask = &task->cpus_mask;
	__u64 sum = tid + 1ULL, word;

	for (at = 0; at < MAX_CPUS / 64; at++) {
		if (at >= words)
			break;
		if (bpf_probe_read_kernel(&word, sizeof(word), mask + at * sizeof(word)))
			return 0;
		sum = (sum ^ word) * 0x9e3779b97f4a7c15ULL;
		sum ^= sum >> 32;
	}
	return sum;
}

/*
 * The allowed CPUs were set. To what is of no interest here, user space asks for that; but
 * whether they are others than those of the last record. What was refused leaves them as
 * they are. Two changes at one moment may leave an older one noted: such a thread is read
 * from /proc now and then, too.
 */
static __always_inline int allowed_changed(struct task_struct *task)
{
	__u32 tid = task->pid, how = how_watched(tid), at = tid % VNUMA_VCPU_MASKS;
	__u64 *known, mask;

	if (!how || how == VNUMA_VCPU_PASSED)
		return 0;
	known = bpf_map_lookup_elem(&masks, &at);
	mask = mask_of(task, tid);
	if (known && mask && *known == mask)
		return 0;
	if (report(tid, VNUMA_VCPU_AFFINITY, task->thread_info.cpu) && known)
		*known = mask;
	return 0;
}

/*
 * sched_setaffinity() and cpusets end in this function. Its later arguments differ
 * between kernels. Optional, as are the two below: a kernel may have inlined it.
 */
SEC("fexit/__set_cpus_allowed_ptr")
int BPF_PROG(vnuma_affinity, struct task_struct *task)
{
	return allowed_changed(task);
}

/*
 * select_fallback_rq() gives a thread other CPUs when none of its own is left (CPUs
 * that went offline, a cpuset without CPUs), and does not go that way: up to 6.17 by
 * do_set_cpus_allowed(), later by set_cpus_allowed_force().
 */
SEC("fexit/do_set_cpus_allowed")
int BPF_PROG(vnuma_fallback, struct task_struct *task)
{
	return allowed_changed(task);
}

SEC("fexit/set_cpus_allowed_force")
int BPF_PROG(vnuma_force, struct task_struct *task)
{
	return allowed_changed(task);
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(vnuma_exit, struct task_struct *task)
{
	__u32 tid = task->pid;
	__u64 *word = word_of(tid), bits = FIRST << shift_of(tid);

	if (!word || !(*word & bits))
		return 0;
	/* The number may be reused: its next thread is not watched. */
	__sync_fetch_and_and(word, ~bits);
	report(tid, VNUMA_VCPU_EXITED, task->thread_info.cpu);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
