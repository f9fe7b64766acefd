// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The physical address and the node of an access.
 *
 * From version 2 on the API gives the physical address, and that is used. Version
 * 1 (QEMU 7.2) gives an offset in QEMU's list of RAM blocks, plus where the block
 * begins within all memory of the machine, and takes a lock and a search for it.
 * There two fields of struct qemu_plugin_hwaddr are read instead: whether the access is
 * MMIO, and QEMU's own address of the memory, from which the physical address
 * follows by where each range of memory is mapped. This layout
 * is internal to 7.2, therefore the first CHECKS accesses, and one in CHECK_EVERY for
 * ever, are compared with those of the API: the same kind of access, and the same
 * place. When one comparison fails, the API is used from then on.
 *
 * Where each range of memory is mapped, and which offset its block has in the list,
 * QEMU itself tells, by functions that it exports for its own modules. Without them
 * nodes cannot be distinguished in version 1, and the plugin does not start.
 */
#include "plugin.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECKS		4096
#define CHECK_EVERY	65536

/* The head of struct qemu_plugin_hwaddr in QEMU 7.2. */
struct hwaddr_7_2 {
	bool is_io;
	bool is_store;
	union {
		void *host;
		__u64 section;
	};
};

struct range {
	__u64 start;		/* physical */
	__u64 size;
	__u64 host;		/* where QEMU has it mapped */
	__u64 block;		/* what version 1 of the API tells for its start */
	__u8 node;
};

enum mode {
	MODE_PHYSICAL,		/* the API tells the physical address */
	MODE_SHORTCUT,
	MODE_BLOCK,		/* the API tells the offset of a RAM block */
};

static struct range ranges[VNUMA_LC_MAX_RANGES];
static __u32 nr_ranges;
static enum mode mode;
static bool mapped;
static cpu_physical_memory_map_fn map_memory;
static cpu_physical_memory_unmap_fn unmap_memory;
static qemu_ram_block_from_host_fn block_from_host;
static qemu_ram_get_offset_fn block_offset;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread __u32 seen;

static int find_functions(void)
{
	map_memory = (cpu_physical_memory_map_fn)dlsym(RTLD_DEFAULT, "cpu_physical_memory_map");
	unmap_memory = (cpu_physical_memory_unmap_fn)dlsym(RTLD_DEFAULT,
							   "cpu_physical_memory_unmap");
	block_from_host = (qemu_ram_block_from_host_fn)dlsym(RTLD_DEFAULT,
							     "qemu_ram_block_from_host");
	block_offset = (qemu_ram_get_offset_fn)dlsym(RTLD_DEFAULT, "qemu_ram_get_offset");
	if (map_memory && unmap_memory && block_from_host && block_offset)
		return 0;
	fprintf(stderr, "counters: this QEMU does not export what tells where its memory is\n");
	return -1;
}

int address_init(int api_version, bool shortcut)
{
	__u32 i;

	if (api_version < 2 && find_functions())
		return -1;

	nr_ranges = config.nr_ranges;
	for (i = 0; i < nr_ranges; i++) {
		const struct vnuma_lc_range *from = &config.ranges[i];

		ranges[i] = (struct range) {
			.start = from->start,
			.size = from->end - from->start,
			.node = from->node,
		};
	}
	header->api_version = api_version;
	if (api_version >= 2)
		mode = MODE_PHYSICAL;
	else
		mode = shortcut ? MODE_SHORTCUT : MODE_BLOCK;
	header->status = mode == MODE_SHORTCUT ? VNUMA_LC_STATUS_CHECKING :
						 VNUMA_LC_STATUS_API;
	return 0;
}

static void give_up(const char *why)
{
	__atomic_store_n(&mode, MODE_BLOCK, __ATOMIC_RELEASE);
	header->status = VNUMA_LC_STATUS_API;
	fprintf(stderr, "counters: addresses come from the plugin API alone, which is slower: %s\n",
		why);
}

/* Memory of the nodes before this one; the machine has its nodes' memory in their order. */
static __u64 memory_below(__u8 node)
{
	__u64 size = 0;
	__u32 i;

	for (i = 0; i < nr_ranges; i++)
		if (ranges[i].node < node)
			size += ranges[i].size;
	return size;
}

/* Asks QEMU where each range is; the first access of all does, when memory is there. */
static void map_ranges(void)
{
	__u32 i;

	pthread_mutex_lock(&lock);
	for (i = 0; i < nr_ranges && !mapped; i++) {
		__u64 length = 4096;
		void *host = map_memory(ranges[i].start, &length, false);
		__u64 offset = 0;
		void *block = host ? block_from_host(host, false, &offset) : NULL;

		if (!block) {
			fprintf(stderr, "counters: ranges.start: no memory at %#llx\n",
				ranges[i].start);
			exit(1);
		}
		ranges[i].host = (uintptr_t)host;
		ranges[i].block = block_offset(block) + offset + memory_below(ranges[i].node);
		unmap_memory(host, length, false, 0);
	}
	__atomic_store_n(&mapped, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
}

static struct range *by_host(__u64 host)
{
	__u32 i;

	for (i = 0; i < nr_ranges; i++)
		if (host - ranges[i].host < ranges[i].size)
			return &ranges[i];
	return NULL;
}

/* Compares the shortcut with the API; false when they differ. */
static bool compare(const struct qemu_plugin_hwaddr *hwaddr)
{
	const struct hwaddr_7_2 *internal = (const void *)hwaddr;
	__u64 offset = qemu_plugin_hwaddr_phys_addr(hwaddr);
	bool same = qemu_plugin_hwaddr_is_io(hwaddr) == internal->is_io;
	struct range *range;

	pthread_mutex_lock(&lock);
	header->compared++;
	if (same && !internal->is_io) {
		range = by_host((uintptr_t)internal->host);
		if (range)
			same = offset - range->block == (uintptr_t)internal->host - range->host;
	}
	if (!same) {
		header->mismatched++;
		give_up("QEMU's internal layout is not the expected one");
	} else if (header->compared == CHECKS && mode == MODE_SHORTCUT) {
		header->status = VNUMA_LC_STATUS_SHORTCUT;
	}
	pthread_mutex_unlock(&lock);
	return same;
}

static void count_mmio(struct cpu *cpu, __u64 phys, bool is_store)
{
	__u32 count = __atomic_load_n(&devices->count, __ATOMIC_ACQUIRE);
	__u32 i;

	if (count > VNUMA_LC_MAX_DEVICES)
		count = 0;
	for (i = 0; i < count; i++) {
		__u64 start = devices->ranges[i].start;
		__u64 end = devices->ranges[i].end;
		__u32 node = devices->ranges[i].node;

		if (phys >= start && phys < end && node < VNUMA_LC_MAX_NODES) {
			add(is_store ? &cpu->count->mmio_write[node] :
				       &cpu->count->mmio_read[node], 1);
			return;
		}
	}
	add(&cpu->count->mmio_other, 1);
}

/* Memory in no range is the firmware's: it lies on the first node. */
static void found(const struct range *range, __u64 offset, __u64 other,
		  struct access *access)
{
	access->phys = range ? range->start + offset : other;
	access->node = range ? range->node : 0;
}

static void by_block(__u64 offset, struct access *access)
{
	__u32 i;

	for (i = 0; i < nr_ranges; i++) {
		if (offset - ranges[i].block < ranges[i].size) {
			found(&ranges[i], offset - ranges[i].block, 0, access);
			return;
		}
	}
	found(NULL, 0, 1ULL << 46 | offset, access);
}

static void by_physical(__u64 phys, struct access *access)
{
	__u32 i;

	for (i = 0; i < nr_ranges; i++) {
		if (phys - ranges[i].start < ranges[i].size) {
			found(&ranges[i], phys - ranges[i].start, 0, access);
			return;
		}
	}
	found(NULL, 0, phys, access);
}

static bool by_shortcut(const struct qemu_plugin_hwaddr *hwaddr,
			struct access *access)
{
	const struct hwaddr_7_2 *internal = (const void *)hwaddr;
	struct range *range;

	if (unlikely(seen++ < CHECKS || seen % CHECK_EVERY == 0) &&
	    !compare(hwaddr))
		return false;
	if (unlikely(internal->is_io))
		return false;
	range = by_host((uintptr_t)internal->host);
	found(range, (uintptr_t)internal->host - (range ? range->host : 0),
	      (uintptr_t)internal->host, access);
	return true;
}

bool address_of(struct cpu *cpu, qemu_plugin_meminfo_t info, __u64 vaddr,
		bool is_store, struct access *access)
{
	const struct qemu_plugin_hwaddr *hwaddr = qemu_plugin_get_hwaddr(info, vaddr);

	if (unlikely(!hwaddr))
		return false;
	if (unlikely(mode != MODE_PHYSICAL && !__atomic_load_n(&mapped, __ATOMIC_ACQUIRE)))
		map_ranges();
	if (mode == MODE_SHORTCUT && by_shortcut(hwaddr, access))
		return true;
	if (qemu_plugin_hwaddr_is_io(hwaddr)) {
		count_mmio(cpu, qemu_plugin_hwaddr_phys_addr(hwaddr), is_store);
		return false;
	}
	if (mode == MODE_PHYSICAL)
		by_physical(qemu_plugin_hwaddr_phys_addr(hwaddr), access);
	else
		by_block(qemu_plugin_hwaddr_phys_addr(hwaddr), access);
	return true;
}
