// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Redirects every packet of an interface to a kernel thread on another CPU (BPF_MAP_TYPE_CPUMAP). The thread builds
 * the socket buffer and passes it up the stack. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* CPU number -> number of packets that may wait for that CPU's thread. */
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
