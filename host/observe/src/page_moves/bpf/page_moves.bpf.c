// SPDX-License-Identifier: GPL-2.0
/*
 * Times the kernel's moves of pages by one thread: from migrate_pages() to its end. Whoever
 * touches a page that it moves waits for as long. What a caller does before, such as having
 * every CPU put its pages back (lru_add_drain_all()), holds nobody.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <vnuma/page_moves.h>

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, VNUMA_PAGE_MOVES_NUMBERS);
	__type(key, __u32);
	__type(value, __u64);
} moves SEC(".maps");

static __always_inline __u64 *number(__u32 index)
{
	return bpf_map_lookup_elem(&moves, &index);
}

static __always_inline int is_ours(void)
{
	__u64 *thread = number(VNUMA_PAGE_MOVES_THREAD);

	return thread && *thread == (__u32)bpf_get_current_pid_tgid();
}

SEC("tp_btf/mm_migrate_pages_start")
int BPF_PROG(vnuma_move_begins)
{
	__u64 *depth = number(VNUMA_PAGE_MOVES_DEPTH), *begun = number(VNUMA_PAGE_MOVES_BEGUN_NS);

	if (!depth || !begun || !is_ours())
		return 0;
	/* To make room for a page, it may move others. */
	if ((*depth)++ == 0)
		*begun = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/mm_migrate_pages")
int BPF_PROG(vnuma_move_ends)
{
	__u64 *depth = number(VNUMA_PAGE_MOVES_DEPTH), *begun = number(VNUMA_PAGE_MOVES_BEGUN_NS);
	__u64 *longest = number(VNUMA_PAGE_MOVES_LONGEST_NS), took;

	/* One that has begun before this was attached is not known. */
	if (!depth || !begun || !longest || !is_ours() || !*depth)
		return 0;
	if (--(*depth))
		return 0;
	took = bpf_ktime_get_ns() - *begun;
	if (took > *longest)
		*longest = took;
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
