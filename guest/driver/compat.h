/* SPDX-License-Identifier: GPL-2.0 */
/* What differs between kernels, or what their public headers leave out. */
#ifndef VNUMA_COMPAT_H
#define VNUMA_COMPAT_H

#include <linux/mm.h>
#include <linux/rseq.h>
#include <linux/topology.h>
#include <linux/version.h>
#include <asm/msr.h>

#include "vnuma.h"

/* Exported, but declared in kernel/rcu/rcu.h only. */
void rcu_expedite_gp(void);
void rcu_unexpedite_gp(void);

#if KERNEL_VERSION(6, 16, 0) > LINUX_VERSION_CODE
#define wrmsrq	wrmsrl
#endif

#if KERNEL_VERSION(6, 19, 0) > LINUX_VERSION_CODE
/* Any context switch has the ids written, see rseq.c for what came later. */
static inline void rseq_force_update(void)
{
	rseq_preempt(current);
}
#endif

#if KERNEL_VERSION(6, 3, 0) > LINUX_VERSION_CODE
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}

static inline void vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#endif

#ifdef VNUMA_CACHE_ID_SYMBOLS
static inline u32 per_cpu_llc_id(unsigned int cpu)
{
	return *per_cpu_ptr(vnuma_symbols.cpu_llc_id, cpu);
}

static inline u32 per_cpu_l2c_id(unsigned int cpu)
{
	return *per_cpu_ptr(vnuma_symbols.cpu_l2c_id, cpu);
}
#endif

/* Exported in any case. */
static inline u32 vnuma_llc_id(unsigned int cpu)
{
#ifdef VNUMA_CACHE_ID_SYMBOLS
	return get_llc_id(cpu);
#else
	return per_cpu_llc_id(cpu);
#endif
}

#endif /* VNUMA_COMPAT_H */
