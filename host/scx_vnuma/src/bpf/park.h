/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where a thread waits for its cpu.max: at its return to user space or to its guest, as with the
 * kernel's own scheduler. In the kernel it may have a mutex that others want, so there it runs on,
 * and what it takes too much it lacks later. A task work tells when it is about to return.
 *
 * A thread that never returns, such as a worker of the kernel for a process, waits in the kernel,
 * and so does one for which there is no memory for a task work: for at most LEAST_PARK_NS at once.
 */
#ifndef SCX_VNUMA_PARK_H
#define SCX_VNUMA_PARK_H

/* The longest wait at once of a thread that is not at its return to user space. */
#define LEAST_PARK_NS	100000000ULL
/*
 * The longest wait at once of one that is. Until it ends the kernel can neither take the thread to
 * another CPU nor end it, and who changes its affinity waits.
 */
#define MOST_PARK_NS	1000000000ULL
/* A thread that runs for so long in the kernel is taken for one that never returns. */
#define MOST_IN_KERNEL_NS 50000000ULL
/* How often a thread looks for its wait to have begun: for some microseconds. */
#define PARK_LOOKS	4096

/* Of each thread that had to wait, by its address: an exec changes the number of a thread. */
struct work {
	struct bpf_task_work work;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4 * VNUMA_SCHED_MAX_THREADS);
	__type(key, __u64);
	__type(value, struct work);
} works SEC(".maps");

static int park(struct bpf_map *map, void *key, void *value);

/* Has park() run before a thread returns. False: it cannot. */
static bool ask(struct task_struct *p, struct thread *t)
{
	struct work *work, none = {};
	__u64 key = (__u64)p;

	if (!bpf_ksym_exists(bpf_task_work_schedule_resume___weak))
		return false;
	if (t->asked)
		return t->in_kernel_ns < MOST_IN_KERNEL_NS;
	work = bpf_map_lookup_elem(&works, &key);
	if (!work) {
		bpf_map_update_elem(&works, &key, &none, BPF_NOEXIST);
		work = bpf_map_lookup_elem(&works, &key);
	}
	if (!work || bpf_task_work_schedule_resume___weak(p, &work->work, &works, park))
		return false;
	t->asked = true;
	t->in_kernel_ns = 0;
	return true;
}

/*
 * A thread is about to return. It gives its CPU away, and enqueue() has it wait here. Here it cannot
 * migrate, and the kernel waits for it if it frees BPF programs. It is not asked for again from here,
 * or it could not be killed. If another class has its CPU just now it does not wait, and is asked for
 * again at the next tick.
 */
static int park(struct bpf_map *map, void *key, void *value)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);
	__u32 i;

	if (!t)
		return 0;
	t->asked = false;
	if (!t->until_ns)
		return 0;
	t->parks = true;
	scx_bpf_kick_cpu(bpf_get_smp_processor_id(), SCX_KICK_PREEMPT);
	bpf_for(i, 0, PARK_LOOKS) {
		/* It has waited. */
		if (!*(volatile bool *)&t->parks)
			break;
	}
	/* Later it may have a lock. */
	t->parks = false;
	return 0;
}

/* Until when a thread that is queued waits for a cpu.max. 0: it is queued as if it had none. */
static __u64 parked_until(struct task_struct *p, struct thread *t, __u64 now)
{
	__u64 until = throttled_until(t, now);
	__u64 most = now + (t->parks ? MOST_PARK_NS : LEAST_PARK_NS);

	if (!until || (!t->parks && ask(p, t)))
		return 0;
	return until < most ? until : most;
}

#endif
