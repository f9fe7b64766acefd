// SPDX-License-Identifier: GPL-2.0
/*
 * Kernel symbols that are not exported.
 *
 * The kernel has all that is needed to move a CPU to another node (CPU hotplug
 * does it), but exports only a part. The rest is looked up by name at load time:
 * a kprobe gives the address of kallsyms_lookup_name(), and that gives the others. A
 * symbol can be missing because the compiler inlined it, because the kernel has no
 * kprobes, or because it was renamed. Fast mode is all or
 * nothing: a CPU moved without the scheduler's NUMA masks lets the next rebuild of
 * the domains loop for ever.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/kernel.h>
#include <linux/kprobes.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <asm/cpufeature.h>
#include <asm/ibt.h>

#include "vnuma.h"

typedef unsigned long (*lookup_fn)(const char *name);

struct vnuma_symbols vnuma_symbols;

static const struct {
	const char *name;
	void *target;		/* member of vnuma_symbols, pointer-sized */
	bool is_function;
	bool is_optional;
	bool is_comfort;	/* optional, and not worth a log line */
} wanted[] = {
#define FUNCTION(sym)	{ #sym, &vnuma_symbols.sym, .is_function = true }
#define DATA(sym)	{ #sym, &vnuma_symbols.sym }
	FUNCTION(cpu_numa_flags),
	FUNCTION(rebuild_sched_domains),
	FUNCTION(register_cpu_under_node),
	FUNCTION(unregister_cpu_under_node),
	DATA(sched_domains_mutex),
	DATA(sched_domains_numa_levels),
	DATA(sched_domains_numa_distance),
	DATA(sched_domains_numa_masks),
	DATA(sched_max_numa_distance),
	DATA(sched_numa_topology_type),
	DATA(sched_domain_topology),
	DATA(sched_domain_topology_saved),
	DATA(x86_topology_update),
	DATA(cpu_llc_shared_map),
	DATA(cpu_l2c_shared_map),
#ifdef VNUMA_CACHE_ID_SYMBOLS
	DATA(cpu_llc_id),
	DATA(cpu_l2c_id),
#endif
	{ "__apicid_to_node", &vnuma_symbols.apicid_to_node },
	{ "numa_distance", &vnuma_symbols.numa_distance, .is_optional = true },
	{ "numa_distance_cnt", &vnuma_symbols.numa_distance_cnt,
	  .is_optional = true },
	{ "build_all_zonelists", &vnuma_symbols.build_all_zonelists,
	  .is_function = true, .is_optional = true },
	{ "idle_cpu", &vnuma_symbols.idle_cpu,
	  .is_function = true, .is_optional = true, .is_comfort = true },
	{ "task_call_func", &vnuma_symbols.task_call_func,
	  .is_function = true, .is_optional = true, .is_comfort = true },
#ifdef VNUMA_NODE_DISTANCES
	FUNCTION(arch_sched_node_distance),
	DATA(sched_numa_node_levels),
	DATA(sched_numa_node_distance),
#endif
#ifdef CONFIG_MEMORY_HOTPLUG
	DATA(mem_hotplug_lock),
#endif
#ifdef VNUMA_SCHED_EXT
	DATA(scx_enable_mutex),
	DATA(scx_root),
	DATA(scx_builtin_idle_per_node),
	DATA(scx_idle_node_masks),
	FUNCTION(scx_bypass),
	FUNCTION(stop_machine_cpuslocked),
#endif
#ifdef VNUMA_LLC_ID
	DATA(sd_llc_id),
	DATA(sched_domains_llc_id_allocmask),
#endif
#ifdef VNUMA_DEBUG_FILES
	{ "debugfs_sched", &vnuma_symbols.debugfs_sched,
	  .is_optional = true, .is_comfort = true },
	{ "update_sched_domain_debugfs",
	  &vnuma_symbols.update_sched_domain_debugfs,
	  .is_function = true, .is_optional = true, .is_comfort = true },
#endif
#undef FUNCTION
#undef DATA
};

/* Names with a blank between them; empty if there is everything. */
static char missing[512];

static void add_missing(int i, const char *note)
{
	size_t used = strlen(missing);

	if (wanted[i].is_comfort)
		return;
	scnprintf(missing + used, sizeof(missing) - used, "%s%s%s",
		  used ? " " : "", wanted[i].name, note);
}

/*
 * Not is_endbr(), which also says yes to what the kernel writes over the ENDBR of a
 * function that it seals.
 */
#ifdef CONFIG_X86_KERNEL_IBT
static bool starts_with_endbr(unsigned long address)
{
	u32 word;

	return !copy_from_kernel_nofault(&word, (void *)address,
					 sizeof(word)) && word == gen_endbr();
}
#else
static bool starts_with_endbr(unsigned long address)
{
	return false;
}
#endif

/*
 * With indirect branch tracking the kernel overwrites the ENDBR of functions whose
 * address it never takes (apply_seal_endbr(), arch/x86/kernel/alternative.c). A
 * call through a pointer to such a function is a fatal #CP.
 */
static bool callable(unsigned long address)
{
	return !cpu_feature_enabled(X86_FEATURE_IBT) ||
	       starts_with_endbr(address);
}

static lookup_fn find_lookup(void)
{
	struct kprobe probe = { .symbol_name = "kallsyms_lookup_name" };
	unsigned long address;
	int err;

	err = register_kprobe(&probe);
	if (err) {
		pr_info("no kprobe on %s (%d)\n", probe.symbol_name, err);
		return NULL;
	}
	address = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	/* arch_adjust_kprobe_func_entry() puts the probe behind the ENDBR. */
	if (starts_with_endbr(address - 4))
		address -= 4;
	return callable(address) ? (lookup_fn)address : NULL;
}

static bool find(lookup_fn lookup, int i)
{
	unsigned long address = lookup(wanted[i].name);

	if (!address) {
		add_missing(i, "");
		return false;
	}
	if (wanted[i].is_function && !callable(address)) {
		add_missing(i, "(sealed)");
		return false;
	}
	*(unsigned long *)wanted[i].target = address;
	return true;
}

/**
 * vnuma_symbols_init - look all symbols up
 *
 * Return: 0 if fast mode has everything that it needs, else -ENOENT; see
 * vnuma_symbols_missing().
 */
int vnuma_symbols_init(void)
{
	lookup_fn lookup = find_lookup();
	int i, err = 0;

	if (!lookup) {
		strscpy(missing, "kallsyms_lookup_name", sizeof(missing));
		return -ENOENT;
	}
	for (i = 0; i < ARRAY_SIZE(wanted); i++)
		if (!find(lookup, i) && !wanted[i].is_optional)
			err = -ENOENT;
	return err;
}

/** vnuma_symbols_missing - names of the symbols that were not found */
const char *vnuma_symbols_missing(void)
{
	return missing;
}
