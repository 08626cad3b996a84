// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Times the idle task of each CPU: what is left is busy, by a clock and not by ticks. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

/* 0 -> nanoseconds in the idle task. While it runs, the time when it began is subtracted, and the sum is negative: one
 * word, so that whoever reads it sees one moment.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1);
} idle SEC(".maps");

/* Arguments: bool preempt, struct task_struct *prev, struct task_struct *next, ... Interrupts are off. */
SEC("tp_btf/sched_switch")
int idle_switch(__u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1];
	struct task_struct *next = (void *)ctx[2];
	__u32 key = 0;
	__s64 *time;

	if (prev->pid && next->pid)
		return 0;
	time = bpf_map_lookup_elem(&idle, &key);
	if (!time)
		return 0;
	/* The idle task may have begun before this was attached. */
	if (!prev->pid && *time < 0)
		*time += bpf_ktime_get_ns();
	else if (!next->pid && *time >= 0)
		*time -= bpf_ktime_get_ns();
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
