/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vnuma.ko: what its files share.
 *
 * A file calls only those below it.
 *
 *	main.c		PCI device, interrupt, the update from reading to acknowledging
 *	hotplug.c	CPUs that come online later
 *	device.c	/dev/vnuma, uevents, attributes
 *	pci_nodes.c	nodes of PCI devices
 *	apply_fast.c	kernel maps changed in place
 *	apply_safe.c	kernel maps changed by CPU hotplug
 *	debug_files.c	the kernel's files of scheduler domains, later
 *	maps.c		the maps that both modes write
 *	autonuma.c	has AutoNUMA look at the memory of threads whose CPUs moved
 *	affinity.c	affinities of tasks, saved around CPU hotplug
 *	distances.c	the kernel's table of distances
 *	levels.c	the scheduler's NUMA levels
 *	spread.c	a function of the kernel that fails when CPUs move, replaced
 *	sched_ext.c	idle masks and queues that sched_ext keeps by node
 *	rseq.c		rseq's node_id of the threads of a CPU that moved
 *	symbols.c	kernel symbols that are not exported
 *	topology.c	looking a topology up; numbers of nodes, agreement with this guest
 *	channel.c	memory shared with the host: reads publications, writes answers
 */
#ifndef VNUMA_H
#define VNUMA_H

#include <linux/cpumask.h>
#include <linux/ktime.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/types.h>
#include <linux/version.h>

#include <vnuma/guest_device.h>
#include <vnuma/topology_channel.h>

/* As in dkms.conf: major << 16 | minor << 8 | patch. */
#define VNUMA_DRIVER_VERSION	0x000100

/* One refusal is one line of the kernel log; this is the part after "refused: ". */
#define VNUMA_REASON_SIZE	160

struct vnuma_reason {
	char text[VNUMA_REASON_SIZE];
};

#define vnuma_fail(why, err, fmt, ...)					\
({									\
	scnprintf((why)->text, sizeof((why)->text), fmt, ##__VA_ARGS__);	\
	(err);								\
})

/**
 * struct vnuma_model - a publication of the host, copied and then checked
 *
 * Its nodes are those of the host until vnuma_topology_number(), after that those of this
 * guest: a CPU or device may then be on one that this guest does not have, which is not below
 * @nr_nodes.
 *
 * @generation: never 0
 * @nr_nodes: 1 to VNUMA_TC_MAX_NODES
 * @nr_vcpus: 1 to VNUMA_TC_MAX_VCPUS
 * @distance: rows and columns below @nr_nodes are valid SLIT values
 * @nr_devices: up to VNUMA_TC_MAX_DEVICES
 * @has_devices: there was a section of devices
 * @vcpu: sorted by APIC id, which are unique; every node is below @nr_nodes
 * @device: sorted by address, which are unique; every node is below @nr_nodes
 */
struct vnuma_model {
	u64 generation;
	u32 nr_nodes;
	u32 nr_vcpus;
	u32 nr_devices;
	bool has_devices;
	u8 distance[VNUMA_TC_MAX_NODES][VNUMA_TC_MAX_NODES];
	struct vnuma_tc_vcpu vcpu[VNUMA_TC_MAX_VCPUS];
	struct vnuma_tc_device device[VNUMA_TC_MAX_DEVICES];
};

/* A PCI function's address as one number, which they are sorted by. */
static inline u32 vnuma_device_address(const struct vnuma_tc_device *device)
{
	return (u32)device->segment << 16 | device->bus << 8 | device->devfn;
}

/**
 * struct vnuma_channel - the shared memory
 * @base: mapped memory that the host can change at any time
 * @size: mapped bytes, at least those of struct vnuma_tc_header
 * @guest_offset: where struct vnuma_tc_guest lies, 0 until a header was accepted
 */
struct vnuma_channel {
	void *base;
	size_t size;
	size_t guest_offset;
};

/**
 * struct vnuma_move - a CPU that changes its node
 */
struct vnuma_move {
	int cpu;
	int from;
	int to;
};

/**
 * struct vnuma_unapplied - what a publication could not change
 * @cpus: how many online CPUs are not on their published node, and those that safe mode has
 *	taken offline and not brought up again
 * @cpu: one of them
 * @error: why that one is not
 */
struct vnuma_unapplied {
	u32 cpus;
	int cpu;
	int error;
};

/* main.c */
extern u32 vnuma_mode;	/* VNUMA_GD_MODE_*, set before anything else is used */

/* channel.c */
bool vnuma_channel_has_magic(const struct vnuma_channel *channel);
u64 vnuma_channel_generation(const struct vnuma_channel *channel);
int vnuma_channel_read(struct vnuma_channel *channel,
		       struct vnuma_model *topology,
		       struct vnuma_reason *why);
bool vnuma_channel_announce(const struct vnuma_channel *channel, u32 mode);
void vnuma_channel_leave(const struct vnuma_channel *channel);
void vnuma_channel_acknowledge(const struct vnuma_channel *channel,
			       u64 generation);
void vnuma_channel_refuse(const struct vnuma_channel *channel, u64 generation,
			  int error);
void vnuma_channel_count_devices(const struct vnuma_channel *channel,
				 u64 changes);

/* topology.c */
void vnuma_topology_number(struct vnuma_model *topology);
bool vnuma_topology_has_node(int node);
int vnuma_topology_domain(int node);
int vnuma_topology_node(const struct vnuma_model *topology, int cpu);
bool vnuma_topology_is_unapplied(const struct vnuma_model *topology, int cpu);
int vnuma_topology_count_unapplied(void);
int vnuma_topology_check(const struct vnuma_model *topology,
			 struct vnuma_reason *why);
const struct vnuma_model *vnuma_topology_current(void);
struct vnuma_model *
vnuma_topology_set_current(struct vnuma_model *topology);

/* hotplug.c */
int vnuma_hotplug_init(void);
void vnuma_hotplug_exit(void);

/* symbols.c */

/* The ids of a CPU's caches became part of cpu_data() in 6.7. */
#if KERNEL_VERSION(6, 7, 0) > LINUX_VERSION_CODE
#define VNUMA_CACHE_ID_SYMBOLS
#endif

/* Since 6.18 the architecture may group nodes for the scheduler. */
#if KERNEL_VERSION(6, 18, 0) <= LINUX_VERSION_CODE
#define VNUMA_NODE_DISTANCES
#endif

/* cpumask_local_spread() reads the scheduler's masks since 6.3, see spread.c. */
#if KERNEL_VERSION(6, 3, 0) > LINUX_VERSION_CODE
#define VNUMA_SPREAD
#endif

/* Every rebuild of scheduler domains makes their debug files anew, see debug_files.c. */
#if KERNEL_VERSION(6, 4, 0) > LINUX_VERSION_CODE
#define VNUMA_DEBUG_FILES
struct dentry;
#endif

/* Since 7.3, where it was tried; Debian's older kernels have no sched_ext. */
#if defined(CONFIG_SCHED_CLASS_EXT) && KERNEL_VERSION(7, 3, 0) <= LINUX_VERSION_CODE
#define VNUMA_SCHED_EXT
struct scx_sched;
struct static_key;
struct vnuma_idle_masks;
#endif

/* A CPU keeps the id of the cache that it shares, for the scheduler, until it goes offline. */
#if KERNEL_VERSION(7, 3, 0) <= LINUX_VERSION_CODE
#define VNUMA_LLC_ID
#endif

struct percpu_rw_semaphore;
struct pglist_data;
struct sched_domain_topology_level;
struct task_struct;

/**
 * struct vnuma_symbols - what fast mode needs and the kernel does not export
 *
 * Each pointer is either valid or NULL. Fast mode needs all but those that are marked:
 * without those for distances the kernel keeps its own, without the others an update takes
 * longer. Safe mode uses those of sched_ext, as far as they are there.
 *
 * Functions have the kernel's own types, and those that are called here are not static there: a
 * kernel with CFI of clang lets no pointer lead to another type, nor to a static function whose
 * address it does not take itself.
 */
struct vnuma_symbols {
	/* kernel/sched/topology.c */
	struct mutex *sched_domains_mutex;
	int *sched_domains_numa_levels;
	int __rcu **sched_domains_numa_distance;
	struct cpumask ** __rcu **sched_domains_numa_masks;
	int *sched_max_numa_distance;
	unsigned int *sched_numa_topology_type;
	struct sched_domain_topology_level **sched_domain_topology;
	struct sched_domain_topology_level **sched_domain_topology_saved;
	int (*cpu_numa_flags)(void);
	/* From 6.18 on; NULL before */
	int (*arch_sched_node_distance)(int from, int to);
	int *sched_numa_node_levels;
	int __rcu **sched_numa_node_distance;
	/* kernel/sched/syscalls.c; may be missing */
	int (*idle_cpu)(int cpu);
	/* kernel/sched/core.c; may be missing */
	int (*task_call_func)(struct task_struct *p,
			      int (*func)(struct task_struct *p, void *arg),
			      void *arg);
	/* kernel/cgroup/cpuset.c */
	void (*rebuild_sched_domains)(void);
	/* arch/x86/kernel/smpboot.c */
	bool *x86_topology_update;
	cpumask_var_t __percpu *cpu_llc_shared_map;
	cpumask_var_t __percpu *cpu_l2c_shared_map;
#ifdef VNUMA_CACHE_ID_SYMBOLS
	/* arch/x86/kernel/cpu/common.c */
	u16 __percpu *cpu_llc_id;
	u16 __percpu *cpu_l2c_id;
#endif
	/* arch/x86/mm/numa.c */
	s16 *apicid_to_node;
	/* drivers/base/node.c */
	int (*register_cpu_under_node)(unsigned int cpu, unsigned int node);
	int (*unregister_cpu_under_node)(unsigned int cpu, unsigned int node);
	/* mm/numa_memblks.c, until 6.11 arch/x86/mm/numa.c; may be missing */
	u8 **numa_distance;
	int *numa_distance_cnt;
#ifdef CONFIG_MEMORY_HOTPLUG
	/* mm/memory_hotplug.c */
	struct percpu_rw_semaphore *mem_hotplug_lock;
#endif
	/* mm/page_alloc.c; may be missing */
	void (*build_all_zonelists)(struct pglist_data *pgdat);
#ifdef VNUMA_SCHED_EXT
	/* kernel/sched/ext/ */
	struct mutex *scx_enable_mutex;
	struct scx_sched __rcu **scx_root;
	struct static_key *scx_builtin_idle_per_node;
	struct vnuma_idle_masks ***scx_idle_node_masks;
	void (*scx_bypass)(struct scx_sched *sch, bool bypass);
	/* kernel/stop_machine.c */
	int (*stop_machine_cpuslocked)(int (*fn)(void *data), void *data,
				       const struct cpumask *cpus);
#endif
#ifdef VNUMA_LLC_ID
	/* kernel/sched/topology.c */
	int __percpu *sd_llc_id;
	cpumask_var_t *sched_domains_llc_id_allocmask;
#endif
#ifdef VNUMA_DEBUG_FILES
	/* kernel/sched/debug.c; may be missing */
	struct dentry **debugfs_sched;
	void (*update_sched_domain_debugfs)(void);
#endif
};

extern struct vnuma_symbols vnuma_symbols;
int vnuma_symbols_init(void);
const char *vnuma_symbols_missing(void);

/* maps.c */
void vnuma_maps_write(const struct vnuma_move *move);
void vnuma_maps_switch(void);

/* apply_safe.c */
struct workqueue_struct;
int vnuma_safe_apply(struct workqueue_struct *queue,
		     struct vnuma_model *topology,
		     struct vnuma_model **old,
		     struct vnuma_unapplied *unapplied,
		     struct vnuma_reason *why);
void vnuma_safe_came_online(int cpu, int node);
void vnuma_safe_bring_up(void);
bool vnuma_safe_has_offline(void);
void vnuma_safe_undo(void);

/* affinity.c */
int vnuma_affinities_save(void);
void vnuma_affinities_restore(int cpu);
void vnuma_affinities_settle(struct workqueue_struct *queue);
void vnuma_affinities_cancel(void);
void vnuma_affinities_finish(void);

/* apply_fast.c */
int vnuma_fast_apply(struct vnuma_model *topology,
		     struct vnuma_model **old, struct vnuma_reason *why);
void vnuma_fast_set_offline(int cpu, int node);
void vnuma_fast_init(void);
void vnuma_fast_finish(void);

/* debug_files.c */
#ifdef VNUMA_DEBUG_FILES
void vnuma_debug_files_pause(void);
void vnuma_debug_files_resume(void);
void vnuma_debug_files_finish(void);
#else
static inline void vnuma_debug_files_pause(void) {}
static inline void vnuma_debug_files_resume(void) {}
static inline void vnuma_debug_files_finish(void) {}
#endif

/* distances.c */
bool vnuma_distances_differ(const struct vnuma_model *topology);
bool vnuma_distances_can_write(const struct vnuma_model *topology,
			       nodemask_t *nodes);
void vnuma_distances_write(const struct vnuma_model *topology,
			   const nodemask_t *nodes);
void vnuma_distances_rebuild_zonelists(void);
u32 vnuma_distances_state(const struct vnuma_model *topology);

/* levels.c */
struct vnuma_levels;
bool vnuma_levels_complete(void);
bool vnuma_levels_have_own_distances(void);
struct vnuma_levels *vnuma_levels_prepare(const struct vnuma_model *topology);
void vnuma_levels_drop(struct vnuma_levels *levels);
void vnuma_levels_publish(struct vnuma_levels *levels);
void vnuma_levels_finish(void);

/* spread.c */
#ifdef VNUMA_SPREAD
int vnuma_spread_init(void);
void vnuma_spread_exit(void);
#else
static inline int vnuma_spread_init(void) { return 0; }
static inline void vnuma_spread_exit(void) {}
#endif

/* sched_ext.c */
void vnuma_sched_ext_lock(void);
void vnuma_sched_ext_unlock(void);
void vnuma_sched_ext_bypass(bool bypass);
void vnuma_sched_ext_write(const struct cpumask *moved, int (*write)(void *data),
			   void *data);
void vnuma_sched_ext_forget(int cpu);

/* rseq.c */
#define VNUMA_RSEQ_RUNNING	16

/* Threads that have to be marked and ran. Each is held. */
struct vnuma_rseq_running {
	int nr;
	struct task_struct *threads[VNUMA_RSEQ_RUNNING];
};

void vnuma_rseq_expect(int cpu);
void vnuma_rseq_switch(void);
void vnuma_rseq_mark(const struct cpumask *moved,
		     struct vnuma_rseq_running *running);
void vnuma_rseq_finish(const struct cpumask *moved,
		       struct vnuma_rseq_running *running);
void vnuma_rseq_came_online(int cpu);

/* pci_nodes.c */
int vnuma_pci_nodes_init(void (*changed)(void));
void vnuma_pci_nodes_exit(void);
void vnuma_pci_nodes_apply(const struct vnuma_model *topology);
void vnuma_pci_nodes_restore(void);
u32 vnuma_pci_nodes_count(void);

/* autonuma.c */
void vnuma_autonuma_moved(int cpu);
void vnuma_autonuma_tell(void);
u64 vnuma_autonuma_count(void);
void vnuma_autonuma_exit(void);

/* device.c */

/**
 * struct vnuma_report - what the last publication came to
 * @topology: now in force, or NULL if it was refused
 * @error: 0 or -errno; with a topology, why CPUs are not on its nodes
 * @interrupt: when its interrupt came
 * @unapplied: CPUs that are not on the node of the topology
 */
struct vnuma_report {
	const struct vnuma_model *topology;
	int error;
	ktime_t interrupt;
	struct vnuma_unapplied unapplied;
};

int vnuma_device_init(void);
int vnuma_device_register(void);
void vnuma_device_unregister(void);
void vnuma_device_exit(void);
void vnuma_device_report(const struct vnuma_report *report);
void vnuma_device_refresh_cpus(void);

#endif /* VNUMA_H */
