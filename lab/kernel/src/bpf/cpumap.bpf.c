// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Passes every packet to a thread of another CPU, which makes a socket buffer of it and passes that up the stack. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* CPU -> the length of its queue. */
struct {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct bpf_cpumap_val));
	__uint(max_entries, 1);
} threads SEC(".maps");

SEC("xdp")
int cpumap_redirect(struct xdp_md *ctx)
{
	return bpf_redirect_map(&threads, 0, XDP_PASS);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
