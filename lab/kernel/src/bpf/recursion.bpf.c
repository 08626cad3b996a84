// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A program that is called while it runs. The kernel skips the inner run and counts it. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Runs when a program prints, so its own printing calls it again. Only the printing of recursion_run starts this. */
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
