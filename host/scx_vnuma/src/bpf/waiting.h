/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which CPUs have a queue in which threads wait: a bit of each CPU. A CPU without work looks at
 * these, not at all queues, as a host can have many.
 *
 * A bit is set before a thread is queued, and cleared by who finds the queue empty. If that is in
 * between, look_around() sets it again.
 */
#ifndef SCX_VNUMA_WAITING_H
#define SCX_VNUMA_WAITING_H

/* With the number of a CPU: the queue of those that have waited too long for it (late.h). */
#define LATE		BIT_ULL(33)

#define BITS		64
#define WORDS		(MAX_CPUS / BITS)

/*
 * 0, which the kernel's verifier does not know: it would go through a loop with a counter
 * that it knows as often as the counter allows.
 */
static volatile __u32 zero;

static __u32 nr_cpus;

static __u64 waited_for[WORDS];

static __u64 *word_of(__u32 cpu)
{
	return &waited_for[cpu / BITS % WORDS];
}

static __u64 bit_of(__u32 cpu)
{
	return BIT_ULL(cpu % BITS);
}

static bool is_waited_for(__u32 cpu)
{
	return *(volatile __u64 *)word_of(cpu) & bit_of(cpu);
}

/* A thread is about to wait for a CPU. */
static void set_waited_for(__u32 cpu)
{
	if (!is_waited_for(cpu))
		__sync_fetch_and_or(word_of(cpu), bit_of(cpu));
}

/* Threads that wait for a CPU. */
static __s32 length_of(__u32 cpu)
{
	__s32 in_time = scx_bpf_dsq_nr_queued(cpu), late = scx_bpf_dsq_nr_queued(LATE | cpu);

	return (in_time > 0 ? in_time : 0) + (late > 0 ? late : 0);
}

/* As before, at less cost where there are none. One that is about to wait may be left out. */
static __s32 length_by_bit(__u32 cpu)
{
	return is_waited_for(cpu) ? length_of(cpu) : 0;
}

/* The same, and clears the bit of an empty queue. */
static __s32 length_if_any(__u32 cpu)
{
	__s32 length;

	if (!is_waited_for(cpu))
		return 0;
	length = length_of(cpu);
	if (length)
		return length;
	__sync_fetch_and_and(word_of(cpu), ~bit_of(cpu));
	length = length_of(cpu);
	if (length)
		set_waited_for(cpu);
	return length;
}

static __u64 word_at(__u32 i)
{
	return *(volatile __u64 *)&waited_for[i % WORDS];
}

static __u32 nr_words(void)
{
	return (nr_cpus + BITS - 1) / BITS;
}

/* Does a thread wait for any CPU? */
static __noinline bool is_any_waited_for(void)
{
	__u64 any = 0;
	__u32 i;

	bpf_for(i, 0, nr_words())
		any |= word_at(i);
	return any;
}

#endif
