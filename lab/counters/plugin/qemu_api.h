/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the plugin uses of QEMU. Debian packages no header of the plugin
 * API, hence these declarations; they follow the API's documentation
 * (https://www.qemu.org/docs/master/devel/tcg-plugins.html) and have been the same from
 * version 1 (QEMU 7.2) to version 4 (QEMU 10.0) except where noted.
 */
#ifndef VNUMA_QEMU_API_H
#define VNUMA_QEMU_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <linux/types.h>

typedef __u64 qemu_plugin_id_t;
typedef __u32 qemu_plugin_meminfo_t;

struct qemu_info {
	const char *target_name;
	struct {
		int min;
		int cur;
	} version;
	bool system_emulation;
	struct {
		int smp_vcpus;
		int max_vcpus;
	} system;
};

enum qemu_plugin_cb_flags {
	QEMU_PLUGIN_CB_NO_REGS,
};

enum qemu_plugin_mem_rw {
	QEMU_PLUGIN_MEM_R = 1,
	QEMU_PLUGIN_MEM_W,
};

struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_hwaddr;

typedef void (*qemu_plugin_trans_fn)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
typedef void (*qemu_plugin_exec_fn)(unsigned int cpu, void *data);
typedef void (*qemu_plugin_mem_fn)(unsigned int cpu, qemu_plugin_meminfo_t info,
				   __u64 vaddr, void *data);

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, qemu_plugin_trans_fn fn);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, qemu_plugin_exec_fn fn,
					  enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, qemu_plugin_exec_fn fn,
					    enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn, qemu_plugin_mem_fn fn,
				      enum qemu_plugin_cb_flags flags,
				      enum qemu_plugin_mem_rw rw, void *data);

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb,
						 size_t index);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
__u64 qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
/* Versions 1 and 2: (insn), the bytes. From 3: (insn, to, size), how many. */
void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn, ...);

struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t info,
						  __u64 vaddr);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *hwaddr);
/* Version 1: the offset in QEMU's list of RAM blocks. From 2: the address. */
__u64 qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *hwaddr);

/*
 * Not part of the API, and so looked up, never linked: Debian's QEMU exports
 * its symbols for its own modules. They translate once per range of memory.
 */
typedef void *(*cpu_physical_memory_map_fn)(__u64 addr, __u64 *len,
					    bool is_write);
typedef void (*cpu_physical_memory_unmap_fn)(void *buffer, __u64 len,
					     bool is_write, __u64 access_len);
typedef void *(*qemu_ram_block_from_host_fn)(void *host, bool round_offset, __u64 *offset);
typedef __u64 (*qemu_ram_get_offset_fn)(void *block);

#endif /* VNUMA_QEMU_API_H */
