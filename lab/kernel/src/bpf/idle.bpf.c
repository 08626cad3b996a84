// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Times the idle task of each CPU, without the softirqs that interrupt it. The rest of the time is busy time,
 * measured by a clock instead of by ticks. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

/* One element per CPU: the time for which the CPU's idle task has run, ns. While the idle task runs, its start time is
 * subtracted, so the value is negative. A reader always sees a consistent state, since total and start time are in a
 * single value.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __s64);
	__uint(max_entries, 1);
} idle SEC(".maps");

/* Starts or stops the idle task's clock. An idle task that ran already when the program was attached is timed only
 * after it has been scheduled again. Runs with interrupts off. */
static __always_inline int turn(int is_idle)
{
	__u32 key = 0;
	__s64 *time = bpf_map_lookup_elem(&idle, &key);

	if (!time)
		return 0;
	if (!is_idle && *time < 0)
		*time += bpf_ktime_get_ns();
	else if (is_idle && *time >= 0)
		*time -= bpf_ktime_get_ns();
	return 0;
}

/* Arguments of the tracepoint: bool preempt, struct task_struct *prev, struct task_struct *next, ... */
SEC("tp_btf/sched_switch")
int idle_switch(__u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1];
	struct task_struct *next = (void *)ctx[2];

	if (prev->pid && next->pid)
		return 0;
	return turn(next->pid == 0);
}

/* The idle task is the only one whose thread ID and process ID are both 0. */
SEC("tp_btf/softirq_entry")
int idle_softirq_entry(__u64 *ctx)
{
	return bpf_get_current_pid_tgid() ? 0 : turn(0);
}

SEC("tp_btf/softirq_exit")
int idle_softirq_exit(__u64 *ctx)
{
	return bpf_get_current_pid_tgid() ? 0 : turn(1);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
