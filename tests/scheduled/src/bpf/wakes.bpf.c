// SPDX-License-Identifier: GPL-2.0
/*
 * How long a watched thread waits for a CPU after it was woken: from sched_waking, in
 * the context of whoever wakes it, to the switch to it.
 *
 * A thread can be woken while it still runs, on its way to sleep. It does not wait
 * then: what was noted is dropped when it is switched out and goes on being runnable.
 * One that sleeps is woken anew, and that replaces what was noted.
 */
#include <stdbool.h>
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define MAX_WATCHED	1024
#define RING_BYTES	(1024 * 1024)

struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

/* By thread: when it was woken, or 0 if it was not, or runs since. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_WATCHED);
	__type(key, __u32);
	__type(value, __u64);
} watched SEC(".maps");

/* Nanoseconds that a thread waited, 8 bytes for each time. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} waits SEC(".maps");

/* How many did not fit. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

static __always_inline __u64 *woken(struct task_struct *task)
{
	__u32 tid = task->pid;

	return bpf_map_lookup_elem(&watched, &tid);
}

static __always_inline void report(__u64 waited_ns)
{
	__u32 first = 0;
	__u64 *count;

	/* No thread is woken for it: user space looks once a period. */
	if (!bpf_ringbuf_output(&waits, &waited_ns, sizeof(waited_ns), BPF_RB_NO_WAKEUP))
		return;
	count = bpf_map_lookup_elem(&lost, &first);
	if (count)
		__sync_fetch_and_add(count, 1);
}

SEC("tp_btf/sched_waking")
int BPF_PROG(wakes_waking, struct task_struct *task)
{
	__u64 *since = woken(task);

	if (since)
		*since = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(wakes_switch, bool preempt, struct task_struct *prev,
	     struct task_struct *next, unsigned int prev_state)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 *since = woken(prev);

	if (since && (preempt || !prev_state))
		*since = 0;
	since = woken(next);
	if (since && *since) {
		report(now - *since);
		*since = 0;
	}
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
