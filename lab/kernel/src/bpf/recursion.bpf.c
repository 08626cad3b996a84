// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A BPF program that triggers its own tracepoint while it runs. The kernel skips the nested run and counts it as
 * missed. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Runs whenever a BPF program calls bpf_printk, so its own call of bpf_printk triggers it again. The program
 * recursion_run makes the first call.
 */
SEC("tp_btf/bpf_trace_printk")
int recursion_again(__u64 *ctx)
{
	bpf_printk("millrace again");
	return 0;
}

SEC("raw_tp")
int recursion_run(__u64 *ctx)
{
	bpf_printk("millrace begins");
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
