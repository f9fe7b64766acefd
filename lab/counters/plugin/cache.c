// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The model: an L2 per CPU, an LLC per node, a stream detector per CPU; and a
 * second LLC per node, if one is asked for, that sees what the first sees.
 *
 * Both caches replace the least recently used line and are filled by each
 * miss; they neither include nor exclude one another, and a write does not take
 * a line away from other caches. The set of a line is
 *
 *   (line / 16) mod (sets / 16) * 16 + fold(line)
 *
 * where fold() is the exclusive or of the line number's 4-bit digits. Thus any aligned group
 * of 16 lines, and of 16 pages at one offset, falls into all 16 residues. Sampling
 * models the sets of one residue, one set in 16, and leaves them exactly as they would
 * be among all sets: what is counted is 1/16 of the work, not another cache.
 * The lines of a set differ in line / 16, which is the tag (plus one: 0 is empty).
 *
 * The stream detector sees all accesses that the L1 does not take. It follows a
 * stream within a page, as hardware does, and needs STREAM_RUN steps to one side.
 */
#include "plugin.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOLD_MASK	15
/* The residue that is sampled; any will do. */
#define SAMPLED_FOLD	5
#define PAGE_LINES	64

static struct llc llcs[VNUMA_LC_MAX_NODES], seconds[VNUMA_LC_MAX_NODES];
static __u32 l2_groups, llc_groups, second_groups;

static bool make_llc(struct llc *llc, __u32 sets, __u32 ways)
{
	sets >>= config.sample_shift;
	llc->ways = ways;
	llc->tags = calloc(sets, ways * sizeof(__u32));
	llc->locks = calloc(sets, 1);
	return llc->tags && llc->locks;
}

int cache_init(void)
{
	__u32 shift = config.sample_shift;
	__u32 i;

	l2_groups = config.l2_sets / 16;
	llc_groups = config.llc_sets / 16;
	second_groups = config.second_sets / 16;
	for (i = 0; i < config.nr_cpus; i++) {
		cpus[i].l2 = calloc(config.l2_sets >> shift, config.l2_ways * sizeof(__u32));
		if (!cpus[i].l2)
			goto no_memory;
	}
	for (i = 0; i < config.nr_nodes; i++) {
		if (!make_llc(&llcs[i], config.llc_sets, config.llc_ways))
			goto no_memory;
		if (second_groups && !make_llc(&seconds[i], config.second_sets, config.second_ways))
			goto no_memory;
	}
	return 0;
no_memory:
	fprintf(stderr, "counters: no memory for the caches\n");
	return -1;
}

static inline __u32 fold(__u64 line)
{
	line ^= line >> 32;
	line ^= line >> 16;
	line ^= line >> 8;
	line ^= line >> 4;
	return line & FOLD_MASK;
}

static inline __u32 set_of(__u64 line, __u32 groups, __u32 residue)
{
	__u32 group = (__u32)(line >> 4) % groups;

	return config.sample_shift ? group : group << 4 | residue;
}

/* Looks for a tag in a set and puts it in front; true when it was there. */
static inline bool touch(__u32 *set, __u32 ways, __u32 tag)
{
	__u32 previous = set[0];
	__u32 i;

	if (previous == tag)
		return true;
	set[0] = tag;
	for (i = 1; i < ways; i++) {
		__u32 here = set[i];

		set[i] = previous;
		if (here == tag)
			return true;
		previous = here;
	}
	return false;
}

static bool touch_llc(struct llc *llc, __u32 set, __u32 tag)
{
	bool hit;

	while (__atomic_exchange_n(&llc->locks[set], 1, __ATOMIC_ACQUIRE))
		sched_yield();
	hit = touch(llc->tags + (size_t)set * llc->ways, llc->ways, tag);
	__atomic_store_n(&llc->locks[set], 0, __ATOMIC_RELEASE);
	return hit;
}

/* Notes an access; true when it continues a stream. */
static inline bool follow_stream(struct cpu *cpu, __u64 line)
{
	__u64 page = line / PAGE_LINES;
	struct stream *stream = &cpu->streams[page % STREAM_PAGES];
	__u8 in_page = line % PAGE_LINES;
	bool foreseen = false;

	if (stream->page != page) {
		stream->page = page;
		stream->run = 0;
	} else if (in_page == stream->line + 1) {
		foreseen = stream->run >= STREAM_RUN;
		stream->run = stream->run < 0 ? 1 : foreseen ? STREAM_RUN : stream->run + 1;
	} else if (in_page + 1 == stream->line) {
		foreseen = stream->run <= -STREAM_RUN;
		stream->run = stream->run > 0 ? -1 : foreseen ? -STREAM_RUN : stream->run - 1;
	} else if (in_page != stream->line) {
		stream->run = 0;
	}
	stream->line = in_page;
	return foreseen;
}

static void touch_second(struct cpu *cpu, __u64 line, __u32 residue,
			 __u8 node, bool foreseen)
{
	struct vnuma_lc_cpu *count = cpu->count;
	__u64 step = 1ULL << config.sample_shift;
	__u32 tag = (__u32)(line >> 4) + 1;

	if (touch_llc(&seconds[cpu->node], set_of(line, second_groups, residue), tag))
		return;
	add(&count->second_misses, step);
	if (foreseen) {
		add(&count->second_misses_streamed, step);
		add(&count->second_dram_streamed[node], step);
	} else {
		add(&count->second_dram[node], step);
	}
}

static void miss_l2(struct cpu *cpu, __u64 line, __u32 residue,
		    __u8 node, bool foreseen)
{
	struct vnuma_lc_cpu *count = cpu->count;
	__u64 step = 1ULL << config.sample_shift;
	__u32 tag = (__u32)(line >> 4) + 1;

	add(&count->llc_references, step);
	if (foreseen)
		add(&count->llc_streamed, step);
	if (second_groups)
		touch_second(cpu, line, residue, node, foreseen);
	if (touch_llc(&llcs[cpu->node], set_of(line, llc_groups, residue), tag))
		return;
	add(&count->llc_misses, step);
	if (foreseen) {
		add(&count->llc_misses_streamed, step);
		add(&count->dram_streamed[node], step);
	} else {
		add(&count->dram[node], step);
	}
}

void cache_access(struct cpu *cpu, const struct access *access)
{
	__u64 line = access->phys >> LINE_SHIFT;
	bool foreseen = follow_stream(cpu, line);
	__u32 residue = fold(line);
	__u32 *set;

	if (config.sample_shift && residue != SAMPLED_FOLD)
		return;
	set = cpu->l2 + (size_t)set_of(line, l2_groups, residue) * config.l2_ways;
	if (!touch(set, config.l2_ways, (__u32)(line >> 4) + 1))
		miss_l2(cpu, line, residue, access->node, foreseen);
}
