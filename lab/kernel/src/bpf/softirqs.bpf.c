// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Times the networking softirqs of all CPUs, and also how long softirqs interrupted one process. */
#include "intf.h"
#include "softirq.h"
#include "util.h"

SEC(".rodata.config")
const volatile struct softirqs_config config = {};

/* enum softirqs_time -> time, ns. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, SOFTIRQS_TIMES);
} times SEC(".maps");

/* One entry per CPU: the start time of the softirq that runs now, ns; 0 if none does. Softirqs do not nest. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
} began SEC(".maps");

static __always_inline int is_networking(__u32 vector)
{
	return vector == NET_TX_SOFTIRQ || vector == NET_RX_SOFTIRQ;
}

/* Argument of the raw tracepoints softirq_entry and softirq_exit: unsigned int vector. */
SEC("raw_tp/softirq_entry")
int softirqs_entry(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 key = 0;
	__u64 *start = bpf_map_lookup_elem(&began, &key);

	if (start && is_networking(ctx->args[0]))
		*start = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/softirq_exit")
int softirqs_exit(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 key = 0;
	__u64 *start = bpf_map_lookup_elem(&began, &key), time_ns;

	/* The start time is 0 if the softirq began before this program was attached. */
	if (!start || !*start || !is_networking(ctx->args[0]))
		return 0;
	time_ns = bpf_ktime_get_ns() - *start;
	*start = 0;
	add_to(&times, SOFTIRQS_ALL, time_ns);
	if (bpf_get_current_pid_tgid() >> 32 == config.tgid)
		add_to(&times, SOFTIRQS_OWN, time_ns);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
