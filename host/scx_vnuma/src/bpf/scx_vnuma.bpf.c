// SPDX-License-Identifier: GPL-2.0
/*
 * A scheduler of vCPU threads: the mechanism. Where each thread belongs is decided in user
 * space (vnumad) and read from the map `assignments`; vnuma/sched.h has its layout.
 *
 * Each CPU has a queue, ordered by weighted virtual time. A thread that wakes takes an idle
 * CPU of its place; if there is none, it waits in a queue of its place, and an idle CPU
 * elsewhere is woken to steal. A CPU whose own queue is empty steals (steal.h).
 *
 * A place says where a thread is taken when it is assigned and when it wakes. It is no
 * limit: work is not left waiting while a CPU is idle, as in the paper. A thread that never
 * sleeps does not pass select_cpu(), so enqueue() looks at the epoch of the assignment. Each
 * epoch is applied once, and a later theft is not undone until the next epoch. The CPUs that
 * an operator allows (cpus_ptr) are a limit everywhere.
 *
 * A thread that wakes takes the CPU of its queue at once if it has had clearly less time than
 * the thread that runs there. So who sleeps most of the time does not wait for slices.
 *
 * CPU time is shared as control groups say. A thread's share is its weight in its group times
 * that of the group among the groups beside it, up to the root; only what is runnable counts.
 * A group that has used up its cpu.max waits for its next period in a queue of its own.
 *
 * Places count while the heartbeat of whoever decides is fresh. Later all threads are
 * treated as if they had no place.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/errno.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <vnuma/sched.h>
#include "kernel.h"
#include "maps.h"
#include "alarm.h"
#include "members.h"
#include "order.h"
#include "groups.h"
#include "park.h"
#include "place.h"
#include "waiting.h"
#include "vtime.h"
#include "steal.h"
#include "yield.h"
#include "tickless.h"
#include "slices.h"
#include "balance.h"

#define CLOCK_MONOTONIC	1

/* A thread that wakes takes a CPU from one that is ahead of it by this part of a slice. */
#define AHEAD_PART	4

/* A thread whose CPU another class has taken is left to CPUs of its place for so long. */
#define RELEASE_NS	2000000ULL

/* Threads that have waited for their cpu.max and are queued at once, and the pause after them. */
#define ENDED_AT_ONCE	64
#define ENDED_PAUSE_NS	250000ULL

/* The queue of threads whose control group has used up its cpu.max, by the end of that. */
#define THROTTLED	BIT_ULL(32)

/*
 * The kernel ends a scheduler that has a thread queued anew more than 256 times before it runs, and
 * one that has a thread wait for 30 s. So threads are queued anew no more often than this.
 */
#define REQUEUE_NS	200000000ULL

/* Time between two looks at all queues, at least. */
#define LEAST_LOOK_NS	1000000ULL

/* When all queues were looked at last. */
static __u64 looked_ns;
/* A cpu.max has changed: those that wait for one are to be queued anew; when that was done last. */
static bool requeue;
static __u64 requeued_ns;
/* When threads that their CPU had already were queued anew last. */
static __u64 released_ns;

/* Who wakes compares itself with the thread that runs. */
static void note_running(struct queue *queue, struct thread *t)
{
	queue->runs_vtime = t->vtime;
	queue->runs_share = t->share;
	queue->charged_ns = t->running_ns;
}

/* Charges a thread that runs for the time since it was charged last. */
static void charge(struct task_struct *p, struct thread *t, __u64 now)
{
	__u64 ns = now - t->running_ns;

	t->running_ns = now;
	t->vtime += used(t, ns);
	if (t->asked)
		t->in_kernel_ns += ns;
	take_time(p, t, ns, now);
}

/* An idle CPU of a mask, on the node of a CPU or on the nearest one that has any. */
static __s32 pick_idle(const struct cpumask *mask, __s32 near)
{
	return scx_bpf_pick_idle_cpu_node(mask, scx_bpf_cpu_node(near), 0);
}

static __u64 queue_to_help(__u32 cpu)
{
	return scx_bpf_dsq_nr_queued(LATE | cpu) > 0 ? LATE | cpu : cpu;
}

/*
 * Wakes an idle CPU for each queue in which a thread waits for a CPU that others have, and
 * has threads queued anew that their CPU had already when another class took it.
 */
static void look_around(__u64 now)
{
	bool release = now >= released_ns + REQUEUE_NS;
	struct task_struct *p;
	__s32 cpu, idle;

	if (release)
		released_ns = now;
	bpf_for(cpu, 0, nr_cpus) {
		if (release && scx_bpf_dsq_nr_queued(SCX_DSQ_LOCAL_ON | cpu) > 0)
			scx_bpf_dsq_reenq(SCX_DSQ_LOCAL_ON | cpu);
		if (!length_of(cpu))
			continue;
		set_waited_for(cpu);
		set_apart(cpu, now);
		idle = -1;
		bpf_for_each(scx_dsq, p, queue_to_help(cpu), 0) {
			idle = pick_idle(p->cpus_ptr, cpu);
			break;
		}
		if (idle >= 0)
			scx_bpf_kick_cpu(idle, SCX_KICK_IDLE);
		else
			call(cpu);
	}
}

/*
 * Has enqueue() decide anew about all that wait for a cpu.max: they may wait for seconds, and its
 * group may have a larger one now. Returns when that is to be done; 0: it is done.
 */
static __u64 queue_anew(__u64 now)
{
	if (!requeue)
		return 0;
	if (now < requeued_ns + REQUEUE_NS)
		return requeued_ns + REQUEUE_NS;
	requeued_ns = now;
	/* First, as a change that follows is not to be lost. */
	requeue = false;
	scx_bpf_dsq_reenq(THROTTLED);
	return 0;
}

/* Control groups have CPU time again: their threads go to the queues of their CPUs. */
static int end_waits(void *map, int *key, struct alarm *alarm)
{
	__u64 now = bpf_ktime_get_ns(), next = 0, slices, anew;
	struct vnuma_sched_header *h = get_header();
	struct task_struct *p;
	struct thread *t;
	__u32 ended = zero;
	__s32 cpu;

	alarm_ns = 0;
	bpf_for_each(scx_dsq, p, THROTTLED, 0) {
		if (ended++ >= ENDED_AT_ONCE) {
			next = now + ENDED_PAUSE_NS;
			break;
		}
		t = bpf_task_storage_get(&threads, p, NULL, 0);
		if (!t)
			continue;
		if (t->parked_ns > now) {
			next = t->parked_ns;
			break;
		}
		cpu = scx_bpf_task_cpu(p);
		if (t->until_ns <= now)
			t->until_ns = 0;
		t->queued_ns = now;
		set_waited_for(cpu);
		scx_bpf_dsq_move_set_vtime(&___it, t->vtime);
		if (scx_bpf_dsq_move_vtime(&___it, p, cpu, 0))
			call(cpu);
	}
	/* Slices may end much more often. */
	if (now >= looked_ns + LEAST_LOOK_NS) {
		looked_ns = now;
		look_around(now);
		if (h)
			balance(h, now);
	} else if (!next || next > looked_ns + LEAST_LOOK_NS) {
		next = looked_ns + LEAST_LOOK_NS;
	}
	slices = end_slices(now);
	if (slices && (!next || slices < next))
		next = slices;
	anew = queue_anew(now);
	if (anew && (!next || anew < next))
		next = anew;
	if (!next || next > now + BALANCE_NS)
		next = now + BALANCE_NS;
	set_alarm(next, now);
	return 0;
}

/* The CPU of a mask with the shortest queue; -1 if there is none. */
static __s32 shortest_queue(const struct cpumask *mask)
{
	__s32 best = -1, least = 0x7fffffff, length, cpu;

	bpf_for(cpu, 0, nr_cpus) {
		if (!bpf_cpumask_test_cpu(cpu, mask))
			continue;
		length = length_if_any(cpu);
		if (length < least) {
			least = length;
			best = cpu;
		}
	}
	return best;
}

/*
 * May a thread run on a CPU that was chosen for it? The operator may have changed its CPUs since
 * the mask was made. An idle CPU that was chosen is taken for busy until it is woken.
 */
static bool is_allowed(struct task_struct *p, __s32 cpu)
{
	if (cpu < 0)
		return false;
	if (bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
		return true;
	scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
	return false;
}

SEC("struct_ops/vnuma_select_cpu")
__s32 BPF_PROG(vnuma_select_cpu, struct task_struct *p, __s32 prev_cpu, __u64 wake_flags)
{
	struct vnuma_sched_header *h = get_header();
	struct thread *t = get_thread(p);
	__u64 now = bpf_ktime_get_ns();
	const struct cpumask *place;
	bool idle = false, there;
	__s32 cpu;

	if (!h || !t)
		return prev_cpu;
	take_time(p, t, 0, now);
	if (t->until_ns && !ask(p, t))
		return prev_cpu;
	place = place_of(p, t, h, now);
	if (!place) {
		cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &idle);
	} else {
		there = bpf_cpumask_test_cpu(prev_cpu, place);
		cpu = scx_bpf_select_cpu_and(p, prev_cpu, place);
		idle = cpu >= 0;
		if (!idle)
			cpu = there ? prev_cpu : shortest_queue(place);
		if (!there)
			count(VNUMA_SCHED_COUNT_PLACED);
		t->apply = false;
	}
	if (!is_allowed(p, cpu))
		return prev_cpu;
	if (idle) {
		begin_wait(t, now);
		come_to(t, cpu, h->slice_ns);
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, h->slice_ns, 0);
	}
	return cpu;
}

/*
 * The CPU whose queue a thread joins that did not wake, or that found no idle CPU. A CPU that does
 * the rest of a wake-up for another one comes here without select_cpu().
 */
static __s32 queue_for(struct task_struct *p, struct thread *t, const struct cpumask *place,
		       __u64 enq_flags)
{
	__s32 cpu = scx_bpf_task_cpu(p), to;

	/* The kernel ends a scheduler that takes it elsewhere. */
	if (is_pinned(p))
		return cpu;
	if (place && (t->apply || (enq_flags & SCX_ENQ_WAKEUP))) {
		t->apply = false;
		if (!bpf_cpumask_test_cpu(cpu, place)) {
			/* take_idle() comes next. */
			to = -1;
			if (!(enq_flags & SCX_ENQ_WAKEUP))
				to = scx_bpf_select_cpu_and(p, cpu, place);
			if (to < 0)
				to = shortest_queue(place);
			if (is_allowed(p, to)) {
				count(VNUMA_SCHED_COUNT_PLACED);
				return to;
			}
		}
	}
	if (!bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
		return bpf_cpumask_first(p->cpus_ptr);
	return cpu;
}

/*
 * Is a thread that wakes the first one of its queue, and behind the one that runs, by more than
 * a part of its turn?
 */
static bool goes_first(struct thread *t, __s32 cpu, __u64 slice, __u64 now)
{
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	__u64 first;

	if (!queue || (first_vtime(cpu, &first) && is_before(first, t->vtime)))
		return false;
	return is_behind(t, queue, used(t, slice / AHEAD_PART), now);
}

/*
 * Has an idle CPU run a thread that wakes, if there is one by now, at best the one that it was on.
 * A CPU that is woken to steal it waits for the locks of a CPU that takes it itself meanwhile.
 */
static bool take_idle(struct task_struct *p, struct thread *t, const struct cpumask *place,
		      __s32 cpu, struct vnuma_sched_header *h, __u64 enq_flags)
{
	const struct cpumask *cpus = place ?: p->cpus_ptr;
	__s32 idle = cpu;

	if (is_pinned(p))
		return false;
	if (!bpf_cpumask_test_cpu(cpu, cpus) || !scx_bpf_test_and_clear_cpu_idle(cpu))
		idle = pick_idle(cpus, cpu);
	if (!is_allowed(p, idle))
		return false;
	come_to(t, idle, h->slice_ns);
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL_ON | idle, h->slice_ns, enq_flags);
	return true;
}

SEC("struct_ops/vnuma_enqueue")
void BPF_PROG(vnuma_enqueue, struct task_struct *p, __u64 enq_flags)
{
	struct vnuma_sched_header *h = get_header();
	struct thread *t = get_thread(p);
	__u64 now = bpf_ktime_get_ns();
	const struct cpumask *place;
	__s32 cpu, idle;
	__u64 until, dsq;
	bool wakes = enq_flags & SCX_ENQ_WAKEUP;

	if (!h || !t) {
		scx_bpf_dsq_insert(p, SCX_DSQ_GLOBAL, 0, enq_flags);
		return;
	}
	if ((p->flags & PF_KTHREAD) && p->nr_cpus_allowed == 1) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, h->slice_ns, enq_flags | SCX_ENQ_PREEMPT);
		return;
	}
	take_time(p, t, 0, now);
	until = parked_until(p, t, now);
	if (until) {
		t->parked_ns = until;
		count(VNUMA_SCHED_COUNT_THROTTLED);
		scx_bpf_dsq_insert_vtime(p, THROTTLED, h->slice_ns, until, enq_flags);
		set_alarm(until, now);
		return;
	}
	place = place_of(p, t, h, now);
	cpu = queue_for(p, t, place, enq_flags);
	begin_wait(t, now);
	come_to(t, cpu, h->slice_ns);
	if ((enq_flags & SCX_ENQ_LAST) && cpu == scx_bpf_task_cpu(p)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, h->slice_ns, enq_flags);
		/* The CPU has chosen its idle thread already, and has to choose again. */
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
		return;
	}
	if (wakes && take_idle(p, t, place, cpu, h, enq_flags))
		return;
	t->late_ns = 0;
	dsq = queue_of(t, cpu, now);
	set_waited_for(cpu);
	scx_bpf_dsq_insert_vtime(p, dsq, h->slice_ns, dsq & LATE ? t->queued_ns : t->vtime,
				 enq_flags);
	if (cpu != scx_bpf_task_cpu(p) || scx_bpf_test_and_clear_cpu_idle(cpu)) {
		call(cpu);
		return;
	}
	/* An idle CPU may steal it, one of its own place if take_idle() has not looked there. */
	idle = place && !wakes ? pick_idle(place, cpu) : -1;
	if (idle < 0 && place && (enq_flags & SCX_ENQ_REENQ))
		set_alarm(now + RELEASE_NS, now);
	else if (idle < 0 && (place || !wakes))
		idle = pick_idle(p->cpus_ptr, cpu);
	if (idle >= 0) {
		scx_bpf_kick_cpu(idle, SCX_KICK_IDLE);
	} else if (wakes && goes_first(t, cpu, h->slice_ns, now)) {
		count(VNUMA_SCHED_COUNT_PREEMPTED);
		scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
	} else {
		call(cpu);
	}
}

/* Is the thread that runs behind the first one of the queue? Then it runs on. */
static bool runs_on(struct task_struct *prev, __s32 cpu, __u64 now)
{
	struct thread *t = bpf_task_storage_get(&threads, prev, NULL, 0);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	__u64 vtime, first;
	bool behind;

	/* Its CPU would stay without a tick, and its time would not end. */
	if (!t || !queue || t->until_ns || t->brief || queue->endless)
		return false;
	vtime = t->vtime + used(t, now - t->running_ns);
	behind = first_vtime(cpu, &first) && is_before(vtime, first);
	/* As when it begins to run. */
	if (behind && is_before(queue->vtime, vtime))
		queue->vtime = vtime;
	return behind;
}

/*
 * Does nothing else want the CPU of the thread that runs, and is it to stay there? Then it runs
 * on. Left to enqueue() as the last one it would give way to the idle thread, and kernels before
 * 7.3 would leave it there until something wakes the CPU.
 */
static bool is_alone(struct task_struct *prev, __s32 cpu, struct vnuma_sched_header *h, __u64 now)
{
	struct thread *t = bpf_task_storage_get(&threads, prev, NULL, 0);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	const struct cpumask *place;
	__u64 vtime;

	if (!t || !queue || t->until_ns || length_of(cpu) > 0)
		return false;
	if (!bpf_cpumask_test_cpu(cpu, prev->cpus_ptr))
		return false;
	/* Only when a thread gets its CPU the kernel decides about the tick. */
	if (queue->endless != needs_no_tick(t, cpu))
		return false;
	place = place_of(prev, t, h, now);
	if (place && t->apply && !bpf_cpumask_test_cpu(cpu, place))
		return false;
	t->apply = false;
	/* Nobody waits for the end of a short slice. */
	t->late_ns = 0;
	queue->ends_ns = 0;
	vtime = t->vtime + used(t, now - t->running_ns);
	if (is_before(queue->vtime, vtime))
		queue->vtime = vtime;
	return true;
}

SEC("struct_ops/vnuma_dispatch")
void BPF_PROG(vnuma_dispatch, __s32 cpu, struct task_struct *prev)
{
	struct vnuma_sched_header *h = get_header();
	__u64 now = bpf_ktime_get_ns();
	bool ready;

	if (!h || serve_yield(cpu) || serve_late(cpu, now))
		return;
	rescue(cpu, h, now);
	ready = prev && (prev->scx.flags & SCX_TASK_QUEUED);
	if (ready && runs_on(prev, cpu, now) && scx_bpf_task_set_slice(prev, slice_on(cpu, h))) {
		count(VNUMA_SCHED_COUNT_KEPT);
		return;
	}
	if (ready && is_alone(prev, cpu, h, now) &&
	    scx_bpf_task_set_slice(prev, lone_slice(cpu, h)))
		return;
	/* With a thread that is ready the CPU is not idle: enqueue() gets it as the last one. */
	if (run_first(cpu) || ready)
		return;
	steal(cpu, h, now);
}

/* Another class takes the CPU: what waits here may run elsewhere, if that takes long. */
SEC("struct_ops/vnuma_cpu_release")
void BPF_PROG(vnuma_cpu_release, __s32 cpu, struct scx_cpu_release_args *args)
{
	__u32 key = cpu;
	struct queue *queue = bpf_map_lookup_elem(&queues, &key);

	if (queue)
		queue->taken = true;
	scx_bpf_reenqueue_local();
}

SEC("struct_ops/vnuma_running")
void BPF_PROG(vnuma_running, struct task_struct *p)
{
	struct vnuma_sched_header *h = get_header();
	struct thread *t = get_thread(p);
	__u32 cpu = scx_bpf_task_cpu(p);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);

	if (!h || !t || !queue)
		return;
	/* It may have been stolen. */
	come_to(t, cpu, h->slice_ns);
	pass_to(queue, cpu, t->vtime);
	t->running_ns = bpf_ktime_get_ns();
	queue->taken = false;
	/* Else it goes on. */
	if (t->queued_ns)
		t->brief = t->late_ns || waits(t, t->running_ns) >= LATE_NS;
	if (t->late_ns)
		t->late_ns = t->running_ns;
	t->queued_ns = 0;
	t->since_ns = 0;
	if (t->parked_ns) {
		t->parked_ns = 0;
		t->parks = false;
	}
	set_share(t, queue, share_of(p, t, t->running_ns));
	note_running(queue, t);
	/*
	 * The kernel calls this as it notes that a thread which gives its CPU away cannot migrate.
	 * With time left the thread would keep the CPU.
	 */
	if (t->parks)
		return;
	begin_slice(p, t, queue, h);
}

SEC("struct_ops/vnuma_tick")
void BPF_PROG(vnuma_tick, struct task_struct *p)
{
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);
	__u32 cpu = scx_bpf_task_cpu(p);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	__u64 now = bpf_ktime_get_ns();

	if (!bpf_get_current_task_btf()->migration_disabled)
		programs_migrate = true;
	/* It is late if it could not be set when it went off last. */
	if (now > alarm_ns + 2 * LOOK_NS)
		set_alarm(now, now);
	if (!t || !queue)
		return;
	charge(p, t, now);
	/* Others may have come or gone since it got the CPU. */
	set_share(t, queue, share_of(p, t, now));
	note_running(queue, t);
	/* Its control group has used up its cpu.max. */
	if (t->until_ns && !ask(p, t))
		scx_bpf_task_set_slice(p, 0);
	if (queue->endless)
		keep_endless(p, t, queue, cpu, now);
}

SEC("struct_ops/vnuma_yield")
bool BPF_PROG(vnuma_yield, struct task_struct *from, struct task_struct *to)
{
	struct vnuma_sched_header *h = get_header();

	if (to && (!h || !yield_to(from, to, h, bpf_ktime_get_ns())))
		return false;
	scx_bpf_task_set_slice(from, 0);
	return !!to;
}

SEC("struct_ops/vnuma_runnable")
void BPF_PROG(vnuma_runnable, struct task_struct *p, __u64 enq_flags)
{
	struct thread *t = get_thread(p);

	if (t)
		join(p, t, true);
}

SEC("struct_ops/vnuma_quiescent")
void BPF_PROG(vnuma_quiescent, struct task_struct *p, __u64 deq_flags)
{
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);

	if (t)
		join(p, t, false);
}

SEC("struct_ops/vnuma_stopping")
void BPF_PROG(vnuma_stopping, struct task_struct *p, bool runnable)
{
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);
	__u32 cpu = scx_bpf_task_cpu(p);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);
	__u64 now = bpf_ktime_get_ns();

	if (queue) {
		queue->served_ns = now;
		queue->charged_ns = 0;
		queue->ends_ns = 0;
	}
	if (t)
		charge(p, t, now);
	if (t && queue && queue->endless)
		end_endless(queue, t);
	if (t && queue && t->late_ns)
		end_late(queue, t, cpu, now);
}

SEC("struct_ops/vnuma_set_cpumask")
void BPF_PROG(vnuma_set_cpumask, struct task_struct *p, const struct cpumask *cpumask)
{
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);

	/* What is left of its place is found anew. */
	if (t)
		t->epoch = 0;
}

SEC("struct_ops/vnuma_enable")
void BPF_PROG(vnuma_enable, struct task_struct *p)
{
	struct thread *t = get_thread(p);
	__u32 cpu = scx_bpf_task_cpu(p);
	struct queue *queue = bpf_map_lookup_elem(&queues, &cpu);

	if (!t || !queue)
		return;
	t->cpu = cpu;
	t->vtime = queue->vtime;
	t->parks = false;
	t->parked_ns = 0;
	t->queued_ns = 0;
	t->since_ns = 0;
	t->running_ns = bpf_ktime_get_ns();
}

SEC("struct_ops/vnuma_exit_task")
void BPF_PROG(vnuma_exit_task, struct task_struct *p, struct scx_exit_task_args *args)
{
	__u32 tid = p->pid;
	__u64 key = (__u64)p;

	/* All threads come here when the scheduler is unloaded. */
	if (!(p->flags & PF_EXITING))
		return;
	bpf_map_delete_elem(&assignments, &tid);
	bpf_map_delete_elem(&works, &key);
}

SEC("struct_ops.s/vnuma_cgroup_init")
__s32 BPF_PROG(vnuma_cgroup_init, struct cgroup *cgrp, struct scx_cgroup_init_args *args)
{
	struct group *g;

	g = bpf_cgrp_storage_get(&groups, cgrp, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!g)
		return -ENOMEM;
	g->weight = args->weight;
	set_bandwidth(g, args->bw_period_us, args->bw_quota_us, args->bw_burst_us);
	return 0;
}

SEC("struct_ops/vnuma_cgroup_move")
void BPF_PROG(vnuma_cgroup_move, struct task_struct *p, struct cgroup *from, struct cgroup *to)
{
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, 0);

	if (t)
		t->limited_ns = 0;
}

SEC("struct_ops/vnuma_cgroup_set_weight")
void BPF_PROG(vnuma_cgroup_set_weight, struct cgroup *cgrp, __u32 weight)
{
	struct group *g = get_group(cgrp);

	if (g)
		set_weight(cgrp, g, weight);
}

SEC("struct_ops/vnuma_cgroup_set_bandwidth")
void BPF_PROG(vnuma_cgroup_set_bandwidth, struct cgroup *cgrp, __u64 period_us, __u64 quota_us,
	      __u64 burst_us)
{
	struct group *g = get_group(cgrp);
	__u64 now = bpf_ktime_get_ns();

	if (!g)
		return;
	set_bandwidth(g, period_us, quota_us, burst_us);
	requeue = true;
	set_alarm(now, now);
}

SEC("struct_ops.s/vnuma_init")
__s32 BPF_PROG(vnuma_init)
{
	__u32 first = 0, key;
	struct alarm *alarm = bpf_map_lookup_elem(&alarms, &first);
	struct queue *queue;
	__s32 cpu, error;

	if (!alarm)
		return -ENOENT;
	error = bpf_timer_init(&alarm->timer, &alarms, CLOCK_MONOTONIC);
	if (!error)
		error = bpf_timer_set_callback(&alarm->timer, end_waits);
	if (!error)
		error = scx_bpf_create_dsq(THROTTLED, -1);
	if (error)
		return error;

	set_alarm(bpf_ktime_get_ns() + LOOK_NS, bpf_ktime_get_ns());
	nr_cpus = scx_bpf_nr_cpu_ids();
	if (nr_cpus > MAX_CPUS)
		return -E2BIG;
	bpf_for(cpu, 0, nr_cpus) {
		key = cpu;
		queue = bpf_map_lookup_elem(&queues, &key);
		if (queue)
			queue->vtime = -BEFORE_WRAP_NS;
		error = scx_bpf_create_dsq(cpu, -1);
		if (!error)
			error = scx_bpf_create_dsq(LATE | key, -1);
		if (error)
			return error;
	}
	return 0;
}

SEC("struct_ops/vnuma_exit")
void BPF_PROG(vnuma_exit, struct scx_exit_info *info)
{
	__u32 first = 0;
	struct vnuma_sched_exit *e = bpf_map_lookup_elem(&ended, &first);

	if (!e)
		return;
	e->code = info->exit_code;
	bpf_probe_read_kernel_str(e->reason, sizeof(e->reason), info->reason);
	bpf_probe_read_kernel_str(e->message, sizeof(e->message), info->msg);
	/* Last, as user space waits for it. */
	e->kind = info->kind;
}

#define VNUMA_OPS(mode, mode_flags)						\
SEC(".struct_ops.link")								\
struct sched_ext_ops mode = {							\
	.select_cpu = (void *)vnuma_select_cpu,					\
	.enqueue = (void *)vnuma_enqueue,					\
	.dispatch = (void *)vnuma_dispatch,					\
	.tick = (void *)vnuma_tick,						\
	.yield = (void *)vnuma_yield,						\
	.runnable = (void *)vnuma_runnable,					\
	.quiescent = (void *)vnuma_quiescent,					\
	.running = (void *)vnuma_running,					\
	.stopping = (void *)vnuma_stopping,					\
	.set_cpumask = (void *)vnuma_set_cpumask,				\
	.exit_task = (void *)vnuma_exit_task,					\
	.enable = (void *)vnuma_enable,						\
	.cgroup_init = (void *)vnuma_cgroup_init,				\
	.cgroup_move = (void *)vnuma_cgroup_move,				\
	.cgroup_set_weight = (void *)vnuma_cgroup_set_weight,			\
	.cgroup_set_bandwidth = (void *)vnuma_cgroup_set_bandwidth,		\
	.cpu_release = (void *)vnuma_cpu_release,				\
	.init = (void *)vnuma_init,						\
	.exit = (void *)vnuma_exit,						\
	.flags = SCX_OPS_ENQ_LAST | SCX_OPS_ENQ_MIGRATION_DISABLED |		\
		 SCX_OPS_ALLOW_QUEUED_WAKEUP | SCX_OPS_BUILTIN_IDLE_PER_NODE |	\
		 (mode_flags),							\
	.timeout_ms = 30000,							\
	.name = "vnuma",							\
}

/* The loader makes one of the two. */
VNUMA_OPS(vnuma_partial, SCX_OPS_SWITCH_PARTIAL);
VNUMA_OPS(vnuma_full, 0);

char LICENSE[] SEC("license") = "GPL";
