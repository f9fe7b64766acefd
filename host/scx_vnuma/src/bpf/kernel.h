/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What scx_vnuma uses of the kernel: types as far as they are used, relocated against the
 * running kernel (CO-RE), and functions by the names that kernels have.
 */
#ifndef SCX_VNUMA_KERNEL_H
#define SCX_VNUMA_KERNEL_H

#include <linux/version.h>

#define BIT_ULL(n)	(1ULL << (n))

/* Headers of Debian 12 do not have its name. */
#define MAP_TYPE_CGRP_STORAGE	32

/* A pointer in a map that the kernel counts. */
#define counted_cpumask	struct bpf_cpumask __kptr

#define PF_EXITING	0x00000004
#define PF_KTHREAD	0x00200000
#define SCX_TASK_QUEUED	1

enum scx_ops_flags {
	SCX_OPS_ENQ_LAST = 2,
	SCX_OPS_SWITCH_PARTIAL = 8,
	SCX_OPS_ENQ_MIGRATION_DISABLED = 16,
	SCX_OPS_ALLOW_QUEUED_WAKEUP = 32,
	SCX_OPS_BUILTIN_IDLE_PER_NODE = 64,
};

enum scx_enq_flags___vnuma {
	SCX_ENQ_WAKEUP = 1,
	SCX_ENQ_PREEMPT = BIT_ULL(32),
	SCX_ENQ_REENQ = BIT_ULL(40),
	SCX_ENQ_LAST = BIT_ULL(41),
};

#define SCX_DSQ_GLOBAL	0x8000000000000001ULL
#define SCX_DSQ_LOCAL	0x8000000000000002ULL
#define SCX_DSQ_LOCAL_ON 0xc000000000000000ULL
#define SCX_SLICE_INF	(~0ULL)
#define SCX_KICK_IDLE	1
#define SCX_KICK_PREEMPT 2
#define SCX_DSQ_ITER_REV 0x10000

struct cpumask {
	unsigned long bits[1];
} __attribute__((preserve_access_index));

struct bpf_cpumask {
	struct cpumask cpumask;
} __attribute__((preserve_access_index));

struct sched_ext_entity {
	__u32 flags;
	__u32 weight;
	__u64 slice;
} __attribute__((preserve_access_index));

struct cgroup {
	int level;
} __attribute__((preserve_access_index));

struct scx_cgroup_init_args {
	__u32 weight;
	__u64 bw_period_us;
	__u64 bw_quota_us;
	__u64 bw_burst_us;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid;
	int tgid;
	unsigned int flags;
	int nr_cpus_allowed;
	const struct cpumask *cpus_ptr;
	unsigned short migration_disabled;
	struct sched_ext_entity scx;
} __attribute__((preserve_access_index));

enum scx_exit_kind {
	SCX_EXIT_NONE,
};

struct scx_exit_info {
	enum scx_exit_kind kind;
	__s64 exit_code;
	const char *reason;
	char *msg;
} __attribute__((preserve_access_index));

struct scx_cpu_release_args {
	int reason;
} __attribute__((preserve_access_index));

struct scx_exit_task_args {
	bool cancelled;
} __attribute__((preserve_access_index));

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
/* The headers of Debian 12 do not have it. */
struct bpf_iter_num {
	__u64 opaque[1];
} __attribute__((aligned(8)));
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 18, 0)
/* Nor this. */
struct bpf_task_work {
	__u64 __opaque;
} __attribute__((aligned(8)));
#endif

struct bpf_map {
};

struct bpf_iter_scx_dsq {
	__u64 opaque[6];
} __attribute__((aligned(8)));

/*
 * Members of the kernel's that are not here are left as they are: unset. They may have another
 * order: the first one is what the loader writes.
 */
struct sched_ext_ops {
	__u64 hotplug_seq;
	__s32 (*select_cpu)(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags);
	void (*enqueue)(struct task_struct *p, __u64 enq_flags);
	void (*dispatch)(__s32 cpu, struct task_struct *prev);
	void (*tick)(struct task_struct *p);
	bool (*yield)(struct task_struct *from, struct task_struct *to);
	void (*runnable)(struct task_struct *p, __u64 enq_flags);
	void (*quiescent)(struct task_struct *p, __u64 deq_flags);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, bool runnable);
	void (*set_cpumask)(struct task_struct *p, const struct cpumask *cpumask);
	void (*exit_task)(struct task_struct *p, struct scx_exit_task_args *args);
	void (*enable)(struct task_struct *p);
	__s32 (*cgroup_init)(struct cgroup *cgrp, struct scx_cgroup_init_args *args);
	void (*cgroup_move)(struct task_struct *p, struct cgroup *from, struct cgroup *to);
	void (*cgroup_set_weight)(struct cgroup *cgrp, __u32 weight);
	void (*cgroup_set_bandwidth)(struct cgroup *cgrp, __u64 period_us, __u64 quota_us,
				     __u64 burst_us);
	void (*cpu_release)(__s32 cpu, struct scx_cpu_release_args *args);
	__s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	__u64 flags;
	__u32 timeout_ms;
	char name[128];
};

/*
 * Kernels rename functions, and give them other types. libbpf ignores what follows the last three
 * underscores of a name, and leaves out what the running kernel has not, or has with another type.
 */
extern bool scx_bpf_dsq_insert___v2___weak(struct task_struct *p, __u64 dsq_id, __u64 slice,
					   __u64 enq_flags) __ksym __weak;
extern bool scx_bpf_dsq_insert___bool(struct task_struct *p, __u64 dsq_id, __u64 slice,
				      __u64 enq_flags) __ksym __weak;
extern void scx_bpf_dsq_insert___void(struct task_struct *p, __u64 dsq_id, __u64 slice,
				      __u64 enq_flags) __ksym __weak;
extern bool scx_bpf_dsq_move_to_local___v2___weak(__u64 dsq_id, __u64 enq_flags) __ksym __weak;
extern bool scx_bpf_dsq_move_to_local___two(__u64 dsq_id, __u64 enq_flags) __ksym __weak;
extern bool scx_bpf_dsq_move_to_local___one(__u64 dsq_id) __ksym __weak;
/* Since Linux 7.1. */
extern void scx_bpf_dsq_reenq___weak(__u64 dsq_id, __u64 reenq_flags) __ksym __weak;
extern __u32 scx_bpf_reenqueue_local___weak(void) __ksym __weak;

struct scx_bpf_dsq_insert_vtime_args {
	__u64 dsq_id;
	__u64 slice;
	__u64 vtime;
	__u64 enq_flags;
};

extern bool __scx_bpf_dsq_insert_vtime(struct task_struct *p,
				       struct scx_bpf_dsq_insert_vtime_args *args) __ksym;

struct scx_bpf_select_cpu_and_args {
	__s32 prev_cpu;
	__u64 wake_flags;
	__u64 flags;
};

extern __s32 __scx_bpf_select_cpu_and(struct task_struct *p, const struct cpumask *cpus,
				      struct scx_bpf_select_cpu_and_args *args) __ksym;

static __always_inline void scx_bpf_dsq_insert(struct task_struct *p, __u64 dsq_id, __u64 slice,
					       __u64 enq_flags)
{
	if (bpf_ksym_exists(scx_bpf_dsq_insert___v2___weak))
		scx_bpf_dsq_insert___v2___weak(p, dsq_id, slice, enq_flags);
	else if (bpf_ksym_exists(scx_bpf_dsq_insert___bool))
		scx_bpf_dsq_insert___bool(p, dsq_id, slice, enq_flags);
	else
		scx_bpf_dsq_insert___void(p, dsq_id, slice, enq_flags);
}

static __always_inline void scx_bpf_dsq_insert_vtime(struct task_struct *p, __u64 dsq_id,
						     __u64 slice, __u64 vtime, __u64 enq_flags)
{
	struct scx_bpf_dsq_insert_vtime_args args = {
		.dsq_id = dsq_id,
		.slice = slice,
		.vtime = vtime,
		.enq_flags = enq_flags,
	};

	__scx_bpf_dsq_insert_vtime(p, &args);
}

/* An idle CPU of a mask: of a core without work, near the last one. Negative: there is none. */
static __always_inline __s32 scx_bpf_select_cpu_and(struct task_struct *p, __s32 prev_cpu,
						    const struct cpumask *cpus)
{
	struct scx_bpf_select_cpu_and_args args = { .prev_cpu = prev_cpu };

	return __scx_bpf_select_cpu_and(p, cpus, &args);
}

static __always_inline bool scx_bpf_dsq_move_to_local(__u64 dsq_id)
{
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local___v2___weak))
		return scx_bpf_dsq_move_to_local___v2___weak(dsq_id, 0);
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local___two))
		return scx_bpf_dsq_move_to_local___two(dsq_id, 0);
	return scx_bpf_dsq_move_to_local___one(dsq_id);
}

/* Without effect on Linux 7.0. */
static __always_inline void scx_bpf_dsq_reenq(__u64 dsq_id)
{
	if (bpf_ksym_exists(scx_bpf_dsq_reenq___weak))
		scx_bpf_dsq_reenq___weak(dsq_id, 0);
}

static __always_inline void scx_bpf_reenqueue_local(void)
{
	if (bpf_ksym_exists(scx_bpf_dsq_reenq___weak))
		scx_bpf_dsq_reenq___weak(SCX_DSQ_LOCAL, 0);
	else
		scx_bpf_reenqueue_local___weak();
}

/* Others are of another type: threads wait in the kernel there. */
extern int bpf_task_work_schedule_resume___weak(struct task_struct *task,
						struct bpf_task_work *work, void *map__const_map,
						int (*callback)(struct bpf_map *map, void *key,
								void *value)) __ksym __weak;
extern bool scx_bpf_dsq_move(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p,
			     __u64 dsq_id, __u64 enq_flags) __ksym;
extern int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, __u64 dsq_id, __u64 flags) __ksym;
extern struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it) __ksym;
extern void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) __ksym;
extern __s32 scx_bpf_create_dsq(__u64 dsq_id, __s32 node) __ksym;
extern __s32 scx_bpf_dsq_nr_queued(__u64 dsq_id) __ksym;
extern void scx_bpf_kick_cpu(__s32 cpu, __u64 flags) __ksym;
extern __u32 scx_bpf_nr_cpu_ids(void) __ksym;
extern struct task_struct *scx_bpf_dsq_peek(__u64 dsq_id) __ksym;
extern bool scx_bpf_test_and_clear_cpu_idle(__s32 cpu) __ksym;
extern __s32 scx_bpf_pick_idle_cpu_node(const struct cpumask *cpus_allowed, int node,
					__u64 flags) __ksym;
extern int scx_bpf_cpu_node(__s32 cpu) __ksym;
extern __s32 scx_bpf_select_cpu_dfl(struct task_struct *p, __s32 prev_cpu, __u64 wake_flags,
				    bool *is_idle) __ksym;
extern __s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
extern bool scx_bpf_dsq_move_vtime(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p,
				   __u64 dsq_id, __u64 enq_flags) __ksym;
extern void scx_bpf_dsq_move_set_vtime(struct bpf_iter_scx_dsq *it__iter, __u64 vtime) __ksym;
extern struct cgroup *scx_bpf_task_cgroup(struct task_struct *p) __ksym;
extern struct cgroup *bpf_cgroup_ancestor(struct cgroup *cgrp, int level) __ksym;
extern void bpf_cgroup_release(struct cgroup *cgrp) __ksym;
extern bool scx_bpf_task_set_slice(struct task_struct *p, __u64 slice) __ksym;
extern struct bpf_cpumask *bpf_cpumask_create(void) __ksym;
extern void bpf_cpumask_release(struct bpf_cpumask *cpumask) __ksym;
extern int bpf_cpumask_populate(struct bpf_cpumask *cpumask, void *src, unsigned long src__sz) __ksym;
extern bool bpf_cpumask_and(struct bpf_cpumask *dst, const struct cpumask *src1,
			    const struct cpumask *src2) __ksym;
extern bool bpf_cpumask_test_cpu(__u32 cpu, const struct cpumask *cpumask) __ksym;
extern __u32 bpf_cpumask_first(const struct cpumask *cpumask) __ksym;

#endif
