// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Counts the system calls of one process, all threads, by number. */
#include "intf.h"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC(".rodata.config")
const volatile struct syscalls_config config = {};

/* System call number -> number of calls. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, SYSCALLS_MAX);
} calls SEC(".maps");

/* Arguments of the raw tracepoint: struct pt_regs *regs, long id. */
SEC("raw_tp/sys_enter")
int syscalls_enter(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 number = ctx->args[1];
	__u64 *counter;

	if (bpf_get_current_pid_tgid() >> 32 != config.tgid)
		return 0;
	if (number >= SYSCALLS_MAX)
		number = SYSCALLS_MAX - 1;
	counter = bpf_map_lookup_elem(&calls, &number);
	/* The addition is atomic because some kernels run this tracepoint's programs preemptibly. */
	if (counter)
		__sync_fetch_and_add(counter, 1);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
