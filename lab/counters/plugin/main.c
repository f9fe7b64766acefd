// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * QEMU's counter plugin: counts what the CPUs of the lab's server do, guests
 * of the server included, through a model of its caches.
 *
 *   -plugin vnuma-counters.so,region=PATH[,layout=api]
 *
 * `region` is a file as in lab_counters.h with a header that says what to model.
 * `layout=api` keeps to the plugin API also where a faster way is known.
 *
 * Per block of translated code one callback adds its instructions. Per
 * access one callback looks at a small filter of recently used lines, which stands for
 * the L1; what misses it goes through address.c and cache.c.
 *
 * Not seen: the MMU's page walks, DMA of devices, speculation, instruction
 * fetches. Of an access that crosses a line only the first line is seen.
 */
#include "plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>

/* A block's callback's data: its instructions, whether it is a program's, and for strings what names it */
#define BLOCK_INSNS	0x3ffUL
#define BLOCK_USER	0x400UL
#define BLOCK_SHIFT	11
#define INSN_MAX	15

/* What QEMU looks up in the plugin */
#define EXPORT		__attribute__((visibility("default")))

/* Read by QEMU, which accepts 1 only in 7.2 and from 2 on in 10.0. */
EXPORT int qemu_plugin_version = 1;

struct cpu *cpus;

static int api_version;
static unsigned int nr_cpus;

/* QEMU reads the version after loading the plugin and before installing it. */
static void __attribute__((constructor)) choose_version(void)
{
	if (dlsym(RTLD_DEFAULT, "qemu_plugin_scoreboard_new"))
		qemu_plugin_version = 4;
}

static inline struct cpu *cpu_of(unsigned int index)
{
	/* CPUs that are plugged in later have no page: they share the last. */
	return &cpus[likely(index < nr_cpus) ? index : nr_cpus - 1];
}

/* A block begins: what it does, accesses included, is of its mode. */
static inline struct vnuma_lc_cpu *enter(struct cpu *cpu, __u64 block)
{
	struct vnuma_lc_cpu *count = &cpu->page->mode[(block & BLOCK_USER) / BLOCK_USER];

	/* Loads and stores would wait for a store made just before them. */
	if (unlikely(cpu->count != count))
		cpu->count = count;
	return count;
}

static void count_block(unsigned int index, void *data)
{
	struct cpu *cpu = cpu_of(index);
	__u64 insns = (uintptr_t)data & BLOCK_INSNS;
	struct vnuma_lc_cpu *count = enter(cpu, (uintptr_t)data);

	cpu->rep = 0;
	add(&count->instructions, insns);
	add(&count->base_cycles, insns);
}

/*
 * A block that ends with a repeated string instruction. QEMU enters it anew for each
 * repetition (7.2), or for each 65536 (10.0), as a block of that instruction
 * alone; those are no further instructions.
 */
static void count_string_block(unsigned int index, void *data)
{
	struct cpu *cpu = cpu_of(index);
	__u64 insns = (uintptr_t)data & BLOCK_INSNS;
	__u64 id = (uintptr_t)data >> BLOCK_SHIFT;
	struct vnuma_lc_cpu *count = enter(cpu, (uintptr_t)data);

	if (insns == 1 && cpu->rep == id)
		return;
	cpu->rep = id;
	add(&count->instructions, insns);
	add(&count->base_cycles, insns);
}

static void empty_filter(unsigned int index, void *data)
{
	struct cpu *cpu = cpu_of(index);

	(void)data;
	memset(cpu->filter, 0xff, sizeof(cpu->filter));
	memset(cpu->pages, 0xff, sizeof(cpu->pages));
}

/* True when the line is not among the recently used ones. */
static inline bool filter_miss(struct cpu *cpu, __u64 vaddr)
{
	__u64 line = vaddr >> LINE_SHIFT;
	__u64 *entry = &cpu->filter[line % FILTER_LINES];

	if (likely(*entry == line))
		return false;
	*entry = line;
	return true;
}

static void missed(struct cpu *cpu, qemu_plugin_meminfo_t info, __u64 vaddr, bool is_store)
{
	const __u64 in_page = (1UL << PAGE_SHIFT) - 1;
	__u64 page = vaddr >> PAGE_SHIFT;
	__u64 *frame = &cpu->frames[page % PAGES];
	struct access access;

	if (likely(cpu->pages[page % PAGES] == page)) {
		access.phys = (*frame & ~in_page) | (vaddr & in_page);
		access.node = *frame & in_page;
	} else if (address_of(cpu, info, vaddr, is_store, &access)) {
		cpu->pages[page % PAGES] = page;
		*frame = (access.phys & ~in_page) | access.node;
	} else {
		cpu->filter[(vaddr >> LINE_SHIFT) % FILTER_LINES] = FILTER_EMPTY;
		return;
	}
	cache_access(cpu, &access);
}

static void load(unsigned int index, qemu_plugin_meminfo_t info, __u64 vaddr,
		 void *data)
{
	struct cpu *cpu = cpu_of(index);

	(void)data;
	add(&cpu->count->loads, 1);
	if (filter_miss(cpu, vaddr))
		missed(cpu, info, vaddr, false);
}

static void store(unsigned int index, qemu_plugin_meminfo_t info,
		  __u64 vaddr, void *data)
{
	struct cpu *cpu = cpu_of(index);

	(void)data;
	add(&cpu->count->stores, 1);
	if (filter_miss(cpu, vaddr))
		missed(cpu, info, vaddr, true);
}

static void string_load(unsigned int index, qemu_plugin_meminfo_t info,
			__u64 vaddr, void *data)
{
	struct cpu *cpu = cpu_of(index);

	(void)data;
	if (!filter_miss(cpu, vaddr))
		return;
	add(&cpu->count->loads, 1);
	add(&cpu->count->base_cycles, 1);
	missed(cpu, info, vaddr, false);
}

static void string_store(unsigned int index, qemu_plugin_meminfo_t info,
			 __u64 vaddr, void *data)
{
	struct cpu *cpu = cpu_of(index);

	(void)data;
	if (!filter_miss(cpu, vaddr))
		return;
	add(&cpu->count->stores, 1);
	add(&cpu->count->base_cycles, 1);
	missed(cpu, info, vaddr, true);
}

/* The bytes of an instruction, at most INSN_MAX; how many. */
static size_t insn_bytes(const struct qemu_plugin_insn *insn, __u8 *bytes)
{
	size_t size = qemu_plugin_insn_size(insn);

	if (size > INSN_MAX)
		size = INSN_MAX;
	if (api_version >= 3)
		return (size_t)(uintptr_t)qemu_plugin_insn_data(insn, bytes, size);
	memcpy(bytes, qemu_plugin_insn_data(insn), size);
	return size;
}

static bool is_prefix(__u8 byte)
{
	switch (byte) {
	case 0x26: case 0x2e: case 0x36: case 0x3e:	/* segments */
	case 0x64: case 0x65: case 0x66: case 0x67:
	case 0xf0: case 0xf2: case 0xf3:
		return true;
	default:
		return (byte & 0xf0) == 0x40;	/* REX; inc/dec in old code */
	}
}

enum insn_kind {
	INSN_PLAIN,
	INSN_STRING,	/* ins, outs, movs, cmps, stos, lods, scas with a repeat prefix */
	INSN_SWITCH,	/* may change what virtual addresses mean */
};

static enum insn_kind insn_kind(const __u8 *bytes, size_t size)
{
	bool repeat = false;
	size_t i;

	for (i = 0; i < size && is_prefix(bytes[i]); i++)
		repeat |= bytes[i] == 0xf2 || bytes[i] == 0xf3;
	if (i == size)
		return INSN_PLAIN;
	if (repeat && ((bytes[i] >= 0x6c && bytes[i] <= 0x6f) ||
		       (bytes[i] >= 0xa4 && bytes[i] <= 0xa7) ||
		       (bytes[i] >= 0xaa && bytes[i] <= 0xaf)))
		return INSN_STRING;
	if (bytes[i] != 0x0f || i + 1 == size)
		return INSN_PLAIN;
	if (bytes[i + 1] == 0x22)	/* mov to a control register */
		return INSN_SWITCH;
	if (bytes[i + 1] == 0x01)	/* invlpg, vmrun, vmload, stgi, ... */
		return INSN_SWITCH;
	if (bytes[i + 1] == 0x38 && i + 2 < size && bytes[i + 2] == 0x82)
		return INSN_SWITCH;	/* invpcid */
	return INSN_PLAIN;
}

/* Instruments one instruction and returns its kind. */
static enum insn_kind instrument(struct qemu_plugin_insn *insn)
{
	__u8 bytes[INSN_MAX];
	enum insn_kind kind = insn_kind(bytes, insn_bytes(insn, bytes));
	bool string = kind == INSN_STRING;

	qemu_plugin_register_vcpu_mem_cb(insn, string ? string_load : load,
					 QEMU_PLUGIN_CB_NO_REGS,
					 QEMU_PLUGIN_MEM_R, NULL);
	qemu_plugin_register_vcpu_mem_cb(insn, string ? string_store : store,
					 QEMU_PLUGIN_CB_NO_REGS,
					 QEMU_PLUGIN_MEM_W, NULL);
	if (kind == INSN_SWITCH)
		qemu_plugin_register_vcpu_insn_exec_cb(insn, empty_filter,
						       QEMU_PLUGIN_CB_NO_REGS,
						       NULL);
	return kind;
}

static void translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t insns = qemu_plugin_tb_n_insns(tb);
	__u64 string_id = 0, user;
	size_t i;

	(void)id;
	/* The lower half of the addresses is the programs'. */
	user = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0)) >> 63 ? 0 : BLOCK_USER;
	for (i = 0; i < insns; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		/* A string instruction is always the last of its block. */
		if (instrument(insn) == INSN_STRING && i + 1 == insns)
			string_id = qemu_plugin_insn_vaddr(insn) << BLOCK_SHIFT;
	}
	if (string_id)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, count_string_block,
						     QEMU_PLUGIN_CB_NO_REGS,
						     (void *)(uintptr_t)(string_id | user | insns));
	else
		qemu_plugin_register_vcpu_tb_exec_cb(tb, count_block,
						     QEMU_PLUGIN_CB_NO_REGS,
						     (void *)(uintptr_t)(user | insns));
}

static int parse(int argc, char **argv, const char **file, bool *shortcut)
{
	int i;

	*file = NULL;
	*shortcut = true;
	for (i = 0; i < argc; i++) {
		if (!strncmp(argv[i], "region=", 7)) {
			*file = argv[i] + 7;
		} else if (!strcmp(argv[i], "layout=api")) {
			*shortcut = false;
		} else {
			fprintf(stderr, "counters: argument %s is unknown\n",
				argv[i]);
			return -1;
		}
	}
	if (!*file)
		fprintf(stderr, "counters: argument region= is missing\n");
	return *file ? 0 : -1;
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info,
			       int argc, char **argv)
{
	const char *file;
	bool shortcut;

	if (strcmp(info->target_name, "x86_64") || !info->system_emulation) {
		fprintf(stderr, "counters: target %s is not supported\n",
			info->target_name);
		return -1;
	}
	if (parse(argc, argv, &file, &shortcut))
		return -1;
	if (config_load(file, info->system.smp_vcpus) || cache_init())
		return -1;
	nr_cpus = config.nr_cpus;
	api_version = info->version.cur;
	if (address_init(api_version, shortcut))
		return -1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
	return 0;
}
