/* SPDX-License-Identifier: GPL-2.0 */
/* The timer, which does whatever is to be done at a time (end_waits()). */
#ifndef SCX_VNUMA_ALARM_H
#define SCX_VNUMA_ALARM_H

/* A timer that should have gone off so long ago is set again. */
#define LOOK_NS		100000000ULL

struct alarm {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct alarm);
} alarms SEC(".maps");

/* When the alarm goes off; 0: it does not. */
static __u64 alarm_ns;

/* Has the timer go off at a time, or earlier. */
static void set_alarm(__u64 until_ns, __u64 now)
{
	__u32 first = 0;
	struct alarm *alarm = bpf_map_lookup_elem(&alarms, &first);

	if (!alarm || (alarm_ns && alarm_ns <= until_ns && now < alarm_ns + LOOK_NS))
		return;
	/* If it cannot be set now, the next one who needs it tries again. */
	alarm_ns = until_ns;
	if (bpf_timer_start(&alarm->timer, until_ns > now ? until_ns - now : 1, 0))
		alarm_ns = 0;
}

#endif
